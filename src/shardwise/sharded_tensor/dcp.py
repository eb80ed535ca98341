"""Entries of torch's distributed checkpoints: every rank writes and reads its own shards."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.metadata import TensorProperties as StoredProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from shardwise.errors import ShardingError, here
from shardwise.layout import Box

if TYPE_CHECKING:
    from shardwise.sharded_tensor.tensor import ShardedTensor


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))


def write_items(name: str, sharded: ShardedTensor) -> list[WriteItem]:
    """One item for each shard that has elements; a rank may have none."""
    size = sharded.metadata().size
    return [
        WriteItem(
            index=MetadataIndex(name, torch.Size(shard.box.offsets), index),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=_chunk(shard.box),
                properties=StoredProperties.create_from_tensor(shard.tensor.detach()),
                size=size,
            ),
        )
        for index, shard in enumerate(sharded.local_shards())
        if not shard.box.is_empty
    ]


def chunks(sharded: ShardedTensor) -> list[ChunkStorageMetadata]:
    """What this rank reads."""
    return [_chunk(box) for box in sharded.boxes if not box.is_empty]


def shard_at(sharded: ShardedTensor, index: MetadataIndex) -> Tensor:
    """The local shard that begins at the offset of `index`."""
    for shard in sharded.local_shards():
        if index.offset is not None and tuple(index.offset) == shard.box.offsets and not shard.box.is_empty:
            return shard.tensor.detach()
    raise ShardingError(
        f"{here()}: expected a shard at {index.offset} of a tensor of shape {tuple(sharded.metadata().size)},"
        f" found {sharded.boxes}"
    )
