"""An embedding that is the output head too, on the first and the last stage of a pipeline, in fp64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

import shardwise
from ranks import on_ranks
from shardwise import ShardingError, fully_shard
from shardwise.checkpoint import load, save
from shardwise.optim import add_tied_gradients, clip_grad_norm_

WORDS, WIDTH, CLIP = 10, 4, 0.05
close = {"rtol": 1e-12, "atol": 1e-14}


class Table(nn.Embedding):
    """Words to vectors, and vectors to scores of words."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) if x.is_floating_point() else super().forward(x)


class Model(nn.Module):
    """All of it, or its first or second half; both halves have the table."""

    def __init__(self, halves: tuple[int, ...] = (0, 1)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = Table(WORDS, WIDTH, dtype=torch.float64)
        parts = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2)]
        self.parts = nn.ModuleDict({str(half): parts[half] for half in halves})

    def forward(self, x: Tensor) -> Tensor:
        if "0" in self.parts:
            x = self.table(x)
        for part in self.parts.values():
            x = x + part(x).tanh()
        return self.table(x) if "1" in self.parts else x


def loss_of(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def batch(step: int) -> tuple[Tensor, Tensor]:
    rows = torch.randint(WORDS, (8, 4), generator=torch.Generator().manual_seed(step))
    return rows[:, :-1], rows[:, 1:]


@pytest.mark.parametrize("layout", ["interleaved", "contiguous"])
@on_ranks(4)
def test_a_table_on_two_stages_trains_as_one_that_is_used_twice(layout: str, tmp_path: Path) -> None:
    whole = Model()
    expected = torch.optim.AdamW(whole.parameters(), lr=0.1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    half, share = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    model = Model((half,))
    for module in (model.table, model):  # the table by itself: the same rows on both stages
        fully_shard(module, mesh=mesh["dp"], layout=layout, reshard_after_forward=False)
    stage = PipelineStage(model, half, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(stage, 2, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    shardwise.install()
    try:
        for step in range(3):
            inputs, targets = batch(step)
            loss_of(whole(inputs), targets).backward()
            norm = nn.utils.clip_grad_norm_(whole.parameters(), CLIP)
            expected.step()
            expected.zero_grad()
            mine: dict[str, Any] = {"target": targets.chunk(2)[share]} if half else {}
            schedule.step(*(() if half else (inputs.chunk(2)[share],)), **mine)
            tied = list(model.table.parameters())
            add_tied_gradients(tied, mesh["pp"], other=1 - half)
            with pytest.warns(UserWarning, match=r"norm of this stage alone; pass stages=mesh\[.pp.\]"):
                clip_grad_norm_(model.parameters(), float("inf"))
            found = clip_grad_norm_(model.parameters(), CLIP, stages=mesh["pp"], tied=tied)
            torch.testing.assert_close(found, norm, **close)
            optimizer.step()
            optimizer.zero_grad()
    finally:
        shardwise.uninstall()
    trained = dict(whole.named_parameters())
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.full_tensor(), trained[name].detach(), **close)
    save(tmp_path / layout, {"model": get_model_state_dict(model)}, step=1)
    again = fully_shard(Model(), mesh=init_device_mesh("cpu", (4,)))
    with torch.no_grad():
        again.table.weight.zero_()
    load(tmp_path / layout, {"model": get_model_state_dict(again)})
    torch.testing.assert_close(again.table.weight.full_tensor(), trained["table.weight"].detach(), **close)


@on_ranks(2)
def test_copies_that_do_not_match_are_an_error_on_both_stages() -> None:
    stages = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    rank = dist.get_rank()

    def filled(*sizes: int) -> list[nn.Parameter]:
        params = [nn.Parameter(torch.zeros(size)) for size in sizes]
        for param in params:
            param.grad = torch.full_like(param, 1.0 + rank)
        return params

    for mine in (filled(2 + rank), filled(*[2] * (1 + rank)), [nn.Parameter(torch.zeros(2))]):
        with pytest.raises(ShardingError, match=rf"not as on rank {1 - rank}; expected a gradient of each"):
            add_tied_gradients(mine, stages, other=1 - rank)
    right = filled(2, 3)
    add_tied_gradients(right, stages, other=1 - rank)
    assert [param.grad.unique().item() for param in right] == [3.0, 3.0]
