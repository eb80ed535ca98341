"""Entries of torch's distributed checkpoints for tensors in pieces.

Every rank writes and reads its own boxes, so that any other cut, number of ranks or kind of tensor reads what
was written. Boxes without elements are left out; of a tensor without elements one rank writes all, so that
checkpoints know it at all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from shardwise.layout import Box


def chunks(boxes: Sequence[Box], size: torch.Size, *, is_first: bool) -> list[ChunkStorageMetadata]:
    """List the chunks that a rank with `boxes` of a tensor of `size` stores; `is_first` on one rank."""
    if not size.numel():
        stored = [Box.whole(size)] if is_first else []
    else:
        stored = [box for box in boxes if not box.is_empty]
    return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in stored]


def write_items(
    name: str, parts: Sequence[ChunkStorageMetadata], size: torch.Size, *, like: Tensor
) -> list[WriteItem]:
    """List what a rank writes of the tensor `name`: `parts` of it, of the dtype and layout of `like`."""
    properties = TensorProperties.create_from_tensor(like)
    return [
        WriteItem(
            index=MetadataIndex(name, part.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=part, properties=properties, size=size),
        )
        for part in parts
    ]
