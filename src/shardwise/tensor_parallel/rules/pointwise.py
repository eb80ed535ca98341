"""Operations that treat every element alike, on inputs that broadcast to one shape."""

from __future__ import annotations

import math
import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from shardwise.tensor_parallel.partition import Partition
from shardwise.tensor_parallel.placement import PARTIAL, REPLICATE, Placement, Split
from shardwise.tensor_parallel.rules.registry import rule

# Elementwise, though torch does not tag them so.
_UNTAGGED = {
    "aten::dropout",
    "aten::native_dropout",
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
    "aten::rand_like",
    "aten::lift_fresh_copy",
}
# f(a + b) = f(a) + f(b): a term of a sum may stay one.
_LINEAR = {"aten::alias", "aten::clone", "aten::contiguous", "aten::detach", "aten::neg"}


def is_pointwise(node: fx.Node, name: str) -> bool:
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or name.partition(".")[0] in _UNTAGGED


def pointwise(p: Partition, node: fx.Node) -> None:
    """Every input as the first one that is cut; the result alike."""
    name = str(getattr(node.target, "_schema").name)  # noqa: B009
    inputs = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]
    if _keeps_terms(p, name, inputs, node):
        made = p.emit(node.target, *map_arg(node.args, lambda n: p.values[n].node), **node.kwargs)
        return p.keep(node, made, PARTIAL)
    out = result(node).ndim
    cut: Split | None = None
    for x in inputs:
        at = p.placement(x)
        if isinstance(at, Split):
            cut = at.on(at.dim + out - len(p.shape(x)))
            break
    args = map_arg(node.args, lambda n: p.take(n, _within(p, n, cut, out)))
    kwargs = map_arg(node.kwargs, lambda n: p.take(n, _within(p, n, cut, out)))
    made = p.emit(node.target, *args, **kwargs)
    placement: Placement = REPLICATE if cut is None else cut
    several = isinstance(node.meta["val"], (tuple, list))
    return p.keep(node, made, (placement,) * len(node.meta["val"]) if several else placement)


def result(node: fx.Node) -> Tensor:
    """The first result of a node, whole."""
    value = node.meta["val"]
    first = value[0] if isinstance(value, (tuple, list)) else value
    assert isinstance(first, Tensor)
    return first


def _within(p: Partition, x: fx.Node, cut: Split | None, ndim: int) -> Placement:
    """Where an input must be for a result of `ndim` dims cut by `cut`."""
    if cut is None or not isinstance(x.meta.get("val"), Tensor):
        return REPLICATE
    dim = cut.dim - (ndim - len(p.shape(x)))
    return REPLICATE if dim < 0 or p.hints(x)[dim] == 1 else cut.on(dim)


def _keeps_terms(p: Partition, name: str, inputs: list[fx.Node], node: fx.Node) -> bool:
    partial = [x for x in inputs if p.may_stay_partial(x)]
    if not partial:
        return False
    if name in _LINEAR:
        return True
    if name in ("aten::add", "aten::sub"):
        return len(partial) == len(inputs) == 2
    scalar = name in ("aten::mul", "aten::div") and len(inputs) == 1
    return scalar and all(isinstance(a, (int, float)) and math.isfinite(a) for a in node.args[1:])


@rule("aten::bernoulli", "aten::rand", "aten::randn", "aten::randint")
def random(p: Partition, node: fx.Node) -> None:
    """Every rank draws the whole value: equal where ranks seed alike."""
    p.keep(node, p.emit(node.target, *p.take_all(node.args), **p.take_all(node.kwargs)), REPLICATE)

