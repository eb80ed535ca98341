"""Convolutions and what goes with them: cut along channels."""

from __future__ import annotations

from typing import Any

from torch import fx

from shardwise.tensor_parallel.partition import Partition, aten
from shardwise.tensor_parallel.placement import PARTIAL, REPLICATE, Split, even
from shardwise.tensor_parallel.rules.registry import rule
from shardwise.tensor_parallel.rules.views import is_tensor

_GROUPS_AT = {"convolution": 8, "conv1d": 6, "conv2d": 6, "conv3d": 6}


@rule(*(f"aten::{name}" for name in _GROUPS_AT))
def convolution(p: Partition, node: fx.Node) -> None:
    """Column: channels out; row: channels in, terms of a sum; each group of channels by itself."""
    args: list[Any] = list(node.args)
    name = str(node.target).split(".")[1]
    x, weight = args[:2]
    bias = args[2] if len(args) > 2 else None
    groups = args[_GROUPS_AT[name]] if len(args) > _GROUPS_AT[name] else 1
    transposed = bool(args[6]) if name == "convolution" else False
    style = p.parameters[weight].style if weight in p.parameters else None
    channel = len(p.shape(x)) - len(p.shape(weight)) + 1
    at = p.cut_of(x)
    at = at if at is not None and at.dim == channel and at.disjoint and at.block is None else None
    if groups != 1:
        return _by_groups(p, node, at if style != "column" or at else None, groups, channel)
    out_dim, in_dim = (1, 0) if transposed else (0, 1)
    if style == "column":
        cut = Split(out_dim, even(p.shape(weight)[out_dim], p.ranks))
        local = None if bias is None else p.take(bias, cut.on(0))
        here = p.take(weight, cut)
        if cut.size(p.rank) == 0:
            here, local = _one_of_zeros(p, here, out_dim), local and _one_of_zeros(p, local, 0)
        made = p.emit(node.target, p.take(x), here, local, *args[3:])
        if cut.size(p.rank) == 0:
            made = p.emit(aten.slice.Tensor, made, channel, 0, 0)
        return p.keep(node, made, cut.on(channel))
    if style == "row":
        cut = (at or p.evenly(x, channel)).on(in_dim)
        part, here = p.take(x, cut.on(channel)), p.take(weight, cut)
        if cut.size(p.rank) == 0:
            part, here = _one_of_zeros(p, part, channel), _one_of_zeros(p, here, in_dim)
        made = p.emit(node.target, part, here, None, *args[3:])
        if bias is None:
            return p.keep(node, made, PARTIAL)
        spread = p.emit(aten.reshape.default, p.take(bias), [-1] + [1] * (len(p.shape(weight)) - 2))
        return p.keep(node, p.emit(aten.add.Tensor, p.all_reduce(made), spread), REPLICATE)
    return p.repeat(node)


def _one_of_zeros(p: Partition, here: fx.Node, dim: int) -> fx.Node:
    """No channels as one of zeros: torch refuses to work on none."""
    padding = [0] * (2 * here.meta["val"].ndim)
    padding[-2 * dim - 1] = 1
    return p.emit(aten.constant_pad_nd.default, here, padding, 0)


def _by_groups(p: Partition, node: fx.Node, at: Split | None, groups: int, channel: int) -> None:
    """Whole groups of channels on each rank."""
    args: list[Any] = list(node.args)
    x, weight = args[:2]
    name = str(node.target).split(".")[1]
    transposed = bool(args[6]) if name == "convolution" else False
    width = p.shape(x)[channel] // groups
    style = p.parameters[weight].style if weight in p.parameters else None
    if at is None and style == "column":
        at = Split(channel, even(p.shape(x)[channel], p.ranks, unit=width))
    if at is None or transposed or any(v % width for held in at.ranges for i in held for v in i):
        return p.repeat(node)
    if any(at.size(rank) == 0 for rank in range(p.ranks)):
        return p.repeat(node)
    out = p.shape(weight)[0] // groups
    cut = Split(0, tuple(tuple((b // width * out, e // width * out) for b, e in held) for held in at.ranges))
    local = None if len(args) < 3 or args[2] is None else p.take(args[2], cut)
    rest = args[3:]
    rest[_GROUPS_AT[name] - 3] = at.size(p.rank) // width
    made = p.emit(node.target, p.take(x, at), p.take(weight, cut), local, *rest)
    return p.keep(node, made, cut.on(channel))


@rule(
    "aten::batch_norm",
    "aten::_native_batch_norm_legit",
    "aten::_native_batch_norm_legit_no_training",
    "aten::_native_batch_norm_legit_functional",
    "aten::native_batch_norm",
    "aten::cudnn_batch_norm",
)
def batch_norm(p: Partition, node: fx.Node) -> None:
    """Every channel by itself."""
    x, *rest = node.args
    assert isinstance(x, fx.Node)
    at = p.cut_of(x)
    if at is None or at.dim != 1 or at.block is not None or len(p.shape(x)) < 2:
        return p.repeat(node)
    if any(at.size(rank) == 0 for rank in range(p.ranks)):  # torch divides by the number of channels
        return p.repeat(node)
    channels = p.shape(x)[1]
    local = [p.take(arg, at.on(0)) if is_tensor(arg) else p.take(arg) for arg in rest]
    made = p.emit(node.target, p.take(x, at), *local, **p.take_all(node.kwargs))
    value = node.meta["val"]
    if not isinstance(value, (tuple, list)):
        return p.keep(node, made, at)
    others = [at.on(0) if list(one.shape) == [channels] else REPLICATE for one in value[1:]]
    return p.keep(node, made, (at, *others))


@rule("aten::group_norm", "aten::native_group_norm")
def group_norm(p: Partition, node: fx.Node) -> None:
    """Every group of channels by itself, where ranks have whole groups."""
    args: Any = node.args
    native = str(node.target).split(".")[1] == "native_group_norm"
    x, groups = args[0], args[6] if native else args[1]
    at = p.cut_of(x)
    width = p.shape(x)[1] // groups
    if at is None or at.block is not None or at.dim != 1:
        return p.repeat(node)
    if any(v % width for held in at.ranges for i in held for v in i):
        return p.repeat(node)
    if any(at.size(rank) == 0 for rank in range(p.ranks)):
        return p.repeat(node)
    local = [p.take(arg, at.on(0)) if is_tensor(arg) else p.take(arg) for arg in args[1:]]
    local[5 if native else 0] = at.size(p.rank) // width
    here = p.emit(aten.contiguous.default, p.take(x, at))
    if not native:
        return p.keep(node, p.emit(node.target, here, *local), at)
    local[3] = at.size(p.rank)
    by_group = Split(1, tuple(tuple((b // width, e // width) for b, e in held) for held in at.ranges))
    return p.keep(node, p.emit(node.target, here, *local), (at, by_group, by_group))


@rule("aten::prelu", "aten::_prelu_kernel")
def prelu(p: Partition, node: fx.Node) -> None:
    """One weight, or one for each channel."""
    args: Any = node.args
    x, weight = args
    at = p.cut_of(x)
    if at is None:
        return p.repeat(node)
    dim = at.dim if len(p.shape(weight)) == len(p.shape(x)) else 0
    by_channel = p.hints(weight)[dim : dim + 1] == [p.hints(x)[at.dim]] and p.hints(x)[at.dim] != 1
    if not by_channel and dim == 0 and p.hints(weight) != [1] and at.dim == 1:
        return p.repeat(node)
    slopes = p.take(weight, at.on(dim) if by_channel and (dim or at.dim == 1) else REPLICATE)
    return p.keep(node, p.emit(node.target, p.take(x, at), slopes), at)
