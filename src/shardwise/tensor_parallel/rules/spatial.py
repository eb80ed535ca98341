"""Convolutions, their norms and PReLU: cut along channels."""

from __future__ import annotations

from typing import Any

from torch import fx

from shardwise.graph.nodes import arguments_of
from shardwise.tensor_parallel.nodes import args_of, is_tensor, op_of
from shardwise.tensor_parallel.partition import Partition, aten
from shardwise.tensor_parallel.placement import PARTIAL, REPLICATE, Split, even
from shardwise.tensor_parallel.rules.registry import Dims, aten_rule, by_dims


@aten_rule("convolution", "conv1d", "conv2d", "conv3d")
def convolution(p: Partition, node: fx.Node) -> None:
    """Cut a convolution. Column: channels out; row: channels in, terms of a sum; groups by themselves."""
    given = arguments_of(node)
    x, weight, bias, *more, groups = given.values()
    transposed = given.get("transposed", False)
    style = p.parameters[weight].style if weight in p.parameters else None
    channel = len(p.shape(x)) - len(p.shape(weight)) + 1
    at = p.cut_of(x)
    at = at if at is not None and at.dim == channel and at.disjoint else None
    if groups != 1:
        return p.repeat(node) if transposed else _by_groups(p, node, at, groups, channel, style)
    out_dim, in_dim = (1, 0) if transposed else (0, 1)
    if style == "column":
        cut = p.evenly(weight, out_dim)
        local = None if bias is None else _at_least_one(p, p.take(bias, cut.on(0)), 0)
        here = _at_least_one(p, p.take(weight, cut), out_dim)
        made = p.emit(node.target, p.take(x), here, local, *more, groups)
        if cut.size(p.rank) == 0:
            made = p.emit(aten.slice.Tensor, made, channel, 0, 0)
        return p.keep(node, made, cut.on(channel))
    if style == "row":
        cut = (at or p.evenly(x, channel)).on(in_dim)
        part = _at_least_one(p, p.take(x, cut.on(channel)), channel)
        here = _at_least_one(p, p.take(weight, cut), in_dim)
        made = p.emit(node.target, part, here, None, *more, groups)
        if bias is None:
            return p.keep(node, made, PARTIAL)
        spread = p.emit(aten.reshape.default, p.take(bias), [-1] + [1] * (len(p.shape(weight)) - 2))
        return p.keep(node, p.emit(aten.add.Tensor, p.all_reduce(made), spread), REPLICATE)
    return p.repeat(node)


def _at_least_one(p: Partition, here: fx.Node, dim: int) -> fx.Node:
    """Pad an input without channels to one channel of zeros, as torch needs at least one."""
    if here.meta["val"].shape[dim]:
        return here
    padding = [0] * (2 * here.meta["val"].ndim)
    padding[-2 * dim - 1] = 1
    return p.emit(aten.constant_pad_nd.default, here, padding, 0)


def _by_groups(
    p: Partition, node: fx.Node, at: Split | None, groups: Any, channel: int, style: str | None
) -> None:
    """Cut into whole groups of channels on each rank."""
    x, weight, bias, *more, _ = arguments_of(node).values()
    width = p.shape(x)[channel] // groups
    if at is None and style == "column":
        at = Split(channel, even(groups, p.ranks)).scaled(width)
    by_group = None if at is None else _groups_of(p, at, width)
    if at is None or by_group is None:
        return p.repeat(node)
    cut = by_group.scaled(p.shape(weight)[0] // groups).on(0)
    local = None if bias is None else p.take(bias, cut)
    made = p.emit(node.target, p.take(x, at), p.take(weight, cut), local, *more, by_group.size(p.rank))
    return p.keep(node, made, cut.on(channel))


def _groups_of(p: Partition, at: Split, width: int) -> Split | None:
    """Return the cut of groups of `width` channels; None if a rank has no channels or part of a group."""
    some = all(at.size(rank) for rank in range(p.ranks))  # torch divides by their number
    return at.divided(width) if some else None


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
    at = p.cut_of(x)
    if at is None or at.dim != 1 or _groups_of(p, at, 1) is None:
        return p.repeat(node)
    inputs = {each: at.on(0) for each in rest if is_tensor(each)} | {x: at}
    value, channels = node.meta["val"], p.shape(x)[1]
    if not isinstance(value, (tuple, list)):
        return p.locally(node, inputs, at)
    others = [at.on(0) if list(one.shape) == [channels] else REPLICATE for one in value[1:]]
    return p.locally(node, inputs, (at, *others))


@aten_rule("group_norm", "native_group_norm")
def group_norm(p: Partition, node: fx.Node) -> None:
    """Normalise each group of channels by itself, if ranks have whole groups."""
    native = op_of(node) == "native_group_norm"
    x, *rest = args_of(node)
    at, place = p.cut_of(x), 5 if native else 0
    width = p.shape(x)[1] // rest[place]
    by_group = _groups_of(p, at, width) if at is not None and at.dim == 1 else None
    if at is None or by_group is None:
        return p.repeat(node)
    local = [p.take(arg, at.on(0)) if is_tensor(arg) else p.take(arg) for arg in rest]
    local[place] = by_group.size(p.rank)
    if native:
        local[3] = at.size(p.rank)
    here = p.emit(aten.contiguous.default, p.take(x, at))
    return p.keep(node, p.emit(node.target, here, *local), (at, by_group, by_group) if native else at)


@by_dims("prelu", "_prelu_kernel")
def prelu(p: Partition, node: fx.Node) -> Dims:
    """Cut a PReLU with one weight, or one for each channel."""
    x, weight = args_of(node)
    dims = range(len(p.shape(x)))
    if len(p.shape(weight)) == len(dims):
        return {x: dims, weight: p.spread(weight, p.shape(x))}
    return {x: dims, weight: [1 if each != 1 else None for each in p.hints(weight)]}
