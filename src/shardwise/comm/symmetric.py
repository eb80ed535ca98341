"""All-gather through symmetric memory: buffers at equal addresses of all ranks, registered once.

NCCL (2.27 and later) gathers such buffers with copy engines or symmetric kernels. Registration is
collective and slow, so buffers are kept. One is used again, for a gather of the same size, when nothing
refers to what was last handed out of it: as the allocator would, and so in the order of the same streams.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise import _compat
from shardwise.comm.api import DefaultAllGather
from shardwise.errors import ShardingError, here


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
        # By size and dtype: buffers, each with what was last handed out of it.
        self.buffers: dict[tuple[int, torch.dtype], list[tuple[Tensor, weakref.ref[Tensor]]]] = {}

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        key = (math.prod(size), dtype)
        buffers = self.buffers.setdefault(key, [])
        free = next((place for place, (_, given) in enumerate(buffers) if given() is None), None)
        if free is None:  # on all ranks at once, as they gather the same
            buffer = _compat.symmetric_empty(key[0], dtype, device, self.group)
        else:
            buffer, _ = buffers.pop(free)
        given = buffer.view(-1)
        buffers.append((buffer, weakref.ref(given)))
        return given
