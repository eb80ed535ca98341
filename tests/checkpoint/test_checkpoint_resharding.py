"""What one number of ranks saved, another number of ranks reads back bit for bit."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

from shardwise import fully_shard
from shardwise.checkpoint import load, save


def sharded_model_and_optimizer(*, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3, bias=False), nn.LayerNorm(3))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05, betas=(0.8, 0.9), foreach=True)


def whole_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, progress: dict[str, Any]
) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "progress": progress,
    }


def full(tree: Any) -> Any:
    """The same tree with every tensor gathered and plain."""
    if isinstance(tree, dict):
        return {key: full(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [full(value) for value in tree]
    if isinstance(tree, Tensor):
        return getattr(tree, "full_tensor", lambda: tree)().clone()
    return tree


def train_and_save(path: Path) -> Any:
    model, optimizer = sharded_model_and_optimizer(seed=1)
    for step in range(3):
        torch.manual_seed(step)
        model(torch.randn(4, 7)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    progress = {"step": 3, "losses": [0.1, 1e-17], "shape": (2, 3), "note": "ünïcode", "none": None}
    state = whole_state(model, optimizer, progress)
    save(path, state, step=3)
    return full(state)


def load_elsewhere(path: Path) -> Any:
    model, optimizer = sharded_model_and_optimizer(seed=2)
    progress = {"step": 0, "losses": [], "shape": (), "note": "", "none": 0}
    state = whole_state(model, optimizer, progress)
    assert load(path, state) == 3
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return full(whole_state(model, optimizer, progress))


def test_four_ranks_checkpoint_loads_on_other_rank_counts_bit_for_bit(ranks: Any, tmp_path: Path) -> None:
    saved = ranks(train_and_save, tmp_path, world_size=4)[0]
    found = [ranks(load_elsewhere, tmp_path, world_size=readers) for readers in (4, 2, 1, 3)]
    for loaded in itertools.chain(*found):
        assert loaded["progress"] == saved["progress"]
        assert loaded["optimizer"]["param_groups"] == saved["optimizer"]["param_groups"]
        assert loaded["model"].keys() == saved["model"].keys()
        for name, weight in saved["model"].items():
            assert torch.equal(loaded["model"][name], weight), name
            for key, moment in saved["optimizer"]["state"][name].items():
                assert torch.equal(loaded["optimizer"]["state"][name][key], moment), (name, key)
                assert moment.any(), (name, key)


def test_one_process_without_a_process_group_saves_and_loads(tmp_path: Path) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    save(tmp_path, {"w": weight, "groups": [{"lr": 0.1, "t": torch.ones(2)}]}, step=0)
    state: dict[str, Any] = {"w": torch.zeros(2, 3), "groups": [{"lr": 0.0, "t": torch.zeros(2)}]}
    assert load(tmp_path, state) == 0
    assert torch.equal(state["w"], weight)
    assert state["groups"][0]["lr"] == 0.1
    assert torch.equal(state["groups"][0]["t"], torch.ones(2))
