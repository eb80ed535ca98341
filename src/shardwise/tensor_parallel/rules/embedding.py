"""Lookups in a table cut by rows (the vocabulary) or by columns, and the table's gradient."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from shardwise.tensor_parallel.nodes import args_of, op_of
from shardwise.tensor_parallel.partition import Partition, aten
from shardwise.tensor_parallel.placement import PARTIAL, REPLICATE, Placement, Split
from shardwise.tensor_parallel.rules.loss import among_own
from shardwise.tensor_parallel.rules.registry import aten_rule


@aten_rule("embedding")
def embedding(p: Partition, node: fx.Node) -> None:
    weight, ids, *rest = args_of(node)
    parameter = p.parameters.get(weight)
    cut = None if parameter is None else parameter.placement
    if parameter is not None and parameter.style is not None and not isinstance(cut, Split):
        cut = p.evenly(weight, int(parameter.style == "column"))
    if not isinstance(cut, Split):
        return p.follow(node, {ids: range(len(p.shape(ids)))})
    if cut.dim == 0:
        return _by_rows(p, node, cut, *rest)
    return p.locally(node, {weight: cut}, cut.on(len(p.shape(node)) - 1))


def _by_rows(
    p: Partition, node: fx.Node, cut: Split, padding: Any = -1, by_count: Any = False, sparse: Any = False
) -> None:
    """Look up, on each rank, the ids whose rows it has; the others add nothing."""
    weight, ids = args_of(node)[:2]
    own = among_own(p, cut, p.shape(weight)[0])
    # one more row, of zeros, for ids of other ranks: where there is none, or where uses of a row are counted
    more = int(not own.count or by_count)
    own_padding = padding - own.begin if own.begin <= padding < own.begin + own.count else -1

    def found(table: Tensor, ids: Tensor) -> Tensor:
        table = aten.constant_pad_nd(table, [0, 0, 0, 1]) if more else table
        local, elsewhere = own.of(ids, hole=own.count * more, more=more)
        looked_up: Tensor = aten.embedding(table, local, own_padding, by_count, sparse)
        return looked_up.masked_fill(elsewhere.unsqueeze(-1), 0)

    return p.keep(node, p.run(found, p.take(weight, cut), p.take(ids)), PARTIAL)


@aten_rule("embedding_dense_backward")
def embedding_backward(p: Partition, node: fx.Node) -> None:
    """Compute a table's gradient, cut as the table in which the same ids were looked up."""
    gradient, ids, _, padding, by_count = args_of(node)
    at, last = _table_of(p, node, ids), len(p.shape(gradient)) - 1
    if not isinstance(at, Split):
        cut = p.cut_of(gradient)
        if cut is None or cut.dim != last:
            return p.repeat(node)
        at = cut.on(1)
    if at.dim == 1:
        return p.locally(node, {gradient: at.on(last)}, at)
    if len(at.ranges[p.rank]) > 1:
        return p.repeat(node)
    own = among_own(p, at, p.shape(node)[0])
    skipped = padding - own.begin if own.begin <= padding < own.begin + own.count else -1

    def made(gradient: Tensor, ids: Tensor) -> Tensor:
        # what other ranks have goes to one more row, which is left out then
        local, _ = own.among(ids, hole=own.count)
        rows: Tensor = aten.embedding_dense_backward(gradient, local, own.count + 1, skipped, by_count)
        return rows[: own.count]

    return p.keep(node, p.run(made, p.take(gradient), p.take(ids)), at)


def _table_of(p: Partition, node: fx.Node, ids: fx.Node) -> Placement:
    """Return the placement of the table that `ids` were looked up in, of the size of this gradient."""
    for user in ids.users:
        if op_of(user) == "embedding" and user.args[1] is ids:
            table: Any = user.args[0]
            if p.hints(table) == p.hints(node):
                return p.placement(table)
    return REPLICATE
