"""Which parameters are cut, where, over which ranks, and what happens to them after forward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fsdp.parity.harness import (
    OURS,
    Case,
    adamw,
    assert_bit_equal,
    by_block,
    mesh_names,
    one_axis,
    run_training,
    train,
    two_axes,
)
from fsdp.parity.models import BRANCHES, BUFFERED, DEEP, LANGUAGE, RESIDUAL, SHARING, UNEVEN, Task, freeze
from ranks import RankPool
from shardwise.fsdp.policy import GroupSettings

Shards = Callable[[ModuleType, nn.Module, DeviceMesh], None]


def one_group(api: ModuleType, model: nn.Module, mesh: DeviceMesh) -> None:
    api.fully_shard(model, mesh=mesh)


def reshard(value: bool | int | None) -> Shards:
    return by_block(lambda api: {"reshard_after_forward": value})


def reshard_set_later(api: ModuleType, model: nn.Module, mesh: DeviceMesh) -> None:
    by_block()(api, model, mesh)
    model.blocks[0].set_reshard_after_forward(False)
    model.set_reshard_after_forward(True, recurse=False)


def nested(api: ModuleType, model: nn.Module, mesh: DeviceMesh) -> None:
    """Groups inside groups: each block's attention, the block, the model."""
    for block in model.blocks:
        api.fully_shard(block.attention, mesh=mesh)
        api.fully_shard(block, mesh=mesh)
    api.fully_shard(model, mesh=mesh)


def lists(api: ModuleType, model: nn.Module, mesh: DeviceMesh) -> None:
    blocks = list(model.blocks)
    api.fully_shard(blocks[:2], mesh=mesh)
    api.fully_shard(blocks[2:], mesh=mesh, reshard_after_forward=False)
    api.fully_shard([model.inward, model.outward], mesh=mesh)
    api.fully_shard(model, mesh=mesh)


def norm_and_head(api: ModuleType, model: nn.Module, mesh: DeviceMesh) -> None:
    """The last norm travels with the tied head and embedding."""
    for block in model.blocks:
        api.fully_shard(block, mesh=mesh)
    api.fully_shard([model.tokens, model.norm, model.head], mesh=mesh)
    api.fully_shard(model, mesh=mesh)


def siblings(api: ModuleType, model: nn.Module, mesh: DeviceMesh) -> None:
    """No group around the groups: each runs as a root of its own."""
    for child in (model.inward, *model.blocks, model.outward):
        api.fully_shard(child, mesh=mesh)


def columns(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.ndim == 2 else None


def last_dim(parameter: nn.Parameter) -> Shard:
    return Shard(-1)


def two_meshes(api: ModuleType, model: nn.Module, mesh: DeviceMesh) -> None:
    """Half of each block is replicated over two halves of the ranks, the rest cut over all of them."""
    names = mesh_names(api)
    everyone = names.FSDPMeshInfo(one_axis(mesh.size()), shard_mesh_dim=0)
    pairs = names.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)

    def place(parameter: nn.Parameter) -> Any:
        info = pairs if parameter.shape[0] == 16 else everyone
        return names.ShardPlacementResult(placement=Shard(0), mesh_info=info)

    for block in model.blocks:
        api.fully_shard(block, mesh=mesh, shard_placement_fn=place)
    api.fully_shard(model, mesh=mesh)


def ignore_outward(api: ModuleType, model: nn.Module, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        api.fully_shard(block, mesh=mesh)
    freeze("outward")(model)
    api.fully_shard(model, mesh=mesh, ignored_params=set(model.outward.parameters()))


def meta(task: Task) -> Shards:
    """Shards a model without storage, then gives it storage and the values of `task.build()`."""

    def shard(api: ModuleType, model: nn.Module, mesh: DeviceMesh) -> None:
        values = {name: p.detach().clone() for name, p in model.state_dict().items()}
        model.to("meta")
        by_block()(api, model, mesh)
        model.to_empty(device="cpu")
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(torch.distributed.tensor.distribute_tensor(values[name], mesh, p.placements))

    return shard


# Cut on another dim than 0 is refused by rows (test_contiguous_errors.py), and what is made on meta is
# filled there in our own way (test_contiguous_module.py). Half of two meshes is summed over 4 ranks.
CASES: dict[str, tuple[tuple[int, ...], Case]] = {
    "uneven dims": ((1, 3), Case(UNEVEN, by_block(), optimizer=adamw)),
    "uneven dims in one group": ((4,), Case(UNEVEN, one_group)),
    "language model in one group": ((2,), Case(LANGUAGE, one_group)),
    "nested groups": ((3,), Case(LANGUAGE, nested)),
    "norm, head and embedding in a list": ((2,), Case(LANGUAGE, norm_and_head)),
    "lists of modules": ((3,), Case(DEEP, lists)),
    "sibling groups": ((2,), Case(RESIDUAL, siblings)),
    "2 replicas of 2 uneven shards": (
        (4,),
        Case(UNEVEN, by_block(), mesh=two_axes(2, 2), optimizer=adamw),
    ),
    "3 replicas of 1 shard": ((3,), Case(UNEVEN, by_block(), mesh=two_axes(3, 1))),
    "1 replica of 4 shards": ((4,), Case(RESIDUAL, by_block(), mesh=two_axes(1, 4))),
    "reshard uneven dims to 2 of 4": ((4,), Case(UNEVEN, reshard(2))),
    "reshard replicas": ((4,), Case(RESIDUAL, reshard(True), mesh=two_axes(2, 2))),
    "reshard set later": ((2,), Case(RESIDUAL, reshard_set_later)),
    "last dim": (
        (2,),
        Case(RESIDUAL, by_block(lambda api: {"shard_placement_fn": last_dim}), contiguous="no"),
    ),
    "columns of replicas": (
        (4,),
        Case(
            RESIDUAL,
            by_block(lambda api: {"shard_placement_fn": columns}),
            mesh=two_axes(2, 2),
            contiguous="no",
        ),
    ),
    "buffers": ((2,), Case(BUFFERED, by_block())),
    "biases frozen": ((2,), Case(RESIDUAL.but(freeze("bias")), by_block())),
    "last block frozen": ((2,), Case(RESIDUAL.but(freeze("blocks.1")), by_block())),
    "all frozen but two": ((3,), Case(LANGUAGE.but(freeze("blocks", "tokens", "positions")), by_block())),
    "two meshes in a block": (
        (4,),
        Case(RESIDUAL, two_meshes, mesh=two_axes(2, 2), contiguous="rounding"),
    ),
    "ignored parameters": ((2,), Case(RESIDUAL.but(freeze("outward")), ignore_outward)),
    "an object that blocks share": ((2,), Case(SHARING, by_block())),
    "unused branch": ((2,), Case(BRANCHES, by_block())),
    "made on meta": ((3,), Case(UNEVEN, meta(UNEVEN), contiguous="no")),
}


def run(name: str) -> None:
    train(CASES, name)


def run_apart(name: str) -> None:
    case = CASES[name][1]
    mesh = case.mesh(dist.get_world_size())
    together = run_training(OURS, case, mesh, wholes=False)
    with mock.patch(
        "shardwise.fsdp.group.GroupSettings", partial(GroupSettings, separate_memory_min_bytes=256)
    ):
        assert_bit_equal(run_training(OURS, case, mesh, wholes=False), together)


@pytest.mark.filterwarnings("ignore:.*returns a view")
@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        ("uneven dims", 3),
        ("language model in one group", 2),
        ("reshard uneven dims to 2 of 4", 4),
        ("columns of replicas", 4),
        ("two meshes in a block", 4),
    ],
)
def test_training_with_memory_for_each_large_parameter_is_the_same(
    ranks: RankPool, name: str, world_size: int
) -> None:
    ranks(run_apart, name, world_size=world_size)


@pytest.mark.filterwarnings("ignore:.*returns a view")  # an attention ends in a linear layer over 3-d input
@pytest.mark.parametrize(
    ("name", "world_size"), [(name, world) for name, (worlds, _) in CASES.items() for world in worlds]
)
def test_sharded_training_equals_torchs_and_one_process(ranks: RankPool, name: str, world_size: int) -> None:
    ranks(run, name, world_size=world_size)
