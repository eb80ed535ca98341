"""A flat optimizer's state is that of the ordinary one, by name, and is saved and loaded on any ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from fsdp.models import Net
from optim.flat_steps import backward, model, pair, rows, same_bits, train
from ranks import on_ranks
from shardwise.checkpoint import load, save
from shardwise.optim import FlatOptimizer, flat
from shardwise.sharded_tensor.rows import ShardedRows


@on_ranks(2, 3)
def test_state_interchanges_with_the_ordinary_optimizers_by_name() -> None:
    (net, optimizer), (other, by_flat) = pair(torch.optim.AdamW, lr=1e-2, foreach=True)
    train(net, optimizer, range(2))
    train(other, by_flat, range(2))
    ours, theirs = by_flat.state_dict(), get_optimizer_state_dict(net, optimizer)
    assert set(ours["state"]) <= set(theirs["state"])
    assert ours["param_groups"] == theirs["param_groups"]
    for name, values in ours["state"].items():
        for key, found in values.items():
            value = theirs["state"][name][key]
            if isinstance(value, ShardedRows):
                assert isinstance(found, ShardedRows)
                assert found.piece == value.piece
                value, found = value.local, found.local
            assert torch.equal(found, value)
    fresh = model()
    fresh.load_state_dict(net.state_dict())
    from_theirs = flat(torch.optim.AdamW, other, lr=1.0, foreach=True)
    from_theirs.load_state_dict(theirs)
    from_ours = torch.optim.AdamW(fresh.parameters(), lr=1.0, foreach=True)
    # on each rank without the parameters of which it holds no rows
    set_optimizer_state_dict(fresh, from_ours, ours, options=StateDictOptions(strict=False))
    for each, of in ((net, optimizer), (other, from_theirs), (fresh, from_ours)):
        assert of.param_groups[0]["lr"] == 1e-2
        train(each, of, range(2, 4))
    assert same_bits(rows(net), rows(other))
    assert same_bits(rows(net), rows(fresh))


@on_ranks(3)
def test_a_state_of_parameters_stepped_unequally_splits_the_tensor_that_loads_it() -> None:
    net = model()
    optimizer = flat(torch.optim.AdamW, net, lr=1e-2, foreach=True)
    for step in range(3):
        backward(net, step)
        if step == 1:
            net.blocks[0].up.weight.grad = None
        optimizer.step()
        optimizer.zero_grad()
    loaded = flat(torch.optim.AdamW, net, lr=1e-2, foreach=True)
    loaded.load_state_dict(optimizer.state_dict())
    a, b = optimizer.state_dict()["state"], loaded.state_dict()["state"]
    for name, values in a.items():
        assert torch.equal(values["step"], b[name]["step"])
        assert torch.equal(values["exp_avg"].local, b[name]["exp_avg"].local)


def checkpointed(net: nn.Module, optimizer: FlatOptimizer) -> dict[str, Any]:
    return {"model": net.state_dict(), "optimizer": optimizer.state_dict()}


Held = dict[tuple[str, int], Tensor]  # rows by name and the first of them


def held_state(optimizer: FlatOptimizer) -> Held:
    return {
        (f"{name}.{key}", value.box.offsets[0] if isinstance(value, ShardedRows) else 0): (
            value.local.clone() if isinstance(value, ShardedRows) else value.clone()
        )
        for name, values in optimizer.state_dict()["state"].items()
        for key, value in values.items()
    }


def whole_state(by_rank: list[Held]) -> dict[str, Tensor]:
    parts: dict[str, dict[int, Tensor]] = {}
    for held in by_rank:
        for (name, first), value in held.items():
            parts.setdefault(name, {})[first] = value
    return {
        name: torch.cat([value for _, value in sorted(of.items())]) if of[0].ndim else of[0]
        for name, of in parts.items()
    }


def write(folder: Path) -> Held:
    net = model()
    optimizer = flat(torch.optim.AdamW, net, lr=1e-2)
    train(net, optimizer, range(3))
    save(folder / "ours", checkpointed(net, optimizer), step=3)
    dcp.save(checkpointed(net, optimizer), checkpoint_id=folder / "torchs")
    return held_state(optimizer)


def read(folder: Path) -> list[Held]:
    found = []
    for which in ("ours", "torchs"):
        net = model()
        optimizer = flat(torch.optim.AdamW, net, lr=1.0)
        before = rows(net)
        optimizer.allocate_state()
        assert same_bits(rows(net), before)
        state = checkpointed(net, optimizer)
        if which == "ours":
            assert load(folder / which, state) == 3
        else:
            dcp.load(state, checkpoint_id=folder / which)
        optimizer.load_state_dict(state["optimizer"])
        assert which == "torchs" or optimizer.param_groups[0]["lr"] == 1e-2
        found.append(held_state(optimizer))
        train(net, optimizer, range(3, 4))
    return found


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 4), (1, 3)])
def test_checkpoints_load_at_other_world_sizes(ranks: Any, tmp_path: Path, before: int, after: int) -> None:
    saved = whole_state(ranks(write, folder=tmp_path, world_size=before))
    assert len(saved) == 3 * len(list(Net(blocks=2).parameters()))
    for by_rank in zip(*ranks(read, folder=tmp_path, world_size=after), strict=True):
        loaded = whole_state(list(by_rank))
        assert set(loaded) == set(saved)
        assert all(torch.equal(loaded[name], value) for name, value in saved.items())


@on_ranks(2)
def test_only_what_trains_gets_state_when_gathered_modules_were_frozen() -> None:
    net = model()
    optimizer = flat(torch.optim.AdamW, net, lr=1.0)
    net.unshard()
    frozen = [name for name, param in net.named_parameters() if type(param) is nn.Parameter][:1]
    dict(net.named_parameters())[frozen[0]].requires_grad_(False)
    optimizer.allocate_state()
    net.reshard()
    held = dict(net.named_parameters())
    assert set(optimizer.state_dict()["state"]) == {
        name for name, param in held.items() if param.to_local().numel() and name not in frozen
    }
