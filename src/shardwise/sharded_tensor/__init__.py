"""One logical tensor in boxes on any ranks."""

from shardwise.sharded_tensor import dcp as dcp  # registers with torch's state-dict helpers
from shardwise.sharded_tensor import ops as ops  # registers the implementations of operations
from shardwise.sharded_tensor.base import ShardedTensorBase
from shardwise.sharded_tensor.construct import (
    empty,
    from_torch,
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
from shardwise.sharded_tensor.dtensor import from_dtensor, from_rows, to_dtensor, to_rows
from shardwise.sharded_tensor.metadata import (
    RemoteDevice,
    Shard,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
)
from shardwise.sharded_tensor.module import (
    Sharder,
    ShardingPlan,
    ShardingPlanner,
    collect_local_shard,
    named_params_with_sharded_tensor,
    pre_load_state_dict_hook,
    reshard_output,
    shard_module,
    shard_parameter,
    state_dict_hook,
)
from shardwise.sharded_tensor.pickling import load_with_process_group
from shardwise.sharded_tensor.refuse import custom_sharded_op_impl, custom_sharding_spec_op
from shardwise.sharded_tensor.rows import RowShard, ShardedParameter, ShardedRows
from shardwise.sharded_tensor.spec import (
    ChunkShardingSpec,
    DevicePlacementSpec,
    EnumerableShardingSpec,
    GridShardingSpec,
    PlacementSpec,
    RaggedShardingSpec,
    ShardingSpec,
    infer_sharding_spec,
)
from shardwise.sharded_tensor.tensor import ShardedTensor

__all__ = [
    "ChunkShardingSpec",
    "DevicePlacementSpec",
    "EnumerableShardingSpec",
    "GridShardingSpec",
    "PlacementSpec",
    "RaggedShardingSpec",
    "RemoteDevice",
    "RowShard",
    "Shard",
    "ShardMetadata",
    "ShardedParameter",
    "ShardedRows",
    "ShardedTensor",
    "ShardedTensorBase",
    "ShardedTensorMetadata",
    "Sharder",
    "ShardingPlan",
    "ShardingPlanner",
    "ShardingSpec",
    "TensorProperties",
    "collect_local_shard",
    "custom_sharded_op_impl",
    "custom_sharding_spec_op",
    "empty",
    "from_dtensor",
    "from_rows",
    "from_torch",
    "full",
    "infer_sharding_spec",
    "init_from_local_shards",
    "init_from_local_shards_and_global_metadata",
    "init_from_local_tensor",
    "load_with_process_group",
    "named_params_with_sharded_tensor",
    "ones",
    "pre_load_state_dict_hook",
    "rand",
    "randn",
    "reshard_output",
    "shard_module",
    "shard_parameter",
    "shard_tensor",
    "state_dict_hook",
    "to_dtensor",
    "to_rows",
    "zeros",
]
