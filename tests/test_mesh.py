"""Which ranks shard and which replicate, on every kind of mesh; wrong meshes are named with the fix."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwise
from ranks import on_ranks
from shardwise.comm.count import CommCounter
from shardwise.errors import ShardingError
from shardwise.mesh import (
    DataParallelMeshDims,
    DataParallelMeshInfo,
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
    default_mesh,
    mesh_device,
    mesh_info,
    shard_mesh,
)


def members(group: dist.ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(group)


def check_shard(info: DataParallelMeshInfo, ranks: list[int]) -> None:
    """This rank shards over `ranks`, in that order."""
    assert isinstance(info, FSDPMeshInfo)
    assert members(info.shard_process_group) == ranks
    assert info.shard_mesh_size == len(ranks)
    assert info.shard_mesh_rank == ranks.index(dist.get_rank())
    assert shard_mesh(info).mesh.tolist() == ranks


def check_replicate(info: DataParallelMeshInfo, ranks: list[int]) -> None:
    assert isinstance(info, DDPMeshInfo)
    assert members(info.replicate_process_group) == ranks
    assert info.replicate_mesh_size == len(ranks)
    assert info.replicate_mesh_rank == ranks.index(dist.get_rank())


@on_ranks(1, 4)
def test_a_1d_mesh_shards_over_all_its_ranks() -> None:
    ranks = list(range(dist.get_world_size()))
    for mesh in (init_device_mesh("cpu", (len(ranks),)), None):
        info = mesh_info(mesh)
        assert type(info) is FSDPMeshInfo
        check_shard(info, ranks)
        assert (info.shard_mesh_dim, info.replicate_mesh_dim) == (0, None)
        assert not info.is_spmd_mesh


@on_ranks(4)
def test_a_2d_mesh_replicates_over_its_first_axis_and_shards_over_its_second() -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with CommCounter() as counter:
        info = mesh_info(mesh)
    assert counter.calls == []
    assert type(info) is HSDPMeshInfo
    assert (info.mesh, info.shard_mesh_dim, info.replicate_mesh_dim) == (mesh, 1, 0)
    check_shard(info, [0, 1] if rank < 2 else [2, 3])
    check_replicate(info, [0, 2] if rank % 2 == 0 else [1, 3])


@on_ranks(4)
def test_a_sub_mesh_of_a_larger_mesh_is_a_mesh_of_its_own() -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    check_shard(mesh_info(mesh["dp"]), [rank % 2, rank % 2 + 2])
    check_shard(mesh_info(mesh["tp"]), [rank // 2 * 2, rank // 2 * 2 + 1])


# (names, kind, ranks of rank 2's shard group, of its replicate group) on the mesh a=2, b=1, c=2
NAMED = [
    ({"shard": "a"}, FSDPMeshInfo, [0, 2], None),
    ({"shard": "c"}, FSDPMeshInfo, [2, 3], None),
    ({"shard": ("a", "b")}, FSDPMeshInfo, [0, 2], None),
    ({"shard": ("a", "c")}, FSDPMeshInfo, [0, 1, 2, 3], None),
    ({"shard": ("a", "b", "c")}, FSDPMeshInfo, [0, 1, 2, 3], None),
    ({"replicate": "c"}, DDPMeshInfo, None, [2, 3]),
    ({"replicate": ("a", "c")}, DDPMeshInfo, None, [0, 1, 2, 3]),
    ({"shard": "c", "replicate": "a"}, HSDPMeshInfo, [2, 3], [0, 2]),
    ({"shard": "a", "replicate": "c"}, HSDPMeshInfo, [0, 2], [2, 3]),
    ({"shard": ("b", "c"), "replicate": "a"}, HSDPMeshInfo, [2, 3], [0, 2]),
    ({"shard": "c", "replicate": ("a", "b")}, HSDPMeshInfo, [2, 3], [0, 2]),
]


@on_ranks(4)
def test_named_dims_of_a_3d_mesh_are_picked_and_flattened() -> None:
    names = ("a", "b", "c")
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=names)
    coordinate = dict(zip(names, mesh.get_coordinate() or [], strict=True))

    def along(picked: str | tuple[str, ...]) -> list[int]:
        """Ranks that share this rank's coordinates in every dim not picked."""
        index = tuple(slice(None) if name in picked else coordinate[name] for name in names)
        return mesh.mesh[index].flatten().tolist()

    for given, kind, shard, replicate in NAMED:
        dims = DataParallelMeshDims(**given)
        for _ in range(2):  # a second fully_shard call names the same dims again
            info = mesh_info(mesh, dims)
            assert type(info) is kind
            assert (info.dp_mesh_dims, info.spmd_mesh, info.is_spmd_mesh) == (dims, mesh, True)
            if shard is not None:
                check_shard(info, along(given["shard"]))
                assert dist.get_rank() != 2 or along(given["shard"]) == shard
            if replicate is not None:
                check_replicate(info, along(given["replicate"]))
                assert dist.get_rank() != 2 or along(given["replicate"]) == replicate


@on_ranks(2)
def test_the_default_mesh_holds_every_rank_on_this_machines_device() -> None:
    mesh = default_mesh()
    assert mesh.mesh.tolist() == [0, 1]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    assert mesh.device_type == ("cpu" if accelerator is None else accelerator.type)
    assert mesh_device(init_device_mesh("cpu", (2,))) == torch.device("cpu")


@on_ranks(1)
def test_a_torch_built_for_an_accelerator_that_the_machine_lacks_gets_a_mesh_on_cpu() -> None:
    with (
        mock.patch.object(torch._C, "_accelerator_getAccelerator", return_value=torch.device("cuda")),
        mock.patch.object(torch.accelerator, "is_available", return_value=False),
    ):
        assert default_mesh().device_type == "cpu"


def test_names_of_dims_are_given_as_tuples_whatever_form_they_had() -> None:
    dims = DataParallelMeshDims(shard="a", replicate=("b", "c"))
    assert (dims.shard_names, dims.replicate_names) == (("a",), ("b", "c"))
    assert DataParallelMeshDims(shard="a").replicate_names == ()


def test_mesh_classes_are_public() -> None:
    for kind in (DataParallelMeshDims, DataParallelMeshInfo, FSDPMeshInfo, DDPMeshInfo, HSDPMeshInfo):
        assert getattr(shardwise, kind.__name__) is kind


# What is wrong, and what to do


def message_of(make: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(ShardingError) as error:
        make(*args, **kwargs)
    return str(error.value)


@on_ranks(2)
def test_a_mesh_that_cannot_be_used_is_shown_with_the_fix() -> None:
    rank = dist.get_rank()
    cube = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("a", "b", "c"))
    message = message_of(mesh_info, cube)
    assert f"rank {rank}: fully_shard expects a 1-D or 2-D mesh, got 3 dims" in message
    assert str(cube) in message
    assert "mesh['shard']" in message
    assert "dp_mesh_dims" in message

    nameless = DeviceMesh("cpu", torch.arange(2).view(1, 2))
    message = message_of(mesh_info, nameless)
    assert f"rank {rank}: the 2-D mesh {nameless} has no dim names" in message
    assert "mesh_dim_names=('replicate', 'shard')" in message

    message = message_of(mesh_info, nameless, DataParallelMeshDims(shard="a"))
    assert f"rank {rank}: dp_mesh_dims needs a mesh with mesh_dim_names, got {nameless}" in message

    for given in ({"shard": "z"}, {"shard": "a", "replicate": "z"}, {"shard": ("a", "z")}):
        message = message_of(mesh_info, cube, DataParallelMeshDims(**given))
        assert f"rank {rank}: dp_mesh_dims names 'z', but the mesh has the dims ('a', 'b', 'c')" in message


@on_ranks(2)
@pytest.mark.parametrize(
    "given",
    [
        {"shard": ("b", "a")},
        {"shard": "a", "replicate": "a"},
        {"shard": ("a", "b"), "replicate": "b"},
        {"shard": ("a", "a")},
    ],
    ids=["out of order", "both", "overlapping", "twice"],
)
def test_names_that_do_not_fit_together_are_repeated_in_the_error(given: dict[str, Any]) -> None:
    cube = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("a", "b", "c"))
    message = message_of(mesh_info, cube, DataParallelMeshDims(**given))
    assert all(repr(name) in message for names in given.values() for name in names)


@pytest.mark.parametrize("given", [{}, {"shard": ()}, {"shard": (), "replicate": ()}])
def test_dims_without_any_name_are_refused(given: dict[str, Any]) -> None:
    assert "set at least one of shard and replicate" in message_of(DataParallelMeshDims, **given)


@on_ranks(2)
def test_an_info_without_the_axis_it_stands_for_is_refused() -> None:
    mesh = init_device_mesh("cpu", (2,))
    neither = "set shard_mesh_dim, replicate_mesh_dim, or both"
    for kind in (DataParallelMeshInfo, FSDPMeshInfo, DDPMeshInfo, HSDPMeshInfo):
        assert neither in message_of(kind, mesh)
    assert f"FSDPMeshInfo: set shard_mesh_dim to a dim of {mesh}" in message_of(
        FSDPMeshInfo, mesh, replicate_mesh_dim=0
    )
    assert f"DDPMeshInfo: set replicate_mesh_dim to a dim of {mesh}" in message_of(
        DDPMeshInfo, mesh, shard_mesh_dim=0
    )
    assert "HSDPMeshInfo: set replicate_mesh_dim" in message_of(HSDPMeshInfo, mesh, shard_mesh_dim=0)
    assert f"shard_mesh_dim=1 is out of range for {mesh}" in message_of(FSDPMeshInfo, mesh, shard_mesh_dim=1)
    assert f"replicate_mesh_dim=-2 is out of range for {mesh}" in message_of(
        DDPMeshInfo, mesh, replicate_mesh_dim=-2
    )


@on_ranks(4)
def test_smaller_shards_are_made_once_for_each_mesh_as_they_take_groups() -> None:
    mesh = init_device_mesh("cpu", (4,))
    before = dist.distributed_c10d._world.group_count
    models = [shardwise.fully_shard(nn.Linear(4, 4), mesh=mesh, reshard_after_forward=2) for _ in range(3)]
    assert len(models) == 3
    assert dist.distributed_c10d._world.group_count - before <= 4
