"""A process group of any size, in one process, whose collectives finish at once.

Measurements under it cover only the library: nothing is copied, sent or reduced, so every output holds the
memory's previous content (use it to measure, never to check values). torch's own fake group copies its input
once per rank in every all-gather, which at 64 ranks costs more than the library does.

    with noop_world(64) as mesh, listening(heard):
        fully_shard(model, mesh=mesh)

All collectives return one shared finished `Work`, so the group itself costs one Python call. torch calls such
a group without its operators, so `comm.count` does not see the collectives; `listening` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise import _compat
from shardwise.comm.count import Collective, collective, tensors_in
from shardwise.comm.kinds import NATIVE, form_of
from shardwise.mesh import smaller_shards

# Methods of a process group, and the operators of `comm.kinds` with the same arguments.
# `dist.all_gather_into_tensor` reaches the group by the first name from torch 2.13 on, else by the second.
COLLECTIVES = {
    "all_gather_single": "_allgather_base_",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced_",
    "reduce_scatter_single": "_reduce_scatter_base_",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced_",
    "all_to_all_single": "alltoall_base_",
    "barrier": "barrier",
    "send": "send",
    **{
        name: f"{name}_"
        for name in ("_allgather_base", "allgather_into_tensor_coalesced", "_reduce_scatter_base")
        + ("reduce_scatter_tensor_coalesced", "alltoall_base", "allgather", "allreduce")
        + ("allreduce_coalesced", "alltoall", "broadcast", "gather", "recv", "reduce", "reduce_scatter")
        + ("scatter",)
    },
}


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
    """A process group in which this process is `rank` of `size`; the other ranks do not exist."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._finished = _FinishedWork()
        self._name = ""

    def getBackendName(self) -> str:  # noqa: N802
        return "noop"

    # The base class keeps the name in its native backends, of which there are none here.
    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        pass

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    @property
    def group_desc(self) -> str:
        return "no-op group"


def _finish_at_once(group: NoopGroup, *args: Any, **kwargs: Any) -> dist.Work:
    return group._finished


for _name in COLLECTIVES:
    setattr(NoopGroup, _name, _finish_at_once)


@contextmanager
def listening(
    listener: Callable[[Collective, list[torch.Tensor], dist.ProcessGroup], None],
) -> Iterator[None]:
    """Call `listener` for every collective on a no-op group, with its tensors and the group."""

    def announcing(operator: str) -> Callable[..., dist.Work]:
        form = form_of(NATIVE, operator)
        assert form is not None

        def tell(group: NoopGroup, *args: Any, **kwargs: Any) -> dist.Work:
            listener(collective(form, args, ranks=group.size()), list(tensors_in(args)), group)
            return group._finished

        return tell

    methods: dict[str, Any] = {name: announcing(operator) for name, operator in COLLECTIVES.items()}
    with mock.patch.multiple(NoopGroup, **methods):
        yield


@contextmanager
def noop_world(
    size: int, *, rank: int = 0, device_type: str = "cpu", axes: dict[str, int] | None = None
) -> Iterator[DeviceMesh]:
    """Make this process a rank of a temporary default group of `size` ranks, whatever group it has.

    Yields the mesh: one axis of all ranks, or `axes` over the first ranks.
    """
    if "noop" not in dist.Backend.backend_list:
        make: Any = lambda store, rank, size, timeout: NoopGroup(rank, size)  # noqa: E731
        dist.Backend.register_backend("noop", make, devices=["cpu", "cuda"])
    with _compat.no_process_groups():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("noop", rank=rank, world_size=size, store=store)
        inside = size if axes is None else math.prod(axes.values())
        if axes is None or (len(axes) == 1 and inside == size):
            yield init_device_mesh(device_type, (size,))
        else:
            yield mesh_of(torch.arange(inside), axes, device_type=device_type)


def make_smaller_shards(mesh: DeviceMesh, ranks: int) -> None:
    """Make the mesh for a `reshard_after_forward` number in advance: fake tensors cannot make one."""
    if ranks > 1 and mesh.size() % ranks == 0:
        axes = {"replicate": mesh.size() // ranks, "shard": ranks}
        smaller = mesh_of(mesh.mesh.flatten(), axes, device_type=mesh.device_type)
        smaller_shards(mesh, ranks, made=smaller)


def mesh_of(ranks: torch.Tensor, axes: dict[str, int], *, device_type: str = "cpu") -> DeviceMesh:
    """Make a mesh as `init_device_mesh` does, without groups that lack rank 0: there may be 100,000."""
    mesh = ranks.view(*axes.values())
    lines = [mesh[(0,) * axis + (slice(None),) + (0,) * (mesh.ndim - axis - 1)] for axis in range(mesh.ndim)]
    groups = [dist.new_group(line.tolist()) for line in lines]
    return DeviceMesh.from_group(groups, device_type, mesh, mesh_dim_names=tuple(axes))
