"""All-gather through symmetric memory: buffers at equal addresses of all ranks, registered once.

NCCL (2.27 and later) gathers such buffers with copy engines or symmetric kernels. Registration is
collective and slow, so buffers of one size are kept and used again; at most two gathers are in
flight, hence two buffers per size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise import _compat
from shardwise.comm.api import DefaultAllGather
from shardwise.errors import ShardingError, here

BUFFERS = 2


class SymmetricAllGather(DefaultAllGather):
    """c10d's all-gather on symmetric memory.

    Raises:
        ShardingError: `group`'s backend or `device` has no symmetric memory.
    """

    def __init__(self, group: dist.ProcessGroup, backend: str, device: torch.device) -> None:
        found = dist.get_backend(group)
        if device.type != "cuda" or found != "nccl" or backend != "NCCL":
            raise ShardingError(
                f"{here()}: symmetric memory needs backend 'NCCL' on CUDA devices, got {backend!r} with the"
                f" process group's backend {found!r} on {device.type}; leave set_symm_mem_for_comm out there"
            )
        _compat.use_symmetric_memory(backend)
        self.group = group
        self.buffers: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self.turn: dict[tuple[int, torch.dtype], int] = {}

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        key = (math.prod(size), dtype)
        buffers = self.buffers.setdefault(key, [])
        if len(buffers) < BUFFERS:
            buffers.append(_compat.symmetric_empty(key[0], dtype, device, self.group))
        self.turn[key] = (self.turn.get(key, -1) + 1) % len(buffers)
        return buffers[self.turn[key]]
