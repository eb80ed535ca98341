"""The second judge: numbers in adverse orders. What the first calls a race fails here, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.planner.noop_group import noop_world
from shardwise.verify.streams import DEVICE, Findings, Order, all_orders, simulated

Program = Callable[[bool], object]


def ones() -> Tensor:
    return torch.ones(64, device=DEVICE)


def current() -> Any:
    return torch.accelerator.current_stream()


def read_before_it_is_written(waits: bool) -> None:
    x, stream = ones(), torch.Stream(device=DEVICE)
    stream.wait_stream(current())
    with stream:
        x.mul_(3)
    if waits:
        current().wait_stream(stream)
    (x + 1).sum().item()


def reduced_shard_copied_to_the_host_by_another_stream_and_dropped(waits: bool) -> None:
    """As FSDP2 did under HSDP with offloading, until April 2026."""
    reduction, copies = torch.Stream(device=DEVICE), torch.Stream(device=DEVICE)
    reduction.wait_stream(current())
    with reduction:
        shard = torch.ones(64, device=DEVICE) * 2
    copies.wait_stream(reduction)
    with copies:
        grad = shard.to("cpu", non_blocking=True)
        copied = copies.record_event()
    if waits:
        reduction.wait_event(copied)
    del shard
    with reduction:
        torch.zeros(64, device=DEVICE)
    copied.synchronize()
    grad.sum().item()


def gathered_storage_freed_under_a_kernel(waits: bool) -> None:
    """As Megatron-FSDP did, until July 2026: resized to nothing, and the next gather writes there."""
    gathers = torch.Stream(device=DEVICE)
    with gathers:
        full = torch.ones(64, device=DEVICE)
    current().wait_stream(gathers)
    out = full * 2
    if waits:
        gathers.wait_stream(current())
    full.untyped_storage().resize_(0)
    with gathers:
        torch.zeros(64, device=DEVICE)
    out.sum().item()


PROGRAMS: list[Program] = [
    read_before_it_is_written,
    reduced_shard_copied_to_the_host_by_another_stream_and_dropped,
    gathered_storage_freed_under_a_kernel,
]


def judged(program: Callable[[], object], order: Order | None = None) -> Findings:
    with simulated(order) as found, noop_world(2):
        program()
    return found


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_both_judges_find_a_missing_wait_and_neither_finds_one_that_is_there(program: Program) -> None:
    wrong = judged(lambda: program(False))
    assert wrong.findings
    orders = all_orders(len(wrong.simulation.timeline.lines), seeds=4)
    assert any(judged(lambda: program(False), order).differences for order in orders)
    for order in orders:
        right = judged(lambda: program(True), order)
        assert not right.findings
        assert not right.differences, (order, [str(one) for one in right.differences])
