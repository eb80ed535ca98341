"""Norms of whole sharded tensors, of all elements and along dims.

Along dims that no shard cuts the result is sharded, otherwise plain (`ops.reduce`). What ranks combine is
fp64. The gradient of a norm of zero is zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.layout import Box
from shardwise.sharded_tensor.autograd import all_reduced
from shardwise.sharded_tensor.ops.extremes import evenly, extreme
from shardwise.sharded_tensor.ops.reduction import (
    Dims,
    as_torch,
    count_of,
    differentiable,
    dims_of,
    each_shard,
    given,
    is_local,
    kept_size,
    slices,
    wide_of,
    without,
)
from shardwise.sharded_tensor.refuse import refuse
from shardwise.sharded_tensor.registry import handles
from shardwise.sharded_tensor.tensor import ShardedTensor

_T: Any = Tensor


def norm(
    sharded: ShardedTensor, p: float = 2.0, *, dim: Any = None, keepdim: Any = False, dtype: Any = None
) -> Tensor:
    """The p-norm along `dim`, by default of all elements. Collective, unless no shard cuts `dim`."""
    dims = dims_of(sharded, dim)
    check_norm(sharded, p, dims, keepdim=bool(keepdim))
    if is_local(sharded, dims):
        return each_shard(
            sharded,
            dims,
            keepdim=keepdim,
            function=lambda t: torch.linalg.vector_norm(t, p, dims, bool(keepdim), dtype=dtype),
        )
    if dtype is not None and dtype != sharded.dtype:
        sharded = sharded.map(lambda t: t.to(dtype))
    wanted = sharded.dtype.to_real() if sharded.dtype.is_complex else sharded.dtype
    if math.isinf(p):
        value = extreme(sharded.map(lambda t: t.detach().abs()), dims, largest=p > 0)
        spread = evenly(value, sharded, dims, of=lambda t: t.abs())

        def derivative(tensor: Tensor, box: Box, grad: Tensor) -> Tensor:
            return tensor.sgn() * spread(tensor, box, grad)
    else:
        value = _power_norm(sharded, dims, p)

        def derivative(tensor: Tensor, box: Box, grad: Tensor) -> Tensor:
            if p == 0:
                return torch.zeros_like(tensor)
            length = value[slices(box, dims)]
            slope = tensor.sgn() if p == 1 else tensor / length
            if p not in (1, 2):
                slope = (tensor.sgn() * (tensor.abs() / length).pow(p - 1)).masked_fill(tensor == 0, 0)
            return (grad * slope).masked_fill(length == 0, 0)

    return without(differentiable(value.to(wanted), sharded, dims, derivative), dims, keepdim)


def check_norm(sharded: ShardedTensor, p: float, dims: Sequence[int], *, keepdim: bool = False) -> None:
    """Raise what torch raises where there is no such norm: of integers, or an extreme of nothing. Local."""
    dims = tuple(dims)
    if not (sharded.dtype.is_floating_point or sharded.dtype.is_complex) or (
        count_of(sharded, dims) == 0 and (p < 0 or math.isinf(p))
    ):
        as_torch(torch.linalg.vector_norm, sharded, p, dims, keepdim)


def _power_norm(sharded: ShardedTensor, dims: Dims, p: float) -> Tensor:
    """The p-norm for finite p without gradient, in fp64: of shards' norms, which do not overflow."""
    tensors = [tensor.detach() for tensor in sharded.tensors]
    wide = wide_of(sharded.dtype)
    total = torch.zeros(kept_size(sharded, dims), dtype=torch.float64, device=sharded.anchor.device)
    for tensor, box in zip(tensors, sharded.boxes, strict=True):
        if tensor.numel():
            length = torch.linalg.vector_norm(tensor, p, dims, True, dtype=wide).to(torch.float64)
            total[slices(box, dims)] += length if p == 0 else length.pow(p)
    if total.numel():
        total = all_reduced(total, sharded.process_group)
    return total if p == 0 else total.pow(1 / p)


def _order(p: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    if p is None or p == "fro":
        return 2.0
    if isinstance(p, str) and p not in ("inf", "-inf"):
        refuse(func, args, kwargs)
    return float(p)


@handles(torch.norm)
def _torch_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    sharded, p, dim, keepdim, _, dtype = given("input p dim keepdim out dtype", func, args, kwargs)
    return norm(sharded, _order(p, func, args, kwargs), dim=dim, keepdim=keepdim, dtype=dtype)


@handles(_T.norm, torch.linalg.vector_norm)
def _vector_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    sharded, p, dim, keepdim, dtype = given("input p dim keepdim dtype", func, args, kwargs)
    return norm(sharded, _order(p, func, args, kwargs), dim=dim, keepdim=keepdim, dtype=dtype)


@handles(torch.linalg.norm)
def _linalg_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Not the norms of matrices but Frobenius', which is that of a vector."""
    sharded, p, dim, keepdim, dtype = given("input p dim keepdim dtype", func, args, kwargs)
    dims = dims_of(sharded, dim)
    if p not in (None, "fro") and len(dims) > 1:
        refuse(func, args, kwargs)
    return norm(sharded, _order(p, func, args, kwargs), dim=dims, keepdim=keepdim, dtype=dtype)


@handles(F.normalize)
def _normalize(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    sharded, p, dim, eps = given("input p dim eps", func, args, kwargs)
    length = norm(sharded, 2.0 if p is None else p, dim=1 if dim is None else dim, keepdim=True)
    return cast(Tensor, sharded / length.clamp_min(1e-12 if eps is None else eps))
