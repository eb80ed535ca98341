"""Public names and where they are defined: `__init__.py` imports each when it is first asked for."""

from .adapters import install, uninstall
from .comm.join import join
from .comm.watch import watched_stages
from .errors import CheckpointError, LifecycleError, RankMismatchError, ShardingError, ShardwiseError
from .fsdp import (
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
from .graph.compile import compile
from .graph.inspect import inspect_graph
from .graph.step import compile_step
from .layout import Owned, RaggedShard
from .mesh import (
    DataParallelMeshDims,
    DataParallelMeshInfo,
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
)
from .optim import clip_grad_norm_
from .planner import plan
from .sharded_tensor.rows import ShardedParameter

__version__: str

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
    "watched_stages",
]
