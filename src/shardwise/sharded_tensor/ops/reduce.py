"""Sums, means, variances and their kin, of whole sharded tensors (also: `ops.extremes`, `ops.norms`).

==============================================  ===========================================================
along                                           result
==============================================  ===========================================================
dims in which every shard has all elements      sharded as before, without communication
any other dims, and all dims together           a plain tensor, the same on every rank (collective)
==============================================  ===========================================================

Which it is follows from the cut alone. What ranks combine is fp32 or wider and is rounded to the
result's dtype at the end. Gradients are torch's for the whole tensor.

Running sums and products have the size of their operand: cut alike, along dims in which every shard has all
elements; along others they are refused.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from shardwise.layout import Box
from shardwise.sharded_tensor.autograd import all_reduced, summed
from shardwise.sharded_tensor.ops.extremes import extreme
from shardwise.sharded_tensor.ops.operands import anchor_of
from shardwise.sharded_tensor.ops.reduction import (
    MAX,
    MIN,
    as_torch,
    count_of,
    differentiable,
    dims_of,
    each_shard,
    given,
    is_local,
    kept_size,
    slices,
    total_of,
    wide_of,
    without,
)
from shardwise.sharded_tensor.refuse import refuse, refuse_case
from shardwise.sharded_tensor.registry import handles
from shardwise.sharded_tensor.tensor import ShardedTensor

_T: Any = Tensor

# Sums


def _sum(sharded: ShardedTensor, dims: tuple[int, ...], keepdim: Any, dtype: Any) -> Tensor:
    if is_local(sharded, dims):
        return each_shard(
            sharded, dims, keepdim=keepdim, function=lambda t: t.sum(dims, keepdim=bool(keepdim), dtype=dtype)
        )
    integral = not (sharded.dtype.is_floating_point or sharded.dtype.is_complex)
    wanted = dtype or (torch.int64 if integral else sharded.dtype)
    wide = wide_of(wanted)
    total = total_of(sharded, dims, lambda t, _: t.to(wanted).sum(dims, keepdim=True, dtype=wide), dtype=wide)
    return without(total.to(wanted), dims, keepdim)


@handles(torch.sum, _T.sum)
def _sum_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    sharded, dim, keepdim, dtype = given("input dim keepdim dtype", func, args, kwargs)
    return _sum(sharded, dims_of(sharded, dim), keepdim, dtype)


@handles(torch.nansum, _T.nansum)
def _nansum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    sharded, dim, keepdim, dtype = given("input dim keepdim dtype", func, args, kwargs)
    numbers = sharded.map(lambda t: torch.where(t.isnan(), 0, t))
    return _sum(numbers, dims_of(sharded, dim), keepdim, dtype)


@handles(torch.count_nonzero, _T.count_nonzero)
def _count_nonzero(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    sharded, dim = given("input dim", func, args, kwargs)
    return _sum(sharded.map(lambda t: t.detach() != 0), dims_of(sharded, dim), False, None)


@handles(torch.mean, _T.mean)
def _mean(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    sharded, dim, keepdim, dtype = given("input dim keepdim dtype", func, args, kwargs)
    dims, wanted = dims_of(sharded, dim), dtype or sharded.dtype
    if not (wanted.is_floating_point or wanted.is_complex):
        torch.empty((), dtype=wanted, device="meta").mean()  # raises torch's own error
    if is_local(sharded, dims):
        return each_shard(
            sharded, dims, keepdim=keepdim, function=lambda t: t.mean(dims, bool(keepdim), dtype=dtype)
        )
    wide = wide_of(wanted)
    total = total_of(sharded, dims, lambda t, _: t.to(wanted).sum(dims, keepdim=True, dtype=wide), dtype=wide)
    return without((total / count_of(sharded, dims)).to(wanted), dims, keepdim)


@handles(torch.prod, _T.prod)
def _prod(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Of every rank's products, which all ranks get: so gradients are right where one of them is zero."""
    sharded, dim, keepdim, dtype = given("input dim keepdim dtype", func, args, kwargs)
    dims = dims_of(sharded, dim)
    if is_local(sharded, dims):
        return each_shard(
            sharded, dims, keepdim=keepdim, function=lambda t: t.prod(dims[0], bool(keepdim), dtype=dtype)
        )
    integral = not (sharded.dtype.is_floating_point or sharded.dtype.is_complex)
    wanted = dtype or (torch.int64 if integral else sharded.dtype)
    wide, kept = wide_of(wanted), kept_size(sharded, dims)
    factors = [torch.ones(kept, dtype=wide, device=sharded.anchor.device) + anchor_of(sharded).sum().to(wide)]
    for tensor, box in zip(sharded.tensors, sharded.boxes, strict=True):
        factor, value = torch.ones_like(factors[0]), tensor.to(wanted).to(wide)
        for d in dims:
            value = value.prod(d, keepdim=True)
        factor[slices(box, dims)] = value
        factors.append(factor)
    group = sharded.process_group
    slots = factors[0].detach().new_zeros(group.size(), *kept)
    slots[group.rank()] = torch.stack(factors).prod(0)
    whole = summed(slots, group).prod(0) if slots.numel() else slots.prod(0)
    return without(whole.to(wanted), dims, keepdim)


@handles(torch.any, _T.any, torch.all, _T.all)
def _truth(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    sharded, dim, keepdim = given("input dim keepdim", func, args, kwargs)
    if dim is not None and not isinstance(dim, int) and not len(dim):
        refuse(func, args, kwargs)  # to torch this means no dim at all
    dims, anything = dims_of(sharded, dim), func.__name__ == "any"
    reduce = torch.any if anything else torch.all
    if is_local(sharded, dims):
        return each_shard(
            sharded, dims, keepdim=keepdim, function=lambda t: reduce(t, dims, keepdim=bool(keepdim))
        )
    dtype = torch.uint8 if sharded.dtype == torch.uint8 else torch.bool
    kept = torch.full(kept_size(sharded, dims), not anything, device=sharded.anchor.device)
    for tensor, box in zip(sharded.tensors, sharded.boxes, strict=True):
        place, found = slices(box, dims), reduce(tensor.detach() != 0, dims, keepdim=True)
        kept[place] = kept[place] | found if anything else kept[place] & found
    if kept.numel():
        kept = all_reduced(kept, sharded.process_group, MAX if anything else MIN)
    return without(kept.to(dtype), dims, keepdim)


@handles(torch.logsumexp, _T.logsumexp, torch.special.logsumexp)
def _logsumexp(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The logarithm of the sum of exponentials, of distances to the largest where ranks combine them."""
    sharded, dim, keepdim = given("input dim keepdim", func, args, kwargs)
    if dim is None or sharded.dtype.is_complex:
        refuse(func, args, kwargs)
    dims = dims_of(sharded, dim)
    if not sharded.dtype.is_floating_point:
        sharded = sharded.to(torch.get_default_dtype())
    if is_local(sharded, dims):
        return each_shard(sharded, dims, keepdim=keepdim, function=lambda t: t.logsumexp(dims, bool(keepdim)))
    wide = wide_of(sharded.dtype)
    with torch.no_grad():
        largest = extreme(sharded, dims, largest=True).to(wide)
        largest = largest.masked_fill(largest.isinf(), 0)
        total = total_of(
            sharded,
            dims,
            lambda t, place: (t.to(wide) - largest[place]).exp().sum(dims, keepdim=True),
            dtype=wide,
        )
        value = total.log() + largest

    def derivative(tensor: Tensor, box: Box, grad: Tensor) -> Tensor:
        return grad * (tensor.to(wide) - value[slices(box, dims)]).exp()

    return without(differentiable(value.to(sharded.dtype), sharded, dims, derivative), dims, keepdim)


@handles(torch.cumsum, _T.cumsum, torch.cumprod, _T.cumprod, torch.logcumsumexp, _T.logcumsumexp)
def _running(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Along a dim in which every shard has all elements. Local."""
    sharded, dim, dtype = given("input dim dtype", func, args, kwargs)
    if not isinstance(dim, int):
        raise TypeError(f"{func.__name__}() needs an int as dim, found {dim!r}")
    dims, size = dims_of(sharded, dim), sharded.metadata().size
    options = {} if dtype is None else {"dtype": dtype}
    cut = any(shard.shard_sizes[d] != size[d] for shard in sharded.metadata().shards_metadata for d in dims)
    if cut and 0 not in size:
        refuse_case(
            func.__name__,
            sharded,
            why=f"shards cut dim {dims[0]}, along which it runs",
            instead="reshard() it so that every shard has all of that dim, or use full_tensor()",
        )
    as_torch(partial(func, dim=dim, **options), sharded)
    tensors = [func(tensor, dim, **options) for tensor in sharded.tensors]
    made: ShardedTensor = sharded.with_tensors(
        tensors, anchor=None if tensors else func(sharded.anchor, 0, **options)
    )
    return made


# Variances


@handles(torch.var, _T.var, torch.std, _T.std)
def _variance(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The mean of squared distances from the mean, in two passes."""
    if len(args) > 1 and isinstance(args[1], bool):  # var(unbiased)
        args, kwargs = args[:1], {**kwargs, "unbiased": args[1]}
    sharded, dim, unbiased, keepdim, correction = given(
        "input dim unbiased keepdim correction", func, args, kwargs
    )
    dims, root = dims_of(sharded, dim), func.__name__ == "std"
    if not sharded.dtype.is_floating_point:
        as_torch(func, sharded)
        refuse(func, args, kwargs)
    if correction is None:
        correction = 1 if unbiased is None else int(unbiased)
    if is_local(sharded, dims):

        def local(tensor: Tensor) -> Tensor:
            if not tensor.numel():  # func would warn
                return tensor.sum(dims, keepdim=bool(keepdim))
            return cast(Tensor, func(tensor, dims, correction=correction, keepdim=bool(keepdim)))

        return each_shard(sharded, dims, keepdim=keepdim, function=local)
    wide, count = wide_of(sharded.dtype), count_of(sharded, dims)
    with torch.no_grad():
        mean = total_of(sharded, dims, lambda t, _: t.sum(dims, keepdim=True, dtype=wide), dtype=wide) / count
        squares = total_of(
            sharded,
            dims,
            lambda t, place: (t.to(wide) - mean[place]).square().sum(dims, keepdim=True),
            dtype=wide,
        )
        freedom = max(0.0, count - correction)
        value = squares / freedom
        value = value.sqrt() if root else value

    def derivative(tensor: Tensor, box: Box, grad: Tensor) -> Tensor:
        place = slices(box, dims)
        distance: Tensor = (tensor.to(wide) - mean[place]) / freedom
        if not root:
            return grad * distance * 2
        length: Tensor = value[place]
        return (grad * distance / length).masked_fill(length == 0, 0)

    return without(differentiable(value.to(sharded.dtype), sharded, dims, derivative), dims, keepdim)


# One element


@handles(_T.item, _T.__float__, _T.__int__, _T.__bool__, _T.__index__, _T.__complex__)
def _scalar(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of a tensor of one element, on every rank. Collective."""
    sharded: ShardedTensor = args[0]
    if sharded.metadata().size.numel() != 1:
        count = sharded.metadata().size.numel()
        raise RuntimeError(f"a Tensor with {count} elements cannot be converted to Scalar")
    with torch.no_grad():
        return func(sharded.full_tensor())
