"""`softmax`, `log_softmax`, `layer_norm`, `rms_norm`, `dropout` of sharded tensors, cut as these; and losses.

Along dims that are not cut, they apply torch's functions to every shard, without communication. Along
other dims they are composed of elementwise functions and reductions, in at least float32: two all-reduces in
forward (rms_norm: one), of one element per normalised slice.

A dropped element is dropped under every sharding, given the state of torch's generator on the group's first
rank: one broadcast, of a seed.

Losses are functions of every element, or of every row, and their mean or sum. With `reduction="none"` they
are local and cut like their input; a mean or sum is a plain tensor, after all-reduces of one number.
Cross-entropy takes logits cut along any dims except the classes.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.errors import ShardingError, here
from shardwise.layout import Box
from shardwise.sharded_tensor.autograd import nothing_of, tied
from shardwise.sharded_tensor.construct import shared_seed
from shardwise.sharded_tensor.ops.elementwise import elementwise
from shardwise.sharded_tensor.ops.operands import anchor_of, by_name, parts, probe, rule, unsharded
from shardwise.sharded_tensor.ops.reduce import dims_of, log_of_exponentials, refuse_cut
from shardwise.sharded_tensor.ops.shape import derive
from shardwise.sharded_tensor.random import bernoulli
from shardwise.sharded_tensor.refuse import refuse, refuse_case
from shardwise.sharded_tensor.registry import Args, Kwargs, handles
from shardwise.sharded_tensor.tensor import ShardedTensor

_T: Any = Tensor


@rule(F.softmax, F.log_softmax, takes="input dim _stacklevel dtype")
def _softmax_of_module(func: Any, sharded: ShardedTensor, dim: Any, level: Any, dtype: Any) -> ShardedTensor:
    return _softmax(getattr(torch, func.__name__), sharded, dim, dtype)


@rule(
    *(torch.softmax, _T.softmax, torch.special.softmax),
    *(torch.log_softmax, _T.log_softmax, torch.special.log_softmax),
    takes="input dim dtype",
)
def _softmax(func: Any, sharded: ShardedTensor, dim: Any, dtype: torch.dtype | None) -> ShardedTensor:
    if not isinstance(dim, int):
        raise ShardingError(f"{here()}: {func.__name__} of a ShardedTensor needs its dim; pass dim=")
    dims = dims_of(sharded, dim)
    if sharded.numel() and not (sharded.dtype.is_floating_point or dtype):  # where shards are empty too
        func(torch.ones((1,) * sharded.ndim, dtype=sharded.dtype, device=sharded.anchor.device), dim)
    if not sharded.metadata().is_cut(dims):
        tensors = [func(tensor, dim, dtype) for tensor in sharded.tensors]
        return sharded.with_tensors(tensors, anchor=None if tensors else func(sharded.anchor, 0, dtype))
    out_dtype = func(sharded.anchor.detach(), -1, dtype).dtype
    wide: Any = _widen(sharded, out_dtype)
    result = wide - log_of_exponentials(wide, dims)
    return cast(ShardedTensor, (result if "log" in func.__name__ else result.exp()).to(out_dtype))


def _widen(sharded: ShardedTensor, out_dtype: torch.dtype) -> ShardedTensor:
    return sharded.to(torch.promote_types(torch.promote_types(sharded.dtype, torch.float32), out_dtype))


@handles(F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm)
def _normalize(func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """Apply `func` to shards that have whole slices; else compute it over ranks."""
    kwargs.pop("cudnn_enable", None)
    func = getattr(F, func.__name__)
    input, shape, *affine, eps = by_name(func, args[:5], kwargs).values()
    shape = tuple(shape)
    func(probe(input), shape, *(None if t is None else probe(t) for t in affine), eps)  # torch judges shapes
    if not isinstance(input, ShardedTensor):
        return cast(Tensor, func(input, shape, *map(unsharded, affine), eps))
    samples = [None if t is None else torch.empty(1, dtype=t.dtype, device=t.device) for t in affine]
    out_dtype = func(input.anchor.detach().reshape(0, 1), (1,), *samples, eps).dtype  # and dtypes
    dims = tuple(range(input.ndim - len(shape), input.ndim))
    if not input.metadata().is_cut(dims):

        def local(tensor: Tensor, *affine: Tensor | None) -> Tensor:
            if tensor.numel():
                return cast(Tensor, func(tensor, shape, *affine, eps))
            empty = (None if t is None else nothing_of(t) for t in affine)
            return cast(Tensor, func(tensor.reshape(0, 0), (0,), *empty, eps)).reshape(tensor.shape)

        return cast(Tensor, elementwise(local, (input, *affine), {}))
    result: Any = _widen(input, out_dtype)
    if func is F.layer_norm:
        result = result - result.mean(dims, keepdim=True)
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    result = result * (result.square().mean(dims, keepdim=True) + eps).rsqrt()
    result = result if affine[0] is None else result * affine[0]
    result = result if affine[-1] is None or len(affine) < 2 else result + affine[-1]
    return cast(Tensor, result.to(out_dtype))


@rule(F.dropout, torch.dropout, takes="input p training inplace")
def _dropout(func: Any, sharded: ShardedTensor, p: Any, training: Any, inplace: Any) -> ShardedTensor:
    p = 0.5 if p is None else p
    if not 0 <= p <= 1:
        raise ShardingError(f"{here()}: dropout needs a probability p in [0, 1], found {p}")
    if training is False or p == 0:
        return sharded
    if inplace and sharded.requires_grad and sharded.is_leaf and torch.is_grad_enabled():
        raise RuntimeError("a leaf that requires grad is used in an in-place operation: dropout")
    seed = shared_seed(sharded.process_group)
    factors = []
    for tensor, box in zip(sharded.tensors, sharded.boxes, strict=True):
        mask = bernoulli(box, shape=sharded.metadata().size, seed=seed, p=1 - p, device=tensor.device)
        factors.append(mask.to(tensor.dtype).div_(1 - p) if p < 1 else mask.to(tensor.dtype))
    factor: Any = sharded.with_tensors(factors, anchor=sharded.anchor.new_empty(0))
    return cast(ShardedTensor, sharded.mul_(factor) if inplace else sharded * factor)


def _loss_arguments(func: Any, args: Args, kwargs: Kwargs) -> tuple[dict[str, Any], str]:
    """Return the arguments by name with `reduction="none"`, and the requested reduction."""
    arguments = by_name(func, args, kwargs)
    reduction = arguments["reduction"]
    deprecated = any(arguments.get(name) is not None for name in ("size_average", "reduce"))
    reductions = ("none", "mean", "sum", "batchmean")[: 4 if func is F.kl_div else 3]
    if deprecated or reduction not in reductions:
        refuse(func, args, kwargs)
    return {**arguments, "reduction": "none"}, reduction


@handles(
    *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.kl_div, F.poisson_nll_loss),
    *(F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.soft_margin_loss),
)
def _loss(func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """Compute a loss of every element. Collective, unless nothing is reduced."""
    arguments, reduction = _loss_arguments(func, args, kwargs)
    if reduction == "none":
        return cast(Tensor, elementwise(func, (), arguments))
    losses = func(**arguments)  # which may fail on one rank: it must not keep the others waiting here
    if reduction == "batchmean":
        return cast(Tensor, losses.sum() / (losses.shape[0] if losses.ndim else 1))
    return cast(Tensor, losses.mean() if reduction == "mean" else losses.sum())


@handles(F.cross_entropy, F.nll_loss)
def _cross_entropy(func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """Compute a loss of every row; a mean is weighted, as torch's. Collective, unless nothing is reduced."""
    arguments, reduction = _loss_arguments(func, args, kwargs)
    if reduction == "none":
        return _row_losses(func, arguments)
    losses = func(**arguments)
    if reduction == "sum":
        return cast(Tensor, losses.sum())
    input, target = arguments["input"], arguments["target"]
    if target.is_floating_point():  # probabilities of classes
        return cast(Tensor, losses.mean())
    # Each row counts by the weight of its class: what the loss of log-probabilities of -1 is.
    with torch.no_grad():
        constant = input.map(lambda t: t.new_full((1,) * t.ndim, -1).expand(t.shape))
        names = ("target", "weight", "ignore_index")
        row_weights = F.nll_loss(constant, **{name: arguments[name] for name in names}, reduction="none")
    return cast(Tensor, losses.sum() / row_weights.sum())


def _row_losses(func: Any, arguments: dict[str, Any]) -> Tensor:
    input, target, weight = (arguments.pop(name) for name in ("input", "target", "weight"))
    sharded = [t for t in (input, target, weight) if isinstance(t, ShardedTensor)]
    if not isinstance(input, ShardedTensor) or isinstance(weight, ShardedTensor):
        reason = "the logits must be sharded, and weights of classes plain"
        hint = "pass full_tensor() of the target and weights, or shard the logits"
        refuse_case(func.__name__, *sharded, reason=reason, hint=hint)
    func(probe(input), probe(target), None if weight is None else probe(weight), **arguments)  # torch judges
    dim = min(1, input.ndim - 1)
    if input.metadata().is_cut((dim,)):
        refuse_cut(func, input, (dim,))
    input = _with_classes(input, dim)

    def drop_dim(values: tuple[int, ...]) -> tuple[int, ...]:
        return values[:dim] + values[dim + 1 :]

    metadata = input.metadata().map(
        drop_dim(input.metadata().size), lambda box: Box(drop_dim(box.offsets), drop_dim(box.sizes))
    )
    cut = input.metadata() if target.is_floating_point() else metadata
    targets = parts(target, leader=input, metadata=cut)
    losses = [
        func(tensor, part, weight, **arguments) if tensor.numel() else tied(tensor.sum(dim), [part])
        for tensor, part in zip(input.tensors, targets, strict=False)
    ]
    anchor = None if losses else tied(anchor_of(input), targets)
    return input.with_tensors(losses, metadata=metadata, anchor=anchor)


def _with_classes(logits: ShardedTensor, dim: int) -> ShardedTensor:
    """Drop shards without classes: these shards are empty, but their rows would not be."""
    metadata = logits.metadata()
    classes = metadata.size[dim]
    boxes = [shard.box if shard.shard_sizes[dim] == classes else None for shard in metadata.shards_metadata]
    if all(box is not None for box in boxes) or all(box is None for box in boxes):
        return logits
    return derive(logits, size=metadata.size, boxes=boxes, make=lambda tensor, number, box: tensor)
