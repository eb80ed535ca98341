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
    ONE_AXIS,
    OURS,
    REPLICAS,
    TWO_AXES,
    ZERO2,
    Case,
    adamw,
    assert_bit_equal,
    by_block,
    compare,
    each_of,
    mesh_names,
    one_axis,
    run_training,
    two_axes,
)
from fsdp.parity.models import BRANCHES, BUFFERED, DEEP, LANGUAGE, RESIDUAL, SHARING, UNEVEN, Task, freeze
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
CASES: dict[str, Case] = {
    "uneven dims": Case(UNEVEN, by_block(), optimizer=adamw, ranks=(1, 3), strategies=ONE_AXIS),
    "uneven dims in one group": Case(UNEVEN, one_group, ranks=4, strategies=ZERO2),
    "language model in one group": Case(LANGUAGE, one_group),
    "nested groups": Case(LANGUAGE, nested, ranks=3),
    "norm, head and embedding in a list": Case(LANGUAGE, norm_and_head),
    "lists of modules": Case(DEEP, lists, ranks=3, strategies=ZERO2),
    "sibling groups": Case(RESIDUAL, siblings),
    "2 replicas of 2 uneven shards": Case(
        UNEVEN, by_block(), optimizer=adamw, strategies=TWO_AXES, **REPLICAS
    ),
    "3 replicas of 1 shard": Case(UNEVEN, by_block(), mesh=two_axes(3, 1), ranks=3, strategies=TWO_AXES),
    "1 replica of 4 shards": Case(RESIDUAL, by_block(), mesh=two_axes(1, 4), ranks=4, strategies=TWO_AXES),
    "reshard uneven dims to 2 of 4": Case(UNEVEN, reshard(2), ranks=4),
    "reshard replicas": Case(RESIDUAL, reshard(True), **REPLICAS),
    "reshard set later": Case(RESIDUAL, reshard_set_later),
    "last dim": Case(RESIDUAL, by_block(lambda api: {"shard_placement_fn": last_dim}), contiguous="no"),
    "columns of replicas": Case(
        RESIDUAL, by_block(lambda api: {"shard_placement_fn": columns}), contiguous="no", **REPLICAS
    ),
    "buffers": Case(BUFFERED, by_block()),
    "biases frozen": Case(RESIDUAL.but(freeze("bias")), by_block()),
    "last block frozen": Case(RESIDUAL.but(freeze("blocks.1")), by_block()),
    "all frozen but two": Case(
        LANGUAGE.but(freeze("blocks", "tokens", "positions")), by_block(), ranks=3, strategies=ZERO2
    ),
    "two meshes in a block": Case(RESIDUAL, two_meshes, contiguous="rounding", **REPLICAS),
    "ignored parameters": Case(RESIDUAL.but(freeze("outward")), ignore_outward),
    "an object that blocks share": Case(SHARING, by_block()),
    "unused branch": Case(BRANCHES, by_block()),
    "made on meta": Case(UNEVEN, meta(UNEVEN), contiguous="no", ranks=3),
}


LARGE = (
    "uneven dims",
    "language model in one group",
    "reshard uneven dims to 2 of 4",
    "columns of replicas",
    "two meshes in a block",
)


@pytest.mark.filterwarnings("ignore:.*returns a view")
@each_of({name: CASES[name] for name in LARGE})
def test_training_with_memory_for_each_large_parameter_is_the_same(name: str) -> None:
    mesh = CASES[name].mesh(dist.get_world_size())
    together = run_training(OURS, CASES[name], mesh, wholes=False)
    apart = partial(GroupSettings, separate_memory_min_bytes=256)
    with mock.patch("shardwise.fsdp.group.GroupSettings", apart):
        assert_bit_equal(run_training(OURS, CASES[name], mesh, wholes=False), together)


@pytest.mark.filterwarnings("ignore:.*returns a view")  # an attention ends in a linear layer over 3-d input
@each_of(CASES)
def test_sharded_training_equals_torchs_and_one_process(name: str) -> None:
    compare(CASES[name])
