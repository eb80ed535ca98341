"""Pickling: shards with the metadata of the whole tensor; the process group comes from the context.

A process group cannot be pickled. A pickled sharded tensor records its rank and the number of ranks. When
loaded, it takes the group of the innermost `load_with_process_group`, or the default group.

A pickle can run any code when it is loaded. This library itself never loads one: checkpoints use
`torch.distributed.checkpoint` or safetensors files, and messages of peers are text and tensor bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch.distributed as dist

from shardwise.errors import ShardingError, here
from shardwise.sharded_tensor.group import group_or_default
from shardwise.sharded_tensor.metadata import Shard, ShardedTensorMetadata
from shardwise.sharded_tensor.spec import ShardingSpec
from shardwise.sharded_tensor.tensor import ShardedTensor

_group: ContextVar[dist.ProcessGroup | None] = ContextVar("shardwise_load_group", default=None)


@contextmanager
def load_with_process_group(process_group: dist.ProcessGroup | None) -> Iterator[dist.ProcessGroup | None]:
    """Load sharded tensors that the block unpickles into `process_group`.

    It must have the same size, and give this process the same rank, as the group of the pickled tensor.
    """
    token = _group.set(process_group)
    try:
        yield process_group
    finally:
        _group.reset(token)


def _reduce(sharded: ShardedTensor, protocol: Any) -> tuple[Any, ...]:
    """Return the function and arguments with which `pickle` rebuilds a sharded tensor."""
    group = sharded.process_group
    shards = [(shard.tensor.detach(), shard.metadata) for shard in sharded.local_shards()]
    is_parameter = bool(getattr(sharded, "_is_param", False))
    ranks = (group.rank(), group.size(), dist.get_rank(), dist.get_world_size())
    return _rebuild, (shards, sharded.metadata(), sharded._spec, ranks, is_parameter)


ShardedTensor.__reduce_ex__ = _reduce  # type: ignore[method-assign, assignment]


def _rebuild(
    shards: list[tuple[Any, Any]],
    metadata: ShardedTensorMetadata,
    spec: ShardingSpec | None,
    origin: tuple[int, int, int, int],
    is_parameter: bool,
) -> ShardedTensor:
    group = group_or_default(_group.get())
    ranks = (group.rank(), group.size(), dist.get_rank(), dist.get_world_size())
    if ranks != origin:
        raise ShardingError(
            f"{here()}: a sharded tensor pickled by rank {origin[0]} of a group of {origin[1]} (global rank"
            f" {origin[2]} of {origin[3]}) cannot be loaded by rank {ranks[0]} of {ranks[1]} (global"
            f" {ranks[2]} of {ranks[3]}); load it on the same rank within load_with_process_group(...), or"
            " save it with torch.distributed.checkpoint, which loads into any world size"
        )
    local_shards = [Shard(tensor, place) for tensor, place in shards]
    sharded = ShardedTensor.wrap(local_shards, metadata, process_group=group, sharding_spec=spec)
    sharded.requires_grad_(metadata.tensor_properties.requires_grad)
    if is_parameter:
        sharded._is_param = True
    return sharded
