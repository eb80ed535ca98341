"""Muon and AdamW8bit on meshes of several dimensions: one process's steps on the same gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from examples import train_dimensions as example
from torch import nn

from fuzz.meshes_part.beside import whole
from fuzz.meshes_part.train import batch, known_to_pipelines, settings
from ranks import on_ranks
from shardwise.dimensions import Dimensions
from shardwise.errors import ShardingError
from shardwise.optim import AdamW8bit, Muon

Optimizers = list[torch.optim.Optimizer]


def muon(params: dict[str, Any]) -> Optimizers:
    hidden = {name: p for name, p in params.items() if name.startswith("blocks") and p.ndim == 2}
    others = [p for name, p in params.items() if name not in hidden]
    return [Muon(hidden.items(), lr=0.02), torch.optim.SGD(others, lr=0.1, foreach=True)]


def eight_bits(params: dict[str, Any]) -> Optimizers:
    return [AdamW8bit(params.items(), lr=1e-2)]


@pytest.mark.parametrize(
    ("kind", "mesh", "layout"),
    [
        (muon, "pp2,ep2", "contiguous"),
        (muon, "replicate2,sp2", "interleaved"),
        (eight_bits, "pp2,ep2", "interleaved"),
        (eight_bits, "dp2,ep2", "contiguous"),
    ],
)
@on_ranks(4)
def test_steps_are_those_of_one_process_on_the_same_gradients(kind: Any, mesh: str, layout: str) -> None:
    args = settings(mesh=mesh, layout=layout, width=32, depth=2, dtype="float32")
    alone = dict(example.build(args).named_parameters())
    expected = {name: nn.Parameter(p.detach().clone()) for name, p in alone.items()}
    step = example.Step(args, Dimensions(mesh).mesh("cpu"), torch.device("cpu"))
    mine = dict(step.model.named_parameters())
    ours, theirs = kind(mine), kind(expected)
    with known_to_pipelines():
        step.backward(batch(args, 0))
    gradients = whole({name: p.grad.full_tensor() for name, p in mine.items()})
    for number in range(2):
        for name, param in mine.items():
            if number:  # other gradients, cut alike
                param.grad.mul_(param.grad)
                gradients[name] *= gradients[name]
            expected[name].grad = gradients[name]
        for optimizer in (*ours, *theirs):
            optimizer.step()
    if kind is eight_bits:
        states = [state for optimizer in ours for state in optimizer.state.values()]
        assert any(state["exp_avg"].dtype == torch.uint8 for state in states)
    for name, param in mine.items():
        assert torch.equal(param.detach().full_tensor(), expected[name].detach()), name
        assert not torch.equal(expected[name], alone[name]), name


@on_ranks(4)
def test_muon_refuses_matrices_that_tp_cuts_too_by_name() -> None:
    args = settings(mesh="dp2,tp2", depth=2)
    step = example.Step(args, Dimensions(args.mesh).mesh("cpu"), torch.device("cpu"))
    with pytest.raises(ShardingError, match=r"cut over one mesh axis, but parameter blocks.0.query.weight"):
        muon(dict(step.model.named_parameters()))
