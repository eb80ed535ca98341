"""What torch's own reader of distributed checkpoints makes of one of ours: tensors and plain values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torchs
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from fsdp.models import Net, step
from ranks import on_ranks
from shardwise import fully_shard
from shardwise.checkpoint import PerRank, load, save

PLAIN = {
    "step": 3,
    "notes": [{"loss": 0.5, "at": (1, 2)}, {"loss": 0.25, "at": None}],
    "names": ["a", ["b"]],
    "more": {"deep": {"on": True}},
}
SHARDS: dict[str, Callable[[nn.Module], Any]] = {
    "contiguous": lambda module: fully_shard(module, layout="contiguous"),
    "interleaved": fully_shard,
    "torch's": torchs.fully_shard,
}


def build(kind: str, *, lr: float) -> tuple[Net, torch.optim.Optimizer]:
    net = Net(blocks=1)
    for module in (net.blocks[0], net):
        SHARDS[kind](module)
    return net, torch.optim.AdamW(net.parameters(), lr=lr)


def state_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(net, optimizer), strict=True))


def whole(state: dict[str, Any]) -> list[Any]:
    moments = [m for of in state["optimizer"]["state"].values() for m in of.values()]
    tensors = [*state["model"].values(), *moments]
    return [getattr(tensor, "full_tensor", tensor.clone)() for tensor in tensors]


@pytest.mark.parametrize("kind", SHARDS)
@on_ranks(2)
def test_it_fills_a_state_of_model_optimizer_and_plain_values(tmp_path: Path, kind: str) -> None:
    net, optimizer = build("contiguous", lr=0.125)
    for _ in range(2):
        step(net)
        optimizer.step()
    saved = state_of(net, optimizer)
    folder = save(tmp_path, {**saved, **copy.deepcopy(PLAIN), "own": PerRank({"at": 7})}, step=3)
    other, optimizer = build(kind, lr=0.5)
    target: Any = {**state_of(other, optimizer), "step": 0, "names": [], "more": {"deep": {"on": False}}}
    target["notes"] = [{"loss": 0.0, "at": ()}, {"loss": 0.0, "at": ()}]
    dcp.load(target, checkpoint_id=folder)
    assert {name: target[name] for name in PLAIN} == PLAIN
    set_state_dict(other, optimizer, model_state_dict=target["model"], optim_state_dict=target["optimizer"])
    assert all(map(torch.equal, whole(state_of(other, optimizer)), whole(saved)))
    assert optimizer.param_groups[0]["lr"] == 0.125
    again: Any = {**saved, **copy.deepcopy(PLAIN), "step": 0, "own": PerRank({"at": 0})}
    assert load(tmp_path, again) == 3
    assert (again["step"], again["own"].value) == (3, {"at": 7})
