"""Sharded tensors in torch's distributed checkpoints and state-dict functions.

Every rank writes and reads its own boxes, so a checkpoint can be read with any other cut, number of ranks or
kind of tensor. Boxes without elements are left out; if the whole tensor has no elements, one rank writes it,
so that checkpoints list it.

Once this module is imported, `torch.distributed.checkpoint.state_dict` gathers and cuts sharded tensors as it
does DTensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from shardwise._compat.dtensors import extend_state_dict_helpers
from shardwise.errors import ShardingError, here
from shardwise.layout import Box
from shardwise.sharded_tensor.ops.operands import within
from shardwise.sharded_tensor.tensor import ShardedTensor


def chunks(boxes: Sequence[Box], size: torch.Size, *, is_first: bool) -> list[ChunkStorageMetadata]:
    """List the chunks that a rank with `boxes` of a tensor of `size` stores; one rank sets `is_first`."""
    if not size.numel():
        stored = [Box.whole(size)] if is_first else []
    else:
        stored = [box for box in boxes if not box.is_empty]
    return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in stored]


def write_items(
    name: str, parts: Sequence[ChunkStorageMetadata], size: torch.Size, *, like: Tensor
) -> list[WriteItem]:
    """List the write items of `parts` of the tensor `name`, with the dtype and layout of `like`."""
    properties = TensorProperties.create_from_tensor(like)
    data = [TensorWriteData(chunk=part, properties=properties, size=size) for part in parts]
    return [WriteItem(MetadataIndex(name, d.chunk.offsets), WriteItemType.SHARD, tensor_data=d) for d in data]


def _write_items(sharded: ShardedTensor, name: str, value: Any) -> list[WriteItem]:
    return write_items(name, _chunks(sharded), sharded.metadata().size, like=sharded.anchor.detach())


def _chunks(sharded: ShardedTensor) -> list[ChunkStorageMetadata]:
    """List the chunks that this rank writes and reads; the first holder has that of an empty tensor."""
    metadata = sharded.metadata()
    is_first = metadata.shards_metadata[0].rank == dist.get_rank()
    return chunks(sharded.boxes, metadata.size, is_first=is_first)


def _shard_at(sharded: ShardedTensor, index: MetadataIndex) -> Tensor:
    if sharded.metadata().size.numel() == 0:
        return sharded.anchor.detach().new_empty(sharded.metadata().size)
    for shard in sharded.local_shards():
        if index.offset is not None and tuple(index.offset) == shard.box.offsets and not shard.box.is_empty:
            return shard.tensor.detach()
    raise ShardingError(
        f"{here()}: expected a shard at {index.offset} of a tensor of shape {tuple(sharded.metadata().size)},"
        f" found {sharded.boxes}"
    )


def _cut_like(sharded: ShardedTensor, whole: Tensor) -> Tensor:
    """Cut `whole`, which every rank has, like `sharded`; `load_state_dict` refuses another shape."""
    if whole.shape != sharded.metadata().size:
        return whole
    tensors = [within(whole, box, size=whole.shape).clone() for box in sharded.boxes]
    return sharded.with_tensors(tensors, anchor=sharded.anchor.detach().to(whole))


ShardedTensor.__create_write_items__ = _write_items
ShardedTensor.__create_chunk_list__ = _chunks
ShardedTensor.__get_tensor_shard__ = _shard_at
extend_state_dict_helpers(ShardedTensor, cut=_cut_like)
