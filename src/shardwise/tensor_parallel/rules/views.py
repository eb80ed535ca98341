"""The same elements in another shape: what is cut stays cut, along the dim that it becomes."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from shardwise.tensor_parallel.partition import Partition, aten, with_dim
from shardwise.tensor_parallel.placement import (
    PARTIAL,
    REPLICATE,
    Placement,
    Ranges,
    Split,
    merged,
    normal,
    unmerged,
)
from shardwise.tensor_parallel.rules.registry import rule


def start(p: Partition, x: fx.Node) -> tuple[fx.Node, Placement]:
    """An input where it is: terms of a sum stay so if this is their one use."""
    at = p.placement(x)
    if at == PARTIAL and not p.may_stay_partial(x):
        at = REPLICATE
    return p.take(x, at), p.placement(x)


@rule("aten::view", "aten::reshape", "aten::_unsafe_view", "aten::flatten", "aten::unflatten", "aten::view_as")
def view(p: Partition, node: fx.Node) -> None:
    x = node.args[0]
    assert isinstance(x, fx.Node)
    here, at = start(p, x)
    sizes = _sizes(p, node)
    if not isinstance(at, Split):
        return p.keep(node, p.emit(aten.reshape.default, here, sizes), at)
    found = regroup(p.hints(x), p.hints(node), at)
    if found is None:
        made = p.emit(aten.reshape.default, p.take(x), sizes)
        return p.keep(node, made, REPLICATE)
    made = p.emit(aten.reshape.default, here, with_dim(sizes, found.dim, found.size(p.rank)))
    return p.keep(node, made, found)


def _sizes(p: Partition, node: fx.Node) -> list[Any]:
    """The whole value's new sizes: numbers, or nodes of this rank's program where they are symbolic."""
    asked = node.args[1] if len(node.args) > 1 else None
    known = p.shape(node)
    if isinstance(asked, (list, tuple)) and len(asked) == len(known):
        taken = [p.take(size) for size in asked]
        return [size if size != -1 or not isinstance(new, int) else new for size, new in zip(taken, known, strict=True)]
    dynamic = [size for size in known if not isinstance(size, int)]
    return [size if isinstance(size, int) else -1 for size in known] if len(dynamic) <= 1 else known


def regroup(old: Sequence[int], new: Sequence[int], at: Split) -> Split | None:
    """Where a value of sizes `old`, cut by `at`, is cut in sizes `new`; None where no dim says it."""
    for before, after in groups(old, new):
        if at.dim not in before:
            continue
        flat = merged(at, [old[d] for d in before], dim=before.index(at.dim))
        found = unmerged(flat, [new[d] for d in after])
        return None if found is None else Split(after[found[0]], found[1])
    return None


def groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Dims of `old` and of `new` that hold the same elements, as few at a time as possible."""
    found: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        before, after = [i] if i < len(old) else [], [j] if j < len(new) else []
        i, j = i + 1, j + 1
        while math.prod(old[d] for d in before) != math.prod(new[d] for d in after):
            if i < len(old) and math.prod(old[d] for d in before) < math.prod(new[d] for d in after):
                before.append(i)
                i += 1
            elif j < len(new):
                after.append(j)
                j += 1
            else:
                before.append(i)
                i += 1
        found.append((before, after))
    return found


@rule("aten::transpose", "aten::permute", "aten::t", "aten::numpy_T")
def permute(p: Partition, node: fx.Node) -> None:
    x, *rest = node.args
    assert isinstance(x, fx.Node)
    ndim = len(p.shape(x))
    order = list(range(ndim))
    if len(rest) == 2:
        a, b = (int(d) % ndim for d in rest)  # type: ignore[arg-type]
        order[a], order[b] = b, a
    elif rest:
        order = [int(d) % ndim for d in rest[0]]  # type: ignore[union-attr, arg-type]
    else:
        order.reverse()
    here, at = start(p, x)
    made = p.emit(node.target, here, *rest)
    p.keep(node, made, at.on(order.index(at.dim)) if isinstance(at, Split) else at)


@rule("aten::unsqueeze")
def unsqueeze(p: Partition, node: fx.Node) -> None:
    x, dim = node.args
    assert isinstance(x, fx.Node) and isinstance(dim, int)
    here, at = start(p, x)
    dim %= len(p.shape(x)) + 1
    made = p.emit(node.target, here, dim)
    p.keep(node, made, at.on(at.dim + (at.dim >= dim)) if isinstance(at, Split) else at)


@rule("aten::squeeze")
def squeeze(p: Partition, node: fx.Node) -> None:
    x, *rest = node.args
    assert isinstance(x, fx.Node)
    sizes = p.hints(x)
    asked = range(len(sizes)) if not rest else rest[0] if isinstance(rest[0], (list, tuple)) else [rest[0]]
    gone = {int(d) % len(sizes) for d in asked if sizes[int(d)] == 1}  # type: ignore[arg-type, union-attr]
    here, at = start(p, x)
    made = p.emit(aten.squeeze.dims, here, sorted(gone))
    p.keep(node, made, at.on(at.dim - sum(d < at.dim for d in gone)) if isinstance(at, Split) else at)


@rule("aten::expand")
def expand(p: Partition, node: fx.Node) -> None:
    x, asked = node.args[:2]
    assert isinstance(x, fx.Node) and isinstance(asked, (list, tuple))
    here, at = start(p, x)
    sizes = [p.take(size) for size in asked]
    if isinstance(at, Split):
        dim = at.dim + len(sizes) - len(p.shape(x))
        made = p.emit(node.target, here, with_dim(sizes, dim, at.size(p.rank)))
        return p.keep(node, made, at.on(dim))
    return p.keep(node, p.emit(node.target, here, sizes), at)


@rule("aten::slice", "aten::narrow", "aten::select", "aten::split", "aten::chunk", "aten::split_with_sizes", "aten::unbind", "aten::tensor_split")
def part(p: Partition, node: fx.Node) -> None:
    """Parts along a dim: along another than the cut one as it is; along the cut one where ranges say it."""
    x, *rest = node.args
    assert isinstance(x, fx.Node)
    name = str(node.target).split(".")[1]
    first = name in ("slice", "narrow", "select", "unbind")
    given = rest[0] if first and rest else rest[1] if not first and len(rest) > 1 else node.kwargs.get("dim", 0)
    assert isinstance(given, int)
    dim = given % len(p.shape(x))
    here, at = start(p, x)
    whole = node.meta["val"]
    count = len(whole) if isinstance(whole, (list, tuple)) else None
    if isinstance(at, Split) and at.dim == dim:
        if count is not None and name in ("split", "chunk", "split_with_sizes", "tensor_split"):
            found = _along(p, node, here, at)
            if found:
                return None
        here, at = p.take(x), REPLICATE
    made = p.emit(node.target, here, *map(p.take, rest), **p.take_all(node.kwargs))
    if name in ("select", "unbind") and isinstance(at, Split):
        at = at.on(at.dim - (at.dim > dim))
    return p.keep(node, made, at if count is None else (at,) * count)


def _along(p: Partition, node: fx.Node, here: fx.Node, at: Split) -> bool:
    """Parts along the cut dim, each cut alike: as the parts of a fused projection are."""
    sizes = [int(part.shape[at.dim]) for part in node.meta["val"]]
    begin, cuts = 0, []
    for size in sizes:
        inside = [
            normal([(max(b, begin) - begin, min(e, begin + size) - begin) for b, e in held if max(b, begin) < min(e, begin + size)])
            for held in at.ranges
        ]
        cuts.append(Split(at.dim, tuple(inside)))
        begin += size
    joined: Ranges = tuple(
        normal([(b + sum(sizes[:i]), e + sum(sizes[:i])) for i, cut in enumerate(cuts) for b, e in cut.ranges[rank]])
        for rank in range(p.ranks)
    )
    if joined != tuple(normal(held) for held in at.ranges):
        return False
    made = p.emit(aten.split_with_sizes.default, here, [cut.size(p.rank) for cut in cuts], at.dim)
    p.keep(node, made, tuple(cuts))
    return True


def getitem(p: Partition, node: fx.Node) -> None:
    """One of several results."""
    whole, index = node.args
    assert isinstance(whole, fx.Node) and isinstance(index, int)
    value = p.values[whole]
    assert isinstance(value.placement, tuple)
    made = p.emit(operator.getitem, value.node, index)
    p.keep(node, made, value.placement[index])


@rule("aten::cat", "aten::stack")
def cat(p: Partition, node: fx.Node) -> None:
    tensors = node.args[0]
    assert isinstance(tensors, (list, tuple))
    given = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    assert isinstance(given, int)
    stacks = node.target is aten.stack.default
    dim = given % (len(p.shape(tensors[0])) + stacks)  # type: ignore[arg-type]
    cut = next((at for x in tensors if isinstance(at := p.placement(x), Split)), None)
    if cut is not None and cut.dim == dim and not stacks:
        cut = None
    where: Placement = REPLICATE if cut is None else cut
    made = p.emit(node.target, [p.take(x, where) for x in tensors], dim)
    p.keep(node, made, cut.on(cut.dim + (stacks and cut.dim >= dim)) if cut is not None else REPLICATE)


@rule("aten::sym_size")
def sym_size(p: Partition, node: fx.Node) -> None:
    """A size of the whole value, from a value that has it whole."""
    x, dim = node.args
    assert isinstance(x, fx.Node) and isinstance(dim, int)
    at = p.placement(x)
    value = p.values[x]
    if isinstance(at, Split) and at.dim == dim:
        return p.keep(node, p.hints(x)[dim], REPLICATE)
    return p.keep(node, p.emit(node.target, value.node, dim), REPLICATE)


