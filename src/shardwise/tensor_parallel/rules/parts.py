"""Parts of a value along a dim, and values from parts."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from shardwise.tensor_parallel.heads import part_dim
from shardwise.tensor_parallel.partition import Partition, aten
from shardwise.tensor_parallel.placement import REPLICATE, Placement, Split, hint
from shardwise.tensor_parallel.rules.registry import rule
from shardwise.tensor_parallel.rules.views import start


@rule(
    "aten::slice",
    "aten::narrow",
    "aten::select",
    "aten::split",
    "aten::chunk",
    "aten::split_with_sizes",
    "aten::unbind",
    "aten::tensor_split",
)
def part(p: Partition, node: fx.Node) -> None:
    """Parts along a dim; along the cut one, each rank's part of them."""
    x, *rest = node.args
    assert isinstance(x, fx.Node)
    name = str(node.target).split(".")[1]
    dim = part_dim(node, name, len(p.shape(x)))
    here, at = start(p, x)
    whole = node.meta["val"]
    if isinstance(at, Split) and at.dim == dim:
        if at.block is None and name in ("split", "chunk", "split_with_sizes", "tensor_split"):
            return _along(p, node, here, at)
        if (
            at.block is None
            and name in ("slice", "narrow")
            and (begin := slice_begin(p, node, 1, size=p.shape(node)[dim])) is not None
        ):
            found = at.within(begin, begin + p.shape(node)[dim])
            return p.keep(node, _local(p, here, at, begin, begin + p.shape(node)[dim]), found)
        return p.repeat(node)
    made = p.emit(node.target, here, *map(p.take, rest), **p.take_all(node.kwargs))
    if name in ("select", "unbind") and isinstance(at, Split):
        at = at.on(at.dim - (at.dim > dim))
    return p.keep(node, made, (at,) * len(whole) if isinstance(whole, (list, tuple)) else at)


def slice_begin(p: Partition, node: fx.Node, place: int, *, size: Any) -> int | None:
    """Where a slice of `size` elements begins, if numbers say it; its dim is the argument at `place`."""
    args: Any = node.args
    dim = args[place] if len(args) > place else 0
    whole = p.shape(args[0])[dim]
    begin = args[place + 1] if len(args) > place + 1 and args[place + 1] is not None else 0
    step = args[place + 3] if str(node.target).startswith("aten.slice") and len(args) > place + 3 else 1
    if step != 1 or not all(isinstance(n, int) for n in (begin, whole, size)):
        return None
    return int(max(0, begin + whole) if begin < 0 else min(begin, whole))


def _local(p: Partition, here: fx.Node, at: Split, begin: int, end: int) -> fx.Node:
    """The elements from `begin` to `end` that this rank has, which lie next to each other."""
    first = at.within(0, begin).size(p.rank)
    return p.emit(aten.slice.Tensor, here, at.dim, first, first + at.within(begin, end).size(p.rank))


def _along(p: Partition, node: fx.Node, here: fx.Node, at: Split) -> None:
    """Parts along the cut dim, each cut alike: as the parts of a fused projection are."""
    cuts, begin = [], 0
    for piece in node.meta["val"]:
        size = hint(piece.shape[at.dim])
        cuts.append(at.within(begin, begin + size))
        begin += size
    made = p.emit(aten.split_with_sizes.default, here, [cut.size(p.rank) for cut in cuts], at.dim)
    p.keep(node, made, tuple(cuts))


def getitem(p: Partition, node: fx.Node) -> None:
    """One of several results."""
    whole, index = node.args
    assert isinstance(whole, fx.Node)
    assert isinstance(index, int)
    value = p.values[whole]
    if not isinstance(value.placement, tuple):
        return p.repeat(node)
    several = isinstance(value.node, tuple)  # made one by one
    made = value.node[index] if several else p.emit(operator.getitem, value.node, index)
    return p.keep(node, made, value.placement[index])


@rule("aten::cat", "aten::stack", "aten::concat", "aten::hstack")
def cat(p: Partition, node: fx.Node) -> None:
    tensors: Any = node.args[0]
    given: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    stacks = node.target is aten.stack.default
    used = [x for x in tensors if len(p.shape(x)) > 1 or p.shape(x)[0] != 0]  # empty vectors fit anything
    if not used or str(node.target).split(".")[1] == "hstack":
        return p.repeat(node)
    dim = given % (len(p.shape(used[0])) + stacks)
    cut = p.cut_of(*used)
    if cut is not None and cut.dim == dim and not stacks:
        return _cat_along(p, node, used, dim)
    where: Placement = REPLICATE if cut is None else cut
    made = p.emit(node.target, [p.take(x, where) for x in used], dim)
    return p.keep(node, made, cut.on(cut.dim + (stacks and cut.dim >= dim)) if cut is not None else REPLICATE)


def _cat_along(p: Partition, node: fx.Node, tensors: list[fx.Node], dim: int) -> None:
    """Values cut along the dim they are joined in: the parts of a fused projection, put together again."""
    cuts = [p.placement(x) for x in tensors]
    known = [at for at in cuts if isinstance(at, Split) and at.dim == dim and at.block is None]
    if len(known) != len(cuts):
        return p.repeat(node)
    begin = 0
    joined: list[list[tuple[int, int]]] = [[] for _ in range(p.ranks)]
    for x, at in zip(tensors, known, strict=True):
        for rank, held in enumerate(at.ranges):
            joined[rank] += [(begin + b, begin + e) for b, e in held]
        begin += p.shape(x)[dim]
    found = Split(dim, tuple(tuple(held) for held in joined)).within(0, begin)
    made = p.emit(aten.cat.default, [p.take(x, at) for x, at in zip(tensors, known, strict=True)], dim)
    return p.keep(node, made, found)
