"""Sums, means, extremes, norms and similar reductions, of whole sharded tensors.

==============================================  ===========================================================
along                                           result
==============================================  ===========================================================
dims in which every shard has all elements      sharded as before: torch's function of every shard
any other dims, and all dims together           a plain tensor, the same on every rank (collective)
==============================================  ===========================================================

Only the cut decides which it is. Ranks combine values in fp32 or wider (norms: fp64), and round them to the
result's dtype at the end. Gradients equal torch's for the whole tensor: that of an extreme is spread evenly
over all elements with that value, and that of a norm of zero is zero. Indices of extremes are refused along
dims that shards cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NoReturn, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.layout import Box
from shardwise.sharded_tensor import failure
from shardwise.sharded_tensor.autograd import all_extreme, summed, with_value
from shardwise.sharded_tensor.ops.elementwise import elementwise, result_of
from shardwise.sharded_tensor.ops.operands import bind_arguments, raise_as_torch, rule
from shardwise.sharded_tensor.refuse import refuse, refuse_case
from shardwise.sharded_tensor.registry import Args, Kwargs, handles
from shardwise.sharded_tensor.tensor import ShardedTensor

_T: Any = Tensor
Dims = tuple[int, ...]


def dims_of(sharded: Tensor, dim: Any) -> Dims:
    """Return the dims that `dim` names, from 0 on and in order; all of them for None and for none."""
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


def refuse_cut(func: Any, sharded: ShardedTensor, dims: Dims) -> NoReturn:
    """Raise ShardingError for a function that needs all elements along `dims` on one rank."""
    names = ", ".join(map(str, dims))
    reason = f"it needs all elements of dim {names} in every shard, and other dims beside"
    hint = "reshard() it so, or use full_tensor()"
    refuse_case(func.__name__, sharded, reason=reason, hint=hint)


def needs_grad(sharded: ShardedTensor) -> bool:
    """Return whether autograd records what is computed of a tensor; the same on every rank."""
    return torch.is_grad_enabled() and sharded.requires_grad


def wide_of(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which to combine values of `dtype`: at least fp32; int64 for integers and bools."""
    if dtype.is_floating_point:
        return torch.promote_types(dtype, torch.float32)
    return dtype if dtype.is_complex else torch.int64


def _count(sharded: ShardedTensor, dims: Dims) -> int:
    return math.prod(sharded.metadata().size[d] for d in dims)


def worst_of(dtype: torch.dtype, *, largest: bool) -> float:
    """Return the number with which any other of `dtype` is the larger, or the smaller."""
    if dtype.is_floating_point:
        return -math.inf if largest else math.inf
    if dtype == torch.bool:
        return not largest
    return torch.iinfo(dtype).min if largest else torch.iinfo(dtype).max


def _reduce(
    func: Callable[..., Tensor],
    sharded: ShardedTensor,
    dims: Dims,
    keepdim: Any,
    merge: Callable[[], Tensor],
    **options: Any,
) -> Tensor:
    """Apply `func` along `dims` of every shard, if these are whole; else `merge()`, which keeps dims."""
    size, shards = sharded.metadata().size, sharded.metadata().shards_metadata
    complete = all(shard.shard_sizes[d] == size[d] for shard in shards for d in dims)
    if not complete or len(dims) == len(size) or not _count(sharded, dims):
        value = merge()
        return value if keepdim else value.reshape([v for d, v in enumerate(value.shape) if d not in dims])

    def replace_dims(values: Sequence[int], reduced: int) -> tuple[int, ...]:
        return tuple(reduced if d in dims else v for d, v in enumerate(values) if keepdim or d not in dims)

    metadata = sharded.metadata().map(
        replace_dims(size, 1), lambda box: Box(replace_dims(box.offsets, 0), replace_dims(box.sizes, 1))
    )
    tensors = sharded.tensors or [sharded.anchor.reshape([n if d in dims else 0 for d, n in enumerate(size)])]
    results = [func(tensor, dims, keepdim=bool(keepdim), **options) for tensor in tensors]
    return result_of(results, sharded, metadata)


def _fold(
    subject: str, sharded: ShardedTensor, dims: Dims, start: Tensor, join: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Return `join(start, shard)` of this rank's shards, each in its place once `dims` are one element."""
    sharded.ask_history()
    size = sharded.metadata().size
    result = start.expand([1 if d in dims else length for d, length in enumerate(size)]).clone()
    if not result.numel():
        return result
    text = f"{subject} in {start.dtype} along dims {list(dims)} of a tensor of size {tuple(size)}"
    with failure.comparing(text, device=start.device, group=sharded.process_group, subject="what to reduce"):
        for tensor, box in zip(sharded.tensors, sharded.boxes, strict=True):
            if tensor.numel():
                extents = enumerate(zip(box.offsets, box.ends, strict=True))
                place = tuple(slice(0, 1) if d in dims else slice(*extent) for d, extent in extents)
                result[place] = join(result[place], tensor)
    return result


def _total(
    sharded: ShardedTensor,
    dims: Dims,
    function: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
    subject: str = "a sum",
    of_nothing: Callable[[Tensor], Tensor] = torch.sum,
) -> Tensor:
    """Return the sum over all shards of `function(shard)`, which keeps `dims`. Collective; differentiable.

    Args:
        subject: the sum, for ranks to compare.
        of_nothing: saves for its backward what `function` saves, and makes zero of an empty tensor.
    """
    zero = torch.zeros((), dtype=dtype, device=sharded.anchor.device)
    total = _fold(subject, sharded, dims, zero, lambda total, tensor: total + function(tensor))
    for tensor in sharded.tensors or [sharded.anchor]:
        if tensor.requires_grad and not tensor.numel():
            total = total + of_nothing(tensor).to(dtype)
    return summed(total, sharded.process_group) if total.numel() else total


@torch.no_grad()
def _extreme(sharded: ShardedTensor, dims: Dims, *, largest: bool) -> Tensor:
    """Return the largest or smallest elements along `dims`, which it keeps, without gradient. Collective."""
    wide = wide_of(sharded.dtype)
    subject, choose = ("the largest", torch.maximum) if largest else ("the smallest", torch.minimum)
    reduce = torch.amax if largest else torch.amin
    worst = torch.full((), worst_of(wide, largest=largest), dtype=wide, device=sharded.anchor.device)
    extremes = _fold(
        subject, sharded, dims, worst, lambda best, t: choose(best, reduce(t, dims, keepdim=True).to(wide))
    )
    value = all_extreme(extremes, sharded.process_group, largest=largest) if extremes.numel() else extremes
    return value.to(sharded.dtype)


def _shared_extreme(sharded: Any, dims: Dims, *, largest: bool) -> Tensor:
    """Return the largest or smallest elements; their gradient is shared equally by ties. Collective."""
    value = _extreme(sharded, dims, largest=largest)
    if not needs_grad(sharded):
        return value
    with torch.no_grad():
        mask: Any = torch.where(value.isnan(), sharded.isnan(), sharded == value)
        ties = _sum(mask, dims)
    shares: Any = torch.where(mask, sharded, 0) / ties
    return with_value(_sum(shares, dims), value)


def _sum(sharded: ShardedTensor, dims: Dims, dtype: torch.dtype | None = None) -> Tensor:
    integral = not (sharded.dtype.is_floating_point or sharded.dtype.is_complex)
    out_dtype = dtype or (torch.int64 if integral else sharded.dtype)
    wide = wide_of(out_dtype)
    total = _total(sharded, dims, lambda t: t.to(out_dtype).sum(dims, keepdim=True, dtype=wide), wide)
    return total.to(out_dtype)


@rule(*(torch.sum, _T.sum, torch.nansum, _T.nansum, torch.mean, _T.mean), takes="input dim keepdim dtype")
def _sums(func: Any, sharded: ShardedTensor, dim: Any, keepdim: Any, dtype: Any) -> Tensor:
    dims, name = dims_of(sharded, dim), func.__name__
    out_dtype = dtype or sharded.dtype
    if name == "mean":
        torch.empty((), dtype=out_dtype, device="meta").mean()  # raises what torch raises

    def merge() -> Tensor:
        if name == "mean":
            total = _sum(sharded.map(lambda t: t.to(out_dtype)), dims, wide_of(out_dtype))
            return (total / _count(sharded, dims)).to(out_dtype)
        numbers = sharded.map(lambda t: torch.where(t.isnan(), 0, t)) if name == "nansum" else sharded
        return _sum(numbers, dims, dtype)

    return _reduce(getattr(torch, name), sharded, dims, keepdim, merge, dtype=dtype)


@rule(torch.count_nonzero, _T.count_nonzero, takes="input dim")
def _count_nonzero(func: Any, sharded: ShardedTensor, dim: Any) -> Tensor:
    return _sums(torch.sum, sharded.map(lambda t: t.detach() != 0), dim, False, None)


@rule(torch.any, _T.any, torch.all, _T.all, takes="input dim keepdim")
def _truth(func: Any, sharded: ShardedTensor, dim: Any, keepdim: Any) -> Tensor:
    if dim is not None and not isinstance(dim, int) and not len(dim):
        refuse(func, (sharded, dim), {})  # to torch this means no dim at all
    dims = dims_of(sharded, dim)

    def merge() -> Tensor:
        counts = _sum(sharded.map(lambda t: t.detach() != 0), dims)
        truth = counts > 0 if func.__name__ == "any" else counts == _count(sharded, dims)
        return truth.to(torch.uint8) if sharded.dtype == torch.uint8 else truth

    return _reduce(func, sharded, dims, keepdim, merge)


def log_of_exponentials(sharded: ShardedTensor, dims: Dims) -> Tensor:
    """Return the log of the sum of exponentials, of distances to the largest. Collective; keeps `dims`."""
    top = _extreme(sharded, dims, largest=True)
    top = top.masked_fill(top.isinf(), 0)
    shifted: Any = sharded - top
    return _sum(shifted.exp(), dims).log() + top


@rule(torch.logsumexp, _T.logsumexp, torch.special.logsumexp, takes="input dim keepdim")
def _logsumexp(func: Any, sharded: ShardedTensor, dim: Any, keepdim: Any) -> Tensor:
    if dim is None or sharded.dtype.is_complex:
        refuse(func, (sharded, dim), {})
    dims = dims_of(sharded, dim)
    dtype = sharded.dtype if sharded.dtype.is_floating_point else torch.get_default_dtype()
    numbers, wide = sharded.to(dtype), wide_of(dtype)
    return _reduce(
        torch.logsumexp, numbers, dims, keepdim, lambda: log_of_exponentials(numbers.to(wide), dims).to(dtype)
    )


@rule(torch.var, _T.var, torch.std, _T.std, takes="input dim unbiased keepdim correction")
def _variance(
    func: Any, sharded: ShardedTensor, dim: Any, unbiased: Any, keepdim: Any, correction: Any
) -> Tensor:
    if isinstance(dim, bool):  # var(unbiased)
        dim, unbiased = None, dim
    dims = dims_of(sharded, dim)
    if not sharded.dtype.is_floating_point:
        raise_as_torch(func, sharded)
        refuse(func, (sharded,), {})
    if correction is None:
        correction = 1 if unbiased is None else int(unbiased)

    def merge() -> Tensor:
        wide: Any = sharded.to(wide_of(sharded.dtype))
        # Distances from the mean add up to zero, and so does its gradient.
        mean = _sum(wide.detach(), dims) / _count(sharded, dims)
        value = _sum((wide - mean).square(), dims) / max(0.0, _count(sharded, dims) - correction)
        return (_power(value, 0.5) if func.__name__ == "std" else value).to(sharded.dtype)

    def local(tensor: Tensor, dims: Dims, keepdim: bool) -> Tensor:
        if not tensor.numel():  # func would warn
            return tensor.square().sum(dims, keepdim=keepdim)  # saves it for backward, as func does
        return cast(Tensor, func(tensor, dims, correction=correction, keepdim=keepdim))

    return _reduce(local, sharded, dims, keepdim, merge)


def _power(value: Tensor, p: float) -> Tensor:
    """Raise non-negative numbers to the power of `p`; the gradient of zero is zero."""
    return value.masked_fill(value == 0, 1).pow(p).masked_fill(value == 0, 0 if p > 0 else math.inf)


@rule(torch.amax, _T.amax, torch.amin, _T.amin, takes="input dim keepdim")
def _amax(func: Any, sharded: ShardedTensor, dim: Any, keepdim: Any) -> Tensor:
    dims, largest = dims_of(sharded, dim), func.__name__ == "amax"
    if sharded.dtype.is_complex or _count(sharded, dims) == 0:
        raise_as_torch(func, sharded, dims)
    return _reduce(func, sharded, dims, keepdim, lambda: _shared_extreme(sharded, dims, largest=largest))


@handles(torch.max, _T.max, torch.min, _T.min)
def _max(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Reduce over all elements; along one dim with indices; or, with another tensor, element by element."""
    largest = func.__name__ == "max"
    if any(isinstance(value, Tensor) for value in (*args[1:], *kwargs.values())):
        return elementwise(torch.maximum if largest else torch.minimum, args, kwargs)
    sharded, dim, keepdim = bind_arguments(["input", "dim", "keepdim"], func, args, kwargs)
    if dim is None:
        return _amax(torch.amax if largest else torch.amin, sharded, None, None)
    kind: Any = torch.return_types.max if largest else torch.return_types.min
    return kind([_reduce_local(func, sharded, dim, keepdim, itemgetter(i)) for i in (0, 1)])


def _reduce_local(
    func: Any, sharded: ShardedTensor, dim: Any, keepdim: Any, pick: Callable[[Any], Tensor]
) -> Tensor:
    """Apply `func` along one dim that every shard has whole, and `pick` its output. Local; else refused."""
    dims = dims_of(sharded, dim)
    if sharded.dtype.is_complex or not dims or _count(sharded, dims) == 0:
        raise_as_torch(func, sharded, dim)

    merge = partial(refuse_cut, func, sharded, dims)
    return _reduce(lambda t, d, keepdim: pick(func(t, d[0], keepdim)), sharded, dims, keepdim, merge)


@rule(torch.argmax, _T.argmax, torch.argmin, _T.argmin, takes="input dim keepdim")
@torch.no_grad()
def _argmax(func: Any, sharded: ShardedTensor, dim: Any, keepdim: Any) -> Tensor:
    """Return the indices of extremes along one dim; the first of several."""
    if dim is None:
        refuse(func, (sharded,), {})
    func(torch.zeros(1, dtype=sharded.dtype), 0)  # raises where torch has none for the dtype
    return _reduce_local(func, sharded, dim, keepdim, lambda indices: indices)


def norm_of(
    sharded: ShardedTensor, p: float = 2.0, *, dim: Any = None, keepdim: Any = False, dtype: Any = None
) -> Tensor:
    """Return the p-norm along `dim`, by default of all elements. Collective, unless no shard cuts `dim`."""
    dims = dims_of(sharded, dim)
    check_norm(sharded, p, dims)

    def merge() -> Tensor:
        cast_to = dtype or sharded.dtype
        operand = sharded.map(lambda t: t.to(cast_to))
        out_dtype = cast_to.to_real() if cast_to.is_complex else cast_to
        if math.isinf(p):
            return _shared_extreme(operand.map(torch.abs), dims, largest=p > 0).to(out_dtype)

        def powers(tensor: Tensor) -> Tensor:  # of norms, which do not overflow
            length = torch.linalg.vector_norm(tensor, p, dims, True, dtype=wide_of(cast_to)).double()
            return length if p == 0 else _power(length, p)

        subject = f"a sum of lengths to the power of {p:g}"
        # Also no gradient if p is 0; other norms than this may need elements.
        of_nothing = partial(torch.linalg.vector_norm, ord=2.0 if p else 0.0)
        total = _total(operand, dims, powers, torch.float64, subject, of_nothing)
        return (total if p == 0 else _power(total, 1 / p)).to(out_dtype)

    norm = torch.linalg.vector_norm
    return _reduce(lambda t, d, keepdim: norm(t, p, d, keepdim, dtype=dtype), sharded, dims, keepdim, merge)


def check_norm(sharded: ShardedTensor, p: float, dims: Sequence[int]) -> None:
    """Raise torch's error if there is no such norm: of integers, or an extreme of no elements. Local."""
    numbers = sharded.dtype.is_floating_point or sharded.dtype.is_complex
    if not numbers or (_count(sharded, tuple(dims)) == 0 and (p < 0 or math.isinf(p))):
        raise_as_torch(torch.linalg.vector_norm, sharded, p, tuple(dims))


@rule(torch.norm, _T.norm, torch.linalg.vector_norm, torch.linalg.norm, takes="input p dim keepdim dtype")
def _norm(func: Any, sharded: ShardedTensor, p: Any, dim: Any, keepdim: Any, dtype: Any) -> Tensor:
    """Compute norms of vectors, and the Frobenius norm of matrices; refuse other norms of matrices."""
    frobenius = p is None or p == "fro"
    of_matrix = func is torch.linalg.norm and not frobenius and len(dims_of(sharded, dim)) > 1
    if of_matrix or (isinstance(p, str) and p not in ("fro", "inf", "-inf")):
        refuse(func, (sharded, p), {})
    return norm_of(sharded, 2.0 if frobenius else float(p), dim=dim, keepdim=keepdim, dtype=dtype)


@rule(F.normalize, takes="input p dim eps")
def _normalize(func: Any, sharded: ShardedTensor, p: Any, dim: Any, eps: Any) -> Tensor:
    length = norm_of(sharded, 2.0 if p is None else p, dim=1 if dim is None else dim, keepdim=True)
    return sharded / length.clamp_min(1e-12 if eps is None else eps)


@handles(_T.item, _T.__float__, _T.__int__, _T.__bool__, _T.__index__, _T.__complex__)
def _scalar(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Convert a tensor of one element to a number, on every rank. Collective."""
    count = args[0].numel()
    if count != 1:
        raise RuntimeError(f"a Tensor with {count} elements cannot be converted to Scalar")
    with torch.no_grad():
        return func(args[0].full_tensor())
