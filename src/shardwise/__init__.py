"""Sharded training for PyTorch models too large for one device."""

from shardwise import torch_version  # isort: skip  # noqa: F401  # first: it says what is wrong with torch

from importlib import metadata

from shardwise.adapters import install, uninstall
from shardwise.comm.join import join
from shardwise.errors import CheckpointError, LifecycleError, RankMismatchError, ShardingError, ShardwiseError
from shardwise.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    GradientReductionHandle,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardPlacementResult,
    UnshardHandle,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from shardwise.graph.compile import compile
from shardwise.graph.inspect import inspect_graph
from shardwise.graph.step import compile_step
from shardwise.layout import Owned, RaggedShard
from shardwise.mesh import (
    DataParallelMeshDims,
    DataParallelMeshInfo,
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
)
from shardwise.optim import clip_grad_norm_
from shardwise.planner import plan
from shardwise.sharded_tensor.rows import ShardedParameter

try:
    __version__ = metadata.version("shardwise")
except metadata.PackageNotFoundError:  # source that nobody installed
    __version__ = "0+unknown"

__all__ = [
    "CPUOffloadPolicy",
    "CheckpointError",
    "DDPMeshInfo",
    "DataParallelMeshDims",
    "DataParallelMeshInfo",
    "FSDPMeshInfo",
    "FSDPModule",
    "GradientReductionHandle",
    "HSDPMeshInfo",
    "LifecycleError",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Owned",
    "RaggedShard",
    "RankMismatchError",
    "ShardPlacementResult",
    "ShardedParameter",
    "ShardingError",
    "ShardwiseError",
    "UnshardHandle",
    "clip_grad_norm_",
    "compile",
    "compile_step",
    "fully_shard",
    "inspect_graph",
    "install",
    "join",
    "plan",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "uninstall",
]
