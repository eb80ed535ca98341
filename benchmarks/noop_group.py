"""A process group of any size, in one process, whose collectives are over at once.

What a benchmark sees under it is the host cost of the library alone: nothing is copied, sent or reduced, so
every output holds what memory held before (use it to measure, never to check values). torch's own fake
group copies its input once per rank in every all-gather, which at 64 ranks costs more than the library
does.

    with noop_world(64) as mesh:
        fully_shard(model, mesh=mesh)

All collectives return one shared finished `Work`: the group's own cost is one Python call, whoever calls it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# `dist.all_gather_into_tensor` reaches the group as the first name from torch 2.13 on, as the second before.
_COLLECTIVES = (
    "all_gather_single",
    "_allgather_base",
    "all_gather_single_coalesced",
    "allgather_into_tensor_coalesced",
    "reduce_scatter_single",
    "_reduce_scatter_base",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "all_to_all_single",
    "alltoall_base",
    "allgather",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
)


class _FinishedWork(dist.Work):
    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[None]:
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future


class NoopGroup(dist.ProcessGroup):
    """The calling process is `rank` of `size`; the other ranks do not exist."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._finished = _FinishedWork()
        self._name = ""

    def getBackendName(self) -> str:  # noqa: N802
        return "noop"

    # The base class keeps the name in its native backends, and there are none here.
    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        pass

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return "no-op group"


def _finish_at_once(group: NoopGroup, *args: Any, **kwargs: Any) -> dist.Work:
    return group._finished


for _name in _COLLECTIVES:
    setattr(NoopGroup, _name, _finish_at_once)

dist.Backend.register_backend(
    "noop",
    lambda store, rank, size, timeout: NoopGroup(rank, size),
    devices=["cpu", "cuda"],
)


@contextmanager
def noop_world(size: int, *, device_type: str = "cpu") -> Iterator[DeviceMesh]:
    """Make this process rank 0 of a default group of `size` ranks; yields its one-axis mesh."""
    dist.init_process_group("noop", rank=0, world_size=size, store=dist.HashStore())
    try:
        yield init_device_mesh(device_type, (size,))
    finally:
        dist.destroy_process_group()
