"""Elements chosen by indices, which every rank has whole: along other dims than the cut one."""

from __future__ import annotations

from typing import Any

from torch import fx

from shardwise.tensor_parallel.partition import Partition
from shardwise.tensor_parallel.placement import PARTIAL, REPLICATE
from shardwise.tensor_parallel.rules.loss import by_intervals, by_rows, choose, is_chosen, placed
from shardwise.tensor_parallel.rules.parts import slice_begin
from shardwise.tensor_parallel.rules.registry import rule
from shardwise.tensor_parallel.rules.views import is_tensor


@rule("aten::index")
def index(p: Partition, node: fx.Node) -> None:
    """x[i, j, ...]: dims with indices are replaced by the indices' own."""
    x, indices = node.args[:2]
    assert isinstance(x, fx.Node)
    assert isinstance(indices, (list, tuple))
    at = p.cut_of(x)
    used = [d for d, chosen in enumerate(indices) if chosen is not None]
    masks = any(str(p.take(i).meta["val"].dtype) == "torch.bool" for i in indices if i is not None)
    together = bool(used) and used == list(range(used[0], used[-1] + 1))
    if p.may_stay_partial(x) and not masks:
        here = p.take(x, PARTIAL)
        return p.keep(
            node, p.emit(node.target, here, [None if i is None else p.take(i) for i in indices]), PARTIAL
        )
    if at is None or at.dim in used or masks or not together:
        return p.repeat(node)
    chosen = [None if i is None else p.take(i) for i in indices]
    made = p.emit(node.target, p.take(x, at), chosen)
    new = max(len(p.shape(i)) for i in indices if isinstance(i, fx.Node))
    return p.keep(node, made, at.on(at.dim if at.dim < used[0] else at.dim - len(used) + new))


@rule("aten::index_select")
def index_select(p: Partition, node: fx.Node) -> None:
    args: Any = node.args
    x, dim, chosen = args
    at = p.cut_of(x)
    if at is None or at.dim == dim % len(p.shape(x)):
        return p.repeat(node)
    return p.keep(node, p.emit(node.target, p.take(x, at), dim, p.take(chosen)), at)


@rule("aten::gather", "aten::take_along_dim", "aten::scatter", "aten::scatter_add", "aten::scatter_reduce")
def gather(p: Partition, node: fx.Node) -> None:
    """Indices have the dims of the value: they are cut with it."""
    args: Any = node.args
    names = str(node.target).split(".")[1]
    dim, chosen = (args[2], args[1]) if names == "take_along_dim" else (args[1], args[2])
    x = args[0]
    at = p.cut_of(x, *[a for a in args[1:] if is_tensor(a)])
    if at is not None and p.placement(x) == at and is_chosen(p, node, at.dim):
        if names == "gather" and (x in p.waiting or by_rows(p, x, at.dim)):
            return choose(p, node)
        single = str(node.target) == "aten.scatter.value" and p.shape(chosen)[at.dim] == 1
        if single and by_intervals(at, at.dim):
            return placed(p, node)
    alike = is_tensor(chosen) and isinstance(dim, int) and len(p.shape(chosen)) == len(p.shape(x))
    if at is None or not alike or at.dim == dim % len(p.shape(x)):
        return p.repeat(node)
    tensors = [a for a in args if is_tensor(a)]
    if any(p.hints(t)[at.dim] != p.hints(x)[at.dim] for t in tensors):
        return p.repeat(node)
    made = p.emit(
        node.target, *[p.take(a, at if is_tensor(a) else REPLICATE) for a in args], **p.take_all(node.kwargs)
    )
    return p.keep(node, made, at)


@rule("aten::slice_scatter", "aten::select_scatter")
def overwrite(p: Partition, node: fx.Node) -> None:
    """A part of a value replaced: along another dim than the cut one, or each rank's part of it."""
    args: Any = node.args
    x, source, *rest = args
    name = str(node.target).split(".")[1]
    dim = (rest[0] if rest else 0) % len(p.shape(x))
    at = p.cut_of(x) or (p.cut_of(source) if name == "slice_scatter" else None)
    if at is None or at.block is not None:
        return p.repeat(node)
    if at.dim == dim:
        begin = None if name != "slice_scatter" else slice_begin(p, node, 2, size=p.shape(source)[dim])
        if begin is None or at != p.cut_of(x):
            return p.repeat(node)
        end = begin + p.shape(source)[dim]
        part = at.within(begin, end)
        first = at.within(0, begin).size(p.rank)
        bounds = (dim, first, first + part.size(p.rank))
        return p.keep(node, p.emit(node.target, p.take(x, at), p.take(source, part), *bounds), at)
    there = at.on(at.dim - (name == "select_scatter" and at.dim > dim))
    where = REPLICATE if p.hints(source)[there.dim] == 1 != p.hints(x)[at.dim] else there
    made = p.emit(node.target, p.take(x, at), p.take(source, where), *map(p.take, rest))
    return p.keep(node, made, at)


@rule("aten::new_zeros", "aten::new_ones", "aten::new_full", "aten::new_empty")
def new(p: Partition, node: fx.Node) -> None:
    """Only the dtype and device of the first input matter."""
    x: Any = node.args[0]
    here = p.values[x].node
    made = p.emit(node.target, here, *p.take_all(node.args[1:]), **p.take_all(node.kwargs))
    return p.keep(node, made, REPLICATE)
