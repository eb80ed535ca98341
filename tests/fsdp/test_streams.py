"""The order of work on accelerator streams, with streams that only write down what they are told.

No accelerator is needed: the numbers are computed on CPU as ever, while a recorder stands in for
streams and events. What it cannot show is real overlap; what it does show is who waits for whom, and
which stream each collective, copy and view was issued to.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from fsdp.models import EXACT, STRATEGIES, assert_same_gradients, in_each_layout, sharded_net, step
from ranks import on_ranks
from shardwise import FSDPModule, MixedPrecisionPolicy
from shardwise.comm import CommStreams, DefaultAllGather, DefaultReduceScatter
from shardwise.fsdp.fast import process
from shardwise.fsdp.module_state import state_of
from shardwise.fsdp.schedule import Schedule

USERS = [
    "shardwise.comm.foreach",
    "shardwise.fsdp.contiguous",
    "shardwise.fsdp.contiguous_reduction",
    "shardwise.fsdp.group",
    "shardwise.fsdp.interleaved",
    "shardwise.fsdp.module_state",
    "shardwise.fsdp.optimizer_watch",
    "shardwise.fsdp.reduction",
    "shardwise.fsdp.schedule",
    "shardwise.fsdp.state",
]


Log = list[tuple[str, ...]]


@dataclass
class Recorder:
    """What each stream was told, and which stream is current."""

    log: Log = field(default_factory=list)
    current: list[Any] = field(default_factory=list)

    def current_stream(self, device: torch.device) -> Any:
        return self.current[-1]


@dataclass(frozen=True)
class FakeStream:
    name: str
    recorder: Recorder = field(compare=False)

    def __enter__(self) -> FakeStream:
        self.recorder.current.append(self)
        return self

    def __exit__(self, *unused: object) -> None:
        self.recorder.current.pop()

    def wait_stream(self, other: FakeStream) -> None:
        self.recorder.log.append((self.name, "waits for", other.name))

    def wait_event(self, event: tuple[str, int]) -> None:
        self.recorder.log.append((self.name, "waits for", event[0]))

    def record_event(self) -> tuple[str, int]:
        return self.name, len(self.recorder.log)


def logged(comm: type, what: str, recorder: Recorder) -> Any:
    """A kind of collective that also notes on which stream it is issued."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.log.append((recorder.current[-1].name, what))
        return comm.__call__(self, *args, **kwargs)

    return type("Logged", (comm,), {"__call__": call})()


@contextmanager
def recorded(model: Any, *, staging_bytes: int | None = None) -> Iterator[Log]:
    """Put recorded streams into the library: the log of what they are told."""
    recorder = Recorder()
    recorder.current.append(FakeStream("compute", recorder))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(logged(DefaultAllGather, "all-gather", recorder))
            module.set_custom_reduce_scatter(logged(DefaultReduceScatter, "reduce-scatter", recorder))
            for group in module._groups():
                group.settings.staging_bytes = staging_bytes or group.settings.staging_bytes
    names = ("copy_in", "all_gather", "reduce_scatter", "all_reduce")
    streams = CommStreams(*(FakeStream(name, recorder) for name in names))  # type: ignore[arg-type]
    with ExitStack() as patches:
        for user in USERS:
            patches.enter_context(mock.patch(f"{user}.current_stream", recorder.current_stream))
        patches.enter_context(mock.patch.object(CommStreams, "create", return_value=streams))
        patches.enter_context(mock.patch.object(process, "computing", set()))  # put back when they end
        yield recorder.log


def logged_step(model: Any, *, steps: int = 2, staging_bytes: int | None = None) -> Log:
    """The log of the last of `steps` steps."""
    with recorded(model, staging_bytes=staging_bytes) as log:
        for _ in range(steps):
            log.clear()
            step(model)
    return log


def issued(log: Log, what: str) -> list[int]:
    return [i for i, entry in enumerate(log) if entry[1] == what]


@in_each_layout(2)
def test_collectives_run_on_their_own_streams_after_what_they_read(layout: str) -> None:
    log = logged_step(sharded_net(layout=layout))
    gathers, scatters = issued(log, "all-gather"), issued(log, "reduce-scatter")
    assert [log[i][0] for i in gathers] == ["all_gather"] * 6
    assert [log[i][0] for i in scatters] == ["reduce_scatter"] * 4
    if layout == "interleaved":
        assert {log[i - 1] for i in gathers} == {("all_gather", "waits for", "copy_in")}
        assert log.index(("copy_in", "waits for", "compute")) < gathers[0]
    assert {log[i - 1] for i in scatters} == {("reduce_scatter", "waits for", "compute")}
    assert log.index(("all_gather", "waits for", "compute")) < gathers[0], "after the optimizer's step"
    assert log.count(("compute", "waits for", "all_gather")) == len(gathers)
    # Forward gathers four groups; by the first reduction (the last block's, which is still gathered)
    # backward has asked for the block before it.
    assert sum(i < scatters[0] for i in gathers) == 4 + 1


@on_ranks(2)
def test_one_reduce_scatter_input_is_in_flight_unless_more_are_allowed() -> None:
    default = logged_step(sharded_net())
    model = sharded_net()
    model.set_reduce_scatter_max_input_buffers(2)
    relaxed = logged_step(model)

    def waits_before_last_reduction(log: Log) -> int:
        last = issued(log, "reduce-scatter")[-1]
        return log[:last].count(("compute", "waits for", "reduce_scatter"))

    assert waits_before_last_reduction(default) == 3
    assert waits_before_last_reduction(relaxed) == 2


@on_ranks(2)
def test_the_end_of_backward_waits_for_every_reduction_and_holds_no_buffer() -> None:
    model = sharded_net()
    log = logged_step(model)
    last = issued(log, "reduce-scatter")[-1]
    assert ("compute", "waits for", "reduce_scatter") in log[last:]
    schedule = state_of(model).schedule
    assert (schedule.reduce_inputs, schedule.reduce_shards, schedule.reduced) == ([], [], {})
    assert schedule.copy_out_pending is None


@on_ranks(2)
def test_shards_are_kept_until_backward_ends_only_where_they_become_gradients() -> None:
    kept: list[int] = []

    def keeping(schedule: Schedule) -> None:
        kept.append(len(schedule.reduce_shards))
        waited(schedule)

    def shards_kept(model: FSDPModule) -> int:
        kept.clear()
        logged_step(model, steps=1)
        return kept[-1]

    waited = Schedule.wait_for_reductions
    with mock.patch.object(Schedule, "wait_for_reductions", keeping):
        model = sharded_net()
        assert shards_kept(model) == 4  # as gradients, which have the same memory
        assert shards_kept(model) == 0  # added to gradients
        hooked = sharded_net()
        for param in hooked.parameters():
            param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
        assert shards_kept(hooked) == 0  # used by an optimizer in backward


@on_ranks(4)
def test_hsdp_all_reduces_on_a_stream_of_its_own_and_ends_waiting_for_it() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    log = logged_step(sharded_net(blocks=2, mesh=mesh))
    assert log.count(("all_reduce", "waits for", "reduce_scatter")) == 3
    last = {("compute", "waits for", "all_reduce"), ("reduce_scatter", "waits for", "all_reduce")}
    assert last <= set(log[-4:])


@on_ranks(4)
def test_backward_of_a_partial_reshard_gathers_after_the_smaller_shards_were_written() -> None:
    log = logged_step(sharded_net(blocks=2, reshard_after_forward=2))
    gathers = issued(log, "all-gather")
    assert len(gathers) == 6
    for i in gathers[3:]:
        assert log[i - 3 : i - 1] == [
            ("copy_in", "waits for", "compute"),
            ("all_gather", "waits for", "compute"),
        ]


@on_ranks(2)
@pytest.mark.parametrize("cast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("strategy", [None, *STRATEGIES])
def test_streams_and_slices_change_no_number(strategy: str | None, cast: bool) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if cast else MixedPrecisionPolicy()
    by_rows = {"layout": "contiguous", "strategy": strategy} if strategy else {}
    on_streams, plain = (sharded_net(blocks=2, mp_policy=policy, **by_rows) for _ in range(2))
    logged_step(on_streams, staging_bytes=200)
    step(plain)
    step(plain)
    assert_same_gradients(on_streams, plain, **EXACT)


@on_ranks(2)
def test_a_post_optim_event_replaces_the_wait_for_the_compute_stream_once() -> None:
    model = sharded_net(blocks=1)
    with recorded(model) as log, mock.patch.object(torch, "Event", tuple):
        step(model)
        for awaited in ("optimizer", "compute"):
            log.clear()
            if awaited == "optimizer":
                model.set_post_optim_event(("optimizer", 0))  # type: ignore[arg-type]
            step(model)
            assert log[0] == ("copy_in", "waits for", awaited)


def test_who_gathers_again_has_its_memory_back_whatever_buffers_others_left() -> None:
    """Buffers of different sizes cannot be compared element by element; a gather must not try to."""
    recorder = Recorder()
    stream: Any = FakeStream("all_gather", recorder)
    streams = CommStreams(stream, stream, stream, stream)
    memory = [torch.zeros(size) for size in (2, 3)]
    owners = [[one] for one in memory]
    for owner, one in zip(owners, memory, strict=True):
        streams.free_later(owner, [one.untyped_storage()], stream)
    streams.reclaim(owners[1], keep=1)
    assert [one.untyped_storage().nbytes() for one in memory] == [8, 12]
    streams.reclaim(keep=0)
    assert [one.untyped_storage().nbytes() for one in memory] == [0, 12]
