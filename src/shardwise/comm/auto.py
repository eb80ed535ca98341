"""Choose the implementation of gathers and reductions by backend and size: direct exchange on gloo, or c10d.

                                             all-gather          reduce-scatter
    CPU buffers over gloo, `min_bytes` on    GlooAllGather       GlooReduceScatter
    everything else                          DefaultAllGather    DefaultReduceScatter

The choice depends only on what is the same on all ranks: the group's backend, the buffer's size, dtype and
device, and the op.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise import _compat
from shardwise.comm.api import DefaultAllGather, DefaultReduceScatter, backend_of
from shardwise.comm.gloo import GlooAllGather, GlooReduceScatter, combination, set_batch_scheduling

# From this many bytes in the whole buffer, the exchange costs less CPU time than c10d on 2 and 4 ranks. Below
# that, messages and Python cost 0.1 ms per rank, as much as c10d's threads and messages.
GATHER_MIN_BYTES = 250_000
REDUCE_MIN_BYTES = 250_000


class AutoAllGather(DefaultAllGather):
    """`GlooAllGather` for CPU buffers of at least `min_bytes` over gloo, else c10d's all-gather."""

    def __init__(self, *, min_bytes: int = GATHER_MIN_BYTES) -> None:
        self.min_bytes = min_bytes
        self._exchange = GlooAllGather()

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        # By values equal on all ranks: one that chose otherwise would wait for messages that nobody sends.
        if output_tensor.is_cpu and output_tensor.nbytes >= self.min_bytes and over_gloo(group):
            return self._exchange(output_tensor, input_tensor, group, async_op)
        return _compat.all_gather_single(output_tensor, input_tensor, group, async_op=async_op)


class AutoReduceScatter(DefaultReduceScatter):
    """`GlooReduceScatter` for CPU buffers that it can reduce, of at least `min_bytes` over gloo, else c10d's
    reduce-scatter. Sums are equal bit for bit."""

    def __init__(self, *, min_bytes: int = REDUCE_MIN_BYTES) -> None:
        self.min_bytes = min_bytes
        self._exchange = GlooReduceScatter()

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        large = input_tensor.is_cpu and input_tensor.nbytes >= self.min_bytes
        if large and over_gloo(group) and combination(input_tensor.dtype, op) is not None:
            return self._exchange(output_tensor, input_tensor, group, op, async_op)
        return _compat.reduce_scatter_single(output_tensor, input_tensor, op, group, async_op=async_op)


def transport(comm: object, nbytes: int, group: dist.ProcessGroup | None, device: torch.device) -> str:
    """Return the transport of a buffer of `nbytes` bytes, and the reason, in words."""
    if group is None or group.size() == 1:
        return "nobody: a rank alone"
    if not isinstance(comm, (AutoAllGather, AutoReduceScatter)):
        return type(comm).__name__
    if device.type != "cpu" or not over_gloo(group):
        return f"c10d ({backend_of(group, device)})"
    small = f"smaller than {comm.min_bytes:,} bytes"
    return f"c10d (gloo; {small})" if nbytes < comm.min_bytes else f"direct exchange (gloo; not {small})"


# Weakly, by object: each new group has its own threads, whose scheduling must be set.
_over_gloo: WeakKeyDictionary[dist.ProcessGroup, bool] = WeakKeyDictionary()


def over_gloo(group: dist.ProcessGroup) -> bool:
    """Return whether `group` moves CPU tensors over gloo; its first call then runs `set_batch_scheduling`."""
    uses_gloo = _over_gloo.get(group)
    if uses_gloo is None:
        uses_gloo = _over_gloo[group] = "cpu:gloo" in dist.get_backend_config(group).split(",")
        if uses_gloo:
            set_batch_scheduling()
    return uses_gloo
