"""`softmax`, `log_softmax`, `layer_norm`, `rms_norm`, `dropout` of sharded tensors; results are cut alike.

    normalised along               communication forward                              backward
    dims that no shard is cut in   none                                               none
    any others, softmax            two all-reduces: greatest elements, sums           one
    any others, layer_norm         two all-reduces: sums, sums of squares             one
    any others, rms_norm           one all-reduce: sums of squares                    one
    dropout                        one broadcast, of a seed                           none

What is all-reduced has one element for each slice that is normalised, in at least float32; ranks fill in
what their boxes have, whichever these are. A dropped element is dropped under every sharding, given the
state of torch's generator on the group's first rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise import _compat
from shardwise.errors import ShardingError, here
from shardwise.sharded_tensor.autograd import all_reduced
from shardwise.sharded_tensor.construct import shared_seed
from shardwise.sharded_tensor.ops.operands import anchor_of, parts
from shardwise.sharded_tensor.random import bernoulli
from shardwise.sharded_tensor.registry import handles
from shardwise.sharded_tensor.tensor import ShardedTensor

_T: Any = Tensor


@dataclass(frozen=True)
class _Slices:
    """The slices of a sharded tensor along `dims`, and where this rank's shards lie among them.

    Attributes:
        size: of the tensor, with one element in each of `dims`.
        numel: elements of one slice.
        places: by local shard, its part of a tensor of `size`.
        dtype: for sums.
        into: of the result.
    """

    dims: tuple[int, ...]
    size: tuple[int, ...]
    numel: int
    places: list[tuple[slice, ...]]
    dtype: torch.dtype
    into: torch.dtype
    device: torch.device
    group: dist.ProcessGroup

    def sums(self, *each: Sequence[Tensor]) -> Tensor:
        """[one for each of `each`, *size]: over all ranks' shards, by slice. Collective, without gradient."""
        total = torch.zeros((len(each), *self.size), dtype=self.dtype, device=self.device)
        for into, tensors in zip(total, each, strict=True):
            for tensor, place in zip(tensors, self.places, strict=True):
                into[place] += tensor.sum(self.dims, keepdim=True)
        return all_reduced(total, self.group) if total.numel() else total

    def greatest(self, tensors: Sequence[Tensor]) -> Tensor:
        """Over all ranks' shards, by slice. Collective, without gradient."""
        found = torch.full(self.size, -torch.inf, dtype=self.dtype, device=self.device)
        for tensor, place in zip(tensors, self.places, strict=True):
            if tensor.numel():
                found[place] = torch.maximum(found[place], tensor.amax(self.dims, keepdim=True))
        return all_reduced(found, self.group, dist.ReduceOp.MAX) if found.numel() else found

    def widened(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.to(self.dtype) for tensor in tensors]

    def of(self, statistic: Tensor) -> list[Tensor]:
        """The statistic of each local shard's slices."""
        return [statistic[place] for place in self.places]


def _slices(sharded: ShardedTensor, dims: tuple[int, ...], into: torch.dtype) -> _Slices:
    size = sharded.metadata().size
    places = [
        tuple(
            slice(0, 1) if dim in dims else slice(start, end)
            for dim, (start, end) in enumerate(zip(box.offsets, box.ends, strict=True))
        )
        for box in sharded.boxes
    ]
    reduced = tuple(1 if dim in dims else length for dim, length in enumerate(size))
    numel = size.numel() // max(1, torch.Size(reduced).numel())
    wide = torch.promote_types(torch.promote_types(into, sharded.dtype), torch.float32)
    return _Slices(dims, reduced, numel, places, wide, into, sharded.anchor.device, sharded.process_group)


def _is_cut(sharded: ShardedTensor, dims: Sequence[int]) -> bool:
    """Is any shard a part only of what lies along `dims`?"""
    size = sharded.metadata().size
    boxes = (shard.box for shard in sharded.metadata().shards_metadata)
    return any(box.sizes[dim] != size[dim] for box in boxes if not box.is_empty for dim in dims)


# ------------------------------------------------------------ softmax


@handles(F.softmax, F.log_softmax)
def _softmax_of_module(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    def softmax(input: ShardedTensor, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
        if dim is None:
            raise ShardingError(f"{here()}: {func.__name__} of a ShardedTensor needs its dim; pass dim=")
        return _softmax(input, dim, dtype, log=func is F.log_softmax)

    return cast(ShardedTensor, softmax(*args, **kwargs))


@handles(torch.softmax, _T.softmax, torch.special.softmax)
def _softmax_of_tensor(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    def softmax(input: ShardedTensor, dim: int, dtype: torch.dtype | None = None) -> ShardedTensor:
        return _softmax(input, dim, dtype, log=False)

    return softmax(*args, **kwargs)


@handles(torch.log_softmax, _T.log_softmax, torch.special.log_softmax)
def _log_softmax_of_tensor(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    def log_softmax(input: ShardedTensor, dim: int, dtype: torch.dtype | None = None) -> ShardedTensor:
        return _softmax(input, dim, dtype, log=True)

    return log_softmax(*args, **kwargs)


def _softmax(sharded: ShardedTensor, dim: int, dtype: torch.dtype | None, *, log: bool) -> ShardedTensor:
    function = torch.log_softmax if log else torch.softmax
    least = max(1, sharded.ndim)
    if not -least <= dim < least:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-least}, {least - 1}], but got {dim})"
        )
    dim %= least
    if sharded.numel() and not (sharded.dtype.is_floating_point or dtype):  # where shards are empty too
        function(torch.ones((1,) * sharded.ndim, dtype=sharded.dtype, device=sharded.anchor.device), dim)
    if not sharded.ndim or not _is_cut(sharded, (dim,)):
        tensors = [function(tensor, dim, dtype) for tensor in sharded.tensors]
        return sharded.with_tensors(tensors, anchor=None if tensors else function(sharded.anchor, -1, dtype))
    into = function(sharded.anchor.detach(), -1, dtype).dtype
    return _applied(_log_softmaxed if log else _softmaxed, sharded, (dim,), into)


def _applied(
    function: Callable[..., Any], sharded: ShardedTensor, dims: tuple[int, ...], into: torch.dtype, *args: Any
) -> ShardedTensor:
    """`function(slices, *args, anchor, *shards)`, one of those below, as a sharded tensor."""
    outputs = function(_slices(sharded, dims, into), *args, sharded.anchor, *sharded.tensors)
    return sharded.with_tensors(outputs[1:], anchor=outputs[0])


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, slices: _Slices, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        wide = slices.widened(tensors)
        greatest = slices.of(slices.greatest(wide))
        powers = [(tensor - top).exp_() for tensor, top in zip(wide, greatest, strict=True)]
        totals = slices.of(slices.sums(powers)[0])
        results = [power.div_(total) for power, total in zip(powers, totals, strict=True)]
        outputs = [result.to(slices.into) for result in results]
        ctx.slices, ctx.anchor = slices, anchor.new_empty(0)
        ctx.save_for_backward(*outputs)
        return anchor.new_empty(0, dtype=slices.into), *outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, anchor: Tensor, *grads: Tensor) -> tuple[Tensor | None, ...]:
        slices, results = ctx.slices, ctx.slices.widened(ctx.saved_tensors)
        weighted = [grad * result for grad, result in zip(grads, results, strict=True)]
        totals = slices.of(slices.sums(weighted)[0])
        back = [
            (product - result * total).to(ctx.anchor.dtype)
            for product, result, total in zip(weighted, results, totals, strict=True)
        ]
        return None, ctx.anchor, *back


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, slices: _Slices, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        wide = slices.widened(tensors)
        greatest = slices.of(slices.greatest(wide))
        shifted = [tensor - top for tensor, top in zip(wide, greatest, strict=True)]
        totals = slices.of(slices.sums([tensor.exp() for tensor in shifted])[0])
        outputs = [
            tensor.sub_(total.log()).to(slices.into) for tensor, total in zip(shifted, totals, strict=True)
        ]
        ctx.slices, ctx.anchor = slices, anchor.new_empty(0)
        ctx.save_for_backward(*outputs)
        return anchor.new_empty(0, dtype=slices.into), *outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, anchor: Tensor, *grads: Tensor) -> tuple[Tensor | None, ...]:
        slices, results = ctx.slices, ctx.slices.widened(ctx.saved_tensors)
        wide = slices.widened(grads)
        totals = slices.of(slices.sums(wide)[0])
        back = [
            (grad - result.exp() * total).to(ctx.anchor.dtype)
            for grad, result, total in zip(wide, results, totals, strict=True)
        ]
        return None, ctx.anchor, *back


_softmaxed = _compat.apply_of(_Softmax)
_log_softmaxed = _compat.apply_of(_LogSoftmax)


# ------------------------------------------------------------ layer_norm, rms_norm


@handles(F.layer_norm, torch.layer_norm)
def _layer_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    def layer_norm(
        input: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
        cudnn_enable: bool = True,
    ) -> Tensor:
        def local(tensor: Tensor, shape: Sequence[int], weight: Any, bias: Any) -> Tensor:
            return F.layer_norm(tensor, shape, weight, bias, eps)

        return _normalized(input, normalized_shape, weight, bias, local=local, centred=True, eps=eps)

    return layer_norm(*args, **kwargs)


@handles(F.rms_norm, torch.rms_norm)
def _rms_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    def rms_norm(
        input: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None = None,
        eps: float | None = None,
    ) -> Tensor:
        def local(tensor: Tensor, shape: Sequence[int], weight: Any, bias: Any) -> Tensor:
            return F.rms_norm(tensor, shape, weight, eps)

        chosen = torch.finfo(input.dtype).eps if eps is None else eps
        return _normalized(input, normalized_shape, weight, None, local=local, centred=False, eps=chosen)

    return rms_norm(*args, **kwargs)


def _normalized(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    local: Callable[..., Tensor],
    centred: bool,
    eps: float,
) -> Tensor:
    """`local`, torch's function, of the shards where these have whole slices; else the same over ranks."""
    affine = [tensor for tensor in (weight, bias) if tensor is not None]
    shown = [
        None if tensor is None else torch.empty(tensor.shape, device="meta") for tensor in (weight, bias)
    ]
    local(torch.empty(input.shape, device="meta"), normalized_shape, *shown)  # torch judges the shapes
    if not isinstance(input, ShardedTensor):
        whole = [t.full_tensor() if isinstance(t, ShardedTensor) else t for t in (weight, bias)]
        return local(input, normalized_shape, *whole)
    ones = [None if t is None else torch.empty(1, dtype=t.dtype, device=t.device) for t in (weight, bias)]
    into = local(input.anchor.detach().reshape(0, 1), (1,), *ones).dtype  # and the dtypes
    dims = tuple(range(input.ndim - len(normalized_shape), input.ndim))
    pieces = [parts(tensor, leader=input, metadata=input.metadata()) for tensor in affine]
    cut = _is_cut(input, dims)
    made = _applied(_normalizer, input, dims, into, centred, eps) if cut else input
    tied = [anchor_of(made), *(piece.reshape(-1)[:0] for column in pieces for piece in column)]
    anchor = torch.cat([tensor.to(into) for tensor in tied])
    results = []
    for index, (tensor, box) in enumerate(zip(made.tensors, input.boxes, strict=True)):
        own = [column[index] for column in pieces]
        factor = own[0] if weight is not None else None
        addend = own[-1] if bias is not None else None
        if box.is_empty:
            results.append(anchor.new_zeros(box.sizes) + anchor.sum())
        elif not cut:
            results.append(local(tensor, normalized_shape, factor, addend))
        else:
            scaled = tensor if factor is None else tensor * factor
            results.append((scaled if addend is None else scaled + addend).to(into))
    return input.with_tensors(results, anchor=anchor)


class _Normalizer(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps), or without the mean; in the dtype of sums."""

    @staticmethod
    def forward(
        ctx: Any, slices: _Slices, centred: bool, eps: float, anchor: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        wide = slices.widened(tensors)
        if centred:
            means = slices.of(slices.sums(wide)[0] / slices.numel)
            wide = [tensor - mean for tensor, mean in zip(wide, means, strict=True)]
        squares = slices.sums([tensor.square() for tensor in wide])[0]
        scales = slices.of((squares / slices.numel + eps).rsqrt())
        outputs = [tensor * scale for tensor, scale in zip(wide, scales, strict=True)]
        ctx.slices, ctx.centred, ctx.anchor = slices, centred, anchor.new_empty(0)
        ctx.save_for_backward(*outputs, *scales)
        return anchor.new_empty(0, dtype=slices.dtype), *outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, anchor: Tensor, *grads: Tensor) -> tuple[Tensor | None, ...]:
        slices, count = ctx.slices, len(grads)
        results, scales = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        products = [grad * result for grad, result in zip(grads, results, strict=True)]
        dots, means = slices.sums(products, grads)
        back = []
        for grad, result, scale, dot, mean in zip(
            grads, results, scales, slices.of(dots), slices.of(means), strict=True
        ):
            inner = grad - result * (dot / slices.numel)
            inner = inner - mean / slices.numel if ctx.centred else inner
            back.append((inner * scale).to(ctx.anchor.dtype))
        return None, None, None, ctx.anchor, *back


_normalizer = _compat.apply_of(_Normalizer)


# ------------------------------------------------------------ dropout


@handles(F.dropout, torch.dropout)
def _dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    def of_module(
        input: ShardedTensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> ShardedTensor:
        return _dropped(input, p, inplace=inplace) if training else _checked(input, p)

    def of_tensor(input: ShardedTensor, p: float, train: bool) -> ShardedTensor:
        return of_module(input, p, train)

    return (of_module if func is F.dropout else of_tensor)(*args, **kwargs)


def _checked(sharded: ShardedTensor, p: float) -> ShardedTensor:
    if not 0 <= p <= 1:
        raise ShardingError(f"{here()}: dropout needs a probability p in [0, 1], found {p}")
    return sharded


def _dropped(sharded: ShardedTensor, p: float, *, inplace: bool) -> ShardedTensor:
    if _checked(sharded, p).requires_grad and inplace and sharded.is_leaf and torch.is_grad_enabled():
        raise RuntimeError("a leaf that requires grad is used in an in-place operation: dropout")
    if p == 0:
        return sharded
    seed = shared_seed(sharded.process_group)
    made = []
    for tensor, box in zip(sharded.tensors, sharded.boxes, strict=True):
        kept = bernoulli(box, shape=sharded.metadata().size, seed=seed, p=1 - p, device=tensor.device)
        factor = kept.to(tensor.dtype).div_(1 - p) if p < 1 else kept.to(tensor.dtype)
        made.append(tensor.mul_(factor) if inplace else tensor * factor)
    return sharded if inplace else sharded.with_tensors(made, anchor=sharded.anchor * 1)
