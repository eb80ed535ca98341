"""Checkpoints hold whole tensors: rows, DTensors and plain tensors read each other's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pieces import Cut, all_on_last, parameter, uneven
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)

import shardwise.checkpoint
from ranks import RankPool, on_ranks
from sharded_tensor.forms import check, load, names, save, state
from shardwise.sharded_tensor.rows import ShardedParameter, ShardedRows

LOADED = {
    "uneven": {1: ["even"], 3: ["all_on_last", "dtensor"], 4: ["plain", "two_groups", "columnwise"]},
    "all_on_last": {1: ["dtensor"], 3: ["uneven", "plain"], 4: ["even", "replicated", "rowwise"]},
}


@pytest.mark.parametrize("form", LOADED)
def test_rows_saved_on_two_ranks_load_on_any_number_in_any_form(
    ranks: RankPool, tmp_path: Path, form: str
) -> None:
    ranks(save, form, tmp_path, world_size=2)
    for world_size, targets in LOADED[form].items():
        ranks(load, form, tmp_path, targets, world_size=world_size)


@pytest.mark.parametrize("form", ["dtensor", "plain"])
def test_rows_load_what_others_saved(ranks: RankPool, tmp_path: Path, form: str) -> None:
    ranks(save, form, tmp_path, world_size=2)
    for world_size in (1, 3):
        ranks(load, form, tmp_path, ["uneven"], world_size=world_size)


@pytest.mark.parametrize("form", ["two_groups", "replicated", "rowwise", "columnwise"])
def test_rows_on_a_mesh_load_on_one_rank(ranks: RankPool, tmp_path: Path, form: str) -> None:
    ranks(save, form, tmp_path, world_size=4)
    ranks(load, form, tmp_path, ["plain"], world_size=1)


def save_ours(path: Path) -> None:
    shardwise.checkpoint.save(path, {"model": state("uneven", empty=False)}, step=3)


def load_ours(form: str, path: Path) -> None:
    tensors = state(form, empty=True)
    target = {"model": {name: tensors[name] for name in names("uneven")}}
    assert shardwise.checkpoint.load(path, target) == 3
    check(target["model"])


def test_shardwise_checkpoints_hold_rows(ranks: RankPool, tmp_path: Path) -> None:
    ranks(save_ours, tmp_path, world_size=2)
    for world_size, form in ((1, "even"), (3, "all_on_last"), (3, "plain")):
        ranks(load_ours, form, tmp_path, world_size=world_size)


# torch's state-dict functions


def model(cut: Cut) -> nn.Linear:
    torch.manual_seed(6)
    linear = nn.Linear(5, 7)
    for name, param in list(linear.named_parameters()):
        setattr(linear, name, parameter(param.detach(), cut))
    return linear


@on_ranks(2)
def test_a_sharded_state_dict_holds_rows() -> None:
    linear = model(uneven)
    optimizer = torch.optim.AdamW(linear.parameters())
    for param in linear.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    for value in get_model_state_dict(linear).values():
        assert isinstance(value, ShardedRows)
    states = get_optimizer_state_dict(linear, optimizer)["state"]
    assert isinstance(states["weight"]["exp_avg"], ShardedRows)
    target = model(all_on_last)
    with torch.no_grad():
        target.weight.zero_()
    set_model_state_dict(target, get_model_state_dict(linear))
    assert torch.equal(target.weight.full_tensor(), linear.weight.full_tensor())


@on_ranks(2)
@pytest.mark.parametrize("broadcast", [False, True])
def test_a_full_state_dict_loads_into_rows(broadcast: bool) -> None:
    linear = model(uneven)
    wanted: dict[str, Tensor] = {"weight": torch.ones(7, 5), "bias": torch.arange(7.0)}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    set_model_state_dict(
        linear, dict(wanted) if not broadcast or dist.get_rank() == 0 else {}, options=options
    )
    for name, param in linear.named_parameters():
        assert isinstance(param, ShardedParameter)
        assert torch.equal(param.full_tensor(), wanted[name])


@on_ranks(2)
def test_a_full_state_dict_of_rows_is_whole() -> None:
    linear = model(uneven)
    wholes = {name: param.full_tensor() for name, param in linear.named_parameters()}
    found = get_model_state_dict(linear, options=StateDictOptions(full_state_dict=True))
    assert found.keys() == wholes.keys()
    offloaded = get_model_state_dict(linear, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert offloaded.keys() == (wholes.keys() if dist.get_rank() == 0 else set())
    for name, value in [*found.items(), *offloaded.items()]:
        assert type(value) is Tensor
        assert torch.equal(value, wholes[name])
