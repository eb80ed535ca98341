"""Sums, means, norms, extremes and their kin, of whole sharded tensors.

==============================================  ===========================================================
along                                           result
==============================================  ===========================================================
dims in which every shard has all elements      sharded as before, without communication
any other dims, and all dims together           a plain tensor, the same on every rank (collective)
==============================================  ===========================================================

Which it is follows from the cut alone. What ranks combine is fp32 or wider (norms: fp64) and is rounded to
the result's dtype at the end. Gradients are torch's for the whole tensor: an extreme's is spread evenly over
all elements that have it, on whatever ranks; that of a norm of zero is zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardwise import _compat
from shardwise.layout import Box
from shardwise.sharded_tensor.autograd import all_reduced, summed
from shardwise.sharded_tensor.ops.elementwise import elementwise
from shardwise.sharded_tensor.ops.operands import anchor_of
from shardwise.sharded_tensor.refuse import refuse
from shardwise.sharded_tensor.registry import handles
from shardwise.sharded_tensor.tensor import ShardedTensor

_T: Any = Tensor
_Slices = tuple[slice, ...]
_Dims = tuple[int, ...]
_Derivative = Callable[[Tensor, Box, Tensor], Tensor]  # by a shard, its box, and the gradient of its part
_MAX, _MIN = dist.ReduceOp.MAX, dist.ReduceOp.MIN
_ALIASES = {"self": "input", "x": "input", "A": "input", "axis": "dim", "keepdims": "keepdim", "ord": "p"}


# What every reduction is made of


def _given(names: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments in the order of `names`, None for what is not given."""
    known = names.split()
    found = dict(zip(known, args, strict=False))
    for name, value in kwargs.items():
        found[_ALIASES.get(name, name)] = value
    if len(args) > len(known) or any(name not in (*known, "out") for name in found):
        raise TypeError(f"{func.__name__}() takes {known}, found {len(args)} arguments and {list(kwargs)}")
    if found.get("out") is not None or not isinstance(found.get("input"), ShardedTensor):
        refuse(func, args, kwargs)
    return [found.get(name) for name in known]


def _dims(sharded: ShardedTensor, dim: Any) -> tuple[int, ...]:
    """All that `dim` names, from 0 on and in order; every one for None and for none."""
    ndim = len(sharded.metadata().size)
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(ndim))
    named = [dim] if isinstance(dim, int) else list(dim)
    least = max(ndim, 1)
    for d in named:
        if not -least <= d < least:
            raise IndexError(f"Dimension out of range (expected in [{-least}, {least - 1}], but got {d})")
    dims = tuple(sorted(d % least for d in named))
    if len(set(dims)) != len(dims):
        raise RuntimeError(f"duplicate dims in {named}")
    return dims if ndim else ()


def _is_local(sharded: ShardedTensor, dims: _Dims) -> bool:
    """Does every shard have all elements along `dims`, of which there are some, and are other dims left?"""
    size = sharded.metadata().size
    return (
        len(dims) < len(size)
        and _count(sharded, dims) > 0
        and all(shard.shard_sizes[d] == size[d] for shard in sharded.metadata().shards_metadata for d in dims)
    )


def _local(
    sharded: ShardedTensor, dims: _Dims, *, keepdim: Any, function: Callable[[Tensor], Tensor]
) -> ShardedTensor:
    """`function`, which reduces `dims`, of every shard. Local."""
    size = sharded.metadata().size

    def kept(values: Sequence[int], reduced: int) -> tuple[int, ...]:
        return tuple(reduced if d in dims else v for d, v in enumerate(values) if keepdim or d not in dims)

    metadata = sharded.metadata().map(
        kept(size, 1), lambda box: Box(kept(box.offsets, 0), kept(box.sizes, 1))
    )
    if sharded.tensors:
        return sharded.with_tensors([function(tensor) for tensor in sharded.tensors], metadata=metadata)
    empty = sharded.anchor.reshape([size[d] if d in dims else 0 for d in range(len(size))])
    return sharded.with_tensors([], metadata=metadata, anchor=function(empty).reshape(-1))


def _kept_size(sharded: ShardedTensor, dims: _Dims) -> list[int]:
    return [1 if d in dims else length for d, length in enumerate(sharded.metadata().size)]


def _slices(box: Box, dims: _Dims) -> _Slices:
    """Where a box lies after `dims` are reduced to one element each."""
    return tuple(
        slice(0, 1) if d in dims else slice(offset, offset + size)
        for d, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True))
    )


def _without(value: Tensor, dims: _Dims, keepdim: Any) -> Tensor:
    return value if keepdim else value.reshape([v for d, v in enumerate(value.shape) if d not in dims])


def _wide(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_floating_point:
        return torch.promote_types(dtype, torch.float32)
    return dtype if dtype.is_complex else torch.int64


def _count(sharded: ShardedTensor, dims: _Dims) -> int:
    return math.prod(sharded.metadata().size[d] for d in dims)


def _needs_grad(sharded: ShardedTensor) -> bool:
    return torch.is_grad_enabled() and sharded.requires_grad


def _as_torch(func: Any, sharded: ShardedTensor, *args: Any) -> None:
    """Raise what torch raises for a whole tensor of this shape and dtype, if anything. Local."""
    func(torch.empty(sharded.metadata().size, dtype=sharded.dtype, device="meta"), *args)


def _total(
    sharded: ShardedTensor,
    dims: _Dims,
    function: Callable[[Tensor, _Slices], Tensor],
    *,
    dtype: torch.dtype,
) -> Tensor:
    """The sum over all shards of `function(shard, place in the sum)`, which sums `dims` and keeps them.

    Collective; differentiable.
    """
    total = torch.zeros(_kept_size(sharded, dims), dtype=dtype, device=sharded.anchor.device)
    for tensor, box in zip(sharded.tensors, sharded.boxes, strict=True):
        place = _slices(box, dims)
        total[place] = total[place] + function(tensor, place)
    if not sharded.tensors:
        total = total + anchor_of(sharded).sum().to(dtype)
    return summed(total, sharded.process_group) if total.numel() else total


class _Reduced(torch.autograd.Function):
    """A value that all ranks have computed without autograd, with its derivative by each local shard."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, derivative: _Derivative, held: Any, anchor: Tensor, *tensors: Tensor
    ) -> Tensor:
        ctx.derivative, ctx.held, ctx.anchor = derivative, held, anchor.new_empty(0)
        ctx.save_for_backward(*tensors)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = (
            ctx.derivative(tensor, box, grad[place]).to(tensor.dtype)
            for tensor, (box, place) in zip(ctx.saved_tensors, ctx.held, strict=True)
        )
        return None, None, None, ctx.anchor, *grads


_reduced = _compat.apply_of(_Reduced)


def _differentiable(value: Tensor, sharded: ShardedTensor, dims: _Dims, derivative: _Derivative) -> Tensor:
    """`value`, to which every shard's `derivative` belongs. Local."""
    if not _needs_grad(sharded):
        return value
    held = [(box, _slices(box, dims)) for box in sharded.boxes]
    return cast(Tensor, _reduced(value, derivative, held, sharded.anchor, *sharded.tensors))


# Sums


def _sum(sharded: ShardedTensor, dims: tuple[int, ...], keepdim: Any, dtype: Any) -> Tensor:
    if _is_local(sharded, dims):
        return _local(
            sharded, dims, keepdim=keepdim, function=lambda t: t.sum(dims, keepdim=bool(keepdim), dtype=dtype)
        )
    integral = not (sharded.dtype.is_floating_point or sharded.dtype.is_complex)
    wanted = dtype or (torch.int64 if integral else sharded.dtype)
    wide = _wide(wanted)
    total = _total(sharded, dims, lambda t, _: t.to(wanted).sum(dims, keepdim=True, dtype=wide), dtype=wide)
    return _without(total.to(wanted), dims, keepdim)


@handles(torch.sum, _T.sum)
def _sum_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    sharded, dim, keepdim, dtype = _given("input dim keepdim dtype", func, args, kwargs)
    return _sum(sharded, _dims(sharded, dim), keepdim, dtype)


@handles(torch.nansum, _T.nansum)
def _nansum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    sharded, dim, keepdim, dtype = _given("input dim keepdim dtype", func, args, kwargs)
    numbers = sharded.map(lambda t: torch.where(t.isnan(), 0, t))
    return _sum(numbers, _dims(sharded, dim), keepdim, dtype)


@handles(torch.count_nonzero, _T.count_nonzero)
def _count_nonzero(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    sharded, dim = _given("input dim", func, args, kwargs)
    return _sum(sharded.map(lambda t: t.detach() != 0), _dims(sharded, dim), False, None)


@handles(torch.mean, _T.mean)
def _mean(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    sharded, dim, keepdim, dtype = _given("input dim keepdim dtype", func, args, kwargs)
    dims, wanted = _dims(sharded, dim), dtype or sharded.dtype
    if not (wanted.is_floating_point or wanted.is_complex):
        torch.empty((), dtype=wanted, device="meta").mean()  # raises torch's own error
    if _is_local(sharded, dims):
        return _local(
            sharded, dims, keepdim=keepdim, function=lambda t: t.mean(dims, bool(keepdim), dtype=dtype)
        )
    wide = _wide(wanted)
    total = _total(sharded, dims, lambda t, _: t.to(wanted).sum(dims, keepdim=True, dtype=wide), dtype=wide)
    return _without((total / _count(sharded, dims)).to(wanted), dims, keepdim)


@handles(torch.prod, _T.prod)
def _prod(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Of every rank's products, which all ranks get: so gradients are right where one of them is zero."""
    sharded, dim, keepdim, dtype = _given("input dim keepdim dtype", func, args, kwargs)
    dims = _dims(sharded, dim)
    if _is_local(sharded, dims):
        return _local(
            sharded, dims, keepdim=keepdim, function=lambda t: t.prod(dims[0], bool(keepdim), dtype=dtype)
        )
    integral = not (sharded.dtype.is_floating_point or sharded.dtype.is_complex)
    wanted = dtype or (torch.int64 if integral else sharded.dtype)
    wide, kept = _wide(wanted), _kept_size(sharded, dims)
    factors = [torch.ones(kept, dtype=wide, device=sharded.anchor.device) + anchor_of(sharded).sum().to(wide)]
    for tensor, box in zip(sharded.tensors, sharded.boxes, strict=True):
        factor, value = torch.ones_like(factors[0]), tensor.to(wanted).to(wide)
        for d in dims:
            value = value.prod(d, keepdim=True)
        factor[_slices(box, dims)] = value
        factors.append(factor)
    group = sharded.process_group
    slots = factors[0].detach().new_zeros(group.size(), *kept)
    slots[group.rank()] = torch.stack(factors).prod(0)
    whole = summed(slots, group).prod(0) if slots.numel() else slots.prod(0)
    return _without(whole.to(wanted), dims, keepdim)


@handles(torch.any, _T.any, torch.all, _T.all)
def _truth(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    sharded, dim, keepdim = _given("input dim keepdim", func, args, kwargs)
    if dim is not None and not isinstance(dim, int) and not len(dim):
        refuse(func, args, kwargs)  # to torch this means no dim at all
    dims, anything = _dims(sharded, dim), func.__name__ == "any"
    reduce = torch.any if anything else torch.all
    if _is_local(sharded, dims):
        return _local(
            sharded, dims, keepdim=keepdim, function=lambda t: reduce(t, dims, keepdim=bool(keepdim))
        )
    dtype = torch.uint8 if sharded.dtype == torch.uint8 else torch.bool
    kept = torch.full(_kept_size(sharded, dims), not anything, device=sharded.anchor.device)
    for tensor, box in zip(sharded.tensors, sharded.boxes, strict=True):
        place, found = _slices(box, dims), reduce(tensor.detach() != 0, dims, keepdim=True)
        kept[place] = kept[place] | found if anything else kept[place] & found
    if kept.numel():
        kept = all_reduced(kept, sharded.process_group, _MAX if anything else _MIN)
    return _without(kept.to(dtype), dims, keepdim)


# Variances and norms


@handles(torch.var, _T.var, torch.std, _T.std)
def _variance(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The mean of squared distances from the mean, in two passes."""
    if len(args) > 1 and isinstance(args[1], bool):  # var(unbiased)
        args, kwargs = args[:1], {**kwargs, "unbiased": args[1]}
    sharded, dim, unbiased, keepdim, correction = _given(
        "input dim unbiased keepdim correction", func, args, kwargs
    )
    dims, root = _dims(sharded, dim), func.__name__ == "std"
    if not sharded.dtype.is_floating_point:
        _as_torch(func, sharded)
        refuse(func, args, kwargs)
    if correction is None:
        correction = 1 if unbiased is None else int(unbiased)
    if _is_local(sharded, dims):

        def local(tensor: Tensor) -> Tensor:
            if not tensor.numel():  # func would warn
                return tensor.sum(dims, keepdim=bool(keepdim))
            return cast(Tensor, func(tensor, dims, correction=correction, keepdim=bool(keepdim)))

        return _local(sharded, dims, keepdim=keepdim, function=local)
    wide, count = _wide(sharded.dtype), _count(sharded, dims)
    with torch.no_grad():
        mean = _total(sharded, dims, lambda t, _: t.sum(dims, keepdim=True, dtype=wide), dtype=wide) / count
        squares = _total(
            sharded,
            dims,
            lambda t, place: (t.to(wide) - mean[place]).square().sum(dims, keepdim=True),
            dtype=wide,
        )
        freedom = max(0.0, count - correction)
        value = squares / freedom
        value = value.sqrt() if root else value

    def derivative(tensor: Tensor, box: Box, grad: Tensor) -> Tensor:
        place = _slices(box, dims)
        distance: Tensor = (tensor.to(wide) - mean[place]) / freedom
        if not root:
            return grad * distance * 2
        length: Tensor = value[place]
        return (grad * distance / length).masked_fill(length == 0, 0)

    return _without(_differentiable(value.to(sharded.dtype), sharded, dims, derivative), dims, keepdim)


def norm(
    sharded: ShardedTensor, p: float = 2.0, *, dim: Any = None, keepdim: Any = False, dtype: Any = None
) -> Tensor:
    """The p-norm along `dim`, by default of all elements. Collective, unless no shard cuts `dim`."""
    dims = _dims(sharded, dim)
    if not (sharded.dtype.is_floating_point or sharded.dtype.is_complex) or (
        _count(sharded, dims) == 0 and (p < 0 or math.isinf(p))
    ):
        _as_torch(torch.linalg.vector_norm, sharded, p, dims, bool(keepdim))
    if _is_local(sharded, dims):
        return _local(
            sharded,
            dims,
            keepdim=keepdim,
            function=lambda t: torch.linalg.vector_norm(t, p, dims, bool(keepdim), dtype=dtype),
        )
    if dtype is not None and dtype != sharded.dtype:
        sharded = sharded.map(lambda t: t.to(dtype))
    wanted = sharded.dtype.to_real() if sharded.dtype.is_complex else sharded.dtype
    if math.isinf(p):
        value = _extreme(sharded.map(lambda t: t.detach().abs()), dims, largest=p > 0)
        spread = _evenly(value, sharded, dims, of=lambda t: t.abs())

        def derivative(tensor: Tensor, box: Box, grad: Tensor) -> Tensor:
            return tensor.sgn() * spread(tensor, box, grad)
    else:
        value = _power_norm(sharded, dims, p)

        def derivative(tensor: Tensor, box: Box, grad: Tensor) -> Tensor:
            if p == 0:
                return torch.zeros_like(tensor)
            length = value[_slices(box, dims)]
            slope = tensor.sgn() if p == 1 else tensor / length
            if p not in (1, 2):
                slope = (tensor.sgn() * (tensor.abs() / length).pow(p - 1)).masked_fill(tensor == 0, 0)
            return (grad * slope).masked_fill(length == 0, 0)

    return _without(_differentiable(value.to(wanted), sharded, dims, derivative), dims, keepdim)


def _power_norm(sharded: ShardedTensor, dims: _Dims, p: float) -> Tensor:
    """The p-norm for finite p without gradient, in fp64: of shards' norms, which do not overflow."""
    tensors = [tensor.detach() for tensor in sharded.tensors]
    wide = _wide(sharded.dtype)
    total = torch.zeros(_kept_size(sharded, dims), dtype=torch.float64, device=sharded.anchor.device)
    for tensor, box in zip(tensors, sharded.boxes, strict=True):
        if tensor.numel():
            length = torch.linalg.vector_norm(tensor, p, dims, True, dtype=wide).to(torch.float64)
            total[_slices(box, dims)] += length if p == 0 else length.pow(p)
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
    sharded, p, dim, keepdim, _, dtype = _given("input p dim keepdim out dtype", func, args, kwargs)
    return norm(sharded, _order(p, func, args, kwargs), dim=dim, keepdim=keepdim, dtype=dtype)


@handles(_T.norm, torch.linalg.vector_norm)
def _vector_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    sharded, p, dim, keepdim, dtype = _given("input p dim keepdim dtype", func, args, kwargs)
    return norm(sharded, _order(p, func, args, kwargs), dim=dim, keepdim=keepdim, dtype=dtype)


@handles(torch.linalg.norm)
def _linalg_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Not the norms of matrices but Frobenius', which is that of a vector."""
    sharded, p, dim, keepdim, dtype = _given("input p dim keepdim dtype", func, args, kwargs)
    dims = _dims(sharded, dim)
    if p not in (None, "fro") and len(dims) > 1:
        refuse(func, args, kwargs)
    return norm(sharded, _order(p, func, args, kwargs), dim=dims, keepdim=keepdim, dtype=dtype)


@handles(F.normalize)
def _normalize(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    sharded, p, dim, eps = _given("input p dim eps", func, args, kwargs)
    length = norm(sharded, 2.0 if p is None else p, dim=1 if dim is None else dim, keepdim=True)
    return cast(Tensor, sharded / length.clamp_min(1e-12 if eps is None else eps))


# Extremes


def _extreme(sharded: ShardedTensor, dims: _Dims, *, largest: bool) -> Tensor:
    """The largest or smallest elements along `dims`, which it keeps, without gradient. Collective."""
    dtype, wide = sharded.dtype, _wide(sharded.dtype)
    if dtype.is_floating_point:
        worst: float = -math.inf if largest else math.inf
    else:
        limits = torch.iinfo(torch.int64)
        worst = limits.min if largest else limits.max
    better = torch.maximum if largest else torch.minimum
    found = torch.full(_kept_size(sharded, dims), worst, dtype=wide, device=sharded.anchor.device)
    for tensor, box in zip(sharded.tensors, sharded.boxes, strict=True):
        if tensor.numel():
            local = (torch.amax if largest else torch.amin)(tensor.detach(), dims, keepdim=True)
            place = _slices(box, dims)
            found[place] = better(found[place], local.to(wide))
    if not found.numel():
        return found.to(dtype)
    if wide != torch.int64:  # a backend's maximum may lose what is not a number: it travels beside
        no_number = found.isnan()
        found = torch.stack(
            [found.masked_fill(no_number, worst), no_number.to(wide) * (1 if largest else -1)]
        )
    found = all_reduced(found, sharded.process_group, _MAX if largest else _MIN)
    if wide != torch.int64:
        found = found[0].masked_fill(found[1] != 0, math.nan)
    return found.to(dtype)


def _has(tensor: Tensor, value: Tensor) -> Tensor:
    """Where `tensor` is `value`, or both are no number."""
    return torch.where(value.isnan(), tensor.isnan(), tensor == value)


def _evenly(
    value: Tensor, sharded: ShardedTensor, dims: _Dims, *, of: Callable[[Tensor], Tensor]
) -> _Derivative:
    """The derivative of an extreme: the gradient in equal parts for all elements that have it. Collective."""
    if not _needs_grad(sharded):
        return lambda tensor, box, grad: grad
    with torch.no_grad():
        number = _total(
            sharded,
            dims,
            lambda t, place: _has(of(t), value[place]).sum(dims, keepdim=True),
            dtype=torch.int64,
        )

    def derivative(tensor: Tensor, box: Box, grad: Tensor) -> Tensor:
        place = _slices(box, dims)
        return grad * _has(of(tensor), value[place]) / number[place]

    return derivative


@handles(torch.amax, _T.amax, torch.amin, _T.amin)
def _extremes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    sharded, dim, keepdim = _given("input dim keepdim", func, args, kwargs)
    dims = _dims(sharded, dim)
    if sharded.dtype.is_complex or _count(sharded, dims) == 0:
        _as_torch(func, sharded, dims)
    if _is_local(sharded, dims):
        return _local(sharded, dims, keepdim=keepdim, function=lambda t: func(t, dims, bool(keepdim)))
    value = _extreme(sharded, dims, largest=func.__name__ == "amax")
    spread = _evenly(value, sharded, dims, of=lambda t: t)
    return _without(_differentiable(value, sharded, dims, spread), dims, keepdim)


@handles(torch.max, _T.max, torch.min, _T.min)
def _extreme_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of all elements; along one dim with indices; or, with another tensor, element by element."""
    largest = func.__name__ == "max"
    if any(isinstance(value, Tensor) for value in (*args[1:], *kwargs.values())):
        return elementwise(torch.maximum if largest else torch.minimum, args, kwargs)
    sharded, dim, keepdim = _given("input dim keepdim", func, args, kwargs)
    if dim is None:
        return _extremes(torch.amax if largest else torch.amin, (sharded,), {})
    values, indices = _along(func, sharded, dim, keepdim, largest=largest)
    kind: Any = torch.return_types.max if largest else torch.return_types.min
    return kind((values, indices))


@handles(torch.argmax, _T.argmax, torch.argmin, _T.argmin)
def _index_of_extreme(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Along one dim: the first of several."""
    sharded, dim, keepdim = _given("input dim keepdim", func, args, kwargs)
    if dim is None:
        refuse(func, args, kwargs)
    with torch.no_grad():
        return _along(torch.max, sharded, dim, keepdim, largest=func.__name__ == "argmax")[1]


def _best(best: Any, dim: int, keepdim: bool, which: int, tensor: Tensor) -> Tensor:
    return cast(Tensor, best(tensor, dim, keepdim)[which])


def _along(
    func: Any, sharded: ShardedTensor, dim: int, keepdim: Any, *, largest: bool
) -> tuple[Tensor, Tensor]:
    """The extremes along one dim and the first place of each; of that element alone is the gradient."""
    dims, best = _dims(sharded, dim), torch.max if largest else torch.min
    if not dims:
        refuse(func, (sharded, dim), {})
    if sharded.dtype.is_complex or _count(sharded, dims) == 0:
        _as_torch(func, sharded, dim)
    (along,) = dims
    if _is_local(sharded, dims):
        both = [
            _local(sharded, dims, keepdim=keepdim, function=partial(_best, best, along, bool(keepdim), i))
            for i in (0, 1)
        ]
        return both[0], both[1]
    value, last = _extreme(sharded, dims, largest=largest), torch.iinfo(torch.int64).max
    index = torch.full(value.shape, last, device=value.device)
    for tensor, box in zip(sharded.tensors, sharded.boxes, strict=True):
        if tensor.numel():
            place, found = _slices(box, dims), best(tensor.detach(), along, True)
            at = (found.indices + box.offsets[along]).masked_fill(~_has(found.values, value[place]), last)
            index[place] = torch.minimum(index[place], at)
    if index.numel():
        index = all_reduced(index, sharded.process_group, _MIN)

    def derivative(tensor: Tensor, box: Box, grad: Tensor) -> Tensor:
        places = torch.arange(box.offsets[along], box.ends[along], device=tensor.device)
        places = places.reshape([-1 if d == along else 1 for d in range(tensor.ndim)])
        return grad * (places == index[_slices(box, dims)])

    value = _differentiable(value, sharded, dims, derivative)
    return _without(value, dims, keepdim), _without(index, dims, keepdim)


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
