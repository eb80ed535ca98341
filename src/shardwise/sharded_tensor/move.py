"""Moves of a sharded tensor's values to other ranks, boxes and devices."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.agree import Agreement
from shardwise.errors import ShardingError, here
from shardwise.layout import Box, transfer
from shardwise.sharded_tensor import autograd, failure
from shardwise.sharded_tensor.check import propose, tell_all
from shardwise.sharded_tensor.group import is_outside, with_ranks
from shardwise.sharded_tensor.metadata import ShardedTensorMetadata
from shardwise.sharded_tensor.registry import does
from shardwise.sharded_tensor.spec import ShardingSpec, spec_of
from shardwise.sharded_tensor.tensor import ShardedTensor, device_of


def boxes_of(metadata: ShardedTensorMetadata, group: dist.ProcessGroup) -> list[list[Box]]:
    return metadata.boxes_by_rank(dist.get_process_group_ranks(group))


@does(ShardedTensor.reshard)
def _reshard(sharded: ShardedTensor, spec: ShardingSpec) -> ShardedTensor:
    source = sharded.metadata()
    moved = move_to(
        sharded,
        lambda: spec_of(spec).build_metadata(source.size, source.tensor_properties),
        subject="the reshard",
    )
    moved._spec = spec_of(spec)
    return moved


def move_to(
    sharded: ShardedTensor, build: Callable[[], ShardedTensorMetadata], *, subject: str
) -> ShardedTensor:
    """Move the values into the boxes that `build` returns. Collective; differentiable."""
    source, group = sharded.metadata(), sharded.process_group

    def build_target() -> ShardedTensorMetadata:
        target = with_ranks(build())
        if target.size != source.size:
            raise ShardingError(f"the spec gives shape {tuple(target.size)}, expected {tuple(source.size)}")
        return target

    if is_outside(group):
        return sharded.with_tensors([], metadata=build_target(), anchor=sharded.anchor)
    ranks = dist.get_process_group_ranks(group)

    def plan_move() -> tuple[tuple[ShardedTensorMetadata, autograd.Route], str]:
        failure.raise_here(failure.failures_of(sharded))
        target = build_target()
        cuts = [_Cut(describe(metadata), metadata) for metadata in (source, target)]
        text, route = _plan(*cuts, tuple(ranks), group.rank())
        return (target, route), text

    (target, route), agreement = propose(plan_move, group=group, subject=subject)
    with agreement:
        if source.cut_as(target):
            tensors, anchor = [tensor.view_as(tensor) for tensor in sharded.views], sharded.anchor.view(-1)
        else:
            like = target.tensor_properties.memory_format
            tensors, anchor = autograd.moved(
                sharded.tensors, route, group=group, anchor=sharded.anchor, like=like, agreement=agreement
            )
    places = [shard.placement for shard in target.held_by(dist.get_rank()) if shard.placement]
    tensors = [tensor.to(place.device()) for tensor, place in zip(tensors, places, strict=True)]
    moved = sharded.with_tensors(tensors, metadata=target, anchor=anchor.to(device_of(tensors, target)))
    if source.cut_as(target):
        moved._ends = [end.view_as(end) for end in sharded._ends]
    return moved


@dataclass(frozen=True)
class _Cut:
    """Metadata as the key of a plan; compared by its text."""

    text: str
    metadata: ShardedTensorMetadata = field(compare=False, repr=False)


@lru_cache(maxsize=64)
def _plan(source: _Cut, target: _Cut | None, ranks: tuple[int, ...], rank: int) -> tuple[str, autograd.Route]:
    """Describe a move and route `rank` of the group of global `ranks`; `target` None: the whole on each."""
    source_boxes = source.metadata.boxes_by_rank(ranks)
    if target is None:
        text, target_boxes = "the whole", [[Box.whole(source.metadata.size)] for _ in ranks]
    else:
        target.metadata.check(ranks)
        text, target_boxes = target.text, target.metadata.boxes_by_rank(ranks)
    messages = transfer(source_boxes, target_boxes, rank=rank)
    return f"{source.text}\nto\n{text}", (messages, source_boxes[rank], target_boxes[rank])


def describe(metadata: ShardedTensorMetadata) -> str:
    """Describe `metadata` completely; equal metadata give equal texts."""
    shards = [f"{s.shard_offsets}+{s.shard_sizes} on {s.placement}" for s in metadata.shards_metadata]
    return "\n".join([f"{tuple(metadata.size)} {metadata.tensor_properties.dtype}", *shards])


@does(ShardedTensor.full_tensor)
def _full_tensor(sharded: ShardedTensor) -> Tensor:
    source, group, rank = sharded.metadata(), sharded.process_group, sharded.process_group.rank()
    ranks = dist.get_process_group_ranks(group)
    plan, route = _plan(_Cut(describe(source), source), None, tuple(ranks), rank)
    text = failure.with_failures(plan, sharded)
    with Agreement(text, group=group, subject="the tensor to make whole") as agreement:
        boxes, anchor = source.boxes_by_rank(ranks), sharded.anchor
        (whole,), _ = autograd.moved(
            sharded.tensors, route, group=group, anchor=anchor, agreement=agreement, to_all=boxes
        )
    return whole


@does(ShardedTensor.gather)
@torch.no_grad()
def _gather(
    sharded: ShardedTensor,
    dst: int = 0,
    out: Tensor | None = None,
    enforce_dtype: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor | None:
    metadata, group = sharded.metadata(), sharded.process_group

    def check_arguments() -> tuple[int, str]:
        failure.raise_here(failure.failures_of(sharded))
        if not isinstance(dst, int) or not 0 <= dst < group.size():
            raise ShardingError(f"has dst {dst}, found no rank {dst} of a group of {group.size()}")
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise ShardingError(f"needs a torch.dtype, found dtype {dtype!r}")
        if out is None:
            return dst, str(dtype)
        if (rank := group.rank()) != dst:
            raise ShardingError(f"has an out on group rank {rank}, but dst is {dst}; pass out=None there")
        if not isinstance(out, Tensor) or out.shape != metadata.size:
            found = tuple(out.shape) if isinstance(out, Tensor) else repr(out)
            raise ShardingError(f"needs an out of shape {tuple(metadata.size)}, found {found}")
        expected = dtype or metadata.tensor_properties.dtype
        if out.dtype != expected and not enforce_dtype:
            raise ShardingError(f"needs an out of {expected}, found {out.dtype}; pass dtype= on every rank")
        return dst, str(dtype)

    requests = tell_all("gather()", check_arguments, group=group, about=describe(metadata))
    if any(request != requests[0] for request in requests):
        dsts, dtypes = map(list, zip(*requests, strict=True))
        raise ShardingError(
            f"{here()}: gather() has dst {dsts} and dtype {dtypes} on the ranks; pass one dst and one"
            " dtype on all of them"
        )
    whole, wire = Box.whole(metadata.size), sharded.anchor if dtype is None else sharded.anchor.to(dtype)
    source_boxes, is_dst = boxes_of(metadata, group), group.rank() == dst
    if is_dst and out is None:
        out = torch.empty(whole.sizes, dtype=wire.dtype, device=wire.device)
    target_boxes = [[whole] if rank == dst else [] for rank in range(len(source_boxes))]
    target = [] if out is None else [out]
    autograd.fill(source_boxes, target_boxes, source=sharded.tensors, target=target, group=group, wire=wire)
    return out


@does(ShardedTensor.to)
def _to(sharded: ShardedTensor, *args: Any, **kwargs: Any) -> ShardedTensor:
    args = tuple(arg.anchor if isinstance(arg, ShardedTensor) else arg for arg in args)
    kwargs = {k: v.anchor if isinstance(v, ShardedTensor) else v for k, v in kwargs.items()}
    result = convert(sharded, Tensor.to, *args, **kwargs)
    old, new = sharded.metadata().tensor_properties, result.metadata().tensor_properties
    is_same = all(map(operator.is_, result.tracked, sharded.tracked))
    return sharded if is_same and new.memory_format is old.memory_format else result


def convert(
    sharded: ShardedTensor, function: Callable[..., Tensor], *args: Any, **options: Any
) -> ShardedTensor:
    """Apply `function` to every shard, for a tensor of the same cut: in other memory, or of another kind."""
    flat_options = {name: value for name, value in options.items() if name != "memory_format"}
    anchor = function(sharded.end, *args, **flat_options)
    tensors = [function(tensor, *args, **options) for tensor in sharded.views]
    metadata = sharded.metadata()
    if (memory_format := options.get("memory_format")) not in (None, torch.preserve_format):
        metadata = metadata.with_properties(memory_format=memory_format)
    if options.get("pin_memory"):
        metadata = metadata.with_properties(pin_memory=True)
    if anchor.device.type != sharded.device.type:
        # Without an index: each rank knows only its own, and the metadata is equal on all.
        metadata = metadata.placed(lambda place: place.on(anchor.device.type))
    result = sharded.with_tensors(tensors, metadata=metadata, anchor=anchor)
    result._ends = [function(end, *args, **flat_options) for end in sharded._ends]
    return result
