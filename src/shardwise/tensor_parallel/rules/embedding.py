"""Lookups in a table cut by rows (the vocabulary) or by columns."""

from __future__ import annotations

from typing import Any

from torch import fx

from shardwise.tensor_parallel.partition import Partition, aten
from shardwise.tensor_parallel.placement import PARTIAL, REPLICATE, Placement, Split
from shardwise.tensor_parallel.rules.loss import own_index
from shardwise.tensor_parallel.rules.registry import rule


@rule("aten::embedding")
def embedding(p: Partition, node: fx.Node) -> None:
    weight, ids, *rest = node.args
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
        return _by_rows(p, node, weight, ids, *rest)
    if style == "column":
        cut = known if isinstance(known, Split) else p.evenly(weight, 1)
        made = p.emit(aten.embedding.default, p.take(weight, cut), p.take(ids), *rest)
        return p.keep(node, made, cut.on(last))
    where: Placement = at if isinstance(at, Split) else REPLICATE
    return p.keep(node, p.emit(aten.embedding.default, p.take(weight), p.take(ids, where), *rest), where)


def _by_rows(
    p: Partition,
    node: fx.Node,
    weight: fx.Node,
    ids: fx.Node,
    padding: Any = -1,
    by_count: Any = False,
    sparse: Any = False,
) -> None:
    """Each rank looks up the ids whose rows it has; the others add nothing."""
    known = p.parameters[weight].placement
    cut = known if isinstance(known, Split) and known.dim == 0 else p.evenly(weight, 0)
    table, index = p.take(weight, cut), p.take(ids)
    begin, end = (*cut.ranges[p.rank], (0, 0))[0]
    # one more row, of zeros, for ids of other ranks: where there is none, or where uses of a row are counted
    more = int(begin == end or by_count)
    if more:
        table = p.emit(aten.constant_pad_nd.default, table, [0, 0, 0, 1], 0)
    local, elsewhere = own_index(p, cut, index, p.shape(weight)[0], hole=(end - begin) * more, more=more)
    own_padding = padding - begin if begin <= padding < end else -1
    found = p.emit(aten.embedding.default, table, local, own_padding, by_count, sparse)
    mask = p.emit(aten.unsqueeze.default, elsewhere, -1)
    return p.keep(node, p.emit(aten.masked_fill.Scalar, found, mask, 0), PARTIAL)
