"""Convolutions, their norms and PReLU, cut along channels; operations along dims, which must be whole."""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from shardwise.graph.nodes import arguments_of
from shardwise.tensor_parallel.nodes import args_of, is_tensor, op_of
from shardwise.tensor_parallel.partition import Partition, aten
from shardwise.tensor_parallel.placement import PARTIAL, REPLICATE, Split, even
from shardwise.tensor_parallel.rules.registry import Dims, aten_rule, by_dims

# Operations whose results have the dims of their input. Some name the dims that must be whole; for others, a
# number of last dims must be whole.
_NAMED = (
    *("_safe_softmax", "cumsum", "cumprod", "logcumsumexp", "sort", "argsort", "flip", "glu"),
    *("topk", "kthvalue", "roll", "diff", "index_select"),
)
_LAST = {
    **dict.fromkeys(("max_pool1d", "avg_pool1d", "adaptive_avg_pool1d"), 1),
    **dict.fromkeys(("tril", "triu", "max_pool2d", "max_pool2d_with_indices", "avg_pool2d"), 2),
    **dict.fromkeys(("adaptive_avg_pool2d", "_adaptive_avg_pool2d", "adaptive_max_pool2d"), 2),
    **dict.fromkeys(("upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d"), 2),
    **dict.fromkeys(("max_pool3d", "avg_pool3d"), 3),
}
_SHAPES = ("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm")  # as many as in their shape
_PADS = ("constant_pad_nd", "pad")  # the padding has two numbers for each


@aten_rule("convolution", "conv1d", "conv2d", "conv3d")
def convolution(p: Partition, node: fx.Node) -> None:
    """Cut a convolution. Column: channels out; row: channels in, terms of a sum; groups by themselves."""
    arguments = arguments_of(node)
    x, weight, bias, *args, groups = arguments.values()
    transposed = arguments.get("transposed", False)
    style = p.parameters[weight].style if weight in p.parameters else None
    channel = len(p.shape(x)) - len(p.shape(weight)) + 1
    x_cut = p.cut_of(x)
    x_cut = x_cut if x_cut is not None and x_cut.dim == channel and x_cut.disjoint else None
    if groups != 1:
        return p.repeat(node) if transposed else _by_groups(p, node, x_cut, groups, channel, style)
    out_dim, in_dim = (1, 0) if transposed else (0, 1)
    if style == "column":
        cut = p.evenly(weight, out_dim)
        local = None if bias is None else _pad_channels(p, p.take(bias, cut.on(0)), 0)
        kernel = _pad_channels(p, p.take(weight, cut), out_dim)
        result = p.emit(node.target, p.take(x), kernel, local, *args, groups)
        if cut.size(p.rank) == 0:
            result = p.emit(aten.slice.Tensor, result, channel, 0, 0)
        return p.keep(node, result, cut.on(channel))
    if style == "row":
        cut = (x_cut or p.evenly(x, channel)).on(in_dim)
        part = _pad_channels(p, p.take(x, cut.on(channel)), channel)
        kernel = _pad_channels(p, p.take(weight, cut), in_dim)
        result = p.emit(node.target, part, kernel, None, *args, groups)
        if bias is None:
            return p.keep(node, result, PARTIAL)
        spread = p.emit(aten.reshape.default, p.take(bias), [-1] + [1] * (len(p.shape(weight)) - 2))
        return p.keep(node, p.emit(aten.add.Tensor, p.all_reduce(result), spread), REPLICATE)
    return p.repeat(node)


def _pad_channels(p: Partition, x: fx.Node, dim: int) -> fx.Node:
    """Pad an input without channels to one channel of zeros, as torch needs at least one."""
    if x.meta["val"].shape[dim]:
        return x
    padding = [0] * (2 * x.meta["val"].ndim)
    padding[-2 * dim - 1] = 1
    return p.emit(aten.constant_pad_nd.default, x, padding, 0)


def _by_groups(
    p: Partition, node: fx.Node, x_cut: Split | None, groups: Any, channel: int, style: str | None
) -> None:
    x, weight, bias, *args, _ = arguments_of(node).values()
    width = p.shape(x)[channel] // groups
    if x_cut is None and style == "column":
        x_cut = Split(channel, even(groups, p.ranks)).scaled(width)
    by_group = None if x_cut is None else _groups_of(p, x_cut, width)
    if x_cut is None or by_group is None:
        return p.repeat(node)
    cut = by_group.scaled(p.shape(weight)[0] // groups).on(0)
    local = None if bias is None else p.take(bias, cut)
    result = p.emit(node.target, p.take(x, x_cut), p.take(weight, cut), local, *args, by_group.size(p.rank))
    return p.keep(node, result, cut.on(channel))


def _groups_of(p: Partition, cut: Split, width: int) -> Split | None:
    """Return the cut of groups of `width` channels; None if a rank has no channels or part of a group."""
    nonempty = all(cut.size(rank) for rank in range(p.ranks))  # torch divides by their number
    return cut.divided(width) if nonempty else None


@aten_rule(
    "batch_norm",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_no_training",
    "_native_batch_norm_legit_functional",
    "native_batch_norm",
    "cudnn_batch_norm",
)
def batch_norm(p: Partition, node: fx.Node) -> None:
    """Normalise each channel by itself."""
    x, *rest = args_of(node)
    cut = p.cut_of(x)
    if cut is None or cut.dim != 1 or _groups_of(p, cut, 1) is None:
        return p.repeat(node)
    inputs = {arg: cut.on(0) for arg in rest if is_tensor(arg)} | {x: cut}
    value, channels = node.meta["val"], p.shape(x)[1]
    if not isinstance(value, (tuple, list)):
        return p.locally(node, inputs, cut)
    statistics = [cut.on(0) if list(stat.shape) == [channels] else REPLICATE for stat in value[1:]]
    return p.locally(node, inputs, (cut, *statistics))


@aten_rule("group_norm", "native_group_norm")
def group_norm(p: Partition, node: fx.Node) -> None:
    """Normalise each group of channels by itself, if ranks have whole groups."""
    native = op_of(node) == "native_group_norm"
    x, *rest = args_of(node)
    cut, place = p.cut_of(x), 5 if native else 0
    width = p.shape(x)[1] // rest[place]
    by_group = _groups_of(p, cut, width) if cut is not None and cut.dim == 1 else None
    if cut is None or by_group is None:
        return p.repeat(node)
    args = [p.take(arg, cut.on(0)) if is_tensor(arg) else p.take(arg) for arg in rest]
    args[place] = by_group.size(p.rank)
    if native:
        args[3] = cut.size(p.rank)
    local = p.emit(aten.contiguous.default, p.take(x, cut))
    return p.keep(node, p.emit(node.target, local, *args), (cut, by_group, by_group) if native else cut)


@by_dims("prelu", "_prelu_kernel")
def prelu(p: Partition, node: fx.Node) -> Dims:
    """Cut a PReLU with one weight, or one for each channel."""
    x, weight = args_of(node)
    dims = range(len(p.shape(x)))
    if len(p.shape(weight)) == len(dims):
        return {x: dims, weight: p.spread(weight, p.shape(x))}
    return {x: dims, weight: [1 if size != 1 else None for size in p.hints(weight)]}


@by_dims(*_NAMED, *_LAST, *_SHAPES, *_PADS)
def along(p: Partition, node: fx.Node) -> Dims:
    """Cut operations along some dims, which must be whole."""
    args, op = args_of(node), op_of(node)
    ndim, arguments = len(p.shape(args[0])), arguments_of(node)
    if op in _NAMED:
        whole = _dims(arguments.get("dim", arguments.get("dims")), ndim)
    else:
        count = _LAST.get(op) or len(args[1]) // (2 if op in _PADS else 1)
        whole = set(range(ndim - count, ndim))
    return {args[0]: [None if d in whole else d for d in range(ndim)]}


def _dims(argument: Any, ndim: int) -> set[int]:
    """Return the dims that an argument names; all dims if it names none, or the value has none."""
    if argument is None or argument == [] or not ndim:
        return set(range(ndim))
    return {int(d) % ndim for d in (argument if isinstance(argument, (list, tuple)) else [argument])}


@aten_rule(
    *("sum", "mean", "amax", "amin", "any", "all", "argmax", "argmin", "max", "min", "median"),
    *("prod", "var", "var_mean", "std", "std_mean", "logsumexp", "count_nonzero"),
    *("norm", "linalg_vector_norm"),
)
def reduce(p: Partition, node: fx.Node) -> None:
    """Reduce over some dims or all. A sum or mean over the cut dim gives a term of the whole one."""
    x, *rest = args_of(node)
    op, cut, ndim = op_of(node), p.cut_of(x), len(p.shape(x))
    if op in ("max", "min") and rest and is_tensor(rest[0]):
        return p.repeat(node)
    arguments = arguments_of(node)
    dims, keep = _dims(arguments.get("dim"), ndim), arguments.get("keepdim", False)
    counts = [p.shape(x)[d] for d in dims]
    is_linear = op == "sum" or (op == "mean" and all(isinstance(size, int) for size in counts))
    if cut is None or cut.dim not in dims or not is_linear or not cut.disjoint:
        dropped = [0 if keep else sum(e < d for e in dims) for d in range(ndim)]
        kept = [None if d in dims else d - dropped[d] for d in range(ndim)]
        return p.follow(node, {x: kept}, linear=op == "sum")
    total = p.emit(aten.sum.dim_IntList, p.take(x, cut), sorted(dims), keep, dtype=node.meta["val"].dtype)
    return p.keep(node, p.emit(aten.div.Tensor, total, math.prod(counts)) if op == "mean" else total, PARTIAL)
