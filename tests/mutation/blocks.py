"""Which tests come to which lines, in their own process and on ranks: asked once, of a copy of the package.

A block is a run of statements of a function that a compound statement does not interrupt. In the copy each
block says that it was entered, in memory that all processes of a test share.
"""

from __future__ import annotations

import ast
import json
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

IMPORT = "import"  # stands for a test: what imports of test modules come to
HITS = "MUTATION_HITS"  # names the file of the shared memory, for processes of all kinds
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# A compiler that traces a block calls `hit` while it traces.
HIT_MODULE = f"""
import builtins, mmap, os
with open(os.environ["{HITS}"] + os.environ.get("PYTEST_XDIST_WORKER", ""), "r+b") as file:
    hits = mmap.mmap(file.fileno(), 0)
def hit(number):
    hits[number] = 1
hit._dynamo_marked_constant = True
builtins._hit = hit  # for functions that are given another module's globals
"""


def runs(statements: list[ast.stmt]) -> Iterator[list[ast.stmt]]:
    """Statements of a list up to and with each compound one."""
    run: list[ast.stmt] = []
    for statement in statements:
        run.append(statement)
        if hasattr(statement, "body") and not isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
            yield run
            run = []
    if run:
        yield run


def blocks(
    tree: ast.AST, inside: str = "", in_function: bool = False
) -> Iterator[tuple[str, list[ast.stmt]]]:
    """Each block's function and statements; those outside functions are run by an import, and are none."""
    for _name, value in ast.iter_fields(tree):
        if (
            not isinstance(value, list)
            or not value
            or not isinstance(value[0], (ast.stmt, ast.excepthandler, ast.match_case))
        ):
            continue
        if in_function and isinstance(value[0], ast.stmt):
            for run in runs(value):
                yield inside, run
        for child in value:
            is_function = isinstance(child, FUNCTIONS)
            below = (
                f"{inside}.{child.name}".lstrip(".")
                if is_function or isinstance(child, ast.ClassDef)
                else inside
            )
            yield from blocks(
                child, below, is_function or (in_function and not isinstance(child, ast.ClassDef))
            )


def numbered(file: str, tree: ast.AST) -> dict[str, list[ast.stmt]]:
    """A file's blocks by names that edits elsewhere in the file leave as they are."""
    found: dict[str, list[ast.stmt]] = {}
    seen: dict[str, int] = {}
    for function, run in blocks(tree):
        seen[function] = seen.get(function, -1) + 1
        found[f"{file}:{function}#{seen[function]}"] = run
    return found


def _insert(tree: ast.Module, of_run: dict[int, int]) -> None:
    """Let the first statement of each run follow a call of `hit`."""
    for node in ast.walk(tree):
        for _, value in ast.iter_fields(node):
            if isinstance(value, list) and any(id(each) in of_run for each in value):
                has_docstring = (
                    isinstance(node, FUNCTIONS) and ast.get_docstring(node, clean=False) is not None
                )
                for statement in list(value):
                    if id(statement) in of_run:
                        call = ast.parse(f"_hit({of_run[id(statement)]})").body[0]
                        value.insert(value.index(statement) + (has_docstring and statement is value[0]), call)


def instrument(package: Path) -> list[str]:
    """Rewrite a copy of the package; the names of blocks, in the order of their numbers."""
    names: list[str] = []
    for path in sorted(package.rglob("*.py")):
        tree = ast.parse(path.read_text())
        found = numbered(path.relative_to(package).as_posix(), tree)
        _insert(tree, {id(run[0]): len(names) + k for k, run in enumerate(found.values())})
        names += found
        header = sum(
            (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
            or (isinstance(node, ast.ImportFrom) and node.module == "__future__")
            for node in tree.body[:2]
        )  # fmt: skip
        tree.body.insert(header, ast.parse(f"from {package.name}._hit import hit as _hit").body[0])
        path.write_text(ast.unparse(ast.fix_missing_locations(tree)))
    (package / "_hit.py").write_text(HIT_MODULE)
    return names


# ---------------------------------------------------------------- in the pytest process


class Recorder:
    """Writes a line for each test: name, outcome, seconds, numbers of blocks."""

    def __init__(self) -> None:
        name = os.environ[HITS] + os.environ.get("PYTEST_XDIST_WORKER", "")
        with open(name, "r+b") as file:
            self.hits = mmap.mmap(file.fileno(), 0)
        self.lines = open(f"{name}.jsonl", "a")  # noqa: SIM115 - as long as the process lives
        self.passed = True

    def write(self, name: str, seconds: float) -> None:
        numbers = [k for k, is_hit in enumerate(self.hits[:]) if is_hit]
        print(json.dumps([name, self.passed, round(seconds, 3), numbers]), file=self.lines, flush=True)

    def pytest_collection_finish(self) -> None:
        self.write(IMPORT, 0.0)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        self.hits[:] = bytes(len(self.hits))
        self.passed, began = True, time.monotonic()
        result = yield
        self.write(item.nodeid, time.monotonic() - began)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed &= report.outcome == "passed"


def pytest_configure(config: pytest.Config) -> None:
    if HITS in os.environ:
        config.pluginmanager.register(Recorder(), "mutation-recorder")
