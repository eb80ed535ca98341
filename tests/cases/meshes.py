"""The example of several dimensions as a case: right on any mesh, and wrong by one dimension."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from examples import train_dimensions as example
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise
from fuzz.meshes_part.train import TINY
from shardwise.dimensions import expert_mesh
from shardwise.nn import ExpertCut
from shardwise.verify import Case

ARGS = example.parse_arguments([])
vars(ARGS).update(TINY | {"depth": 2, "dtype": "float64"})
steps: list[Any] = []  # of this process: the one that it trains


def build() -> nn.Module:
    model = example.build(ARGS)
    for module in model.modules():
        if isinstance(module, example.MixtureOfExperts):
            module.cut = ExpertCut(None, ARGS.experts)
    return model


def shard(model: nn.Module, mesh: Any, layout: str = "interleaved") -> nn.Module:
    ARGS.layout = layout
    steps[:] = [example.Step(ARGS, mesh, torch.device("cpu"))]
    return steps[0].model


def batch(step: int) -> tuple[Tensor, ...]:
    rows = torch.randint(256, (ARGS.batch, ARGS.seq + 1), generator=torch.Generator().manual_seed(step))
    return rows[:, :-1], rows[:, 1:]


def loss(model: nn.Module, rows: tuple[Tensor, ...]) -> Tensor:
    return F.cross_entropy(model(rows[0]).flatten(0, 1), rows[1].flatten())


def backward(model: nn.Module, rows: tuple[Tensor, ...]) -> Tensor | None:
    step = steps[0]
    if step.sequences is not None:
        rows = tuple(step.sequences(each).contiguous() for each in rows)
    losses: list[Tensor] = []
    if step.schedule is None:
        losses.append(step.loss(model(rows[0]), rows[1]))
        losses[0].backward()
    else:
        shardwise.install()
        ends = {"target": rows[1], "losses": losses} if step.is_last else {}
        step.schedule.step(*((rows[0],) if step.is_first else ()), **ends)
        shardwise.uninstall()
    return torch.stack([each.detach() for each in losses]).mean() if losses else None


def verify_case(**changes: Any) -> Case:
    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)

    parts: dict[str, Any] = {"build": build, "shard": shard, "optimizer": sgd, "batch": batch, "loss": loss}
    return Case(**parts | {"backward": backward} | changes)


def without_the_divisor_of_experts() -> Case:
    """Experts' gradients stay means over the ranks of their shards: too large by the size of ep."""

    def wrong(model: nn.Module, mesh: Any, layout: str = "interleaved") -> nn.Module:
        with mock.patch.object(example, "data_ranks", lambda mesh: expert_mesh(mesh).size()):
            return shard(model, mesh, layout)

    return verify_case(shard=wrong)
