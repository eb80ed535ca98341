"""The order of work on accelerator streams, with streams that only write down what they are told.

No accelerator is needed: the numbers are computed on CPU as ever, while a recorder stands in for
streams and events. What it cannot show is real overlap; what it does show is who waits for whom, and
which stream each collective, copy and view was issued to.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.distributed.device_mesh import init_device_mesh

from fsdp.models import sharded_net, step
from ranks import on_ranks
from shardwise import FSDPModule
from shardwise.comm import CommStreams, DefaultAllGather, DefaultReduceScatter
from shardwise.fsdp.fast import process
from shardwise.fsdp.module_state import state_of
from shardwise.fsdp.schedule import Schedule

USERS = [
    "shardwise.comm.foreach",
    "shardwise.fsdp.group",
    "shardwise.fsdp.interleaved",
    "shardwise.fsdp.module_state",
    "shardwise.fsdp.optimizer_watch",
    "shardwise.fsdp.reduction",
    "shardwise.fsdp.schedule",
    "shardwise.fsdp.state",
]


@dataclass
class Recorder:
    """What each stream was told, and which stream is current."""

    log: list[tuple[str, ...]] = field(default_factory=list)
    current: list[Any] = field(default_factory=list)

    def event(self, stream: str) -> tuple[str, int]:
        return (stream, len(self.log))


class FakeStream:
    def __init__(self, name: str, recorder: Recorder) -> None:
        self.name, self.recorder = name, recorder

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FakeStream) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

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
        return self.recorder.event(self.name)


class LoggedAllGather(DefaultAllGather):
    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.recorder.log.append((self.recorder.current[-1].name, "all-gather"))
        return super().__call__(*args, **kwargs)


class LoggedReduceScatter(DefaultReduceScatter):
    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.recorder.log.append((self.recorder.current[-1].name, "reduce-scatter"))
        return super().__call__(*args, **kwargs)


def on_streams(recorder: Recorder) -> list[Any]:
    """Patches that put recorded streams into the library."""
    compute = FakeStream("compute", recorder)
    recorder.current.append(compute)
    names = ("copy_in", "all_gather", "reduce_scatter", "all_reduce")
    streams = CommStreams(*(FakeStream(name, recorder) for name in names))  # type: ignore[arg-type]

    def current(device: torch.device) -> Any:
        return recorder.current[-1]

    patches = [mock.patch(f"{user}.current_stream", current) for user in USERS]
    patches.append(mock.patch.object(CommStreams, "create", return_value=streams))
    patches.append(mock.patch.object(process, "computing", set()))  # put back when they end
    return patches


def logged_step(model: FSDPModule, *, steps: int = 1) -> list[tuple[str, ...]]:
    """The log of the last of `steps` steps on recorded streams."""
    recorder = Recorder()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(LoggedAllGather(recorder))
            module.set_custom_reduce_scatter(LoggedReduceScatter(recorder))
    patches = on_streams(recorder)
    for patch in patches:
        patch.start()
    try:
        for _ in range(steps):
            recorder.log.clear()
            step(model)
    finally:
        for patch in patches:
            patch.stop()
    return recorder.log


def position(log: list[tuple[str, ...]], entry: tuple[str, ...], start: int = 0) -> int:
    return log.index(entry, start)


@on_ranks(2)
def test_collectives_run_on_their_own_streams_after_what_they_read() -> None:
    log = logged_step(sharded_net(blocks=3), steps=2)
    gathers = [i for i, entry in enumerate(log) if entry[1] == "all-gather"]
    assert {log[i][0] for i in gathers} == {"all_gather"}
    for i in gathers:
        assert log[i - 1] == ("all_gather", "waits for", "copy_in")
    scatters = [i for i, entry in enumerate(log) if entry[1] == "reduce-scatter"]
    assert {log[i][0] for i in scatters} == {"reduce_scatter"}
    for i in scatters:
        assert log[i - 1] == ("reduce_scatter", "waits for", "compute")


@on_ranks(2)
def test_gathers_start_only_after_the_optimizer_step_and_copies_only_after_their_gather() -> None:
    log = logged_step(sharded_net(blocks=3), steps=2)
    first = position(log, ("all_gather", "all-gather"))
    assert position(log, ("copy_in", "waits for", "compute")) < first
    assert position(log, ("all_gather", "waits for", "compute")) < first
    waits = log.count(("compute", "waits for", "all_gather"))
    assert waits == sum(entry[1] == "all-gather" for entry in log)


@on_ranks(2)
def test_backward_gathers_the_next_module_before_it_needs_it() -> None:
    log = logged_step(sharded_net(blocks=3), steps=2)
    first_reduction = position(log, ("reduce_scatter", "reduce-scatter"))
    gathered_by_then = sum(entry[1] == "all-gather" for entry in log[:first_reduction])
    # Forward gathers four groups; by the first reduction (the last block's, which is still gathered)
    # backward has asked for the block before it.
    assert gathered_by_then == 4 + 1


@on_ranks(2)
def test_one_reduce_scatter_input_is_in_flight_unless_more_are_allowed() -> None:
    default = logged_step(sharded_net(blocks=3), steps=2)
    model = sharded_net(blocks=3)
    model.set_reduce_scatter_max_input_buffers(2)
    relaxed = logged_step(model, steps=2)

    def waits_before_last_reduction(log: list[tuple[str, ...]]) -> int:
        last = max(i for i, entry in enumerate(log) if entry[1] == "reduce-scatter")
        return log[:last].count(("compute", "waits for", "reduce_scatter"))

    assert waits_before_last_reduction(default) == 3
    assert waits_before_last_reduction(relaxed) == 2


@on_ranks(2)
def test_the_end_of_backward_waits_for_every_reduction_and_holds_no_buffer() -> None:
    model = sharded_net(blocks=3)
    log = logged_step(model, steps=2)
    last = max(i for i, entry in enumerate(log) if entry[1] == "reduce-scatter")
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
        logged_step(model)
        return kept[-1]

    waited = Schedule.wait_for_reductions
    with mock.patch.object(Schedule, "wait_for_reductions", keeping):
        model = sharded_net(blocks=3)
        assert shards_kept(model) == 4  # as gradients, which have the same memory
        assert shards_kept(model) == 0  # added to gradients
        hooked = sharded_net(blocks=3)
        for param in hooked.parameters():
            param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
        assert shards_kept(hooked) == 0  # used by an optimizer in backward


@on_ranks(4)
def test_hsdp_all_reduces_on_a_stream_of_its_own_and_ends_waiting_for_it() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    log = logged_step(sharded_net(blocks=2, mesh=mesh), steps=2)
    assert log.count(("all_reduce", "waits for", "reduce_scatter")) == 3
    assert log[-1][0] == "compute"
    assert ("compute", "waits for", "all_reduce") in log[-4:]


@on_ranks(4)
def test_backward_of_a_partial_reshard_gathers_after_the_smaller_shards_were_written() -> None:
    log = logged_step(sharded_net(blocks=2, reshard_after_forward=2), steps=2)
    gathers = [i for i, entry in enumerate(log) if entry[1] == "all-gather"]
    assert len(gathers) == 6
    for i in gathers[3:]:
        assert log[i - 3 : i - 1] == [
            ("copy_in", "waits for", "compute"),
            ("all_gather", "waits for", "compute"),
        ]


@on_ranks(2)
def test_streams_change_no_number() -> None:
    recorded, plain = sharded_net(blocks=2), sharded_net(blocks=2)
    logged_step(recorded, steps=2)
    step(plain)
    step(plain)
    for ours, theirs in zip(recorded.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad.to_local(), theirs.grad.to_local())


@on_ranks(2)
def test_a_post_optim_event_replaces_the_wait_for_the_compute_stream_once() -> None:
    model = sharded_net(blocks=1)
    recorder = Recorder()
    patches = [*on_streams(recorder), mock.patch.object(torch, "Event", tuple)]
    for patch in patches:
        patch.start()
    try:
        step(model)
        recorder.log.clear()
        model.set_post_optim_event(("optimizer", 0))  # type: ignore[arg-type]
        step(model)
        assert recorder.log[0] == ("copy_in", "waits for", "optimizer")
        recorder.log.clear()
        step(model)
        assert recorder.log[0] == ("copy_in", "waits for", "compute")
    finally:
        for patch in patches:
            patch.stop()


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
