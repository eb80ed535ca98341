"""Backward operations, for programs exported with their backward in them.

Most of a backward is products, sums and elementwise operations, whose rules are those of the forward: the
gradient of a column layer's input is a term of a sum, that of its weight is cut like the weight. This module
has rules for operators of backward only. Only softmax over a cut dim communicates, and log-softmax if its
gradient is not from a loss: they need a sum for each row.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from shardwise.tensor_parallel.nodes import args_of, is_tensor, op_of
from shardwise.tensor_parallel.partition import Partition, aten
from shardwise.tensor_parallel.placement import PARTIAL, Split, with_dim
from shardwise.tensor_parallel.rules.attention import key_heads, mask_for, repeat_heads, without_heads
from shardwise.tensor_parallel.rules.registry import aten_rule
from shardwise.tensor_parallel.rules.vocabulary import (
    MEAN,
    NONE,
    class_dim,
    is_interval,
    local_span,
    loss_weights,
)


@aten_rule("nll_loss_backward", "nll_loss2d_backward")
def nll_backward(p: Partition, node: fx.Node) -> None:
    """Put each row's gradient, one number at the target's index, on the rank that has this index."""
    gradient, x, target, weight, reduction, ignored, total = args_of(node)
    cut, dim = p.placement(x), class_dim(p, x)
    if not isinstance(cut, Split) or not is_interval(cut, dim):
        return p.repeat(node)
    span, dtype = local_span(p, x, cut), node.meta["val"].dtype

    def rows(grad: Tensor, target: Tensor, weight: Tensor | None, total: Tensor) -> Tensor:
        index = target.unsqueeze(dim)
        skipped = index == ignored
        grad = grad.unsqueeze(dim) if reduction == NONE else grad / total if reduction == MEAN else grad
        # masked, as nan times 0 is nan: the gradient of a mean over no rows
        return (-loss_weights(weight, index, skipped, dtype) * grad).masked_fill(skipped, 0)

    def place(local: Tensor, target: Tensor, row: Tensor) -> Tensor:
        result, index = torch.zeros_like(local), target.unsqueeze(dim)
        if not span.count:
            return result
        offset, remote = span.offsets(index.masked_fill(index == ignored, 0))
        return result.scatter(dim, offset, row.masked_fill(remote, 0))

    index = p.take(target)
    p.row_sums[node] = row = p.run(rows, p.take(gradient), index, p.take(weight), p.take(total))
    return p.keep(node, p.run(place, p.take(x, cut), index, row), cut)


@aten_rule("_log_softmax_backward_data", "_softmax_backward_data")
def softmax_backward(p: Partition, node: fx.Node) -> None:
    gradient, result, raw_dim, _ = args_of(node)
    cut = p.cut_of(result, gradient)
    dim = raw_dim % max(1, len(p.shape(gradient)))
    if cut is None or (cut.dim == dim and not is_interval(cut, dim)):
        return p.repeat(node)
    grad, output, dtype = p.take(gradient, cut), p.take(result, cut), node.meta["val"].dtype
    if cut.dim != dim:
        return p.keep(node, p.emit(node.target, grad, output, *args_of(node)[2:]), cut)
    logarithm = "log" in op_of(node)
    total = p.row_sums.get(gradient) if logarithm else None
    if total is None:
        total = p.run(lambda x, y: (x if logarithm else x * y).sum(dim, True), grad, output)
        total = p.all_reduce(total)

    def differentiate(x: Tensor, y: Tensor, total: Tensor) -> Tensor:
        return (x - y.exp() * total if logarithm else (x - total) * y).to(dtype)

    return p.keep(node, p.run(differentiate, grad, output, total), cut)


@aten_rule("native_layer_norm_backward", "_fused_rms_norm_backward")
def norm_backward(p: Partition, node: fx.Node) -> None:
    """Cut a norm's backward; its dims must be whole. Weights' gradients are sums over ranks' rows."""
    gradient, x, shape, *rest = args_of(node)
    cut = p.cut_of(x, gradient)
    if cut is None or cut.dim >= len(p.shape(x)) - len(shape) or not cut.disjoint:
        return p.repeat(node)
    statistics = rest[: 2 if "layer" in op_of(node) else 1]  # means and deviations of rows, or these alone
    weights = [PARTIAL] * (len(node.meta["val"]) - 1)
    return p.locally(node, dict.fromkeys([gradient, x, *statistics], cut), (cut, *weights))


@aten_rule(
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention_backward",
)
def attention_backward(p: Partition, node: fx.Node) -> None:
    """Differentiate each head by itself: gradients are cut like the queries, keys and values."""
    gradient, q, k, v = args_of(node)[:4]
    cut = p.cut_of(q, gradient, k, v)
    heads = [p.hints(x)[-3] for x in (q, k, v)]
    if cut is not None and without_heads(p, cut, 1):
        return p.repeat(node)
    if cut is None or cut.dim > 1 or (cut.dim == 1 and len(set(heads)) > 1):
        return _grouped(p, node, cut, group=heads[0] // heads[1]) if heads[1] == heads[2] else p.repeat(node)
    return p.keep(node, _emit_backward(p, node, cut, p.take(k, cut), p.take(v, cut)), cut)


def _emit_backward(p: Partition, node: fx.Node, cut: Split, k: fx.Node, v: fx.Node) -> fx.Node:
    gradient, q, _, _, *rest = args_of(node)
    others = [_with_heads(p, x, cut, q) for x in rest]
    kwargs = {name: _with_heads(p, x, cut, q) for name, x in node.kwargs.items()}
    return p.emit(node.target, p.take(gradient, cut), p.take(q, cut), k, v, *others, **kwargs)


def _grouped(p: Partition, node: fx.Node, cut: Split | None, *, group: int) -> None:
    """Cut a backward with fewer key heads: if several ranks use one, each has a term of its gradient."""
    _, q, k, v = args_of(node)[:4]
    if cut is None or cut.dim != 1 or cut != p.placement(q) or any(len(part) > 1 for part in cut.ranges):
        return p.repeat(node)
    count = p.shape(k)[1]
    key_cut, whole_groups = key_heads(p, cut, group=group, count=count)
    if whole_groups:
        result = _emit_backward(p, node, cut, p.take(k, key_cut), p.take(v, key_cut))
        return p.keep(node, result, (cut, key_cut, key_cut))
    keys, values = (repeat_heads(p, x, key_cut, cut, group=group) for x in (k, v))
    result = _emit_backward(p, node, cut, keys, values)
    gradients = [p.emit(operator.getitem, result, place) for place in range(3)]
    begin, end = (*cut.ranges[p.rank], (0, 0))[0]
    for place in (1, 2):  # for all query heads, with zeros for those of other ranks
        padding = [0, 0, 0, 0, begin, count * group - end]
        padded = p.emit(aten.constant_pad_nd.default, gradients[place], padding, 0)
        grouped = p.emit(aten.unflatten.int, padded, 1, [count, group])
        gradients[place] = p.emit(aten.sum.dim_IntList, grouped, [2])
    return p.keep(node, tuple(gradients), (cut, PARTIAL, PARTIAL))


def _with_heads(p: Partition, x: Any, cut: Split, q: fx.Node) -> Any:
    """Return `x` on this rank: the result, statistics [batch, heads, queries], a mask, or a number."""
    if is_tensor(x) and len(p.shape(x)) == len(p.shape(q)) - 1 and isinstance(p.placement(x), Split):
        return p.take(x, cut)
    return mask_for(p, x, cut, q)


@aten_rule("slice_backward", "select_backward")
def part_backward(p: Partition, node: fx.Node) -> None:
    """Put a gradient among zeros, along another dim than the cut one."""
    gradient, sizes, dim, *rest = args_of(node)
    cut = p.cut_of(gradient)
    if cut is None:
        return p.repeat(node)
    dim %= len(sizes)
    result_cut = cut.on(cut.dim + (op_of(node) == "select_backward" and cut.dim >= dim))
    if result_cut.dim == dim:
        return p.repeat(node)
    local = with_dim([p.take(size) for size in sizes], result_cut.dim, result_cut.size(p.rank))
    result = p.emit(node.target, p.take(gradient, cut), local, dim, *map(p.take, rest))
    return p.keep(node, result, result_cut)
