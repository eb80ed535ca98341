"""Parts of a value along a dim, values from parts, and elements chosen by indices."""

from __future__ import annotations

import operator
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import fx

from shardwise.graph.nodes import arguments_of
from shardwise.tensor_parallel.heads import column_ranges, part_dim
from shardwise.tensor_parallel.nodes import args_of, is_tensor, op_of, several
from shardwise.tensor_parallel.partition import Partition, aten
from shardwise.tensor_parallel.placement import REPLICATE, Split, end_to_end, hint
from shardwise.tensor_parallel.rules.registry import Dims, aten_rule, by_dims
from shardwise.tensor_parallel.rules.vocabulary import gather_cut, is_gather, is_interval, row_cut, scatter


@aten_rule("slice", "narrow", "select", "split", "chunk", "split_with_sizes", "unbind", "tensor_split")
def part(p: Partition, node: fx.Node) -> None:
    """Take parts along a dim; along the cut dim, each rank's part of them."""
    x, op = args_of(node)[0], op_of(node)
    ndim = len(p.shape(x))
    dim = part_dim(node, ndim)
    if (weight_cut := _fused_cut(p, node, dim)) is not None:
        p.take(x, weight_cut)
    placement = p.placement(x)
    if not isinstance(placement, Split) or placement.dim != dim:
        drops = op in ("select", "unbind")
        dims = [None if d == dim else d - (drops and d > dim) for d in range(ndim)]
        return p.follow(node, {x: dims}, linear=True)
    if op in ("split", "chunk", "split_with_sizes", "tensor_split"):
        ends = accumulate((hint(piece.shape[dim]) for piece in node.meta["val"]), initial=0)
        cuts = tuple(placement.within(begin, end) for begin, end in pairwise(ends))
        sizes = [cut.size(p.rank) for cut in cuts]  # parts are cut too, like those of a fused projection
        return p.keep(node, p.emit(aten.split_with_sizes.default, p.take(x, placement), sizes, dim), cuts)
    begin = _slice_begin(p, node, size=p.shape(node)[dim]) if op in ("slice", "narrow") else None
    if begin is None:
        return p.repeat(node)
    result_cut = placement.within(begin, begin + p.shape(node)[dim])
    start = placement.within(0, begin).size(p.rank)
    result = p.emit(aten.slice.Tensor, p.take(x, placement), dim, start, start + result_cut.size(p.rank))
    return p.keep(node, result, result_cut)


def _fused_cut(p: Partition, node: fx.Node, dim: int) -> Split | None:
    """Return the cut of a fused weight [out, in] whose parts are weights of several linear layers."""
    parameter = p.parameters.get(args_of(node)[0])
    if parameter is None or parameter.style != "column" or parameter.placement is not None or dim != 0:
        return None
    cuts = []
    for index, piece in enumerate(several(node.meta["val"])):
        users = (use for item in node.users if item.args[1] == index for use in item.users)
        layer = next((use for use in users if op_of(use) == "linear" and use.args[0] not in node.users), None)
        if layer is None or piece.ndim != 2:
            return None
        size = hint(piece.shape[0])
        cuts.append((size, column_ranges(p, layer, size, dim=len(p.shape(layer)) - 1)))
    return Split(0, end_to_end(cuts))


def _slice_begin(p: Partition, node: fx.Node, *, size: Any) -> int | None:
    """Return where a slice of `size` elements begins; None if that is not known."""
    arguments = arguments_of(node)
    whole, begin = p.shape(args_of(node)[0])[arguments["dim"]], arguments["start"] or 0
    if arguments.get("step", 1) != 1 or not all(isinstance(n, int) for n in (begin, whole, size)):
        return None
    return int(max(0, begin + whole) if begin < 0 else min(begin, whole))


def getitem(p: Partition, node: fx.Node) -> None:
    """Take one of several results."""
    whole, index = args_of(node)
    value = p.values[whole]
    if not isinstance(value.placement, tuple):
        return p.repeat(node)
    separate = isinstance(value.node, tuple)  # one node per result
    result = value.node[index] if separate else p.emit(operator.getitem, value.node, index)
    return p.keep(node, result, value.placement[index])


@aten_rule("cat", "stack", "concat")
def cat(p: Partition, node: fx.Node) -> None:
    tensors: Any = node.args[0]
    raw_dim = arguments_of(node)["dim"]
    stacks = op_of(node) == "stack"
    used = [x for x in tensors if stacks or list(p.shape(x)) != [0]]  # empty vectors fit anything
    dims = range(len(p.shape(used[0])) if used else 0)
    dim = raw_dim % (len(dims) + stacks) if used else 0
    if stacks or (cut := p.cut_of(*used)) is None or cut.dim != dim:
        out = [d + (d >= dim) if stacks else None if d == dim else d for d in dims]
        return p.follow(node, dict.fromkeys(used, out))
    # along the dim in which they are cut, such as the parts of a fused projection
    cuts = [at for x in used if isinstance(at := p.placement(x), Split) and at.dim == dim]
    if len(cuts) < len(used):
        return p.repeat(node)
    joined = end_to_end([(p.shape(x)[dim], cut.ranges) for x, cut in zip(used, cuts, strict=True)])
    result = p.emit(aten.cat.default, [p.take(x, cut) for x, cut in zip(used, cuts, strict=True)], dim)
    return p.keep(node, result, Split(dim, joined))


@aten_rule("index")
def index(p: Partition, node: fx.Node) -> None:
    """Index x[i, j, ...]: the indices' dims replace the dims that have indices."""
    x, indices = args_of(node)[:2]
    of_x = _indexed(p, x, indices)
    dims = range(len(p.shape(x)) if of_x else 0)
    dims_of = {x: [of_x.index(d) if d in of_x else None for d in dims]} if of_x else {}
    return p.follow(node, dims_of, linear=of_x is not None)


@by_dims("index_put")
def index_put(p: Partition, node: fx.Node) -> Dims:
    """Write x[i, j, ...] = values, as key/value caches are written: along dims without indices."""
    x, indices, values = args_of(node)[:3]
    of_x = _indexed(p, x, indices)
    if of_x is None:
        return {}
    x_dims = of_x[len(of_x) - len(p.shape(values)) :]
    sizes = [1 if d is None else p.shape(x)[d] for d in x_dims]
    broadcast = [d is not None and p.is_spread(values, i, sizes[i]) for i, d in enumerate(x_dims)]
    return {
        x: [d if d in of_x else None for d in range(len(p.shape(x)))],
        values: [None if wide else d for d, wide in zip(x_dims, broadcast, strict=True)],
    }


def _indexed(p: Partition, x: fx.Node, indices: Any) -> list[int | None] | None:
    """Return, for each dim of x[indices], its dim of x, or None for the indices' dims; None for masks."""
    used = {d: i for d, i in enumerate(indices) if i is not None}
    if not used or any(i.meta["val"].dtype == torch.bool for i in used.values()):
        return None
    first, ndim = min(used), len(p.shape(x))
    adjacent = list(used) == list(range(first, first + len(used)))
    x_dims: list[int | None] = [d for d in range(ndim) if d not in used]
    new: list[int | None] = [None] * max(len(p.shape(i)) for i in used.values())
    return [*x_dims[:first], *new, *x_dims[first:]] if adjacent else [*new, *x_dims]


@by_dims("index_copy", "index_add", "index_fill")
def index_copy(p: Partition, node: fx.Node) -> Dims:
    """Replace elements of one dim; the source is ordered as the indices."""
    x, dim, _, source = args_of(node)[:4]
    out = [None if d == dim % len(p.shape(x)) else d for d in range(len(p.shape(x)))]
    return dict.fromkeys([x, source] if is_tensor(source) and p.shape(source) else [x], out)


@aten_rule("gather", "take_along_dim", "scatter", "scatter_add", "scatter_reduce")
def gather(p: Partition, node: fx.Node) -> None:
    """Gather by indices that have the same dims as the value and are cut like it."""
    args, op = args_of(node), op_of(node)
    dim, indices = (args[2], args[1]) if op == "take_along_dim" else (args[1], args[2])
    x, tensors = args[0], [a for a in args if is_tensor(a)]
    cut, ndim = p.cut_of(*tensors), len(p.shape(x))
    if cut is not None and p.placement(x) == cut and is_gather(p, node, cut.dim):
        if op == "gather" and row_cut(p, x, cut.dim):
            return gather_cut(p, node, cut)
        single = str(node.target) == "aten.scatter.value" and p.shape(indices)[cut.dim] == 1
        if single and is_interval(cut, cut.dim):
            return scatter(p, node, cut)
    if not is_tensor(indices) or not isinstance(dim, int) or any(len(p.shape(t)) != ndim for t in tensors):
        return p.repeat(node)
    aligned = [len({p.hints(t)[d] for t in tensors}) == 1 and d != dim % ndim for d in range(ndim)]
    out = [d if aligned[d] else None for d in range(ndim)]
    return p.follow(node, dict.fromkeys(tensors, out))


@aten_rule("slice_scatter", "select_scatter")
def overwrite(p: Partition, node: fx.Node) -> None:
    """Replace a part of a value along an uncut dim, or each rank's part of it along the cut dim."""
    x, source = args_of(node)[:2]
    selects, sizes = op_of(node) == "select_scatter", p.shape(x)
    dim = part_dim(node, len(sizes))
    cut = p.cut_of(x)
    if cut is None or cut.dim != dim or selects:
        parts = [d for d in range(len(sizes)) if d != dim or not selects]
        out = [None if d == dim or p.is_spread(source, i, sizes[d]) else d for i, d in enumerate(parts)]
        return p.follow(node, {x: [None if d == dim else d for d in range(len(sizes))], source: out})
    begin = _slice_begin(p, node, size=p.shape(source)[dim])
    if begin is None:
        return p.repeat(node)
    source_cut, start = cut.within(begin, begin + p.shape(source)[dim]), cut.within(0, begin).size(p.rank)
    bounds = (dim, start, start + source_cut.size(p.rank))
    return p.keep(node, p.emit(node.target, p.take(x, cut), p.take(source, source_cut), *bounds), cut)


@aten_rule("new_zeros", "new_ones", "new_full", "new_empty")
def new(p: Partition, node: fx.Node) -> None:
    """Make a new tensor, for which only the dtype and device of the first input matter."""
    x, *rest = args_of(node)
    result = p.emit(node.target, p.values[x].node, *p.take_all(rest), **p.take_all(node.kwargs))
    return p.keep(node, result, REPLICATE)
