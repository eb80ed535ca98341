"""Where communication buffers come from."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise import _compat


def allocate_default(size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor of the device's own allocator."""
    return torch.empty(*size, dtype=dtype, device=device)


def allocate_from_group(
    group: dist.ProcessGroup, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """An uninitialised tensor of `group`'s allocator, or of the device's where the backend has none."""
    backend = _compat.group_allocator(group, device)
    if backend is None:
        return allocate_default(size, dtype=dtype, device=device)
    tensor: Tensor = backend.allocate_tensor(math.prod(size), dtype=dtype, device=device)
    return tensor.view(*size)
