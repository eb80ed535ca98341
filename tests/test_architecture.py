"""The shape of the package: files keep the rules of `architecture`, and rules notice what breaks them."""

from __future__ import annotations

import re
import textwrap

import pytest

from architecture import (
    MAX_FILE_LINES,
    MAX_FUNCTION_LINES,
    ROOT,
    RULES,
    Rule,
    Source,
    circle,
    every_source,
    files_and_functions_are_short,
    kinds_asked_for,
    layout_knows_no_communication,
    names_are_nouns,
    nothing_imports_the_command_line,
    package,
    packages_import_only_from_above,
    packages_stand_in_the_order,
    private_torch_names_stay_in_compat,
    ranks_and_files_say_text_and_numbers_only,
    ranks_compare_in_one_place,
    safetensors_files_have_one_reader_and_one_writer,
    source,
    torch_modules_this_library_replaces_are_not_used,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_file_keeps_the_rule(rule: Rule) -> None:
    sources = every_source()
    assert len(sources) > 5
    assert [violation for file in sources for violation in rule(file)] == []


# ---------------------------------------------------------------- circles


def test_no_more_places_ask_which_kind_of_sharded_tensor_one_is() -> None:
    """What tells kinds apart belongs to `sharded_tensor`: move a question there, and lower the number."""
    assert sum(len(kinds_asked_for(file)) for file in every_source()) <= 34
    asks = "def f(x):\n    return isinstance(x, (int, DTensor))"
    assert kinds_asked_for(source("shardwise.fsdp.group", asks)) == [2]
    assert kinds_asked_for(source("shardwise.sharded_tensor.move", asks)) == []


def test_no_package_has_a_circle_of_imports() -> None:
    by_package: dict[str, list[Source]] = {}
    for file in every_source():
        by_package.setdefault(package(file.module), []).append(file)
    assert {name: ring for name, sources in by_package.items() if (ring := circle(sources))} == {}


def test_a_circle_is_noticed_also_where_it_closes_within_a_function() -> None:
    first = source("shardwise.comm.one", "from shardwise.comm.two import f")
    second = source("shardwise.comm.two", "def f():\n    from shardwise.comm import one")
    assert set(circle([first, second])) == {"shardwise.comm.one", "shardwise.comm.two"}
    assert circle([first, source("shardwise.comm.two", "from shardwise.comm import three")]) == []


# ---------------------------------------------------------------- the rules notice

LONG_FUNCTION = "def f():\n" + "    pass\n" * MAX_FUNCTION_LINES


@pytest.mark.parametrize(
    ("rule", "module", "text", "lines"),
    [
        (packages_stand_in_the_order, "shardwise.helpers.x", "", [1]),
        (packages_import_only_from_above, "shardwise.layout.box", "import shardwise.comm.ops", [1]),
        (packages_import_only_from_above, "shardwise.comm.ops", "from shardwise import _compat, fsdp", [1]),
        (packages_import_only_from_above, "shardwise.comm.ops", "from ..fsdp.group import Group", [1]),
        (packages_import_only_from_above, "shardwise.comm.ops", "from .. import optim", [1]),
        (packages_import_only_from_above, "shardwise.errors", "from .mesh import MeshInfo", [1]),
        (packages_import_only_from_above, "shardwise.verify.run", "from shardwise import fully_shard", [1]),
        (packages_import_only_from_above, "shardwise.fsdp.group", "import shardwise", [1]),
        (
            packages_import_only_from_above,
            "shardwise.fsdp.group",
            """
            from typing import TYPE_CHECKING
            if TYPE_CHECKING:
                from shardwise.checkpoint import save
            def late():
                import shardwise.planner
            """,
            [4, 6],
        ),
        (layout_knows_no_communication, "shardwise.layout.box", "import torch.distributed as dist", [1]),
        (layout_knows_no_communication, "shardwise.layout.box", "from torch import distributed", [1]),
        (
            layout_knows_no_communication,
            "shardwise.layout.box",
            "import torch\nrank = torch.distributed.get_rank()",
            [2],
        ),
        (names_are_nouns, "shardwise.fsdp.group", "def f(what):\n    return [one for one in what]", [1, 2]),
        (nothing_imports_the_command_line, "shardwise", "from shardwise.cli import app", [1]),
        (nothing_imports_the_command_line, "shardwise.doctor", "def f():\n    from . import cli", [2]),
        (
            torch_modules_this_library_replaces_are_not_used,
            "shardwise.fsdp.group",
            """
            import torch.distributed.fsdp
            from torch.distributed import _composable
            from torch.distributed._tools.mem_tracker import MemTracker
            from torch.distributed.tensor import experimental
            """,
            [2, 3, 4, 5],
        ),
        (
            torch_modules_this_library_replaces_are_not_used,
            "shardwise._compat",
            "import torch.distributed as dist\nshard = dist.fsdp",
            [2],
        ),
        (
            private_torch_names_stay_in_compat,
            "shardwise.fsdp.group",
            """
            import torch._dynamo
            from torch._prims import x
            from torch import nn, _foreach_add_
            import torch
            torch.ops._c10d_functional
            nn.Module._apply
            getattr(torch, "_chunk_cat")
            torch.__version__
            """,
            [2, 3, 4, 6, 7, 8],
        ),
        (
            ranks_and_files_say_text_and_numbers_only,
            "shardwise.verify.run",
            """
            import pickle, torch, torch.distributed as dist
            from torch.distributed import all_gather_object
            from pickle import loads
            from torch.distributed.checkpoint import save
            dist.broadcast_object_list([1])
            pickle.loads(b"")
            torch.load("x")
            torch.load("x", weights_only=False)
            torch.load("x", weights_only=True)
            """,
            [3, 4, 5, 6, 7, 8, 9],
        ),
        (
            safetensors_files_have_one_reader_and_one_writer,
            "shardwise.hf.load",
            "def f():\n    from safetensors.torch import save_file",
            [2],
        ),
        (
            ranks_compare_in_one_place,
            "shardwise.checkpoint.write",
            """
            import torch.distributed as dist
            from shardwise.comm.agree import agree, gather_text
            from shardwise.errors import RankMismatchError
            def f(found, group):
                dist.all_gather_object(found, group)
                raise RankMismatchError("ranks differ")
            """,
            [3, 6, 7],
        ),
        (files_and_functions_are_short, "shardwise.cli", LONG_FUNCTION, [1]),
        (files_and_functions_are_short, "shardwise.cli", "\n" * (MAX_FILE_LINES + 1), [MAX_FILE_LINES + 1]),
    ],
)
def test_a_rule_names_the_line_that_breaks_it(rule: Rule, module: str, text: str, lines: list[int]) -> None:
    found = rule(source(module, textwrap.dedent(text)))
    assert [int(violation.split(":")[1]) for violation in found] == lines
    assert all(violation.startswith(f"{module}:") for violation in found)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("shardwise", "from shardwise.verify import Case\nfrom shardwise.fsdp.module import fully_shard"),
        ("shardwise.cli", "from shardwise import fully_shard"),
        ("shardwise.comm.ops", "from shardwise import _compat, errors\nfrom . import divide"),
        ("shardwise.layout.box", "import torch\nfrom torch import Tensor\nfrom . import placement"),
        ("shardwise._compat", "from torch._dynamo import config"),
        ("shardwise.comm.ops", "def f(torch):\n    return torch._private"),
        ("shardwise.cli", LONG_FUNCTION.removesuffix("    pass\n")),
        ("shardwise.cli", "\n" * MAX_FILE_LINES),
    ],
)
def test_a_file_within_the_rules_passes_them_all(module: str, text: str) -> None:
    file = source(module, text, is_package=module == "shardwise")
    assert [violation for rule in RULES for violation in rule(file)] == []


@pytest.mark.parametrize("folder", ["tests", "benchmarks", "examples", "docs"])
def test_no_file_beside_the_package_is_long_either(folder: str) -> None:
    lines = {path: len(path.read_text().splitlines()) for path in (ROOT.parents[1] / folder).rglob("*.py")}
    assert lines
    assert {str(path): count for path, count in lines.items() if count > MAX_FILE_LINES} == {}


def walks() -> list[tuple[str, list[str]]]:
    """The numbered lists of ARCHITECTURE.md, each with the line above it."""
    found: list[tuple[str, list[str]]] = []
    title = ""
    for line in (ROOT.parents[1] / "ARCHITECTURE.md").read_text().splitlines():
        if line.startswith("1. "):
            found.append((title, []))
        if re.match(r"\d+\. ", line):
            found[-1][1].append(line)
        title = line or title
    return found


def test_the_three_walks_name_at_most_ten_functions_each_and_all_exist() -> None:
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in ROOT.rglob("*.py")}
    assert [title for title, _ in walks()] == [
        "A batch through `fully_shard`:",
        "A tensor through `reshard`:",
        "A program through the transformation:",
    ]
    for _, steps in walks():
        assert len(steps) <= 10
        for name, file in re.findall(r"`([\w.]+)` \(`([\w/]+\.py)`", " ".join(steps)):
            what = rf"^ *(def|class) {name.rsplit('.')[-1]}\b"
            places = [path for path in texts if f"/{path}".endswith(f"/{file}")]
            assert any(re.search(what, texts[path], re.MULTILINE) for path in places), (name, file)
