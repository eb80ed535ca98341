"""The two collectives that a parameter group needs, as protocols, and the implementations we ship.

Custom communication is any object with these two methods: `allocate` returns communication buffers, and
`__call__` runs the collective. `FSDPModule.set_custom_all_gather` and `set_custom_reduce_scatter` install it.
Buffers are 1-D: the gathered one holds rank 0's shard, then rank 1's, and so on.

Symmetric memory consists of buffers at equal addresses on all ranks. NCCL (2.27 and later) gathers them with
copy engines or symmetric kernels. Registration is collective and slow, so buffers are kept. Like an
allocator, a gather of the same size reuses a buffer once nothing refers to the tensor last returned for it.
A gather on another stream waits for the stream that used it.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, empty

from shardwise import _compat
from shardwise.errors import ShardingError, here


class AllGather(Protocol):
    """Gathers equal shards of all ranks into one buffer."""

    # Called on the stream to which the memory is to belong. An implementation that reuses buffers must make
    # that stream wait for earlier users: a new gather would overwrite what they still read.
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor: ...

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather `input_tensor`, which may be this rank's slice of `output_tensor`. Collective over `group`.

        Returns the work to wait for if `async_op`; else returns None once the current stream (on CPU, the
        caller) may read the output.
        """
        ...


class ReduceScatter(Protocol):
    """Reduces equal buffers of all ranks and leaves each rank its slice."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor: ...

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce by `op`, a `torch.distributed.ReduceOp`, and scatter. Collective over `group`."""
        ...


class FromDevice:
    """Allocates buffers from the device's own allocator."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return empty(size, dtype=dtype, device=device)


class DefaultAllGather(FromDevice):
    """c10d's all-gather on buffers of the device's own allocator."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        return _compat.all_gather_single(output_tensor, input_tensor, group, async_op=async_op)


class DefaultReduceScatter(FromDevice):
    """c10d's reduce-scatter on buffers of the device's own allocator."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        return _compat.reduce_scatter_single(output_tensor, input_tensor, op, group, async_op=async_op)


class _FromGroup:
    """Allocates buffers from the process group's allocator, or the device's if its backend has none."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        backend = _compat.group_allocator(self.group, device)
        if backend is None:
            return empty(size, dtype=dtype, device=device)
        tensor: Tensor = backend.allocate_tensor(math.prod(size), dtype=dtype, device=device)
        return tensor.view(*size)


class ProcessGroupAllocAllGather(_FromGroup, DefaultAllGather):
    """c10d's all-gather on buffers that the process group allocates, where it can (zero-copy NCCL)."""


class ProcessGroupAllocReduceScatter(_FromGroup, DefaultReduceScatter):
    """c10d's reduce-scatter on buffers that the process group allocates, where it can."""


class SymmetricAllGather(DefaultAllGather):
    """c10d's all-gather on symmetric memory.

    Raises:
        ShardingError: `group`'s backend or `device` has no symmetric memory.
    """

    def __init__(self, group: dist.ProcessGroup, backend: str, device: torch.device) -> None:
        actual = backend_of(group, device)
        if device.type != "cuda" or actual != "nccl" or backend != "NCCL":
            raise ShardingError(
                f"{here()}: symmetric memory needs backend 'NCCL' on CUDA devices, got {backend!r} with the"
                f" process group's backend {actual!r} on {device.type}; leave set_symm_mem_for_comm out there"
            )
        _compat.use_symmetric_memory(backend)
        self.group = group
        # By size and dtype: buffers, each with the tensor last returned for it and the stream that asked.
        self.buffers: dict[Any, list[tuple[Tensor, weakref.ref[Tensor], torch.Stream]]] = {}

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        key = (math.prod(size), dtype)
        buffers = self.buffers.setdefault(key, [])
        stream = torch.accelerator.current_stream(device)
        free = _unused(buffers)
        if free is None and buffers and gc.collect():
            # Cycles that kept a tensor on this rank only are gone: else only this rank would make a buffer.
            free = _unused(buffers)
        if free is None:  # on all ranks at once, since they gather the same
            buffer = _compat.symmetric_empty(key[0], dtype, device, self.group)
        else:
            buffer, _, previous = buffers.pop(free)
            if previous != stream:  # a gather that the user began runs on computation's stream
                stream.wait_stream(previous)
        # A new tensor each time: when it is gone, nothing uses the buffer any more.
        view = buffer.view(-1)
        buffers.append((buffer, weakref.ref(view), stream))
        return view


def _unused(buffers: Sequence[tuple[Tensor, weakref.ref[Tensor], torch.Stream]]) -> int | None:
    return next((place for place, (_, ref, _) in enumerate(buffers) if ref() is None), None)


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the backend that moves tensors on `device`. Raises ShardingError if the group has none."""
    served = backends(group)
    if device.type not in served:
        raise ShardingError(
            f"{here()}: expected tensors on a device that the process group serves ({', '.join(served)}),"
            f" got {device}; move them there, or make the group with a backend for {device.type}"
        )
    return served[device.type]


def backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the backends of `group` by device type. Raises ValueError if the group was destroyed."""
    try:
        config = dist.get_backend_config(group)
    except TypeError as error:  # it has none any more
        raise ValueError(f"{here()}: the process group was destroyed") from error
    return dict(entry.split(":") for entry in config.split(","))
