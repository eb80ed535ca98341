"""Parts of a value along a dim, and values from parts."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from shardwise.tensor_parallel.heads import part_dim
from shardwise.tensor_parallel.nodes import args_of, op_of
from shardwise.tensor_parallel.partition import Partition, aten
from shardwise.tensor_parallel.placement import REPLICATE, Split, hint
from shardwise.tensor_parallel.rules.registry import aten_rule


@aten_rule("slice", "narrow", "select", "split", "chunk", "split_with_sizes", "unbind", "tensor_split")
def part(p: Partition, node: fx.Node) -> None:
    """Parts along a dim; along the cut one, each rank's part of them."""
    x, op = args_of(node)[0], op_of(node)
    dim, at = part_dim(node, len(p.shape(x))), p.stays(x)
    if not isinstance(at, Split) or at.dim != dim:
        gone = op in ("select", "unbind") and isinstance(at, Split) and at.dim > dim
        return p.locally(node, {x: at}, at.on(at.dim - 1) if gone and isinstance(at, Split) else at)
    if at.block is None and op in ("split", "chunk", "split_with_sizes", "tensor_split"):
        return _along(p, node, at)
    begin = slice_begin(p, node, 1, size=p.shape(node)[dim]) if op in ("slice", "narrow") else None
    if at.block is not None or begin is None:
        return p.repeat(node)
    found = at.within(begin, begin + p.shape(node)[dim])
    first = at.within(0, begin).size(p.rank)
    bounds = (dim, first, first + found.size(p.rank))
    return p.keep(node, p.emit(aten.slice.Tensor, p.take(x, at), *bounds), found)


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


def _along(p: Partition, node: fx.Node, at: Split) -> None:
    """Parts along the cut dim, each cut alike: as the parts of a fused projection are."""
    cuts, begin = [], 0
    for piece in node.meta["val"]:
        end = begin + hint(piece.shape[at.dim])
        cuts.append(at.within(begin, end))
        begin = end
    here, sizes = p.take(node.args[0], at), [cut.size(p.rank) for cut in cuts]
    p.keep(node, p.emit(aten.split_with_sizes.default, here, sizes, at.dim), tuple(cuts))


def getitem(p: Partition, node: fx.Node) -> None:
    """One of several results."""
    whole, index = args_of(node)
    value = p.values[whole]
    if not isinstance(value.placement, tuple):
        return p.repeat(node)
    apart = isinstance(value.node, tuple)  # made one by one
    made = value.node[index] if apart else p.emit(operator.getitem, value.node, index)
    return p.keep(node, made, value.placement[index])


@aten_rule("cat", "stack", "concat", "hstack")
def cat(p: Partition, node: fx.Node) -> None:
    tensors: Any = node.args[0]
    given: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    stacks = node.target is aten.stack.default
    used = [x for x in tensors if len(p.shape(x)) > 1 or p.shape(x)[0] != 0]  # empty vectors fit anything
    if not used or op_of(node) == "hstack":
        return p.repeat(node)
    dim = given % (len(p.shape(used[0])) + stacks)
    cut = p.cut_of(*used)
    if cut is not None and cut.dim == dim and not stacks:
        return _cat_along(p, node, used, dim)
    made = p.emit(node.target, [p.take(x, cut or REPLICATE) for x in used], dim)
    return p.keep(node, made, cut.on(cut.dim + (stacks and cut.dim >= dim)) if cut is not None else REPLICATE)


def _cat_along(p: Partition, node: fx.Node, tensors: list[fx.Node], dim: int) -> None:
    """Values cut along the dim they are joined in: the parts of a fused projection, put together again."""
    cuts = [at for x in tensors if isinstance(at := p.placement(x), Split) and at.dim == dim]
    if len(cuts) < len(tensors) or any(at.block for at in cuts):
        return p.repeat(node)
    begin = 0
    joined: list[list[tuple[int, int]]] = [[] for _ in range(p.ranks)]
    for x, at in zip(tensors, cuts, strict=True):
        for rank, held in enumerate(at.ranges):
            joined[rank] += [(begin + b, begin + e) for b, e in held]
        begin += p.shape(x)[dim]
    found = Split(dim, tuple(tuple(held) for held in joined)).within(0, begin)
    made = p.emit(aten.cat.default, [p.take(x, at) for x, at in zip(tensors, cuts, strict=True)], dim)
    return p.keep(node, made, found)
