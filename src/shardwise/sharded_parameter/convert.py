"""Row ranges to whole tensors, to DTensors, and to the entries of torch's distributed checkpoints."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardwise import _compat
from shardwise.errors import ShardingError, here
from shardwise.layout import Box, EvenShard
from shardwise.sharded_parameter.piece import Piece


@torch.no_grad()
def full_tensor(local: Tensor, piece: Piece) -> Tensor:
    """The whole tensor of which every rank gives its rows. Collective over `piece.axes`."""
    boxes = piece.boxes
    largest = max(box.numel for box in boxes)
    gathered = local.new_zeros(largest)
    gathered[: local.numel()].copy_(local.reshape(-1))
    for group in piece.groups:
        wider = local.new_empty(group.size() * gathered.numel())
        _compat.all_gather_single(wider, gathered, group, async_op=False)
        gathered = wider
    parts = gathered.view(len(boxes), largest)
    ends = [max(end, 0) for box in boxes for end in box.ends[:1]]
    shape = (max(ends), *boxes[0].sizes[1:])
    whole = local.new_empty(shape)
    for part, box in zip(parts, boxes, strict=True):
        if box.numel:
            whole.narrow(0, box.offsets[0], box.sizes[0]).copy_(part[: box.numel].view(box.sizes))
    if piece.tensor_parallel is None:
        return whole.view(piece.shape)
    return _compat.dtensor(whole, piece.tensor_parallel).full_tensor()


@torch.no_grad()
def to_dtensor(local: Tensor, piece: Piece, mesh: DeviceMesh | None) -> DTensor:
    """Rows wherever they lie to even chunks of dim 0. Collective over the piece's one group.

    Both sides hold row ranges, so who sends what to whom is the intersections of intervals, and one
    all-to-all of flat pieces moves each row at most once.
    """
    group = piece.group
    if piece.tensor_parallel is not None or len(piece.groups) > 1:
        raise ShardingError(
            f"{here()}: only rows cut over one mesh axis convert to a DTensor, got {piece}; use full_tensor()"
        )
    if mesh is None:
        ranks = [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)
        mesh = (
            DeviceMesh.from_group(group, local.device.type)
            if group is not None
            else DeviceMesh(local.device.type, ranks)
        )
    even = EvenShard(0)
    shape = tuple(piece.shape)
    targets = [even.box(shape, rank=rank, ranks=piece.ranks) for rank in range(piece.ranks)]
    mine = targets[piece.rank]
    spec = _compat.dtensor_spec(mesh, [Shard(0)], shape=piece.shape, dtype=local.dtype)
    if group is None:
        return _compat.dtensor(local.clone(), spec)
    send = [_overlap(piece.rows, target) for target in targets]
    receive = [_overlap(mine, source) for source in piece.boxes]
    chunk = local.new_empty(mine.sizes)
    dist.all_to_all_single(chunk.view(-1), local.reshape(-1).contiguous(), receive, send, group=group)
    return _compat.dtensor(chunk, spec)


def _overlap(a: Box, b: Box) -> int:
    common = a.intersect(b)
    return 0 if common is None else common.numel


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(piece.box.offsets), torch.Size(piece.box.sizes))


def chunks(piece: Piece) -> list[ChunkStorageMetadata]:
    """What this rank reads from a checkpoint: nothing where it holds no rows."""
    return [] if piece.box.is_empty else [_chunk(piece)]


def write_items(name: str, local: Tensor, piece: Piece) -> list[WriteItem]:
    """What this rank writes to a checkpoint."""
    if piece.box.is_empty:
        return []
    chunk = _chunk(piece)
    data = TensorWriteData(chunk, TensorProperties.create_from_tensor(local), piece.shape)
    return [WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]
