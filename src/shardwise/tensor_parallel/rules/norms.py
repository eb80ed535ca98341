"""Operations over some dims of a value: local where another dim is cut, on the whole value where one of these is."""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from shardwise.tensor_parallel.partition import Partition, aten
from shardwise.tensor_parallel.placement import PARTIAL, REPLICATE, Placement, Split, covers_once
from shardwise.tensor_parallel.rules.registry import rule


@rule("aten::layer_norm", "aten::native_layer_norm", "aten::rms_norm", "aten::_fused_rms_norm")
def norm(p: Partition, node: fx.Node) -> None:
    """Over the last dims, which must be whole."""
    x, shape, *rest = node.args
    assert isinstance(x, fx.Node) and isinstance(shape, (list, tuple))
    at = p.placement(x)
    where: Placement = at if isinstance(at, Split) and at.dim < len(p.shape(x)) - len(shape) else REPLICATE
    made = p.emit(node.target, p.take(x, where), list(shape), *map(p.take, rest), **p.take_all(node.kwargs))
    several = isinstance(node.meta["val"], (tuple, list))
    p.keep(node, made, (where,) * len(node.meta["val"]) if several else where)


@rule("aten::softmax", "aten::_softmax", "aten::log_softmax", "aten::_log_softmax", "aten::cumsum", "aten::sort", "aten::topk")
def along(p: Partition, node: fx.Node) -> None:
    """Along one dim, which must be whole; the result has the same dims."""
    x, *rest = node.args
    assert isinstance(x, fx.Node)
    name = str(node.target).split(".")[1]
    place = 1 if name == "topk" else 0
    given = rest[place] if len(rest) > place else node.kwargs.get("dim", -1)
    assert isinstance(given, int)
    dim = given % len(p.shape(x))
    at = p.placement(x)
    where: Placement = at if isinstance(at, Split) and at.dim != dim else REPLICATE
    made = p.emit(node.target, p.take(x, where), *map(p.take, rest), **p.take_all(node.kwargs))
    several = isinstance(node.meta["val"], (tuple, list))
    p.keep(node, made, (where,) * len(node.meta["val"]) if several else where)


@rule("aten::sum", "aten::mean", "aten::amax", "aten::amin", "aten::any", "aten::all", "aten::argmax", "aten::argmin")
def reduce(p: Partition, node: fx.Node) -> None:
    """Over some dims or all. A sum or mean over the cut dim is a term of the whole one."""
    x = node.args[0]
    assert isinstance(x, fx.Node)
    ndim = len(p.shape(x))
    given: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    keep: Any = node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim", False)
    listed = list(range(ndim)) if given is None or given == [] else [given] if isinstance(given, int) else given
    dims = {d % ndim for d in listed}
    at = p.placement(x)
    if not isinstance(at, Split):
        made = p.emit(node.target, p.take(x), *map(p.take, node.args[1:]), **p.take_all(node.kwargs))
        return p.keep(node, made, REPLICATE)
    name = str(node.target).split(".")[1]
    if at.dim in dims:
        whole = p.hints(x)[at.dim]
        sums = name == "sum" or (name == "mean" and isinstance(p.shape(x)[at.dim], int))
        if not sums or not covers_once(at.ranges, whole):
            made = p.emit(node.target, p.take(x), *map(p.take, node.args[1:]), **p.take_all(node.kwargs))
            return p.keep(node, made, REPLICATE)
        made = p.emit(aten.sum.dim_IntList, p.take(x, at), sorted(dims), bool(keep))
        if name == "mean":
            counts = [p.shape(x)[d] for d in dims]
            if all(isinstance(count, int) for count in counts):
                made = p.emit(aten.div.Tensor, made, math.prod(counts))
            else:
                made = p.emit(aten.mean.dim, p.take(x), sorted(dims), bool(keep))
                return p.keep(node, made, REPLICATE)
        return p.keep(node, made, PARTIAL)
    made = p.emit(node.target, p.take(x, at), *map(p.take, node.args[1:]), **p.take_all(node.kwargs))
    moved = at if keep else at.on(at.dim - sum(d < at.dim for d in dims))
    return p.keep(node, made, moved)


