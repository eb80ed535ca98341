"""A cross-entropy that never holds all logits.

It processes the rows of the head's weight in chunks. With N tokens, V rows of width H and C rows a chunk::

    forward     each chunk's logits [N, C]; keeps each token's largest logit and sum of exp so far
    backward    the chunk's logits again; its rows of the weight's gradient; its part of the input's

so N x C logits are alive, not four copies of N x V (compute dtype, float32, and the gradient of each).
One product computes a chunk's rows of the weight's gradient, as without chunks. If ranks hold different rows
of the weight, each processes its own, and three numbers a token are reduced.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardwise.errors import ShardingError, here
from shardwise.layout.placement import EvenShard

CHUNK_ELEMENTS = 1 << 25  # of logits: 128 MiB in float32
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
    chunk: int | None = None,
) -> Tensor:
    """Compute `F.cross_entropy(F.linear(hidden, weight, bias).float(), targets)` without all logits.

    Gradients are exact: the weight's is computed as without chunks, and that of `hidden` is summed over
    chunks in float32. Backward computes the logits again: a third more arithmetic than without chunks.

    Collective over the mesh axis that cuts `weight`, if one does: its ranks pass the same `hidden` and
    `targets`, and get the same gradient of `hidden`. Otherwise local. Call it in the forward of the module
    that owns `weight`, where `fully_shard` has gathered it.

    Args:
        hidden: [..., H] of a floating dtype, the compute dtype (under autocast, autocast's dtype is). Sums
            and the loss are float32, or wider.
        weight: [V, H] in the same dtype; a DTensor may be cut on dim 0 over one mesh axis, as by
            tensor parallelism, and be replicated on others.
        targets: integers [...], each from 0 to V - 1 or `ignore_index`; any other makes the loss nan.
        bias: [V], cut like `weight`.
        ignore_index: value of targets that count in neither loss nor gradients.
        reduction: the mean over the targets that count (nan if none does, with zero gradients), or the sum.
        chunk: rows of `weight` in a chunk; by default as many as make 2**25 logits.

    Raises:
        ShardingError: shapes, dtypes or placements that do not fit. In backward: `create_graph=True`.
    """
    device = hidden.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = _autocast(hidden, dtype), _autocast(weight, dtype)
        bias = None if bias is None else _autocast(bias, dtype)
    _check(hidden, weight, bias, targets, reduction, chunk)
    rows, first, group = weight, 0, None
    if isinstance(weight, DTensor):
        first, group = _cut(weight)
        rows = weight.to_local()
        bias = bias.to_local() if isinstance(bias, DTensor) else bias
    tokens = hidden.reshape(-1, hidden.shape[-1])
    total, count = _Sum.apply(  # type: ignore[no-untyped-call]
        tokens,
        rows,
        bias,
        targets.reshape(-1).long(),
        (len(weight), first, chunk or max(1, CHUNK_ELEMENTS // max(1, len(tokens))), ignore_index, group),
    )
    loss: Tensor = total / count if reduction == "mean" else total
    return loss


def _autocast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast as `F.linear` does under autocast: all floating dtypes but float64."""
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor


def _check(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, reduction: str, chunk: int | None
) -> None:
    wrong, dtypes = "", [x.dtype for x in (hidden, weight, bias) if x is not None]
    if weight.ndim != 2 or not hidden.ndim or hidden.shape[-1] != weight.shape[1] or not weight.numel():
        shapes = f"{list(hidden.shape)} and {list(weight.shape)}"
        wrong = f"expected hidden [..., H] and weight [V, H] with elements, found {shapes}"
    elif targets.shape != hidden.shape[:-1] or targets.dtype not in _INTEGERS:
        wrong = (
            f"expected integer targets {list(hidden.shape[:-1])}, found {targets.dtype} {list(targets.shape)}"
        )
    elif bias is not None and bias.shape != weight.shape[:1]:
        wrong = f"expected a bias of {weight.shape[0]}, found {list(bias.shape)}"
    elif len(set(dtypes)) > 1 or not hidden.is_floating_point():
        wrong = f"expected one floating dtype, found {dtypes} of hidden, weight and bias"
    elif isinstance(hidden, DTensor) or isinstance(targets, DTensor):
        wrong = (
            "hidden and targets are plain tensors, the same on all ranks that cut the weight; use to_local()"
        )
    elif isinstance(bias, DTensor) != isinstance(weight, DTensor) and bias is not None:
        wrong = "expected a bias that is cut as the weight"
    elif reduction not in ("mean", "sum") or not (chunk is None or (isinstance(chunk, int) and chunk > 0)):
        wrong = f"expected reduction 'mean' or 'sum' and chunk 1 or more, found {reduction!r} and {chunk}"
    if wrong:
        raise ShardingError(f"{here()}: linear_cross_entropy: {wrong}")


def _cut(weight: DTensor) -> tuple[int, dist.ProcessGroup | None]:
    """Return the first row that this rank holds, and the group over which rows are cut."""
    axes = [axis for axis, placement in enumerate(weight.placements) if placement != Replicate()]
    if not axes:
        return 0, None
    (axis, *extra) = axes
    if extra or weight.placements[axis] != Shard(0):
        raise ShardingError(
            f"{here()}: linear_cross_entropy: expected a weight cut on dim 0 over one mesh axis, found"
            f" {weight.placements}; redistribute it"
        )
    mesh = weight.device_mesh
    box = EvenShard().box(tuple(weight.shape), rank=mesh.get_local_rank(axis), ranks=mesh.size(axis))
    return box.offsets[0], mesh.get_group(axis)


def _chunks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, size: int
) -> Iterator[tuple[int, int, Tensor]]:
    """Yield the logits [N, rows] in float32 or wider, with the rows' begin and end."""
    for begin in range(0, len(weight), size):
        end = min(begin + size, len(weight))
        logits = F.linear(hidden, weight[begin:end], None if bias is None else bias[begin:end])
        yield begin, end, logits.to(torch.promote_types(logits.dtype, torch.float32))


def _rows_inside(targets: Tensor, begin: int, end: int) -> tuple[Tensor, Tensor]:
    """Return a mask of tokens whose target is in rows `begin` to `end`, and its row there; 0 for others."""
    inside = (targets >= begin) & (targets < end)
    return inside, (targets - begin).where(inside, 0)


def _finite(largest: Tensor) -> Tensor:
    """Return the offset to subtract from logits before exp: 0 where all so far are -inf."""
    return largest.where(largest > -torch.inf, 0)


class _Sum(torch.autograd.Function):
    """The sum of losses over the targets that count, and the number of these targets."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, spec: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor]:
        rows, first, size, ignored, group = spec
        wide = torch.promote_types(hidden.dtype, torch.float32)
        largest = hidden.new_full((len(hidden),), -torch.inf, dtype=wide)
        exps, at_target = torch.zeros_like(largest), torch.zeros_like(largest)
        for begin, end, logits in _chunks(hidden, weight, bias, size):
            maximum = torch.maximum(largest, logits.amax(1))
            inside, row = _rows_inside(targets - first, begin, end)
            at_target += logits.gather(1, row[:, None])[:, 0].where(inside, 0)
            shift = _finite(maximum)
            exps = exps * (largest - shift).exp() + logits.sub_(shift[:, None]).exp_().sum(1)
            largest = maximum
        if group is not None:
            own = largest.clone()
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
            sums = torch.stack([exps * (own - _finite(largest)).exp(), at_target])
            dist.all_reduce(sums, group=group)
            exps, at_target = sums
        log_sum = _finite(largest) + exps.log()
        valid = targets != ignored
        at_target.masked_fill_((targets < 0) | (targets >= rows), torch.nan)
        ctx.save_for_backward(hidden, weight, bias, targets, log_sum)
        ctx.spec = spec
        count = valid.sum()
        ctx.mark_non_differentiable(count)
        return (log_sum - at_target).where(valid, 0).sum(), count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise ShardingError(
                f"{here()}: linear_cross_entropy has first derivatives only; with create_graph=True compute"
                " F.cross_entropy of all logits"
            )
        hidden, weight, bias, targets, log_sum = ctx.saved_tensors
        _, first, size, ignored, group = ctx.spec
        factor = grad.to(log_sum.dtype).expand_as(log_sum).where(targets != ignored, 0)
        to_hidden = torch.zeros_like(hidden, dtype=log_sum.dtype) if ctx.needs_input_grad[0] else None
        to_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        to_bias = torch.empty_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        for begin, end, logits in _chunks(hidden, weight, bias, size):
            change = logits.sub_(log_sum[:, None]).exp_()
            inside, row = _rows_inside(targets - first, begin, end)
            change.scatter_add_(1, row[:, None], -inside.to(change.dtype)[:, None])
            change = change.mul_(factor[:, None]).to(hidden.dtype)
            if to_weight is not None:
                torch.mm(change.t(), hidden, out=to_weight[begin:end])
            if to_bias is not None:
                to_bias[begin:end] = change.sum(0)
            if to_hidden is not None:
                to_hidden += change @ weight[begin:end]
        if to_hidden is not None:
            if group is not None:
                dist.all_reduce(to_hidden, group=group)
            to_hidden = to_hidden.to(hidden.dtype)
        return to_hidden, to_weight, to_bias, None, None
