"""Elements chosen by indices, which every rank has whole: along other dims than the cut one."""

from __future__ import annotations

from torch import fx

from shardwise.tensor_parallel.nodes import args_of, is_tensor, op_of
from shardwise.tensor_parallel.partition import Partition
from shardwise.tensor_parallel.placement import PARTIAL, REPLICATE
from shardwise.tensor_parallel.rules.loss import by_intervals, by_rows, choose, is_chosen, placed
from shardwise.tensor_parallel.rules.parts import slice_begin
from shardwise.tensor_parallel.rules.registry import aten_rule


@aten_rule("index")
def index(p: Partition, node: fx.Node) -> None:
    """x[i, j, ...]: dims with indices are replaced by the indices' own."""
    x, indices = args_of(node)[:2]
    used = {d: i for d, i in enumerate(indices) if i is not None}
    masks = any(str(p.take(i).meta["val"].dtype) == "torch.bool" for i in used.values())
    if p.may_stay_partial(x) and not masks:
        return p.locally(node, {x: PARTIAL}, PARTIAL)
    at, first = p.cut_of(x), min(used, default=0)
    together = bool(used) and list(used) == list(range(first, first + len(used)))
    if at is None or at.dim in used or masks or not together:
        return p.repeat(node)
    new = max(len(p.shape(i)) for i in used.values())
    return p.locally(node, {x: at}, at.on(at.dim if at.dim < first else at.dim - len(used) + new))


@aten_rule("index_select")
def index_select(p: Partition, node: fx.Node) -> None:
    x, dim, _ = args_of(node)
    at = p.cut_of(x)
    if at is None or at.dim == dim % len(p.shape(x)):
        return p.repeat(node)
    return p.locally(node, {x: at}, at)


@aten_rule("gather", "take_along_dim", "scatter", "scatter_add", "scatter_reduce")
def gather(p: Partition, node: fx.Node) -> None:
    """Indices have the dims of the value: they are cut with it."""
    args, op = args_of(node), op_of(node)
    dim, chosen = (args[2], args[1]) if op == "take_along_dim" else (args[1], args[2])
    x, tensors = args[0], [a for a in args if is_tensor(a)]
    at = p.cut_of(*tensors)
    if at is not None and p.placement(x) == at and is_chosen(p, node, at.dim):
        if op == "gather" and (x in p.waiting or by_rows(p, x, at.dim)):
            return choose(p, node)
        single = str(node.target) == "aten.scatter.value" and p.shape(chosen)[at.dim] == 1
        if single and by_intervals(at, at.dim):
            return placed(p, node)
    alike = is_tensor(chosen) and isinstance(dim, int) and len(p.shape(chosen)) == len(p.shape(x))
    if at is None or not alike or at.dim == dim % len(p.shape(x)):
        return p.repeat(node)
    if any(p.hints(t)[at.dim] != p.hints(x)[at.dim] for t in tensors):
        return p.repeat(node)
    return p.locally(node, dict.fromkeys(tensors, at), at)


@aten_rule("slice_scatter", "select_scatter")
def overwrite(p: Partition, node: fx.Node) -> None:
    """A part of a value replaced: along another dim than the cut one, or each rank's part of it."""
    x, source, *rest = args_of(node)
    selects = op_of(node) == "select_scatter"
    dim = (rest[0] if rest else 0) % len(p.shape(x))
    at = p.cut_of(x) or (None if selects else p.cut_of(source))
    if at is None or at.block is not None:
        return p.repeat(node)
    if at.dim == dim:
        begin = None if selects else slice_begin(p, node, 2, size=p.shape(source)[dim])
        if begin is None or at != p.cut_of(x):
            return p.repeat(node)
        part = at.within(begin, begin + p.shape(source)[dim])
        first = at.within(0, begin).size(p.rank)
        bounds = (dim, first, first + part.size(p.rank))
        return p.keep(node, p.emit(node.target, p.take(x, at), p.take(source, part), *bounds), at)
    there = at.on(at.dim - (selects and at.dim > dim))
    spread = p.is_spread(source, there.dim, p.shape(x)[at.dim])
    return p.locally(node, {x: at, source: REPLICATE if spread else there}, at)


@aten_rule("new_zeros", "new_ones", "new_full", "new_empty")
def new(p: Partition, node: fx.Node) -> None:
    """Only the dtype and device of the first input matter."""
    x, *rest = args_of(node)
    made = p.emit(node.target, p.values[x].node, *p.take_all(rest), **p.take_all(node.kwargs))
    return p.keep(node, made, REPLICATE)
