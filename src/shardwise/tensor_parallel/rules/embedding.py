"""Lookups in a table cut by rows (the vocabulary) or by columns."""

from __future__ import annotations

from torch import fx

from shardwise.tensor_parallel.partition import Partition, aten
from shardwise.tensor_parallel.placement import PARTIAL, REPLICATE, Split
from shardwise.tensor_parallel.rules.registry import rule


@rule("aten::embedding")
def embedding(p: Partition, node: fx.Node) -> None:
    weight, ids = node.args[:2]
    assert isinstance(weight, fx.Node)
    assert isinstance(ids, fx.Node)
    parameter = p.parameters.get(weight)
    style = parameter.style if parameter is not None else None
    last = len(p.shape(node)) - 1
    at = p.placement(ids)
    known = None if parameter is None else parameter.placement
    if isinstance(known, Split):
        style = "row" if known.dim == 0 else "column"
    if style == "row":
        return _by_rows(p, node, weight, ids)
    if style == "column":
        cut = known if isinstance(known, Split) else p.evenly(weight, 1)
        made = p.emit(aten.embedding.default, p.take(weight, cut), p.take(ids))
        return p.keep(node, made, cut.on(last))
    made = p.emit(
        aten.embedding.default, p.take(weight), p.take(ids, at if isinstance(at, Split) else REPLICATE)
    )
    return p.keep(node, made, at if isinstance(at, Split) else REPLICATE)


def _by_rows(p: Partition, node: fx.Node, weight: fx.Node, ids: fx.Node) -> None:
    """Each rank looks up the ids whose rows it has; the others add nothing."""
    parameter = p.parameters[weight]
    known = parameter.placement
    cut = known if isinstance(known, Split) and known.dim == 0 else p.evenly(weight, 0)
    table, index = p.take(weight, cut), p.take(ids)
    held = cut.ranges[p.rank]
    begin, end = held[0] if held else (0, 0)
    if begin == end:  # a table without rows answers no id
        sizes = p.emit(aten.unsqueeze.default, index, -1)
        zeros = p.emit(aten.expand.default, sizes, [*[-1] * len(p.shape(ids)), p.shape(weight)[1]])
        made = p.emit(aten.zeros_like.default, zeros, dtype=node.meta["val"].dtype)
        # Of no rows, but its gradient must flow here as on the other ranks.
        made = p.emit(aten.add.Tensor, made, p.emit(aten.sum.dim_IntList, table, [0]))
        return p.keep(node, made, PARTIAL)
    local = p.emit(aten.sub.Tensor, index, begin)
    below, above = p.emit(aten.lt.Scalar, local, 0), p.emit(aten.ge.Scalar, local, end - begin)
    elsewhere = p.emit(aten.logical_or.default, below, above)
    found = p.emit(aten.embedding.default, table, p.emit(aten.masked_fill.Scalar, local, elsewhere, 0))
    mask = p.emit(aten.unsqueeze.default, elsewhere, -1)
    return p.keep(node, p.emit(aten.masked_fill.Scalar, found, mask, 0), PARTIAL)
