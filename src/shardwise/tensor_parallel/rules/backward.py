"""Backward operations, for programs exported with their backward in them.

Most of a backward is products, sums and elementwise operations, whose rules are those of the forward: the
gradient of a column layer's input is a term of a sum, that of its weight is cut as the weight is. Here is
what has operators of its own. None of it communicates, but softmax over a cut dim, and its logarithm where
the gradient is not that of a loss: they need a sum for each row.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from shardwise.tensor_parallel.nodes import args_of, is_tensor, op_of
from shardwise.tensor_parallel.partition import Partition, aten
from shardwise.tensor_parallel.placement import PARTIAL, REPLICATE, Placement, Split, with_dim
from shardwise.tensor_parallel.rules.attention import for_queries, key_heads, mask_for
from shardwise.tensor_parallel.rules.loss import (
    among_own,
    as_dtype,
    by_intervals,
    class_dim,
    loss_weights,
    own_index,
)
from shardwise.tensor_parallel.rules.registry import aten_rule

_NONE, _MEAN = 0, 1  # reductions


# ------------------------------------------------------------ losses and softmax


@aten_rule("nll_loss_backward", "nll_loss2d_backward")
def nll_backward(p: Partition, node: fx.Node) -> None:
    """Each row's gradient is one number at the target's place: on the rank that has it."""
    gradient, x, target, weight, reduction, ignored, total = args_of(node)
    at, dim = p.placement(x), class_dim(p, x)
    if not isinstance(at, Split) or not by_intervals(at, dim):
        return p.repeat(node)
    dtype = node.meta["val"].dtype
    index = p.emit(aten.unsqueeze.default, p.take(target), dim)
    skipped = p.emit(aten.eq.Scalar, index, ignored)
    row = p.emit(aten.neg.default, loss_weights(p, weight, index, skipped, dtype=dtype))
    above = p.take(gradient)
    if reduction == _NONE:
        above = p.emit(aten.unsqueeze.default, above, dim)
    elif reduction == _MEAN:
        above = p.emit(aten.div.Tensor, above, p.take(total))
    # no weight but nan times 0 is nan: of a mean over no rows
    row = p.emit(aten.masked_fill.Scalar, p.emit(aten.mul.Tensor, row, above), skipped, 0)
    made = p.emit(aten.zeros_like.default, p.take(x, at))
    if at.ranges[p.rank]:
        safe = p.emit(aten.masked_fill.Scalar, index, skipped, 0)
        local, elsewhere = own_index(p, at, safe, p.shape(x)[dim])
        mine = p.emit(aten.masked_fill.Scalar, row, elsewhere, 0)
        made = p.emit(aten.scatter.src, made, dim, local, mine)
    p.row_sums[node] = row
    return p.keep(node, made, at)


@aten_rule("_log_softmax_backward_data", "_softmax_backward_data")
def softmax_backward(p: Partition, node: fx.Node) -> None:
    gradient, result, along, dtype = args_of(node)
    at = p.cut_of(result, gradient)
    dim = along % max(1, len(p.shape(gradient)))
    if at is None or (at.dim == dim and not by_intervals(at, dim)):
        return p.repeat(node)
    here, below = p.take(gradient, at), p.take(result, at)
    if at.dim != dim:
        return p.keep(node, p.emit(node.target, here, below, dim, dtype), at)
    logarithm = "log" in op_of(node)
    total = _row_sums(p, gradient, dim) if logarithm else None
    if total is None:
        term = here if logarithm else p.emit(aten.mul.Tensor, here, below)
        total = p.all_reduce(p.emit(aten.sum.dim_IntList, term, [dim], True))
    if logarithm:
        made = p.emit(aten.mul.Tensor, p.emit(aten.exp.default, below), total)
        made = p.emit(aten.sub.Tensor, here, made)
    else:
        made = p.emit(aten.mul.Tensor, p.emit(aten.sub.Tensor, here, total), below)
    return p.keep(node, as_dtype(p, made, node.meta["val"].dtype), at)


def _row_sums(p: Partition, gradient: fx.Node, dim: int) -> fx.Node | None:
    """Sums of a loss's gradient along the cut dim, which are known whole."""
    source: Any = gradient
    while source not in p.row_sums and op_of(source) in ("view", "reshape"):
        source = source.args[0]
    known = p.row_sums.get(source)
    if known is None or source is gradient:
        return known
    return p.emit(aten.reshape.default, known, with_dim(p.shape(gradient), dim, 1))


# ------------------------------------------------------------ norms


@aten_rule("native_layer_norm_backward", "_fused_rms_norm_backward")
def norm_backward(p: Partition, node: fx.Node) -> None:
    """Over the last dims, which must be whole; each rank's rows add to the weights' gradients."""
    gradient, x, shape, *rest = args_of(node)
    at = p.cut_of(x, gradient)
    if at is None or at.dim >= len(p.shape(x)) - len(shape) or not at.disjoint:
        return p.repeat(node)
    statistics = rest[: 2 if "layer" in op_of(node) else 1]  # means and deviations of rows, or these alone
    weights = [PARTIAL] * (len(node.meta["val"]) - 1)
    return p.locally(node, dict.fromkeys([gradient, x, *statistics], at), (at, *weights))


# ------------------------------------------------------------ attention


@aten_rule(
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention_backward",
)
def attention_backward(p: Partition, node: fx.Node) -> None:
    """Every head by itself: the gradients are cut as the queries, keys and values are."""
    gradient, q, k, v = args_of(node)[:4]
    at = p.cut_of(q, gradient, k, v)
    heads = [p.hints(x)[-3] for x in (q, k, v)]
    if at is None or at.dim > 1 or (at.dim == 1 and len(set(heads)) > 1):
        return _grouped(p, node, at, group=heads[0] // heads[1]) if heads[1] == heads[2] else p.repeat(node)
    return p.keep(node, _attention(p, node, at, p.take(k, at), p.take(v, at)), at)


def _attention(p: Partition, node: fx.Node, at: Split, k: fx.Node, v: fx.Node) -> fx.Node:
    gradient, q, _, _, *rest = args_of(node)
    others = [_with_heads(p, x, at, q) for x in rest]
    kwargs = {name: _with_heads(p, x, at, q) for name, x in node.kwargs.items()}
    return p.emit(node.target, p.take(gradient, at), p.take(q, at), k, v, *others, **kwargs)


def _grouped(p: Partition, node: fx.Node, at: Split | None, *, group: int) -> None:
    """Fewer heads of keys: where several ranks use one, each has a term of its gradient."""
    _, q, k, v = args_of(node)[:4]
    if at is None or at.dim != 1 or at != p.placement(q) or any(len(held) > 1 for held in at.ranges):
        return p.repeat(node)
    count = p.shape(k)[1]
    needed, whole_groups = key_heads(p, at, group=group, count=count)
    if whole_groups:
        made = _attention(p, node, at, p.take(k, needed), p.take(v, needed))
        return p.keep(node, made, (at, needed, needed))
    keys, values = (for_queries(p, x, needed, at, group=group) for x in (k, v))
    made = _attention(p, node, at, keys, values)
    found = [p.emit(operator.getitem, made, place) for place in range(3)]
    begin, end = (*at.ranges[p.rank], (0, 0))[0]
    for place in (1, 2):  # of every head of queries, zeros where other ranks have them
        padding = [0, 0, 0, 0, begin, count * group - end]
        every = p.emit(aten.constant_pad_nd.default, found[place], padding, 0)
        apart = p.emit(aten.unflatten.int, every, 1, [count, group])
        found[place] = p.emit(aten.sum.dim_IntList, apart, [2])
    return p.keep(node, tuple(found), (at, PARTIAL, PARTIAL))


def _with_heads(p: Partition, x: Any, at: Split, q: fx.Node) -> Any:
    """The result, its statistics [batch, heads, queries], a mask, which broadcasts, or a number."""
    if is_tensor(x) and len(p.shape(x)) == len(p.shape(q)) - 1 and isinstance(p.placement(x), Split):
        return p.take(x, at)
    return mask_for(p, x, at, q)


# ------------------------------------------------------------ parts and lookups


@aten_rule("slice_backward", "select_backward")
def part_backward(p: Partition, node: fx.Node) -> None:
    """A gradient among zeros: along another dim than the cut one."""
    gradient, sizes, dim, *rest = args_of(node)
    at = p.cut_of(gradient)
    if at is None:
        return p.repeat(node)
    dim %= len(sizes)
    there = at.on(at.dim + (op_of(node) == "select_backward" and at.dim >= dim))
    if there.dim == dim or at.block is not None:
        return p.repeat(node)
    local = with_dim([p.take(size) for size in sizes], there.dim, there.size(p.rank))
    made = p.emit(node.target, p.take(gradient, at), local, dim, *map(p.take, rest))
    return p.keep(node, made, there)


@aten_rule("embedding_dense_backward")
def embedding_backward(p: Partition, node: fx.Node) -> None:
    """The gradient of a table, as the table is cut that the same ids were looked up in."""
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
    begin, end = (*at.ranges[p.rank], (0, 0))[0]
    # what other ranks have goes to one more row, which is left out then
    local, _ = among_own(p, at, p.take(ids), hole=end - begin)
    skipped = padding - begin if begin <= padding < end else -1
    made = p.emit(node.target, p.take(gradient), local, end - begin + 1, skipped, by_count)
    return p.keep(node, p.emit(aten.slice.Tensor, made, 0, 0, end - begin), at)


def _table_of(p: Partition, node: fx.Node, ids: fx.Node) -> Placement:
    """Where the table is that `ids` were looked up in, of the size of this gradient."""
    for user in ids.users:
        if op_of(user) == "embedding" and user.args[1] is ids:
            table: Any = user.args[0]
            if p.hints(table) == p.hints(node):
                return p.placement(table)
    return REPLICATE
