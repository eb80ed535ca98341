"""Sums, means, extremes, norms and their kin, of whole sharded tensors.

==============================================  ===========================================================
along                                           result
==============================================  ===========================================================
dims in which every shard has all elements      sharded as before, without communication
any other dims, and all dims together           a plain tensor, the same on every rank (collective)
==============================================  ===========================================================

Which it is follows from the cut alone. What ranks combine is fp32 or wider (norms: fp64) and is rounded to
the result's dtype at the end. Gradients are torch's for the whole tensor: that of an extreme is spread evenly
over all elements that have it, that of a norm of zero is zero.

Products, running sums and indices of extremes are refused along dims that shards cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.layout import Box
from shardwise.sharded_tensor.autograd import all_extreme, summed, valued
from shardwise.sharded_tensor.ops.arguments import as_torch, given, rule
from shardwise.sharded_tensor.ops.elementwise import elementwise
from shardwise.sharded_tensor.ops.operands import anchor_of
from shardwise.sharded_tensor.refuse import refuse, refuse_case
from shardwise.sharded_tensor.registry import handles
from shardwise.sharded_tensor.tensor import ShardedTensor

_T: Any = Tensor
Dims = tuple[int, ...]


# ---------------------------------------------------------------- what all are made of


def dims_of(sharded: ShardedTensor, dim: Any) -> Dims:
    """All that `dim` names, from 0 on and in order; every one for None and for none."""
    ndim = sharded.ndim
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


def is_cut(sharded: ShardedTensor, dims: Sequence[int]) -> bool:
    """Has any shard with elements a part only of what lies along `dims`?"""
    size = sharded.metadata().size
    boxes = (shard.box for shard in sharded.metadata().shards_metadata)
    return any(box.sizes[d] != size[d] for box in boxes if not box.is_empty for d in dims)


def _is_local(sharded: ShardedTensor, dims: Dims) -> bool:
    """Does every shard have all elements along `dims`, of which there are some, and are other dims left?"""
    size = sharded.metadata().size
    return (
        len(dims) < len(size)
        and count_of(sharded, dims) > 0
        and all(shard.shard_sizes[d] == size[d] for shard in sharded.metadata().shards_metadata for d in dims)
    )


def count_of(sharded: ShardedTensor, dims: Dims) -> int:
    """How many elements become one."""
    return math.prod(sharded.metadata().size[d] for d in dims)


def wide_of(dtype: torch.dtype) -> torch.dtype:
    """What values of a dtype are combined in: at least fp32, and int64 for integers and bools."""
    if dtype.is_floating_point:
        return torch.promote_types(dtype, torch.float32)
    return dtype if dtype.is_complex else torch.int64


def _either(
    func: Callable[..., Tensor],
    sharded: ShardedTensor,
    dims: Dims,
    keepdim: Any,
    whole: Callable[[], Tensor],
    **options: Any,
) -> Tensor:
    """`func` along `dims` of every shard, where shards have all of them; else `whole()`, which keeps dims."""
    if not _is_local(sharded, dims):
        value = whole()
        return value if keepdim else value.reshape([v for d, v in enumerate(value.shape) if d not in dims])
    size = sharded.metadata().size

    def kept(values: Sequence[int], reduced: int) -> tuple[int, ...]:
        return tuple(reduced if d in dims else v for d, v in enumerate(values) if keepdim or d not in dims)

    metadata = sharded.metadata().map(
        kept(size, 1), lambda box: Box(kept(box.offsets, 0), kept(box.sizes, 1))
    )
    shards = sharded.tensors or [sharded.anchor.reshape([n if d in dims else 0 for d, n in enumerate(size)])]
    made = [func(tensor, dims, keepdim=bool(keepdim), **options) for tensor in shards]
    if sharded.tensors:
        return sharded.with_tensors(made, metadata=metadata)
    return sharded.with_tensors([], metadata=metadata, anchor=made[0].reshape(-1))


def kept_size(sharded: ShardedTensor, dims: Dims) -> list[int]:
    """The whole size after `dims` are reduced to one element each."""
    return [1 if d in dims else length for d, length in enumerate(sharded.metadata().size)]


def place_of(box: Box, dims: Dims) -> tuple[slice, ...]:
    """Where a box lies after `dims` are reduced to one element each."""
    return tuple(
        slice(0, 1) if d in dims else slice(start, end)
        for d, (start, end) in enumerate(zip(box.offsets, box.ends, strict=True))
    )


def _partial(
    sharded: ShardedTensor, dims: Dims, function: Callable[..., Tensor], dtype: torch.dtype
) -> Tensor:
    """The sum over this rank's shards of `function(shard, place in the sum)`, which keeps `dims`. Local."""
    total = torch.zeros(kept_size(sharded, dims), dtype=dtype, device=sharded.anchor.device)
    for tensor, box in zip(sharded.tensors, sharded.boxes, strict=True):
        if tensor.numel():
            place = place_of(box, dims)
            total[place] = total[place] + function(tensor, place)
    nothing = anchor_of(sharded)
    return total + nothing.sum().to(dtype) if nothing.requires_grad else total


def total_of(
    sharded: ShardedTensor, dims: Dims, function: Callable[..., Tensor], *, dtype: torch.dtype
) -> Tensor:
    """The sum over all shards of `function(shard, place in the sum)`. Collective; differentiable."""
    total = _partial(sharded, dims, function, dtype)
    return summed(total, sharded.process_group) if total.numel() else total


def needs_grad(sharded: ShardedTensor) -> bool:
    """Does autograd record what is computed of it? The same on every rank."""
    return torch.is_grad_enabled() and sharded.requires_grad


def refuse_cut(func: Any, sharded: ShardedTensor, dims: Dims) -> NoReturn:
    """Raise ShardingError for a function that needs all elements along `dims` on one rank."""
    refuse_case(
        func if isinstance(func, str) else func.__name__,
        sharded,
        why=f"it needs all elements of dim {', '.join(map(str, dims))} in every shard, and other dims beside",
        instead="reshard() it so, or use full_tensor()",
    )


# ---------------------------------------------------------------- sums


def sum_of(sharded: ShardedTensor, dims: Dims, keepdim: Any = False, dtype: Any = None) -> Tensor:
    """As `torch.sum`. Collective, unless every shard has all elements along `dims`."""
    integral = not (sharded.dtype.is_floating_point or sharded.dtype.is_complex)
    wanted = dtype or (torch.int64 if integral else sharded.dtype)
    wide = wide_of(wanted)

    def each(tensor: Tensor, at: Any) -> Tensor:
        return tensor.to(wanted).sum(dims, keepdim=True, dtype=wide)

    def whole() -> Tensor:
        return total_of(sharded, dims, each, dtype=wide).to(wanted)

    return _either(torch.sum, sharded, dims, keepdim, whole, dtype=dtype)


def mean_of(sharded: ShardedTensor, dims: Dims, keepdim: Any = False, dtype: Any = None) -> Tensor:
    """As `torch.mean`. Collective, unless every shard has all elements along `dims`."""
    wanted = dtype or sharded.dtype
    if not (wanted.is_floating_point or wanted.is_complex):
        torch.empty((), dtype=wanted, device="meta").mean()  # raises torch's own error

    def whole() -> Tensor:
        total = sum_of(sharded.map(lambda t: t.to(wanted)), dims, True, wide_of(wanted))
        return (total / count_of(sharded, dims)).to(wanted)

    return _either(torch.mean, sharded, dims, keepdim, whole, dtype=dtype)


@rule(torch.sum, _T.sum, takes="input dim keepdim dtype")
def _sum(func: Any, sharded: ShardedTensor, dim: Any, keepdim: Any, dtype: Any) -> Tensor:
    return sum_of(sharded, dims_of(sharded, dim), keepdim, dtype)


@rule(torch.nansum, _T.nansum, takes="input dim keepdim dtype")
def _nansum(func: Any, sharded: ShardedTensor, dim: Any, keepdim: Any, dtype: Any) -> Tensor:
    numbers = sharded.map(lambda t: torch.where(t.isnan(), 0, t))
    return sum_of(numbers, dims_of(sharded, dim), keepdim, dtype)


@rule(torch.count_nonzero, _T.count_nonzero, takes="input dim")
def _count_nonzero(func: Any, sharded: ShardedTensor, dim: Any) -> Tensor:
    return sum_of(sharded.map(lambda t: t.detach() != 0), dims_of(sharded, dim))


@rule(torch.mean, _T.mean, takes="input dim keepdim dtype")
def _mean(func: Any, sharded: ShardedTensor, dim: Any, keepdim: Any, dtype: Any) -> Tensor:
    return mean_of(sharded, dims_of(sharded, dim), keepdim, dtype)


@rule(torch.any, _T.any, torch.all, _T.all, takes="input dim keepdim")
def _truth(func: Any, sharded: ShardedTensor, dim: Any, keepdim: Any) -> Tensor:
    if dim is not None and not isinstance(dim, int) and not len(dim):
        refuse(func, (sharded, dim), {})  # to torch this means no dim at all
    dims, anything = dims_of(sharded, dim), func.__name__ == "any"

    def whole() -> Tensor:
        hold = sum_of(sharded.map(lambda t: t.detach() != 0), dims, True)
        found = hold > 0 if anything else hold == count_of(sharded, dims)
        return found.to(torch.uint8) if sharded.dtype == torch.uint8 else found

    return _either(func, sharded, dims, keepdim, whole)


@rule(torch.logsumexp, _T.logsumexp, torch.special.logsumexp, takes="input dim keepdim")
def _logsumexp(func: Any, sharded: ShardedTensor, dim: Any, keepdim: Any) -> Tensor:
    """The logarithm of the sum of exponentials, of distances to the largest where ranks combine them."""
    if dim is None or sharded.dtype.is_complex:
        refuse(func, (sharded, dim), {})
    dims = dims_of(sharded, dim)
    if not sharded.dtype.is_floating_point:
        sharded = sharded.to(torch.get_default_dtype())
    wide = wide_of(sharded.dtype)

    def whole() -> Tensor:
        top = extreme(sharded, dims, largest=True).to(wide)
        top = top.masked_fill(top.isinf(), 0)
        total = total_of(
            sharded, dims, lambda t, at: (t.to(wide) - top[at]).exp().sum(dims, keepdim=True), dtype=wide
        )
        return (total.log() + top).to(sharded.dtype)

    return _either(torch.logsumexp, sharded, dims, keepdim, whole)


@rule(torch.var, _T.var, torch.std, _T.std, takes="input dim unbiased keepdim correction")
def _variance(
    func: Any, sharded: ShardedTensor, dim: Any, unbiased: Any, keepdim: Any, correction: Any
) -> Tensor:
    """The mean of squared distances from the mean, in two passes."""
    if isinstance(dim, bool):  # var(unbiased)
        dim, unbiased = None, dim
    dims, root = dims_of(sharded, dim), func.__name__ == "std"
    if not sharded.dtype.is_floating_point:
        as_torch(func, sharded)
        refuse(func, (sharded,), {})
    if correction is None:
        correction = 1 if unbiased is None else int(unbiased)

    def whole() -> Tensor:
        wide, count = wide_of(sharded.dtype), count_of(sharded, dims)
        with torch.no_grad():  # distances from it sum up to zero, and so does its gradient
            mean = sum_of(sharded, dims, True, wide) / count
        value = total_of(
            sharded, dims, lambda t, at: (t.to(wide) - mean[at]).square().sum(dims, keepdim=True), dtype=wide
        )
        value = value / max(0.0, count - correction)
        return (_power(value, 0.5) if root else value).to(sharded.dtype)

    def local(tensor: Tensor, dims: Dims, keepdim: bool) -> Tensor:
        if not tensor.numel():  # func would warn
            return tensor.sum(dims, keepdim=keepdim)
        return cast(Tensor, func(tensor, dims, correction=correction, keepdim=keepdim))

    return _either(local, sharded, dims, keepdim, whole)


def _power(value: Tensor, p: float) -> Tensor:
    """Numbers from 0 on to the power of `p`; the gradient of zero is zero."""
    if p <= 0:
        return value.pow(p)
    return value.masked_fill(value == 0, 1).pow(p).masked_fill(value == 0, 0)


# ---------------------------------------------------------------- extremes


@torch.no_grad()
def extreme(sharded: ShardedTensor, dims: Dims, *, largest: bool) -> Tensor:
    """The largest or smallest elements along `dims`, which it keeps, without gradient. Collective."""
    wide = wide_of(sharded.dtype)
    if wide.is_floating_point:
        worst: float = -math.inf if largest else math.inf
    else:
        worst = torch.iinfo(wide).min if largest else torch.iinfo(wide).max
    better = torch.maximum if largest else torch.minimum
    found = torch.full(kept_size(sharded, dims), worst, dtype=wide, device=sharded.anchor.device)
    for tensor, box in zip(sharded.tensors, sharded.boxes, strict=True):
        if tensor.numel():
            place = place_of(box, dims)
            found[place] = better(
                found[place], (torch.amax if largest else torch.amin)(tensor, dims, keepdim=True).to(wide)
            )
    return (all_extreme(found, sharded.process_group, largest=largest) if found.numel() else found).to(
        sharded.dtype
    )


def _extreme(sharded: ShardedTensor, dims: Dims, *, largest: bool) -> Tensor:
    """The same, differentiable: in equal parts by all elements that have it. Collective."""
    value = extreme(sharded, dims, largest=largest)
    if not needs_grad(sharded):
        return value

    def has(tensor: Tensor, at: Any) -> Tensor:
        return torch.where(value[at].isnan(), tensor.isnan(), tensor == value[at])

    with torch.no_grad():
        number = total_of(sharded, dims, lambda t, at: has(t, at).sum(dims, keepdim=True), dtype=torch.int64)
    shares = _partial(
        sharded,
        dims,
        lambda t, at: (torch.where(has(t, at), t, 0) / number[at]).sum(dims, keepdim=True),
        value.dtype,
    )
    return valued(shares, value)


@rule(torch.amax, _T.amax, torch.amin, _T.amin, takes="input dim keepdim")
def _amax(func: Any, sharded: ShardedTensor, dim: Any, keepdim: Any) -> Tensor:
    dims = dims_of(sharded, dim)
    if sharded.dtype.is_complex or count_of(sharded, dims) == 0:
        as_torch(func, sharded, dims)
    largest = func.__name__ == "amax"
    return _either(func, sharded, dims, keepdim, lambda: _extreme(sharded, dims, largest=largest))


@handles(torch.max, _T.max, torch.min, _T.min)
def _max(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of all elements; along one dim with indices; or, with another tensor, element by element."""
    largest = func.__name__ == "max"
    if any(isinstance(value, Tensor) for value in (*args[1:], *kwargs.values())):
        return elementwise(torch.maximum if largest else torch.minimum, args, kwargs)
    sharded, dim, keepdim = given(["input", "dim", "keepdim"], func, args, kwargs)
    if dim is None:
        return _amax(torch.amax if largest else torch.amin, sharded, None, None)
    kind: Any = torch.return_types.max if largest else torch.return_types.min
    return kind([_along(func, sharded, dim, keepdim, which) for which in (0, 1)])


@rule(torch.argmax, _T.argmax, torch.argmin, _T.argmin, takes="input dim keepdim")
def _argmax(func: Any, sharded: ShardedTensor, dim: Any, keepdim: Any) -> Tensor:
    """Along one dim: the first of several."""
    if dim is None:
        refuse(func, (sharded,), {})
    with torch.no_grad():
        return _along(torch.max if func.__name__ == "argmax" else torch.min, sharded, dim, keepdim, 1)


def _along(func: Any, sharded: ShardedTensor, dim: int, keepdim: Any, which: int) -> Tensor:
    """The extremes along one dim, or where they are, of shards that have all of it. Local."""
    dims = dims_of(sharded, dim)
    if sharded.dtype.is_complex or not dims or count_of(sharded, dims) == 0:
        as_torch(func, sharded, dim)

    def local(tensor: Tensor, dims: Dims, keepdim: bool) -> Tensor:
        return cast(Tensor, func(tensor, dims[0], keepdim)[which])

    return _either(local, sharded, dims, keepdim, lambda: refuse_cut(func, sharded, dims))


# ---------------------------------------------------------------- norms


def norm_of(
    sharded: ShardedTensor, p: float = 2.0, *, dim: Any = None, keepdim: Any = False, dtype: Any = None
) -> Tensor:
    """The p-norm along `dim`, by default of all elements. Collective, unless no shard cuts `dim`."""
    dims = dims_of(sharded, dim)
    check_norm(sharded, p, dims, keepdim=bool(keepdim))

    def whole() -> Tensor:
        cast_to = dtype or sharded.dtype
        operand = sharded.map(lambda t: t.to(cast_to))
        wanted = cast_to.to_real() if cast_to.is_complex else cast_to
        if math.isinf(p):
            return _extreme(operand.map(torch.abs), dims, largest=p > 0).to(wanted)

        def powers(tensor: Tensor, at: Any) -> Tensor:  # of norms, which do not overflow
            length = torch.linalg.vector_norm(tensor, p, dims, True, dtype=wide_of(cast_to)).double()
            return length if p == 0 else _power(length, p)

        total = total_of(operand, dims, powers, dtype=torch.float64)
        return (total if p == 0 else _power(total, 1 / p)).to(wanted)

    def local(tensor: Tensor, dims: Dims, keepdim: bool) -> Tensor:
        return cast(Tensor, torch.linalg.vector_norm(tensor, p, dims, keepdim, dtype=dtype))

    return _either(local, sharded, dims, keepdim, whole)


def check_norm(sharded: ShardedTensor, p: float, dims: Sequence[int], *, keepdim: bool = False) -> None:
    """Raise what torch raises where there is no such norm: of integers, or an extreme of nothing. Local."""
    dims = tuple(dims)
    if not (sharded.dtype.is_floating_point or sharded.dtype.is_complex) or (
        count_of(sharded, dims) == 0 and (p < 0 or math.isinf(p))
    ):
        as_torch(torch.linalg.vector_norm, sharded, p, dims, keepdim)


@rule(torch.norm, takes="input p dim keepdim out dtype")
def _torch_norm(
    func: Any, sharded: ShardedTensor, p: Any, dim: Any, keepdim: Any, out: Any, dtype: Any
) -> Any:
    return _norm(func, sharded, p, dim, keepdim, dtype)


@rule(torch.norm, _T.norm, torch.linalg.vector_norm, torch.linalg.norm, takes="input p dim keepdim dtype")
def _norm(func: Any, sharded: ShardedTensor, p: Any, dim: Any, keepdim: Any, dtype: Any) -> Tensor:
    """Not the norms of matrices but Frobenius', which is that of a vector."""
    frobenius = p is None or p == "fro"
    if isinstance(p, str) and p not in ("fro", "inf", "-inf"):
        refuse(func, (sharded, p), {})
    if func is torch.linalg.norm and not frobenius and len(dims_of(sharded, dim)) > 1:
        refuse(func, (sharded, p), {})
    return norm_of(sharded, 2.0 if frobenius else float(p), dim=dim, keepdim=keepdim, dtype=dtype)


@rule(F.normalize, takes="input p dim eps")
def _normalize(func: Any, sharded: ShardedTensor, p: Any, dim: Any, eps: Any) -> Tensor:
    length = norm_of(sharded, 2.0 if p is None else p, dim=1 if dim is None else dim, keepdim=True)
    return sharded / length.clamp_min(1e-12 if eps is None else eps)


# ---------------------------------------------------------------- others


@rule(torch.prod, _T.prod, takes="input dim keepdim dtype")
def _prod(func: Any, sharded: ShardedTensor, dim: Any, keepdim: Any, dtype: Any) -> Tensor:
    dims = dims_of(sharded, dim)

    def local(tensor: Tensor, dims: Dims, keepdim: bool) -> Tensor:
        return tensor.prod(dims[0], keepdim, dtype=dtype)

    return _either(local, sharded, dims, keepdim, lambda: refuse_cut(func, sharded, dims))


@rule(
    *(torch.cumsum, _T.cumsum, torch.cumprod, _T.cumprod, torch.logcumsumexp, _T.logcumsumexp),
    takes="input dim dtype",
)
def _running(func: Any, sharded: ShardedTensor, dim: Any, dtype: Any) -> ShardedTensor:
    """Along a dim in which every shard has all elements. Local."""
    if not isinstance(dim, int):
        raise TypeError(f"{func.__name__}() needs an int as dim, found {dim!r}")
    options = {} if dtype is None else {"dtype": dtype}
    if is_cut(sharded, dims_of(sharded, dim)):
        refuse_cut(func, sharded, dims_of(sharded, dim))
    as_torch(partial(func, dim=dim, **options), sharded)
    tensors = [func(tensor, dim, **options) for tensor in sharded.tensors]
    return sharded.with_tensors(tensors, anchor=None if tensors else func(sharded.anchor, 0, **options))


@handles(_T.item, _T.__float__, _T.__int__, _T.__bool__, _T.__index__, _T.__complex__)
def _scalar(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of a tensor of one element, on every rank. Collective."""
    count = args[0].numel()
    if count != 1:
        raise RuntimeError(f"a Tensor with {count} elements cannot be converted to Scalar")
    with torch.no_grad():
        return func(args[0].full_tensor())
