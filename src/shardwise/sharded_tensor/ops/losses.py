"""Losses of sharded tensors: functions of every element, or of every row, and their mean or sum.

With `reduction="none"` they are local and cut as their input; a mean or sum is a plain tensor, after
all-reduces of one number. Cross-entropy takes logits cut along any dims but that of the classes, as where
every rank has rows of its own of a batch.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.layout import Box
from shardwise.sharded_tensor.autograd import tied
from shardwise.sharded_tensor.ops.arguments import by_name, probe
from shardwise.sharded_tensor.ops.elementwise import elementwise
from shardwise.sharded_tensor.ops.operands import anchor_of, parts
from shardwise.sharded_tensor.ops.reduce import is_cut, refuse_cut
from shardwise.sharded_tensor.ops.shape import derived
from shardwise.sharded_tensor.refuse import refuse, refuse_case
from shardwise.sharded_tensor.registry import handles
from shardwise.sharded_tensor.tensor import ShardedTensor


def _given(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the arguments by name with `reduction="none"`, and the reduction that was asked for."""
    given = by_name(func, args, kwargs)
    reduction = given["reduction"]
    deprecated = any(given.get(name) is not None for name in ("size_average", "reduce"))
    known = ("none", "mean", "sum", "batchmean")[: 4 if func is F.kl_div else 3]
    if deprecated or reduction not in known:
        refuse(func, args, kwargs)
    return {**given, "reduction": "none"}, reduction


@handles(
    *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.kl_div, F.poisson_nll_loss),
    *(F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.soft_margin_loss),
)
def _loss(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Compute a loss of every element. Collective, unless nothing is reduced."""
    given, reduction = _given(func, args, kwargs)
    if reduction == "none":
        return cast(Tensor, elementwise(func, (), given))
    losses = func(**given)  # which may fail on one rank: it must not keep the others waiting here
    if reduction == "batchmean":
        return cast(Tensor, losses.sum() / (losses.shape[0] if losses.ndim else 1))
    return cast(Tensor, losses.mean() if reduction == "mean" else losses.sum())


@handles(F.cross_entropy, F.nll_loss)
def _cross_entropy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Compute a loss of every row; a mean is weighted, as torch's. Collective, unless nothing is reduced."""
    given, reduction = _given(func, args, kwargs)
    if reduction == "none":
        return _rows(func, given)
    losses = func(**given)
    if reduction == "sum":
        return cast(Tensor, losses.sum())
    input, target = given["input"], given["target"]
    if target.is_floating_point():  # probabilities of classes
        return cast(Tensor, losses.mean())
    # Each row counts by the weight of its class: what the loss of log-probabilities of -1 is.
    with torch.no_grad():
        flat = input.map(lambda t: t.new_full((1,) * t.ndim, -1).expand(t.shape))
        names = ("target", "weight", "ignore_index")
        counted = F.nll_loss(flat, **{name: given[name] for name in names}, reduction="none")
    return cast(Tensor, losses.sum() / counted.sum())


def _rows(func: Any, given: dict[str, Any]) -> Tensor:
    input, target, weight = (given.pop(name) for name in ("input", "target", "weight"))
    sharded = [t for t in (input, target, weight) if isinstance(t, ShardedTensor)]
    if not isinstance(input, ShardedTensor) or isinstance(weight, ShardedTensor):
        refuse_case(
            func.__name__,
            *sharded,
            why="the logits must be sharded, and weights of classes plain",
            instead="pass full_tensor() of the target and weights, or shard the logits",
        )
    func(probe(input), probe(target), None if weight is None else probe(weight), **given)  # torch judges
    dim = min(1, input.ndim - 1)
    if is_cut(input, (dim,)):
        refuse_cut(func, input, (dim,))
    input = _with_classes(input, dim)

    def row(values: tuple[int, ...]) -> tuple[int, ...]:
        return values[:dim] + values[dim + 1 :]

    size = input.metadata().size
    metadata = input.metadata().map(row(tuple(size)), lambda box: Box(row(box.offsets), row(box.sizes)))
    alike = input.metadata() if target.is_floating_point() else metadata
    targets = parts(target, leader=input, metadata=alike)
    made = [
        func(tensor, piece, weight, **given) if tensor.numel() else tied(tensor.sum(dim), [piece])
        for tensor, piece in zip(input.tensors, targets, strict=False)
    ]
    anchor = None if made else tied(anchor_of(input), targets)
    return input.with_tensors(made, metadata=metadata, anchor=anchor)


def _with_classes(logits: ShardedTensor, dim: int) -> ShardedTensor:
    """Drop shards that have no classes: such a shard is empty, but its rows would not be."""
    metadata = logits.metadata()
    classes = metadata.size[dim]
    boxes = [shard.box if shard.shard_sizes[dim] == classes else None for shard in metadata.shards_metadata]
    if all(box is not None for box in boxes) or all(box is None for box in boxes):
        return logits
    return derived(logits, size=metadata.size, boxes=boxes, make=lambda tensor, number, box: tensor)
