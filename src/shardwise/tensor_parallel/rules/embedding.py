"""Lookups in a table cut by rows (the vocabulary) or by columns."""

from __future__ import annotations

from typing import Any

from torch import fx

from shardwise.tensor_parallel.nodes import args_of
from shardwise.tensor_parallel.partition import Partition, aten
from shardwise.tensor_parallel.placement import PARTIAL, REPLICATE, Placement, Split
from shardwise.tensor_parallel.rules.loss import own_index
from shardwise.tensor_parallel.rules.registry import aten_rule


@aten_rule("embedding")
def embedding(p: Partition, node: fx.Node) -> None:
    weight, ids, *rest = args_of(node)
    parameter = p.parameters.get(weight)
    style, cut = (parameter.style, parameter.placement) if parameter is not None else (None, None)
    if isinstance(cut, Split):
        style = "row" if cut.dim == 0 else "column"
    elif style is not None:
        cut = p.evenly(weight, int(style == "column"))
    if style == "row" and isinstance(cut, Split):
        return _by_rows(p, node, cut, *rest)
    if isinstance(cut, Split):
        return p.locally(node, {weight: cut}, cut.on(len(p.shape(node)) - 1))
    at = p.placement(ids)
    where: Placement = at if isinstance(at, Split) else REPLICATE
    return p.locally(node, {ids: where}, where)


def _by_rows(
    p: Partition, node: fx.Node, cut: Split, padding: Any = -1, by_count: Any = False, sparse: Any = False
) -> None:
    """Each rank looks up the ids whose rows it has; the others add nothing."""
    weight, ids = args_of(node)[:2]
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
