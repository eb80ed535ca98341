"""Parts of a value along a dim, values from parts, and elements chosen by indices."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from shardwise.graph.nodes import arguments_of
from shardwise.tensor_parallel.heads import column_ranges, part_dim
from shardwise.tensor_parallel.nodes import args_of, is_tensor, op_of, several
from shardwise.tensor_parallel.partition import Partition, aten
from shardwise.tensor_parallel.placement import PARTIAL, REPLICATE, Split, hint, normal
from shardwise.tensor_parallel.rules.registry import Dims, aten_rule, by_dims
from shardwise.tensor_parallel.rules.vocabulary import by_intervals, by_rows, choose, is_chosen, placed


@aten_rule("slice", "narrow", "select", "split", "chunk", "split_with_sizes", "unbind", "tensor_split")
def part(p: Partition, node: fx.Node) -> None:
    """Take parts along a dim; along the cut dim, each rank's part of them."""
    x, op = args_of(node)[0], op_of(node)
    ndim = len(p.shape(x))
    dim = part_dim(node, ndim)
    if (wanted := _weights_cut(p, node, dim)) is not None:
        p.take(x, wanted)
    at = p.stays(x)
    if at == PARTIAL:
        return p.locally(node, {x: PARTIAL}, PARTIAL)
    if not isinstance(at, Split) or at.dim != dim:
        gone = op in ("select", "unbind")
        return p.follow(node, {x: [None if d == dim else d - (gone and d > dim) for d in range(ndim)]})
    if op in ("split", "chunk", "split_with_sizes", "tensor_split"):
        return _along(p, node, at)
    begin = _slice_begin(p, node, size=p.shape(node)[dim]) if op in ("slice", "narrow") else None
    if begin is None:
        return p.repeat(node)
    found, first = _sliced(p, at, begin, p.shape(node)[dim])
    made = p.emit(aten.slice.Tensor, p.take(x, at), dim, first, first + found.size(p.rank))
    return p.keep(node, made, found)


def _weights_cut(p: Partition, node: fx.Node, dim: int) -> Split | None:
    """Return the cut of a fused weight [out, in] whose parts are weights of several linear layers."""
    parameter = p.parameters.get(args_of(node)[0])
    if parameter is None or parameter.style != "column" or parameter.placement is not None or dim != 0:
        return None
    begin, joined = 0, [list[tuple[int, int]]() for _ in range(p.ranks)]
    for index, piece in enumerate(several(node.meta["val"])):
        users = (use for item in node.users if item.args[1] == index for use in item.users)
        layer = next((use for use in users if op_of(use) == "linear" and use.args[0] not in node.users), None)
        if layer is None or piece.ndim != 2:
            return None
        size = hint(piece.shape[0])
        ranges = column_ranges(p, layer, size, dim=len(p.shape(layer)) - 1)
        for held, found in zip(joined, ranges, strict=True):
            held += [(begin + b, begin + e) for b, e in found]
        begin += size
    return Split(0, tuple(map(normal, joined)))


def _slice_begin(p: Partition, node: fx.Node, *, size: Any) -> int | None:
    """Return where a slice of `size` elements begins; None if that is not known."""
    given = arguments_of(node)
    whole, begin = p.shape(args_of(node)[0])[given["dim"]], given["start"] or 0
    if given.get("step", 1) != 1 or not all(isinstance(n, int) for n in (begin, whole, size)):
        return None
    return int(max(0, begin + whole) if begin < 0 else min(begin, whole))


def _sliced(p: Partition, at: Split, begin: int, size: int) -> tuple[Split, int]:
    """Return the cut of `size` elements from `begin` on, and where they begin in this rank's part."""
    return at.within(begin, begin + size), at.within(0, begin).size(p.rank)


def _along(p: Partition, node: fx.Node, at: Split) -> None:
    """Take parts along the cut dim; each is cut too, like the parts of a fused projection."""
    cuts, begin = [], 0
    for piece in node.meta["val"]:
        end = begin + hint(piece.shape[at.dim])
        cuts.append(at.within(begin, end))
        begin = end
    here, sizes = p.take(node.args[0], at), [cut.size(p.rank) for cut in cuts]
    p.keep(node, p.emit(aten.split_with_sizes.default, here, sizes, at.dim), tuple(cuts))


def getitem(p: Partition, node: fx.Node) -> None:
    """Take one of several results."""
    whole, index = args_of(node)
    value = p.values[whole]
    if not isinstance(value.placement, tuple):
        return p.repeat(node)
    apart = isinstance(value.node, tuple)  # one node per result
    made = value.node[index] if apart else p.emit(operator.getitem, value.node, index)
    return p.keep(node, made, value.placement[index])


@aten_rule("cat", "stack", "concat")
def cat(p: Partition, node: fx.Node) -> None:
    tensors: Any = node.args[0]
    given = arguments_of(node)["dim"]
    stacks = op_of(node) == "stack"
    used = [x for x in tensors if stacks or list(p.shape(x)) != [0]]  # empty vectors fit anything
    dims = range(len(p.shape(used[0])) if used else 0)
    dim = given % (len(dims) + stacks) if used else 0
    if (cut := p.cut_of(*used)) is not None and cut.dim == dim and not stacks:
        return _cat_along(p, node, used, dim)
    own = [d + (d >= dim) if stacks else None if d == dim else d for d in dims]
    return p.follow(node, dict.fromkeys(used, own))


def _cat_along(p: Partition, node: fx.Node, tensors: list[fx.Node], dim: int) -> None:
    """Join values along the dim in which they are cut, such as the parts of a fused projection."""
    cuts = [at for x in tensors if isinstance(at := p.placement(x), Split) and at.dim == dim]
    if len(cuts) < len(tensors):
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


# ------------------------------------------------------------ by indices, which every rank has whole


@aten_rule("index")
def index(p: Partition, node: fx.Node) -> None:
    """Index x[i, j, ...]: the indices' dims replace the dims that have indices."""
    x, indices = args_of(node)[:2]
    of_x = _indexed(p, x, indices)
    if of_x is not None and p.may_stay_partial(x):
        return p.locally(node, {x: PARTIAL}, PARTIAL)
    dims = range(len(p.shape(x)) if of_x else 0)
    return p.follow(node, {x: [of_x.index(d) if d in of_x else None for d in dims]} if of_x else {})


@by_dims("index_put")
def index_put(p: Partition, node: fx.Node) -> Dims:
    """Write x[i, j, ...] = values, as key/value caches are written: along dims without indices."""
    x, indices, values = args_of(node)[:3]
    of_x = _indexed(p, x, indices)
    if of_x is None:
        return {}
    own = of_x[len(of_x) - len(p.shape(values)) :]
    sizes = [1 if d is None else p.shape(x)[d] for d in own]
    spread = [d is not None and p.is_spread(values, i, sizes[i]) for i, d in enumerate(own)]
    return {
        x: [d if d in of_x else None for d in range(len(p.shape(x)))],
        values: [None if each else d for d, each in zip(own, spread, strict=True)],
    }


def _indexed(p: Partition, x: fx.Node, indices: Any) -> list[int | None] | None:
    """Return, for each dim of x[indices], its dim of x, or None for the indices' dims; None for masks."""
    used = {d: i for d, i in enumerate(indices) if i is not None}
    if not used or any(i.meta["val"].dtype == torch.bool for i in used.values()):
        return None
    first, ndim = min(used), len(p.shape(x))
    together = list(used) == list(range(first, first + len(used)))
    own: list[int | None] = [d for d in range(ndim) if d not in used]
    new: list[int | None] = [None] * max(len(p.shape(i)) for i in used.values())
    return [*own[:first], *new, *own[first:]] if together else [*new, *own]


@by_dims("index_copy", "index_add", "index_fill")
def index_copy(p: Partition, node: fx.Node) -> Dims:
    """Replace elements of one dim; the source is ordered as the indices."""
    x, dim, _, source = args_of(node)[:4]
    own = [None if d == dim % len(p.shape(x)) else d for d in range(len(p.shape(x)))]
    return dict.fromkeys([x, source] if is_tensor(source) and p.shape(source) else [x], own)


@aten_rule("gather", "take_along_dim", "scatter", "scatter_add", "scatter_reduce")
def gather(p: Partition, node: fx.Node) -> None:
    """Gather by indices that have the same dims as the value and are cut like it."""
    args, op = args_of(node), op_of(node)
    dim, chosen = (args[2], args[1]) if op == "take_along_dim" else (args[1], args[2])
    x, tensors = args[0], [a for a in args if is_tensor(a)]
    at, ndim = p.cut_of(*tensors), len(p.shape(x))
    if at is not None and p.placement(x) == at and is_chosen(p, node, at.dim):
        if op == "gather" and by_rows(p, x, at.dim):
            return choose(p, node, at)
        single = str(node.target) == "aten.scatter.value" and p.shape(chosen)[at.dim] == 1
        if single and by_intervals(at, at.dim):
            return placed(p, node, at)
    if not is_tensor(chosen) or not isinstance(dim, int) or any(len(p.shape(t)) != ndim for t in tensors):
        return p.repeat(node)
    same = [len({p.hints(t)[d] for t in tensors}) == 1 and d != dim % ndim for d in range(ndim)]
    own = [d if same[d] else None for d in range(ndim)]
    return p.follow(node, dict.fromkeys(tensors, own))


@aten_rule("slice_scatter", "select_scatter")
def overwrite(p: Partition, node: fx.Node) -> None:
    """Replace a part of a value along an uncut dim, or each rank's part of it along the cut dim."""
    x, source = args_of(node)[:2]
    selects, sizes = op_of(node) == "select_scatter", p.shape(x)
    dim = part_dim(node, len(sizes))
    at = p.cut_of(x)
    if at is None or at.dim != dim or selects:
        parts = [d for d in range(len(sizes)) if d != dim or not selects]
        own = [None if d == dim or p.is_spread(source, i, sizes[d]) else d for i, d in enumerate(parts)]
        return p.follow(node, {x: [None if d == dim else d for d in range(len(sizes))], source: own})
    begin = _slice_begin(p, node, size=p.shape(source)[dim])
    if begin is None:
        return p.repeat(node)
    part, first = _sliced(p, at, begin, p.shape(source)[dim])
    bounds = (dim, first, first + part.size(p.rank))
    return p.keep(node, p.emit(node.target, p.take(x, at), p.take(source, part), *bounds), at)


@aten_rule("new_zeros", "new_ones", "new_full", "new_empty")
def new(p: Partition, node: fx.Node) -> None:
    """Make a new tensor, for which only the dtype and device of the first input matter."""
    x, *rest = args_of(node)
    made = p.emit(node.target, p.values[x].node, *p.take_all(rest), **p.take_all(node.kwargs))
    return p.keep(node, made, REPLICATE)
