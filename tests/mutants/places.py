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
import re
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
HOST = ("checkpoint/", "comm/agree.py", "comm/order.py", "comm/watch.py", "sharded_tensor/pickling.py")

CALLS = {
    "wait": {
        "wait", "wait_event", "wait_stream", "wait_tensor", "wait_for", "synchronize", "wait_for_gather",
        "wait_for_unshard", "wait_for_reductions", "wait_for_offload", "follow_optimizer",
        "finish_gather", "make_room_for_reduction", "follow_stream", "follow_other_streams",
    },
    "event": {"record_event", "record"},
    "keep-alive": {"track_reductions", "record_stream"},
    "giving back": {
        "abandon_gather", "free_gathered", "end_copy_out", "free_later", "reclaim", "drop_stale"
    },
}  # fmt: skip
STREAMS = {"stream", "copy_in", "all_gather", "reduce_scatter", "all_reduce", "where", "_on_its_stream"}
KEEPS = {
    "_freed", "copy_out_pending", "offload_events", "reduce_inputs", "reduce_shards",
    "reduced", "smaller_ready", "reducing_from", "stepped", "owner", "ready", "ran_on",
}  # fmt: skip
_NAMES = re.compile(rf"\b({'|'.join(set().union(*CALLS.values()))})\(|with .*stream|{'|'.join(KEEPS)}")
_NOTHING = ast.Tuple([], ast.Load())


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


def _call(function: str) -> ast.Call:
    return ast.Call(ast.Name(function, ast.Load()), [], [])


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

    def _asks(self, kind: str, node: Any, text: str) -> ast.Call:
        number, function = self.first + len(self.places), ".".join(self.inside)
        self.places.append(Place(number, kind, self.file, node.lineno, function, text.splitlines()[0]))
        return ast.Call(ast.Name("_left_out", ast.Load()), [ast.Constant(number)], [])

    def _either(self, kind: str, node: ast.expr, other: ast.expr, text: str = "") -> ast.expr:
        return ast.IfExp(self._asks(kind, node, text or ast.unparse(node)), other, node)

    def _named(self, node: Any) -> Any:
        self.inside.append(node.name)
        self.generic_visit(node)
        self.inside.pop()
        return node

    visit_ClassDef = visit_FunctionDef = _named  # noqa: N815 - as ast calls them

    def visit_Call(self, node: ast.Call) -> ast.AST:
        name = _name(node.func)
        kind = next((kind for kind, names in CALLS.items() if name in names), "")
        if (name == "wait" and self.file.startswith(HOST)) or (
            name == "record" and isinstance(node.func, ast.Name)
        ):
            kind = ""
        text = ast.unparse(node) if kind or name == "AllGatherResult" else ""
        self.generic_visit(node)
        if name == "AllGatherResult" and _name(node.args[1]):
            node.args[1] = self._either("keep-alive", node.args[1], _NOTHING, text)
        if not kind:
            return node
        if kind == "event":
            return self._either(kind, node, _call("_never"), text)
        # What it would have been given is made all the same.
        made = [*node.args, *[keyword.value for keyword in node.keywords]]
        if isinstance(node.func, ast.Attribute) and name == "wait":
            made.insert(0, node.func.value)  # what nobody waits for is the result
        elif name != "wait_tensor":
            made.insert(0, ast.Constant(None))
        other = ast.Subscript(ast.Tuple(made, ast.Load()), ast.Constant(0), ast.Load())
        return self._either(kind, node, other, text)

    def visit_With(self, node: ast.With) -> ast.AST:
        for item in node.items:
            found = item.context_expr
            if _name(found.func if isinstance(found, ast.Call) else found) in STREAMS:
                item.context_expr = self._either("context", found, _call("_nothing"))
            elif isinstance(found, ast.IfExp) and _name(found.orelse) in STREAMS:
                found.orelse = self._either("context", found.orelse, _call("_nothing"))
        self.generic_visit(node)
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        call = node.value
        is_append = isinstance(call, ast.Call) and _name(call.func) == "append"
        return self._stores(node, call.func.value if is_append else None)  # type: ignore[attr-defined]

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        target = node.targets[0]
        target = target.value if isinstance(target, ast.Subscript) else target
        return self._stores(node, None if _is_nothing(node.value) else target)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        return self._stores(node, node.target)

    def _stores(self, node: Any, into: ast.expr | None) -> ast.AST:
        if isinstance(into, ast.Attribute) and _name(into) in KEEPS:
            asks = self._asks("keep-alive", node, ast.unparse(node))
            self.generic_visit(node)
            return ast.If(ast.UnaryOp(ast.Not(), asks), [node], [])
        self.generic_visit(node)
        return node

    def visit_Tuple(self, node: ast.Tuple) -> ast.AST:
        """A tensor with the event after which it may be freed."""
        is_pair = isinstance(node.ctx, ast.Load) and len(node.elts) == 2
        if is_pair and _name(node.elts[1]) in ("event", "copied_out"):
            text = ast.unparse(node)
            node.elts[0] = self._either("keep-alive", node.elts[0], ast.Constant(None), text)
        self.generic_visit(node)
        return node


def _transformed() -> Iterator[tuple[Path, ast.Module, list[Place]]]:
    """The files that have places."""
    count = 0
    for path in sorted(SOURCE.rglob("*.py")):
        file, text = path.relative_to(SOURCE).as_posix(), path.read_text()
        if not file.startswith(NOT_LOOKED_AT) and _NAMES.search(text):
            finder = _Finder(file, count)
            tree = ast.fix_missing_locations(finder.visit(ast.parse(text)))
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
    is_frozen = gc.get_freeze_count()
    gc.unfreeze()  # frozen objects are not shown
    functions = [each for each in gc.get_objects() if type(each) is FunctionType]
    if is_frozen:
        gc.freeze()
    for function in functions:
        old = function.__code__
        new = codes.get((old.co_filename, old.co_firstlineno, old.co_qualname))
        if new is not None:
            kept.append((function, old))
            function.__code__ = new
            function.__globals__.update(_left_out=switch, _never=_never, _nothing=nullcontext)
    try:
        yield
    finally:
        switch.place = None  # closures that were made meanwhile go on asking
        for function, old in kept:
            function.__code__ = old


def _never() -> torch.Event:
    """An event that was not recorded: who waits for it goes on."""
    return torch.Event()
