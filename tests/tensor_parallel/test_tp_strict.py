"""Strict refuses exactly the programs that gather what nothing asked for, and the report names each."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import lockstep
import pytest
import torch
from torch import Tensor, nn
from torch.export import export
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from shardwise.errors import ShardingError
from shardwise.tensor_parallel import counts, explain, tensor_parallel_transformation

# torch's own decompositions copy what it calls deprecated
pytestmark = pytest.mark.filterwarnings("ignore:.*treespec:FutureWarning")

# Of a value [4, 6] that is cut along its last dim: do they gather it?
OPERATIONS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "relu": (torch.relu, False),
    "add": (lambda y: y + y[:1], False),
    "flip": (lambda y: y.flip(-1), True),
    "flip rows": (lambda y: y.flip(0), False),
    "cumsum": (lambda y: y.cumsum(-1), True),
    "cumsum of rows": (lambda y: y.cumsum(0), False),
    "glu": (lambda y: F.glu(y, -1), True),
    "pad": (lambda y: F.pad(y, (1, 1)), True),
    "sort": (lambda y: y.sort(-1)[0], True),
    "topk": (lambda y: y.topk(2, -1)[0], True),
    "std": (lambda y: y.std(-1), True),
    "var of rows": (lambda y: y.var(0), False),
    "mean": (lambda y: y.mean(-1), False),
    "amax": (lambda y: y.amax(-1), True),
    "prod": (lambda y: y.prod(-1), True),
    "argmax": (lambda y: y.argmax(-1), True),
    "logsumexp": (lambda y: y.logsumexp(-1), True),
    "softmax": (lambda y: y.softmax(-1), False),
    "movedim": (lambda y: y.movedim(1, 0), False),
    "roll": (lambda y: y.roll(1, -1), True),
    "chunk": (lambda y: y.chunk(2, -1), False),
    "slice": (lambda y: y[:, 1:4], False),
    "slice of a squeezed one": (lambda y: y.unsqueeze(1).squeeze(1)[:, 1:4], False),
    "roll of all": (lambda y: y.roll(1), True),
    "sum that keeps dims": (lambda y: y.norm(dim=None, keepdim=True) + y.sum((0, 1), keepdim=True), True),
    "prelu": (lambda y: F.prelu(F.prelu(y, torch.full((6,), 0.5)), torch.full((1,), 0.5)), False),
    "new value": (lambda y: y * y.new_full((1,), 2.0), False),
    "step": (lambda y: y[:, ::2], True),
    "select": (lambda y: y[:, 2], True),
    "index": (lambda y: y[:, torch.tensor([0, 3])], True),
    "view": (lambda y: y.view(4, 2, 3), False),
    "mixed view": (lambda y: y.reshape(3, 8), True),
    "cat": (lambda y: torch.cat([y, y], -1), False),
    "cat with a whole one": (lambda y: torch.cat([y, torch.ones(4, 6)], -1), True),
    "repeat": (lambda y: y.repeat(1, 2), True),
    "layer norm": (lambda y: F.layer_norm(y, (6,)), True),
    "tril": (lambda y: y.tril(), True),
    "matmul": (lambda y: y @ y.mT, False),
    "dropout": (lambda y: F.dropout(y, 0.5, training=False), False),
    "einsum": (lambda y: torch.einsum("bi,bi->b", y, y), True),
    "cond": (lambda y: torch.cond(torch.ones(()) > 0, lambda y: y * 2, lambda y: y + 1, (y,)), True),
    "unstyled linear": (lambda y: F.linear(y, torch.ones(2, 6)), True),
    "masked select": (lambda y: torch.where(y > 0, y, 0.0), False),
    "one hot": (lambda y: F.one_hot((y > 0).long(), 2), True),
    "diff": (lambda y: y.diff(dim=-1), True),
}


class Applied(nn.Module):
    def __init__(self, operation: Callable[[Any], Any]) -> None:
        super().__init__()
        self.up, self.operation = nn.Linear(5, 6), operation

    def forward(self, x: Tensor) -> list[Tensor]:
        return [each.sum() for each in pytree.tree_leaves(self.operation(self.up(x)))]


class All(nn.Module):
    """Operations, each of a value of its own."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name.replace(" ", "_"): Applied(OPERATIONS[name][0]) for name in names})

    def forward(self, x: Tensor) -> list[list[Tensor]]:
        return [part(x) for part in self.parts.values()]


PLAN = {"*.up": "colwise"}


def test_the_report_names_each_operation_that_gathers_what_the_plan_did_not_ask_for() -> None:
    torch.manual_seed(0)
    model, x = All(list(OPERATIONS)), torch.randn(4, 5)
    program = export(model, (x,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        programs = lockstep.parts(program, PLAN, ranks=2)
    for results in lockstep.run(programs, x):
        torch.testing.assert_close(results, pytree.tree_leaves(model(x)))
    report = explain(programs[0])
    gathering = {name.replace(" ", "_") for name, (_, gathers) in OPERATIONS.items() if gathers}
    assert {row.module.split(".")[1] for row in report.unasked} == gathering
    assert {row.module.split(".")[1] for row in report.collectives if row.kind == "all_gather"} == gathering
    assert all(row.node in str(report) for row in report.unasked)


def test_strict_refuses_a_program_that_gathers_and_names_the_operation() -> None:
    program = export(All(["relu", "flip"]), (torch.randn(4, 5),))
    with pytest.raises(ShardingError, match=r"flip.* \(flip, of module 'parts.flip', .* gather 96 bytes"):
        tensor_parallel_transformation(program, 0, 2, "cpu", PLAN, strict=True)


def test_strict_takes_programs_that_gather_nothing_else() -> None:
    names = [name for name, (_, gathers) in OPERATIONS.items() if not gathers]
    program = export(All(names), (torch.randn(4, 5),))
    part = tensor_parallel_transformation(program, 0, 2, "cpu", PLAN, strict=True)
    assert "all_gather" not in counts(part)
    assert explain(part).unasked == ()
