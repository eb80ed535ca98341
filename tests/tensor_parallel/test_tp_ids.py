"""Ids and targets outside of a vocabulary that is cut, and what of a table's gradient is special."""

from __future__ import annotations

from typing import Any

import lockstep
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.export import export
from torch.nn import functional as F

from ranks import on_ranks
from shardwise.tensor_parallel import counts, tensor_parallel_transformation

# torch's compiler copies what it calls deprecated
pytestmark = pytest.mark.filterwarnings("ignore:.*treespec:FutureWarning")


class Language(nn.Module):
    """Losses of every kind over a head cut by a vocabulary of which the last rank has nothing."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(size, 4), nn.Linear(4, size)

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        logits = self.head(self.table(ids))
        logarithms = logits.log_softmax(-1)
        return (
            F.cross_entropy(logits, targets),
            F.nll_loss(logarithms, targets),
            logarithms.gather(-1, targets.clamp(min=0).unsqueeze(-1)),
            torch.zeros_like(logits.detach())
            .add(logits)
            .scatter(-1, targets.abs().unsqueeze(-1) // 100, 1.0),
        )


@on_ranks(3)
def test_what_is_no_id_raises_on_every_rank_as_in_the_whole_model_also_compiled() -> None:
    torch.manual_seed(0)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    size = 2  # the last rank has nothing
    model, ids = Language(size), torch.tensor([0, 1, 1])
    program = export(model, (ids, ids.clone()))
    part = tensor_parallel_transformation(
        program, rank, ranks, "cpu", {"table": "rowwise", "head": "colwise"}
    )
    assert counts(part).keys() == {"all_reduce", "all_gather"}
    compiled = torch.compile(part.module(), backend="aot_eager")
    good = torch.tensor([0, -100, 1])
    with torch.no_grad():
        for run in (part.module(), compiled):
            torch.testing.assert_close(run(ids, good), model(ids, good))
            for wrong_id in (size, -1):
                for wrong in (True, False):
                    bad = torch.tensor([0, wrong_id, 1])
                    given = (bad, good) if wrong else (ids, bad)
                    for each in (model, run):
                        with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
                            each(*given)
                    dist.barrier()


@pytest.mark.parametrize(("style", "by_count"), [("rowwise", False), ("rowwise", True), ("colwise", True)])
def test_gradients_of_padding_and_by_count_are_those_of_the_whole_table(style: str, by_count: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4, padding_idx=3, scale_grad_by_freq=by_count))
    ids = torch.tensor([[0, 3, 4, 4], [0, 0, 1, 3]])
    model(ids).square().sum().backward()
    for ranks in (2, 3):
        program = export(model, (ids,))
        plan: Any = {"0": style}
        programs = lockstep.parts(program, plan, ranks=ranks, training=True)
        lockstep.backward([out.square().sum() for (out,) in lockstep.run(programs, ids)])
        gradients = [part.state_dict["0.weight"].grad for part in programs]
        torch.testing.assert_close(torch.cat(gradients, 0 if style == "rowwise" else 1), model[0].weight.grad)
