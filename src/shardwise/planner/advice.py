"""Changes to a setup that does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from shardwise.errors import ShardingError
from shardwise.planner.devices import Hardware
from shardwise.planner.events import LOGITS
from shardwise.planner.models import Factory, Model, resolve
from shardwise.planner.plan import Plan, plan, sized, suggesting
from shardwise.planner.setup import MOST, Setup
from shardwise.planner.tensor import cuts


def lines(model: str | Model | Factory, plan: Plan, hardware: str | Hardware) -> Iterator[str]:
    """Yield the largest part of a plan's memory, then each change as it is planned."""
    category, size = max(plan.peak.alive.items(), key=lambda item: item[1])
    words = f"Most at the peak: {category}, {sized(size)} of {sized(plan.peak_bytes)}"
    logits = plan.peak.alive.get(LOGITS, 0)
    if plan.whole_logits and 4 * logits > plan.peak_bytes:
        words += (
            f"; logits and loss, {sized(logits)}, are whole on each of {plan.setup.tensor} tensor-parallel"
            " ranks: loss_parallel=True cuts them"
        )
    yield words
    best = plan
    for words, changed in advise(model, plan.setup, hardware=hardware, planned=plan):
        end = "" if changed.free_bytes > best.free_bytes else ", so without that"
        yield f"{words}: {'fits, with' if changed.fits else 'short of'} {sized(abs(changed.free_bytes))}{end}"
        best = max(best, changed, key=lambda plan: plan.free_bytes)


def advise(
    model: str | Model | Factory, setup: Setup, *, hardware: str | Hardware, planned: Plan | None = None
) -> Iterator[tuple[str, Plan]]:
    """Yield changes to a setup that does not fit, one after another, cheapest in time first, until it fits.

    A change that gains no memory is not kept for the next ones.

    Args:
        planned: the setup's plan, if it was made already.
    """
    model, setup = resolve(model, setup)
    best = planned or plan(model, setup, hardware=hardware)
    for words, change in _changes(model, best):
        try:
            with suggesting():
                changed = plan(model, replace(best.setup, **change), hardware=hardware)
        except ShardingError:  # no experts, say
            continue
        yield words, changed
        if changed.fits:
            return
        best = changed if changed.free_bytes > best.free_bytes else best


def _changes(model: Model, plan: Plan) -> Iterator[tuple[str, dict[str, Any]]]:
    setup = plan.setup
    if setup.tensor > 1 and setup.loss == "whole":
        with torch.device("meta"):
            module = model.build(1)
        if not cuts(module, setup)[1]:
            yield "cut the logits up to the loss (loss_parallel=True)", {"loss_parallel": True}
    data_only = setup.pipeline * setup.ulysses * setup.experts * setup.tensor == 1
    if data_only and setup.loss == "whole" and 4 * plan.peak.alive.get(LOGITS, 0) > plan.peak_bytes:
        options = {"loop_holds": "nothing", "compile_loss": False}
        yield "compute the loss in chunks (loss='chunked')", {"loss": "chunked", **options}
    if setup.reshard_after_forward is False:
        yield "free parameters after forward (reshard_after_forward=True)", {"reshard_after_forward": True}
    if setup.layout == "interleaved":
        yield 'gather in place (layout="contiguous")', {"layout": "contiguous"}
    if setup.checkpointing == "none":
        yield "recompute most of each block (checkpointing='selective')", {"checkpointing": "selective"}
    if setup.checkpointing != "full":
        yield "recompute each block (checkpointing='full')", {"checkpointing": "full"}
    if setup.micro_batch > 1:
        steps = setup.accumulation * setup.micro_batch
        yield "smaller micro-batches, more of them", {"micro_batch": 1, "accumulation": steps}
    if setup.replicas > 1:
        yield "cut over all ranks (replicas=1)", {"replicas": 1}
    if data_only and setup.loss == "whole" and setup.axes["shard"] % 8 == 0:
        yield "share experts out over 8 ranks (experts=8)", {"experts": 8}
    for words, times in (("twice", 2), ("four times", 4)):
        if times * setup.ranks <= MOST:
            yield f"{words} as many ranks", {"ranks": times * setup.ranks}
