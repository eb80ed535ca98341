"""Every wait, event, stream context and keep-alive in the source, each of which can be left out.

`places` finds them in the syntax. `instrumented` gives the functions that hold them other code, in place, in
which each asks whether it is the one to leave out; so one process can leave out one after another.

    wait          `stream.wait_event(event)`, `work.wait()` and what is made of them: is not called
    event         `record_event(stream)`: an event that was never recorded, which nobody waits for
    context       `with stream:`: what is inside runs on the stream that is current
    keep-alive    what is stored so that it lives until a stream has used it: is not stored
    giving back   a call that gives memory back after a wait: is not called
"""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch

import shardwise

SOURCE = Path(shardwise.__file__).parent
NOT_LOOKED_AT = ("verify/", "planner/")  # which run nothing on a device
# What waits there is the host: for threads, files, the store and words of other processes.
HOST = ("checkpoint/", "comm/agree.py", "comm/order.py", "comm/watch.py", "sharded_tensor/remote.py")

WAITS = {
    "wait", "wait_event", "wait_stream", "wait_tensor", "synchronize", "wait_for_gather", "wait_for_unshard",
    "wait_for_reductions", "wait_for_offload", "follow_computation", "begin_forward", "finish_gather",
    "make_room_for_reduction",
}  # fmt: skip
GIVES_BACK = {"abandon_gather", "free_gathered", "drop_copying_gather", "free_later", "reclaim", "drop_stale"}
EVENTS = {"record_event", "record"}
STREAMS = {"stream", "copy_in", "all_gather", "reduce_scatter", "all_reduce", "where"}
KEEPS = {
    "_freed", "copying_gather", "gathers_begun", "offload_events", "reduce_inputs", "reduce_shards",
    "reduced", "smaller_ready",
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """One of them."""

    number: int
    kind: str
    file: str  # below the package
    line: int
    function: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}: {self.text}"


@dataclass
class Switch:
    """Which place is left out, and which were come to."""

    place: int | None = None
    reached: set[int] = field(default_factory=set)

    def __call__(self, number: int) -> bool:
        self.reached.add(number)
        return number == self.place


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_nothing(node: ast.expr) -> bool:
    """Is it None, or an empty list or tuple?"""
    return (isinstance(node, ast.Constant) and node.value is None) or (
        isinstance(node, (ast.List, ast.Tuple)) and not node.elts
    )


class _Finder(ast.NodeTransformer):
    """Lets each place ask `_left_out(number)`."""

    def __init__(self, file: str, first: int) -> None:
        self.file, self.first = file, first
        self.places: list[Place] = []
        self.inside: list[str] = []

    def _asks(self, kind: str, node: ast.AST) -> ast.Call:
        number = self.first + len(self.places)
        text = ast.unparse(node).splitlines()[0]
        self.places.append(Place(number, kind, self.file, node.lineno, ".".join(self.inside), text))  # type: ignore[attr-defined]
        return ast.Call(ast.Name("_left_out", ast.Load()), [ast.Constant(number)], [])

    def _either(
        self, kind: str, node: ast.expr, other: ast.expr, *, shown: ast.AST | None = None
    ) -> ast.expr:
        return ast.IfExp(self._asks(kind, shown or node), other, node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._named(node, node.name)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._named(node, node.name)

    def _named(self, node: ast.AST, name: str) -> ast.AST:
        self.inside.append(name)
        self.generic_visit(node)
        self.inside.pop()
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        before = ast.parse(ast.unparse(node), mode="eval").body
        ast.copy_location(before, node)
        name = _name(node.func)
        self.generic_visit(node)
        if name in EVENTS and not (name == "record" and isinstance(node.func, ast.Name)):
            return self._either("event", node, ast.Call(ast.Name("_never", ast.Load()), [], []), shown=before)
        if name in WAITS and not (name == "wait" and self.file.startswith(HOST)):
            kind = "wait"
        elif name in GIVES_BACK:
            kind = "giving back"
        elif name == "track_reductions":
            kind = "keep-alive"
        elif name == "AllGatherResult" and _name(node.args[1]):
            node.args[1] = self._either("keep-alive", node.args[1], ast.Tuple([], ast.Load()), shown=before)
            return node
        else:
            return node
        # What it would have been given is made all the same.
        made = [*node.args, *[keyword.value for keyword in node.keywords]]
        which: int = 0
        if isinstance(node.func, ast.Attribute) and name == "wait":
            made.insert(0, node.func.value)  # an object that nobody waits for
        elif name != "wait_tensor":
            made, which = [*made, ast.Constant(None)], -1
        other = ast.Subscript(ast.Tuple(made, ast.Load()), ast.Constant(which), ast.Load())
        return self._either(kind, node, other, shown=before)

    def visit_With(self, node: ast.With) -> ast.AST:
        for item in node.items:
            found = item.context_expr
            if _name(found) in STREAMS:
                other = ast.Call(ast.Name("_nothing", ast.Load()), [], [])
                item.context_expr = self._either("context", found, other)
            elif isinstance(found, ast.IfExp) and _name(found.orelse) in STREAMS:
                other = ast.Call(ast.Name("_nothing", ast.Load()), [], [])
                found.orelse = self._either("context", found.orelse, other)
        self.generic_visit(node)
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        call = node.value
        if isinstance(call, ast.Call) and _name(call.func) == "append":
            assert isinstance(call.func, ast.Attribute)
            return self._stores(node, call.func.value)
        self.generic_visit(node)
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        target = node.targets[0]
        target = target.value if isinstance(target, ast.Subscript) else target
        return self._stores(node, None if _is_nothing(node.value) else target)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        return self._stores(node, node.target)

    def _stores(self, node: Any, into: ast.expr | None) -> ast.AST:
        kept = into is not None and _name(into) in KEEPS
        if not kept or (isinstance(into, ast.Name) and into.id != "gathers_begun"):
            self.generic_visit(node)
            return node
        asks = self._asks("keep-alive", node)
        self.generic_visit(node)
        return ast.If(ast.UnaryOp(ast.Not(), asks), [node], [])

    def visit_Tuple(self, node: ast.Tuple) -> ast.AST:
        """A tensor with the event after which it may be freed."""
        first, *rest = node.elts or [node]
        if len(rest) == 1 and isinstance(node.ctx, ast.Load) and _name(rest[0]) in ("event", "copied_out"):
            node.elts[0] = self._either("keep-alive", first, ast.Constant(None), shown=node)
        self.generic_visit(node)
        return node


def _transformed() -> Iterator[tuple[Path, ast.Module, list[Place]]]:
    """The files that have places."""
    count = 0
    for path in sorted(SOURCE.rglob("*.py")):
        file = path.relative_to(SOURCE).as_posix()
        if not file.startswith(NOT_LOOKED_AT):
            finder = _Finder(file, count)
            tree = ast.fix_missing_locations(finder.visit(ast.parse(path.read_text())))
            count += len(finder.places)
            if finder.places:
                yield path, tree, finder.places


def places() -> list[Place]:
    return [place for _, _, found in _transformed() for place in found]


def _asking(code: CodeType) -> Iterator[CodeType]:
    """The functions in which something asks, and those around them."""
    inner = [each for const in code.co_consts if isinstance(const, CodeType) for each in _asking(const)]
    if inner or "_left_out" in code.co_names:
        yield code
    yield from inner


@contextmanager
def instrumented(switch: Switch) -> Iterator[None]:
    """Meanwhile the package's functions leave out what `switch` says."""
    codes: dict[Any, CodeType] = {}
    for path, tree, _ in _transformed():
        for code in _asking(compile(tree, str(path), "exec", dont_inherit=True)):
            codes[str(path), code.co_firstlineno, code.co_qualname] = code
    kept: list[tuple[FunctionType, CodeType]] = []
    for function in [each for each in gc.get_objects() if type(each) is FunctionType]:
        old = function.__code__
        new = codes.get((old.co_filename, old.co_firstlineno, old.co_qualname))
        if new is not None:
            kept.append((function, old))
            function.__code__ = new
            function.__globals__.update(_left_out=switch, _never=_never, _nothing=nullcontext)
    try:
        yield
    finally:
        for function, old in kept:
            function.__code__ = old


def _never() -> torch.Event:
    """An event that was not recorded: who waits for it goes on."""
    return torch.Event()
