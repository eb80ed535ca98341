"""Operations that treat every element alike, on inputs that broadcast to one shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from shardwise.tensor_parallel.partition import Partition
from shardwise.tensor_parallel.placement import PARTIAL, REPLICATE, Placement, Split
from shardwise.tensor_parallel.rules.registry import name_of

# Elementwise, though torch does not tag them so.
_UNTAGGED = {
    "aten::_to_copy",
    "aten::to",
    "aten::type_as",
    "aten::contiguous",
    "aten::clone",
    "aten::alias",
    "aten::detach",
    "aten::masked_fill",
    "aten::zeros_like",
    "aten::ones_like",
    "aten::full_like",
    "aten::empty_like",
    "aten::lift_fresh_copy",
    "aten::where",
    "aten::fill",
    "aten::copy",
    "aten::nan_to_num",
    "aten::isclose",
    "aten::isfinite",
    "aten::isinf",
    "aten::logical_not",
}
# f(a + b) = f(a) + f(b): a term of a sum may stay one.
_LINEAR = {"aten::alias", "aten::clone", "aten::contiguous", "aten::detach", "aten::neg"}


def is_pointwise(node: fx.Node, name: str) -> bool:
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags:  # a part's draws are others than the whole's
        return False
    return torch.Tag.pointwise in tags or name.partition(".")[0] in _UNTAGGED


def pointwise(p: Partition, node: fx.Node) -> None:
    """Every input as the first one that is cut; the result alike."""
    if p.is_whole(node):
        return p.repeat(node)
    name = name_of(node).partition(".")[0]
    inputs = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]
    if _keeps_terms(p, name, inputs, node):
        made = p.emit(node.target, *map_arg(node.args, lambda n: p.take(n, p.placement(n))), **node.kwargs)
        return p.keep(node, made, PARTIAL)
    sizes = result(node).shape
    cuts = {x: at for x in inputs if (at := _cut_by(p, x, sizes)) is not None}
    cut = next((at for at in cuts.values() if at.disjoint), next(iter(cuts.values()), None))
    if all(p.is_gathered(x) for x in cuts):
        cut = None  # no communication either way, and a whole result never needs any
    args = map_arg(node.args, lambda n: p.take(n, _within(p, n, cut, sizes)))
    kwargs = map_arg(node.kwargs, lambda n: p.take(n, _within(p, n, cut, sizes)))
    made = p.emit(node.target, *args, **kwargs)
    placement: Placement = REPLICATE if cut is None else cut
    return p.keep(node, made, p.like(node, placement))


def result(node: fx.Node) -> Tensor:
    """The first result of a node, whole."""
    value = node.meta["val"]
    first = value[0] if isinstance(value, (tuple, list)) else value
    assert isinstance(first, Tensor)
    return first


def _cut_by(p: Partition, x: fx.Node, sizes: Sequence[Any]) -> Split | None:
    """How a result of `sizes` is cut if it is as the input `x`; None if one element is for all of it."""
    at = p.placement(x)
    if not isinstance(at, Split):
        return None
    there = at.on(at.dim + len(sizes) - len(p.shape(x)))
    return None if p.is_spread(x, at.dim, sizes[there.dim]) else there


def _within(p: Partition, x: fx.Node, cut: Split | None, sizes: Sequence[Any]) -> Placement:
    """Where an input must be for a result of `sizes` cut by `cut`."""
    is_tensor = isinstance(x.meta.get("val"), Tensor)
    return REPLICATE if cut is None or not is_tensor else p.aligned(x, cut, sizes)


def _keeps_terms(p: Partition, name: str, inputs: list[fx.Node], node: fx.Node) -> bool:
    partial = [x for x in inputs if p.may_stay_partial(x)]
    if not partial:
        return False
    if name in _LINEAR:
        return True
    if name in ("aten::add", "aten::sub"):
        return len(partial) == len(inputs) == 2
    if name == "aten::mul" and len(partial) == 1 and len(inputs) == 2 and node.args[0] is not node.args[1]:
        (other,) = (x for x in inputs if x is not partial[0])
        return p.placement(other) == REPLICATE
    if node.kwargs:  # rounding, say
        return False
    scalar = name in ("aten::mul", "aten::div") and len(inputs) == 1
    return scalar and all(isinstance(a, (int, float)) and math.isfinite(a) for a in node.args[1:])
