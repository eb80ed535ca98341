"""Shards of other processes by reference, over torch RPC."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.errors import ShardingError, here
from shardwise.sharded_tensor.metadata import ShardedTensorMetadata

if TYPE_CHECKING:
    from shardwise.sharded_tensor.tensor import ShardedTensor


def with_ranks(metadata: ShardedTensorMetadata) -> ShardedTensorMetadata:
    """The same shards, placements by a worker's name replaced by those of its rank. Local."""
    return metadata


def register_shards(sharded: ShardedTensor) -> None:
    """Make every rank's shards reachable from the others. Collective over the group."""
    raise ShardingError(f"{here()}: not built yet")


def remote_shards(sharded: ShardedTensor) -> dict[int, list[Any]]:
    """`ShardedTensor.remote_shards`."""
    raise ShardingError(f"{here()}: not built yet")
