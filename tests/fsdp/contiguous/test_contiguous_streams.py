"""The contiguous layout on accelerator streams, with streams that only write down what they are told.

See `tests/fsdp/test_streams.py`: numbers are computed on CPU, a recorder stands in for streams and events.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from fsdp.models import gathered_bytes, groups, sharded_net
from fsdp.test_streams import issued, logged_step
from ranks import on_ranks
from shardwise.fsdp.module_state import state_of
from shardwise.planner.noop_group import noop_world
from shardwise.verify.streams import DEVICE, simulated
from shardwise.verify.streams.clocks import Clock, Operation


def net(**options: Any) -> Any:
    return sharded_net(layout="contiguous", **options)


@on_ranks(2)
def test_memory_that_a_gather_reuses_is_waited_for_by_the_stream_that_gathers() -> None:
    """Every gather after the first few follows an event of the computation whose memory was freed."""
    log = logged_step(net(blocks=5))
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
def test_computation_waits_for_no_slice_of_a_reduction_nor_copies_to_one() -> None:
    model = net(blocks=1)
    log = logged_step(model, staging_bytes=200)
    assert len(issued(log, "reduce-scatter")) > 2 * len(groups(model))
    assert log.count(("reduce_scatter", "waits for", "compute")) == len(groups(model))
    assert log.count(("compute", "waits for", "reduce_scatter")) == len(groups(model)), "before the next"


@on_ranks(2)
def test_at_rest_no_gathered_memory_is_held_and_a_deleted_model_is_gone_at_once() -> None:
    gc.collect()
    gc.disable()
    try:
        model = net(blocks=3)
        log = logged_step(model)
        assert log[-1][0] == "all_gather", "it waits for the computation that read what is freed"
        assert gathered_bytes(model) == 0
        model.zero_grad()
        watched: list[Any] = [weakref.ref(model), weakref.ref(state_of(model))]
        watched += [weakref.ref(g) for g in groups(model)]
        del model
        assert [ref() for ref in watched] == [None] * len(watched)
    finally:
        gc.enable()
