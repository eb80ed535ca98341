"""Exported programs cut over ranks."""

from shardwise.tensor_parallel.rules import rule
from shardwise.tensor_parallel.styles import ColwiseParallel, RowwiseParallel
from shardwise.tensor_parallel.transform import tensor_parallel_transformation

__all__ = ["ColwiseParallel", "RowwiseParallel", "rule", "tensor_parallel_transformation"]
