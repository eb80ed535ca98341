"""`fully_shard` and the modules it shards: when parameters are gathered and freed."""

from shardwise.fsdp.finalization import GradientReductionHandle
from shardwise.fsdp.fully_shard import fully_shard
from shardwise.fsdp.lifecycle import TrainingState
from shardwise.fsdp.module import FSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx
from shardwise.fsdp.parameter import ShardPlacementResult
from shardwise.fsdp.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "GradientReductionHandle",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ShardPlacementResult",
    "TrainingState",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
