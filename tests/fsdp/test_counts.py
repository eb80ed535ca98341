"""Exactly which collectives a step issues, how many bytes they carry, and what stays gathered."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp.models import Net, groups, in_each_layout, kinds, sharded_net, step
from ranks import on_ranks
from shardwise import FSDPModule, fully_shard
from shardwise.comm.count import CommCounter
from shardwise.fsdp.module_state import state_of
from shardwise.planner.noop_group import noop_world

BLOCK_NUMEL, ROOT_NUMEL = 2 * 8 * 16 + 16 + 8, 8 * 8 + 8 + 2 * 8 + 2


def warm(model: nn.Module) -> nn.Module:
    """Past the first forward, whose ranks compare their layouts."""
    step(model)
    model.zero_grad()
    return model


def counted(model: nn.Module, **how: Any) -> CommCounter:
    with CommCounter() as counter:
        step(model, **how)
    return counter


@in_each_layout(2, 3, 4)
def test_a_step_gathers_each_group_twice_but_the_root_and_the_last_block_once(layout: str) -> None:
    counter = counted(warm(sharded_net(layout=layout)))
    assert kinds(counter) == {"all_gather": 2 * 2 + 1 + 1, "reduce_scatter": 4, "all_reduce": 0}
    assert len(counter.calls) == 6 + 4, "nothing else: no collective per parameter"
    if layout == "interleaved" and dist.get_world_size() == 2:  # nothing is padded
        assert counter.bytes("all_gather") == 4 * ((2 * 2 + 1) * BLOCK_NUMEL + ROOT_NUMEL)
        assert counter.bytes("reduce_scatter") == 4 * (3 * BLOCK_NUMEL + ROOT_NUMEL)


@pytest.mark.parametrize(("reshard", "gathers"), [(False, 4), (True, 8)])
@in_each_layout(2, 3)
def test_groups_that_stay_are_gathered_once_and_a_root_that_reshards_again(
    layout: str, reshard: bool, gathers: int
) -> None:
    model = warm(sharded_net(reshard_after_forward=reshard, layout=layout))
    kept: list[str] = []
    counter = counted(model, then=lambda: kept.extend(unsharded_groups(model)))
    assert len(kept) == (0 if reshard else 4)
    assert kinds(counter) == {"all_gather": gathers, "reduce_scatter": 4, "all_reduce": 0}
    assert len(counter.calls) == gathers + 4


@in_each_layout(4)
def test_hsdp_adds_one_all_reduce_of_the_shard_per_group(layout: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = warm(sharded_net(mesh=mesh, layout=layout))
    counter = counted(model)
    assert kinds(counter) == {"all_gather": 6, "reduce_scatter": 4, "all_reduce": 4}
    assert counter.bytes("all_reduce") == counter.bytes("reduce_scatter") // 2


@in_each_layout(4)
def test_after_a_partial_reshard_backward_gathers_over_the_smaller_groups(layout: str) -> None:
    model = warm(sharded_net(reshard_after_forward=2, layout=layout))
    counter = counted(model)
    sizes = [call.group_size for call in counter.calls if call.kind == "all_gather"]
    assert sizes.count(4) == 4  # forward, root included
    assert sizes.count(2) == 4  # backward: three blocks and the root, which was told to reshard too
    assert kinds(counter) == {"all_gather": 8, "reduce_scatter": 4, "all_reduce": 0}


@in_each_layout(4)
def test_what_a_forward_cut_over_fewer_ranks_is_gathered_from_all_when_that_setting_changes(
    layout: str,
) -> None:
    model = warm(sharded_net(blocks=2, reshard_after_forward=2, layout=layout))
    assert isinstance(model, FSDPModule)
    model(torch.ones(1, 8))  # no backward follows
    model.set_reshard_after_forward(True)
    counter = counted(model)
    assert {call.group_size for call in counter.calls if call.kind == "all_gather"} == {4}


@on_ranks(2)
def test_evaluation_gathers_each_group_once_and_keeps_none() -> None:
    model = warm(sharded_net())
    with CommCounter() as counter, torch.no_grad():
        model(torch.ones(1, 8))
    assert kinds(counter) == {"all_gather": 4, "reduce_scatter": 0, "all_reduce": 0}
    assert unsharded_groups(model) == []


@pytest.mark.parametrize("reshard", [None, False])
@in_each_layout(2)
def test_accumulation_without_sync_and_without_resharding_communicates_only_once(
    layout: str, reshard: bool | None
) -> None:
    model: Any = warm(sharded_net(layout=layout, reshard_after_forward=reshard))
    found = []
    for syncs in (False, False, True):
        model.set_requires_gradient_sync(syncs)
        model.set_reshard_after_backward(syncs)
        found.append(kinds(counted(model)))
    assert [one["reduce_scatter"] for one in found] == [0, 0, 4]
    gathers = [one["all_gather"] for one in found]
    # Where forward frees the blocks, only the parameters that backward left gathered are reused.
    assert gathers == [4, 0, 0] if reshard is False else gathers[1] < gathers[0] == 6


@in_each_layout(2, 3)
def test_frozen_parameters_are_gathered_and_never_reduced(layout: str) -> None:
    """By rows they are a segment of their own, with an all-gather of its own."""
    net = Net(blocks=2)
    for block in net.blocks:
        block.up.requires_grad_(False)
        fully_shard(block, layout=layout)
    fully_shard(net, layout=layout)
    counter = counted(warm(net))
    segments = 2 if layout == "contiguous" else 1
    gathers = 1 + segments * (1 + 2)  # of the root, and of the last block and the other
    assert kinds(counter) == {"all_gather": gathers, "reduce_scatter": 3, "all_reduce": 0}
    if layout == "contiguous":
        trained = [s.unsharded_numel for g in groups(net) for s in g.layout.segments if s.trainable]
        assert counter.bytes("reduce_scatter") == 4 * sum(trained)
    elif dist.get_world_size() == 2:
        up = 8 * 16 + 16
        assert counter.bytes("reduce_scatter") == 4 * (2 * (BLOCK_NUMEL - up) + ROOT_NUMEL)


@on_ranks(2)
def test_a_module_called_twice_in_a_row_is_gathered_once_for_both_calls() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = fully_shard(nn.Linear(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(torch.relu(self.inner(x)))

    model = warm(fully_shard(Twice()))
    with CommCounter() as counter, torch.no_grad():
        model(torch.ones(1, 8))
    assert counter.count("all_gather") == 1


@on_ranks(2)
def test_parameters_of_several_dtypes_travel_in_one_gather() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.float64).requires_grad_(False))
    fully_shard(model)
    with CommCounter() as counter, torch.no_grad():
        model.unshard()
    assert [call.dtype for call in counter.calls if call.kind == "all_gather"] == [torch.uint8]
    assert counter.bytes("all_gather") == (4 + 8) * (64 + 8)


def unsharded_groups(model: nn.Module) -> list[str]:
    states = [state for module in model.modules() if (state := state_of(module)) is not None]
    return [group.name for state in states for group in state.groups if group.is_unsharded]


@on_ranks(2)
def test_a_backward_of_the_first_block_alone_gathers_no_other() -> None:
    model = sharded_net(reshard_after_forward=True)
    kept: list[torch.Tensor] = []
    model.blocks[0].register_forward_hook(lambda _, __, output: kept.append(output))
    for _ in range(2):
        model(torch.randn(4, 8))
        with CommCounter() as counter:
            kept.pop().sum().backward()
    assert counter.count("all_gather") == 1


def test_backends_that_average_are_asked_to() -> None:
    with noop_world(2):
        model = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
        state = state_of(model)
        assert state is not None
        factors = state.reducers[0].plan_for(torch.float32, torch.float32).factors
    assert factors.reduce_scatter_op == dist.ReduceOp.AVG
