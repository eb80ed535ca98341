"""The memory behind a tensor, whatever its form."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise import _compat
from shardwise.sharded_tensor.rows import ShardedRows


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor or of sharded rows; a plain tensor as it is. No communication."""
    if isinstance(tensor, ShardedRows):
        return tensor.local
    return _compat.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
