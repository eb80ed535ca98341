"""Backward ended by hand, and which gradients `zero_grad` clears.

Before 2.15 torch's FSDP2 cannot do the former and does the latter otherwise; there only ours are compared
with one process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.parity.harness import (
    BF16,
    REPLICAS,
    Case,
    by_block,
    compare,
    each_of,
    micro_batches,
    no_options,
    one_pass,
)
from fsdp.parity.models import LANGUAGE, RESIDUAL, UNEVEN, Batch, Task
from fsdp.parity.test_parity_grad_dtypes import IN_TORCH
from fsdp.parity.test_parity_precision import policy

Step = Callable[[nn.Module, Task, Batch], Tensor]


def by_hand(*, async_op: bool, count: int = 1) -> Step:
    """Backwards that communicate nothing, then one reduction; with one micro-batch, in its backward."""

    def step(model: nn.Module, task: Task, batch: Batch) -> Tensor:
        model.set_manual_backward_finalization(True)
        total = torch.zeros(())
        for part in micro_batches(batch, count):
            model.set_requires_gradient_sync(count == 1)
            loss = task.loss(model, part) / count
            loss.backward()
            total += loss.detach()
        model.set_requires_gradient_sync(True)
        handle = model.finalize_backward(async_op=async_op)
        if async_op:
            handle.wait()
            handle.wait()
        return total

    return step


def cleared_between(*, gathered: bool) -> Step:
    """The first half's gradients wait, unsharded, while `zero_grad` is called."""

    def step(model: nn.Module, task: Task, batch: Batch) -> Tensor:
        halves = micro_batches(batch, 2)
        for i, half in enumerate(halves):
            model.set_requires_gradient_sync(i == 1)
            model.set_reshard_after_backward(i == 1 or not gathered)
            loss = task.loss(model, half) / 2
            loss.backward()
            if i == 0:
                model.zero_grad()
        return loss.detach()

    return step


def halves_of_all_ranks(second_only: bool, ranks: int) -> Step:
    def alone(model: Any, task: Task, batch: Batch) -> Tensor:
        slices = [[part.chunk(2) for part in tensor.chunk(ranks)] for tensor in batch]
        for i in (1,) if second_only else (0, 1):
            half = tuple(torch.cat([halves[i] for halves in tensor]) for tensor in slices)
            loss = task.loss(model, half) / 2
            loss.backward()
        return loss.detach()

    return alone


def case(task: Task, step: Step, **changes: Any) -> Case:
    return replace(Case(task, by_block(no_options), step=step, torchs=IN_TORCH), **changes)


BF = policy(torch.bfloat16, torch.float32)
CASES: dict[str, Case] = {
    "ended by hand": case(UNEVEN, by_hand(async_op=False), alone=one_pass, ranks=3),
    "ended by hand, waited for later": case(LANGUAGE, by_hand(async_op=True)),
    "accumulated, reduced by hand": case(LANGUAGE, by_hand(async_op=True, count=2), ranks=3),
    "accumulated in fp32, reduced by hand": case(
        LANGUAGE,
        by_hand(async_op=False, count=2),
        shard=by_block(BF),
        compute_dtype=torch.bfloat16,
        rounding=BF16,
    ),
    "replicas reduced by hand": case(RESIDUAL, by_hand(async_op=True, count=2), **REPLICAS),
    "zero_grad while resharded": case(
        RESIDUAL, cleared_between(gathered=False), alone=halves_of_all_ranks(False, 2)
    ),
    "zero_grad while gathered": case(
        RESIDUAL, cleared_between(gathered=True), alone=halves_of_all_ranks(True, 2)
    ),
    "zero_grad while gathered, in fp32": case(
        RESIDUAL,
        cleared_between(gathered=True),
        alone=halves_of_all_ranks(True, 2),
        shard=by_block(BF),
        compute_dtype=torch.bfloat16,
        rounding=BF16,
    ),
}


@each_of(CASES)
def test_what_backward_leaves_is_torchs_and_near_one_process(name: str) -> None:
    compare(CASES[name])
