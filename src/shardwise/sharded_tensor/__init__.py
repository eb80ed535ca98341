"""One logical tensor in boxes on any ranks."""

from shardwise.sharded_tensor import ops as ops  # registers what operations do
from shardwise.sharded_tensor.construct import (
    empty,
    full,
    init_from_local_shards,
    init_from_local_shards_and_global_metadata,
    init_from_local_tensor,
    ones,
    rand,
    randn,
    shard_tensor,
    zeros,
)
from shardwise.sharded_tensor.context import load_with_process_group
from shardwise.sharded_tensor.metadata import (
    RemoteDevice,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
)
from shardwise.sharded_tensor.registry import custom_sharded_op_impl
from shardwise.sharded_tensor.shard import Shard
from shardwise.sharded_tensor.spec import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    GridShardingSpec,
    RaggedShardingSpec,
    ShardingSpec,
    infer_sharding_spec,
)
from shardwise.sharded_tensor.tensor import ShardedTensor

__all__ = [
    "ChunkShardingSpec",
    "EnumerableShardingSpec",
    "GridShardingSpec",
    "RaggedShardingSpec",
    "RemoteDevice",
    "Shard",
    "ShardMetadata",
    "ShardedTensor",
    "ShardedTensorMetadata",
    "ShardingSpec",
    "TensorProperties",
    "custom_sharded_op_impl",
    "empty",
    "full",
    "infer_sharding_spec",
    "init_from_local_shards",
    "init_from_local_shards_and_global_metadata",
    "init_from_local_tensor",
    "load_with_process_group",
    "ones",
    "rand",
    "randn",
    "shard_tensor",
    "zeros",
]
