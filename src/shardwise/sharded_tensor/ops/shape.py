"""Other shapes of the same elements: permuted dims, reshapes, expansions. No communication.

Every shard becomes a shard of the result on the same rank: the operation's result for its tensor, a view if
torch returns one. So in-place operations on the result write the original, as in torch.

A reshape needs every shard's box to stay a box (`layout.regroup`): dims may merge if the shards have all of
them but the first whole, or one element of the first. If a box does not stay one, every rank raises
ShardingError, which names a cut that works. Arguments that torch refuses raise torch's errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise import _compat
from shardwise.layout import Box
from shardwise.layout.regroup import expand_box, reshape_boxes
from shardwise.sharded_tensor.autograd import nothing_of
from shardwise.sharded_tensor.metadata import ShardMetadata
from shardwise.sharded_tensor.ops.operands import functions, probe
from shardwise.sharded_tensor.refuse import refuse_case
from shardwise.sharded_tensor.registry import Args, Kwargs, handles
from shardwise.sharded_tensor.spec import ChunkShardingSpec
from shardwise.sharded_tensor.tensor import ShardedTensor

_T: Any = Tensor


def split_operand(args: Args, kwargs: Kwargs) -> tuple[Any, Args, Kwargs]:
    if args:
        return args[0], args[1:], kwargs
    rest = dict(kwargs)
    return rest.pop("tensor" if "tensor" in rest else "input"), (), rest


def _split_with_shapes(args: Args, kwargs: Kwargs) -> tuple[Any, Args, Kwargs]:
    """Return the first operand and the other arguments, with meta tensors for sharded ones among these."""
    tensor, rest, kwargs = split_operand(args, kwargs)
    return tensor, *_compat.pytree.tree_map_only(ShardedTensor, probe, (rest, kwargs))


def derive(
    sharded: ShardedTensor,
    *,
    size: Sequence[int],
    boxes: Sequence[Box | None],
    make: Callable[[Tensor, int, Box], Tensor],
) -> ShardedTensor:
    """Return a tensor of `size` made shard by shard. Local; every rank passes the same size and boxes.

    `boxes` has the box in the result of every shard of all ranks; None leaves the shard out. `make` returns
    the new tensor, from that of a local shard, the shard's number and its new box.
    """
    ends = list(map(nothing_of, sharded._ends or ([] if sharded._shards else [sharded.anchor])))
    rank, local = dist.get_rank(), iter(sharded.views)
    shards: list[ShardMetadata] = []
    tensors: list[Tensor] = []
    for number, (shard, box) in enumerate(zip(sharded.metadata().shards_metadata, boxes, strict=True)):
        tensor = next(local) if shard.rank == rank else None
        if box is not None:
            shards.append(ShardMetadata(box.offsets, box.sizes, shard.placement))
        if tensor is not None and box is not None:
            tensors.append(make(tensor, number, box))
        elif tensor is not None:
            ends.append(nothing_of(tensor))
    return assemble(sharded, shards, tensors, size=size, ends=ends)


def assemble(
    like: ShardedTensor,
    shards: list[ShardMetadata],
    tensors: list[Tensor],
    *,
    size: Sequence[int],
    ends: Sequence[Tensor],
) -> ShardedTensor:
    """Return a tensor of this rank's `tensors`, cut as all ranks' `shards`, over the group of `like`.

    `ends` are empty tensors to which the result must be connected in the autograd graph: views of shards
    left out, or of anchors. Other ranks' results may depend on earlier collectives, whose backward needs this
    rank. Operations that write the result write them.
    """
    metadata = replace(like.metadata(), shards_metadata=shards, size=torch.Size(size))
    if len(size) != len(like.metadata().size):
        metadata = metadata.with_properties(memory_format=torch.contiguous_format)
    anchor = None if tensors else nothing_of(*ends)
    result = like.with_tensors(tensors, metadata=metadata, anchor=anchor)
    result._ends = ends
    return result


@contextmanager
def writable(*targets: ShardedTensor) -> Iterator[None]:
    """Let `tensors` be `views` inside, for an operation that writes these tensors."""
    for target in targets:
        target.ask_history()
    parts = [(target, target._ends) for target in targets if target._ends]
    try:
        for target, _ in parts:
            target._anchor, target._ends = target.end, ()
        yield
    finally:
        for target, ends in parts:
            target._ends = ends


@handles(*functions("transpose swapaxes swapdims t permute movedim moveaxis"), _T.T.__get__, _T.mT.__get__)
def _permute(func: Any, args: Args, kwargs: Kwargs) -> Any:
    sharded, rest, kwargs = split_operand(args, kwargs)
    # Torch itself says where each dim goes: to where its size does, if no two have the same.
    moved = func(torch.empty([*range(2, 2 + sharded.ndim)], device="meta"), *rest, **kwargs)

    def permuted(values: Sequence[int]) -> tuple[int, ...]:
        return tuple(values[number - 2] for number in moved.shape)

    order, old = permuted(range(sharded.ndim)), [shard.box for shard in sharded.metadata().shards_metadata]
    boxes = [Box(permuted(box.offsets), permuted(box.sizes)) for box in old]
    size = permuted(sharded.metadata().size)
    result = derive(sharded, size=size, boxes=boxes, make=lambda tensor, *_: tensor.permute(order))
    result._metadata = result.metadata().with_properties(memory_format=torch.contiguous_format)
    return result


@handles(*functions("reshape flatten unflatten ravel squeeze unsqueeze view view_as reshape_as"))
def _reshape(func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    sharded, rest, kwargs = _split_with_shapes(args, kwargs)
    if not isinstance(sharded, ShardedTensor):
        return cast(Tensor, func(sharded, *rest, **kwargs))
    if any(isinstance(value, torch.dtype) for value in [*rest, *kwargs.values()]):
        reason = "the bytes of a shard in another dtype are no part of the whole tensor's"
        hint = "to(dtype) converts values; local_shards() has the tensors"
        refuse_case("view(dtype)", sharded, reason=reason, hint=hint)
    size = func(probe(sharded), *rest, **kwargs).shape
    return reshaped(sharded, size, name=func.__name__, view=func in (_T.view, _T.view_as))


def reshaped(sharded: ShardedTensor, size: Sequence[int], *, name: str, view: bool = False) -> ShardedTensor:
    """Return the elements in dims of `size`; with `view`, raise where a shard's memory allows no view."""
    metadata = sharded.metadata()
    sources = [shard.box for shard in metadata.shards_metadata]
    boxes = reshape_boxes(sources, old=metadata.size, new=size)
    for source, box in zip(sources, boxes, strict=True):
        if box is None and not source.is_empty:
            _refuse_reshape(name, sharded, size, source)

    def make(tensor: Tensor, number: int, box: Box) -> Tensor:
        if not view:
            return tensor.reshape(box.sizes)
        try:
            return tensor.view(box.sizes)
        except RuntimeError:
            found = f"a shard of size {tuple(tensor.shape)} and stride {tensor.stride()}"
            reason, hint = (
                f"{found} has no view of size {box.sizes}",
                "use reshape(), which copies where it must",
            )
            refuse_case(name, sharded, reason=reason, hint=hint)

    return derive(sharded, size=size, boxes=boxes, make=make)


def _refuse_reshape(name: str, sharded: ShardedTensor, size: Sequence[int], broken: Box) -> NoReturn:
    old = sharded.metadata().size
    hint = "use full_tensor(), or a cut by rows whose numbers fit both shapes"
    placements = [shard.placement for shard in sharded.metadata().shards_metadata]
    for dim in range(len(old)):
        spec = ChunkShardingSpec(dim, placements)
        cut = spec.build_metadata(old, sharded.metadata().tensor_properties)
        boxes = [shard.box for shard in cut.shards_metadata]
        fit = reshape_boxes(boxes, old=old, new=size)
        if all(box is not None or source.is_empty for source, box in zip(boxes, fit, strict=True)):
            hint = f"reshard to ChunkShardingSpec(dim={dim}, placements={placements}) before"
            break
    reason = f"the shard at {broken.offsets} of size {broken.sizes} does not stay one box"
    refuse_case(f"{name} to {tuple(size)}", sharded, reason=reason, hint=hint)


@handles(*functions("expand broadcast_to expand_as"))
def _expand(func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    tensor, rest, kwargs = _split_with_shapes(args, kwargs)
    if not isinstance(tensor, ShardedTensor):
        return cast(Tensor, func(tensor, *rest, **kwargs))
    old, size = tensor.metadata().size, func(probe(tensor), *rest, **kwargs).shape
    boxes = [expand_box(shard.box, old=old, new=size) for shard in tensor.metadata().shards_metadata]
    return derive(tensor, size=size, boxes=boxes, make=lambda local, number, box: local.expand(box.sizes))
