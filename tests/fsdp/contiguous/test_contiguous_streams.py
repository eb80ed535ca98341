"""The contiguous layout on accelerator streams, with streams that only write down what they are told.

See `tests/fsdp/test_streams.py`: numbers are computed on CPU, a recorder stands in for streams and events.
"""

from __future__ import annotations

import gc
import weakref
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from fsdp.models import groups, sharded_net, step
from fsdp.test_streams import LoggedAllGather, LoggedReduceScatter, Recorder, on_streams
from ranks import on_ranks
from shardwise import FSDPModule, MixedPrecisionPolicy
from shardwise.fsdp.module_state import state_of
from shardwise.planner.noop_group import noop_world
from shardwise.verify.streams import DEVICE, simulated
from shardwise.verify.streams.clocks import Clock, Operation

Log = list[tuple[str, ...]]
USERS = ("shardwise.fsdp.contiguous", "shardwise.fsdp.contiguous_reduction")


def net(**options: Any) -> Any:
    return sharded_net(layout="contiguous", **options)


def logged_steps(model: Any, *, steps: int = 2, staging_bytes: int | None = None) -> Log:
    """The log of the last of `steps` steps on recorded streams."""
    recorder = Recorder()

    def current(device: torch.device) -> Any:
        return recorder.current[-1]

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(LoggedAllGather(recorder))
            module.set_custom_reduce_scatter(LoggedReduceScatter(recorder))
            for group in module._groups():
                group.settings.staging_bytes = staging_bytes or group.settings.staging_bytes
    with ExitStack() as patches:
        for patch in on_streams(recorder):
            patches.enter_context(patch)
        for user in USERS:
            patches.enter_context(mock.patch(f"{user}.current_stream", current))
        for _ in range(steps):
            recorder.log.clear()
            step(model)
    return recorder.log


def issued(log: Log, what: str) -> list[int]:
    return [i for i, entry in enumerate(log) if entry[1] == what]


@on_ranks(2)
def test_collectives_run_on_their_own_streams_and_reductions_after_what_they_read() -> None:
    log = logged_steps(net(blocks=3))
    assert [log[i][0] for i in issued(log, "all-gather")] == ["all_gather"] * 6
    scatters = issued(log, "reduce-scatter")
    assert [log[i][0] for i in scatters] == ["reduce_scatter"] * 4
    for i in scatters:
        assert log[i - 1] == ("reduce_scatter", "waits for", "compute")


@on_ranks(2)
def test_gathers_start_after_the_optimizer_step_and_computation_waits_for_each() -> None:
    log = logged_steps(net(blocks=3))
    gathers = issued(log, "all-gather")
    assert ("all_gather", "waits for", "compute") in log[: gathers[0]]
    assert log.count(("compute", "waits for", "all_gather")) == len(gathers)


@on_ranks(2)
def test_memory_that_a_gather_reuses_is_waited_for_by_the_stream_that_gathers() -> None:
    """Every gather after the first few follows an event of the computation whose memory was freed."""
    log = logged_steps(net(blocks=5))
    waits = log.count(("all_gather", "waits for", "compute"))
    assert waits > len(issued(log, "all-gather")) - 3


def test_forward_gathers_run_beside_the_computation_of_the_module_before() -> None:
    """They follow what used the memory that they are given, which is earlier."""
    behind = []

    def heard(operation: Operation, clock: Clock) -> None:
        if operation.stream == "the all-gather stream" and "gather" in operation.name:
            computing = found.simulation.timeline.computation.line
            behind.append(computing.clock[computing.number] - clock[computing.number])

    with noop_world(2), simulated() as found:
        model = nn.Sequential(*(nn.Linear(4, 4, device=DEVICE) for _ in range(6)))
        mesh = init_device_mesh(DEVICE, (2,))
        for module in (*model, model):
            shardwise.fully_shard(module, mesh=mesh, layout="contiguous")
        found.simulation.timeline.listener = heard
        for _ in range(2):
            before = len(behind)
            loss = model(torch.randn(2, 4, device=DEVICE)).sum()
            _, *others = behind[before:]
            assert len(others) == 5
            assert all(others), "the first follows all before"
            loss.backward()


def test_roots_may_share_their_streams_after_a_step() -> None:
    reductions = set()

    def heard(operation: Operation, clock: Clock) -> None:
        if "reduce_scatter" in operation.name:
            reductions.add(operation.line)

    with noop_world(2), simulated() as found:
        mesh = init_device_mesh(DEVICE, (2,))
        roots = [nn.Sequential(*(nn.Linear(4, 4, device=DEVICE) for _ in range(3))) for _ in range(2)]
        for root in roots:
            for module in (*root, root):
                shardwise.fully_shard(module, mesh=mesh, layout="contiguous")
        for shared in (False, True):
            if shared:
                shardwise.share_comm_ctx(roots)
                found.simulation.timeline.listener = heard
            for root in roots:
                root(torch.randn(2, 4, device=DEVICE)).sum().backward()
    assert not found.findings
    assert len(reductions) == 1


def test_memory_that_was_not_freed_yet_is_gathered_into_again() -> None:
    places = []
    with noop_world(2), simulated():
        module, between = (nn.Linear(4, 4, device=DEVICE) for _ in range(2))
        model = nn.Sequential(module, between, module)
        module.register_forward_hook(lambda *_: places.append(module.weight.data_ptr()))
        for each in (module, between, model):
            shardwise.fully_shard(each, mesh=init_device_mesh(DEVICE, (2,)), layout="contiguous")
        with torch.no_grad():
            model(torch.ones(2, 4, device=DEVICE))
    assert places == places[:1] * 2


@on_ranks(2)
def test_backward_gathers_the_next_module_before_it_needs_it() -> None:
    log = logged_steps(net(blocks=3))
    first_reduction = issued(log, "reduce-scatter")[0]
    assert sum(i < first_reduction for i in issued(log, "all-gather")) == 4 + 1


@on_ranks(2)
@pytest.mark.parametrize("cast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("strategy", ["fsdp", "zero2", "zero1", "ddp"])
def test_streams_and_slices_change_no_number(strategy: str, cast: bool) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if cast else MixedPrecisionPolicy()
    recorded, plain = (net(blocks=2, strategy=strategy, mp_policy=policy) for _ in range(2))
    logged_steps(recorded, staging_bytes=200)
    step(plain)
    step(plain)
    for ours, theirs in zip(recorded.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad.local, theirs.grad.local)


@on_ranks(2)
def test_computation_waits_for_no_slice_of_a_reduction_nor_copies_to_one() -> None:
    model = net(blocks=1)
    log = logged_steps(model, staging_bytes=200)
    assert len(issued(log, "reduce-scatter")) > 2 * len(groups(model))
    assert log.count(("reduce_scatter", "waits for", "compute")) == len(groups(model))
    assert log.count(("compute", "waits for", "reduce_scatter")) == len(groups(model)), "before the next"


@on_ranks(2)
def test_a_deleted_model_is_gone_at_once_on_streams_too() -> None:
    gc.collect()
    gc.disable()
    try:
        model = net(blocks=3)
        logged_steps(model)
        model.zero_grad()
        watched: list[Any] = [weakref.ref(model), weakref.ref(state_of(model))]
        watched += [weakref.ref(g) for g in groups(model)]
        del model
        assert [ref() for ref in watched] == [None] * len(watched)
    finally:
        gc.enable()


@on_ranks(2)
def test_at_rest_no_gathered_memory_is_held_on_streams() -> None:
    model = net(blocks=3)
    log = logged_steps(model)
    assert log[-1][0] == "all_gather", "it waits for the computation that read what is freed"
    held = [b.full.untyped_storage().nbytes() for g in groups(model) for b in g.buffers]
    assert held == [0] * len(held)
