"""Collectives over groups of parameters, with pluggable communication and allocation."""

from shardwise.comm.api import (
    AllGather,
    DefaultAllGather,
    DefaultReduceScatter,
    ProcessGroupAllocAllGather,
    ProcessGroupAllocReduceScatter,
    ReduceScatter,
)
from shardwise.comm.arithmetic import DivideFactors, divide_factors
from shardwise.comm.auto import AutoAllGather, AutoReduceScatter
from shardwise.comm.foreach import (
    AllGatherResult,
    ReduceResult,
    foreach_all_gather,
    foreach_all_gather_copy_out,
    foreach_reduce,
)
from shardwise.comm.gloo import GlooAllGather, GlooReduceScatter
from shardwise.comm.streams import CommStreams

__all__ = [
    "AllGather",
    "AllGatherResult",
    "AutoAllGather",
    "AutoReduceScatter",
    "CommStreams",
    "DefaultAllGather",
    "DefaultReduceScatter",
    "DivideFactors",
    "GlooAllGather",
    "GlooReduceScatter",
    "ProcessGroupAllocAllGather",
    "ProcessGroupAllocReduceScatter",
    "ReduceResult",
    "ReduceScatter",
    "divide_factors",
    "foreach_all_gather",
    "foreach_all_gather_copy_out",
    "foreach_reduce",
]
