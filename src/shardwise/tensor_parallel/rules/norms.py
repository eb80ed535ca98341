"""Operations over some dims of a value: local where another dim is cut, on the whole value otherwise."""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from shardwise.tensor_parallel.partition import Partition, aten
from shardwise.tensor_parallel.placement import PARTIAL, Split
from shardwise.tensor_parallel.rules.registry import rule
from shardwise.tensor_parallel.rules.views import is_tensor


@rule("aten::layer_norm", "aten::native_layer_norm", "aten::rms_norm", "aten::_fused_rms_norm")
def norm(p: Partition, node: fx.Node) -> None:
    """Over the last dims, which must be whole."""
    x, shape, *rest = node.args
    assert isinstance(x, fx.Node)
    assert isinstance(shape, (list, tuple))
    at = p.cut_of(x)
    if at is None or at.dim >= len(p.shape(x)) - len(shape):
        return p.repeat(node)
    made = p.emit(node.target, p.take(x, at), list(shape), *map(p.take, rest), **p.take_all(node.kwargs))
    return p.keep(node, made, p.like(node, at))


# Where the dim, or dims, that must be whole stand among the arguments; or how many of the last dims.
_DIM_AT = {
    "_safe_softmax": 1,
    "cumsum": 1,
    "cumprod": 1,
    "logcumsumexp": 1,
    "sort": 1,
    "argsort": 1,
    "topk": 2,
    "kthvalue": 2,
    "flip": 1,
    "roll": 2,
    "glu": 1,
    "diff": 2,
}
_LAST = {
    "tril": 2,
    "triu": 2,
    "max_pool1d": 1,
    "max_pool2d": 2,
    "max_pool2d_with_indices": 2,
    "max_pool3d": 3,
    "avg_pool1d": 1,
    "avg_pool2d": 2,
    "avg_pool3d": 3,
    "adaptive_avg_pool1d": 1,
    "adaptive_avg_pool2d": 2,
    "_adaptive_avg_pool2d": 2,
    "adaptive_max_pool2d": 2,
    "upsample_nearest2d": 2,
    "upsample_bilinear2d": 2,
    "upsample_bicubic2d": 2,
    "constant_pad_nd": -1,
    "pad": -1,
}


@rule(*(f"aten::{name}" for name in (*_DIM_AT, *_LAST)))
def along(p: Partition, node: fx.Node) -> None:
    """Along some dims, which must be whole; the results have the same dims."""
    x, *rest = node.args
    assert isinstance(x, fx.Node)
    name = str(node.target).split(".")[1]
    ndim = len(p.shape(x))
    at = p.cut_of(x)
    if at is None or at.dim in _whole_dims(node, name, ndim):
        return p.repeat(node)
    made = p.emit(node.target, p.take(x, at), *map(p.take, rest), **p.take_all(node.kwargs))
    return p.keep(node, made, p.like(node, at))


def _whole_dims(node: fx.Node, name: str, ndim: int) -> set[int]:
    args: Any = node.args
    if name in _LAST:
        count = _LAST[name] if _LAST[name] > 0 else len(args[1]) // 2
        return set(range(ndim - count, ndim))
    place = _DIM_AT[name]
    given: Any = args[place] if len(args) > place else node.kwargs.get("dim", node.kwargs.get("dims", -1))
    if isinstance(given, bool) or given is None or given == []:
        return set(range(ndim))
    return {int(d) % ndim for d in (given if isinstance(given, (list, tuple)) else [given])}


@rule(
    *(f"aten::{name}" for name in ("sum", "mean", "amax", "amin", "any", "all", "argmax", "argmin")),
    *(
        f"aten::{name}"
        for name in ("prod", "var", "var_mean", "std", "std_mean", "logsumexp", "count_nonzero")
    ),
    "aten::max.dim",
    "aten::min.dim",
    "aten::max",
    "aten::min",
    "aten::norm",
    "aten::linalg_vector_norm",
    "aten::median",
)
def reduce(p: Partition, node: fx.Node) -> None:
    """Over some dims or all. A sum or mean over the cut dim is a term of the whole one."""
    x: Any = node.args[0]
    name = str(node.target).split(".")[1]
    at = p.cut_of(x)
    if name in ("max", "min") and len(node.args) > 1 and is_tensor(node.args[1]):
        return p.repeat(node)
    if p.may_stay_partial(x) and name == "sum":
        made = p.emit(node.target, p.take(x, PARTIAL), *map(p.take, node.args[1:]), **p.take_all(node.kwargs))
        return p.keep(node, made, PARTIAL)
    if at is None:
        return p.repeat(node)
    dims, keep = _reduced(node, name, len(p.shape(x)))
    if at.dim in dims:
        if name not in ("sum", "mean") or not at.disjoint:
            return p.repeat(node)
        return _terms(p, node, at, sorted(dims), keep=keep)
    args = [p.take(x, at), *map(p.take, node.args[1:])]
    made = p.emit(node.target, *args, **p.take_all(node.kwargs))
    p.keep(node, made, p.like(node, at if keep else at.on(at.dim - sum(d < at.dim for d in dims))))
    return None


def _reduced(node: fx.Node, name: str, ndim: int) -> tuple[set[int], bool]:
    """Which dims of the input, and are they kept with one element each?"""
    args: Any = node.args
    place = 2 if name in ("norm", "linalg_vector_norm") else 1
    given: Any = args[place] if len(args) > place else node.kwargs.get("dim")
    if given is None or isinstance(given, bool) or given == []:
        return set(range(ndim)), False
    # var and std have a correction between the dims and this, or among the keyword arguments
    found = [a for a in args[place + 1 :] if isinstance(a, bool)]
    keep = bool(found[-1]) if found else bool(node.kwargs.get("keepdim", False))
    return {int(d) % ndim for d in (given if isinstance(given, (list, tuple)) else [given])}, keep


def _terms(p: Partition, node: fx.Node, at: Split, dims: list[int], *, keep: bool) -> None:
    """A sum of this rank's elements."""
    x: Any = node.args[0]
    mean = str(node.target).split(".")[1] == "mean"
    counts = [p.shape(x)[d] for d in dims]
    if mean and not all(isinstance(count, int) for count in counts):
        return p.repeat(node)
    dtype = node.meta["val"].dtype
    made = p.emit(aten.sum.dim_IntList, p.take(x, at), dims, keep, dtype=dtype)
    p.keep(node, p.emit(aten.div.Tensor, made, math.prod(counts)) if mean else made, PARTIAL)
    return None
