"""`softmax`, `log_softmax`, `layer_norm`, `rms_norm`, `dropout` of sharded tensors; results are cut alike.

Along dims that no shard is cut in they are torch's functions of every shard, without communication. Along
others they are made of elementwise functions and reductions: two all-reduces forward (rms_norm: one) and as
many or fewer backward, of one element for each slice that is normalised, in at least float32.

A dropped element is dropped under every sharding, given the state of torch's generator on the group's first
rank: one broadcast, of a seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.errors import ShardingError, here
from shardwise.sharded_tensor.autograd import replicated
from shardwise.sharded_tensor.construct import shared_seed
from shardwise.sharded_tensor.ops.arguments import called_as, probe, rule
from shardwise.sharded_tensor.ops.elementwise import elementwise
from shardwise.sharded_tensor.ops.reduce import (
    count_of,
    extreme,
    is_cut,
    kept_size,
    place_of,
    sum_of,
    total_of,
)
from shardwise.sharded_tensor.random import bernoulli
from shardwise.sharded_tensor.tensor import ShardedTensor

_T: Any = Tensor


# ---------------------------------------------------------------- softmax


@rule(F.softmax, F.log_softmax, takes="input dim _stacklevel dtype")
def _softmax_of_module(
    func: Any, sharded: ShardedTensor, dim: Any, stacklevel: Any, dtype: Any
) -> ShardedTensor:
    if dim is None:
        raise ShardingError(f"{here()}: {func.__name__} of a ShardedTensor needs its dim; pass dim=")
    return _softmax(func, sharded, dim, dtype)


@rule(
    *(torch.softmax, _T.softmax, torch.special.softmax),
    *(torch.log_softmax, _T.log_softmax, torch.special.log_softmax),
    takes="input dim dtype",
)
def _softmax(func: Any, sharded: ShardedTensor, dim: int, dtype: torch.dtype | None) -> ShardedTensor:
    log = "log" in func.__name__
    function = torch.log_softmax if log else torch.softmax
    least = max(1, sharded.ndim)
    if not -least <= dim < least:
        raise IndexError(f"Dimension out of range (expected in [{-least}, {least - 1}], but got {dim})")
    dim %= least
    if sharded.numel() and not (sharded.dtype.is_floating_point or dtype):  # where shards are empty too
        function(torch.ones((1,) * sharded.ndim, dtype=sharded.dtype, device=sharded.anchor.device), dim)
    if not sharded.ndim or not is_cut(sharded, (dim,)):
        tensors = [function(tensor, dim, dtype) for tensor in sharded.tensors]
        return sharded.with_tensors(tensors, anchor=None if tensors else function(sharded.anchor, -1, dtype))
    into = function(sharded.anchor.detach(), -1, dtype).dtype
    wide = sharded.to(_wide(sharded.dtype, into))
    shifted: Any = wide - extreme(wide, (dim,), largest=True)
    powers = shifted.exp()
    total = sum_of(powers, (dim,), keepdim=True)
    made = shifted - total.log() if log else powers / total
    return cast(ShardedTensor, made.to(into))


def _wide(*dtypes: torch.dtype) -> torch.dtype:
    """What statistics of these are computed in."""
    wide = torch.float32
    for dtype in dtypes:
        wide = torch.promote_types(wide, dtype)
    return wide


# ---------------------------------------------------------------- layer_norm, rms_norm


@called_as(F.layer_norm, torch.layer_norm)
def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    return _normalized(F.layer_norm, input, tuple(normalized_shape), (weight, bias), eps)


@called_as(F.rms_norm, torch.rms_norm)
def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    return _normalized(F.rms_norm, input, tuple(normalized_shape), (weight,), eps)


def _normalized(
    func: Any, input: Tensor, shape: tuple[int, ...], affine: tuple[Tensor | None, ...], eps: Any
) -> Tensor:
    """`func` of the shards where these have whole slices; else the same over ranks."""
    func(probe(input), shape, *(None if t is None else probe(t) for t in affine), eps)  # torch judges shapes
    if not isinstance(input, ShardedTensor):
        whole = [t.full_tensor() if isinstance(t, ShardedTensor) else t for t in affine]
        return cast(Tensor, func(input, shape, *whole, eps))
    ones = [None if t is None else torch.empty(1, dtype=t.dtype, device=t.device) for t in affine]
    into = func(input.anchor.detach().reshape(0, 1), (1,), *ones, eps).dtype  # and dtypes
    dims = tuple(range(input.ndim - len(shape), input.ndim))
    if not is_cut(input, dims):

        def local(tensor: Tensor, *affine: Tensor | None) -> Tensor:
            if tensor.numel():
                return cast(Tensor, func(tensor, shape, *affine, eps))
            return sum((t.sum().to(into) for t in affine if t is not None), start=tensor.to(into))

        return cast(Tensor, elementwise(local, (input, *affine), {}))
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    made: Any = _over_ranks(input.to(_wide(input.dtype, into)), dims, centred=func is F.layer_norm, eps=eps)
    made = made if affine[0] is None else made * affine[0]
    made = made if affine[-1] is None or len(affine) < 2 else made + affine[-1]
    return cast(Tensor, made.to(into))


def _over_ranks(sharded: ShardedTensor, dims: tuple[int, ...], *, centred: bool, eps: float) -> ShardedTensor:
    """(x - mean) / sqrt(variance + eps), or without the mean. Collective."""
    count = count_of(sharded, dims)
    mean = (
        sum_of(sharded, dims, keepdim=True) / count
        if centred
        else sharded.anchor.new_zeros((1,) * sharded.ndim)
    )
    fixed = mean.detach().expand(kept_size(sharded, dims))  # the gradient of the squares by the mean is zero
    squares = total_of(
        sharded, dims, lambda t, at: (t - fixed[at]).square().sum(dims, keepdim=True), dtype=sharded.dtype
    )
    scale = (squares / count + eps).rsqrt()
    # Together, so that one all-reduce sums the gradients of both.
    found = replicated(torch.stack([scale, mean] if centred else [scale]), sharded.process_group)
    made = []
    for tensor, box in zip(sharded.tensors, sharded.boxes, strict=True):
        at = place_of(box, dims)
        made.append((tensor - found[1][at] if centred else tensor) * found[0][at])
    return sharded.with_tensors(made, anchor=torch.cat([sharded.anchor, found.reshape(-1)[:0]]))


# ---------------------------------------------------------------- dropout


@rule(F.dropout, takes="input p training inplace")
def _dropout(func: Any, sharded: ShardedTensor, p: Any, training: Any, inplace: Any) -> ShardedTensor:
    p = 0.5 if p is None else p
    if not 0 <= p <= 1:
        raise ShardingError(f"{here()}: dropout needs a probability p in [0, 1], found {p}")
    if training is False or p == 0:
        return sharded
    if inplace and sharded.requires_grad and sharded.is_leaf and torch.is_grad_enabled():
        raise RuntimeError("a leaf that requires grad is used in an in-place operation: dropout")
    seed = shared_seed(sharded.process_group)
    made = []
    for tensor, box in zip(sharded.tensors, sharded.boxes, strict=True):
        kept = bernoulli(box, shape=sharded.metadata().size, seed=seed, p=1 - p, device=tensor.device)
        factor = kept.to(tensor.dtype).div_(1 - p) if p < 1 else kept.to(tensor.dtype)
        made.append(tensor.mul_(factor) if inplace else tensor * factor)
    return sharded if inplace else sharded.with_tensors(made, anchor=sharded.anchor * 1)


@rule(torch.dropout, takes="input p train")
def _torch_dropout(func: Any, sharded: ShardedTensor, p: Any, train: Any) -> ShardedTensor:
    return _dropout(func, sharded, p, bool(train), False)
