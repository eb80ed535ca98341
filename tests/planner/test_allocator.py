"""The caching allocator's model, against what is known of the real one, by hand; and times of a step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shardwise.comm.count import Collective
from shardwise.planner import Setup, plan
from shardwise.planner.allocator import MIB, Allocator
from shardwise.planner.devices import hardware_of
from shardwise.planner.events import (
    COMPUTATION,
    TENSOR_PARALLEL,
    Allocate,
    Compute,
    Free,
    Mark,
    Memory,
    Place,
    Record,
    Recording,
    Segment,
    Send,
    Wait,
)
from shardwise.planner.measure import moments
from shardwise.planner.models import model_of
from shardwise.planner.plan import plan_of, recording_of
from shardwise.planner.timing import delay_frees, host_bound, send_seconds, time_of


@pytest.mark.parametrize(
    ("nbytes", "segment"),
    [(1, 2 * MIB), (MIB, 2 * MIB), (MIB + 1, 20 * MIB), (10 * MIB - 512, 20 * MIB), (10 * MIB, 10 * MIB)]
    + [(11 * MIB, 12 * MIB)],
)
def test_a_first_request_reserves_a_segment_of_its_kind(nbytes: int, segment: int) -> None:
    allocator = Allocator()
    allocator.allocate(nbytes, "a")
    assert allocator.reserved == segment


def test_what_is_left_of_a_segment_serves_the_next_and_neighbours_become_one_again() -> None:
    allocator = Allocator()
    pieces = [allocator.allocate(5 * MIB, "a") for _ in range(4)]
    assert allocator.reserved == 20 * MIB
    allocator.allocate(5 * MIB, "another stream")
    assert allocator.reserved == 40 * MIB
    for i in (0, 2, 1):
        allocator.free(pieces[i])
    whole = allocator.allocate(15 * MIB, "a")
    assert allocator.reserved == 40 * MIB
    allocator.free(whole)
    allocator.free(pieces[3])
    allocator.allocate(20 * MIB, "a")
    assert allocator.reserved == allocator.peak == 40 * MIB


def test_fragments_too_small_for_a_request_are_no_use_but_to_segments_that_grow() -> None:
    reserved = []
    for expandable in (False, True):
        allocator = Allocator(expandable=expandable)
        first = allocator.allocate(100 * MIB, "a")
        allocator.free(first)
        allocator.allocate(120 * MIB, "a")
        reserved.append(allocator.reserved)
    assert reserved == [220 * MIB, 120 * MIB]


def test_the_end_of_a_segment_that_grows_is_left_for_what_fits_nowhere_else() -> None:
    allocator = Allocator(expandable=True)
    first, _ = allocator.allocate(60 * MIB, "a"), allocator.allocate(15 * MIB, "a")
    allocator.free(first)
    allocator.allocate(4 * MIB, "a")  # of the 60 MiB that are free, not of the 5 MiB at the end
    allocator.allocate(56 * MIB, "a")
    assert allocator.reserved == 80 * MIB
    allocator.allocate(5 * MIB, "a")
    assert allocator.reserved == 80 * MIB


def test_a_segment_grows_by_what_is_not_free_at_its_end() -> None:
    allocator = Allocator(expandable=True)
    allocator.allocate(60 * MIB, "a")
    allocator.free(allocator.allocate(15 * MIB, "a"))  # joined with the 5 MiB behind it
    allocator.allocate(30 * MIB, "a")
    assert allocator.reserved == 100 * MIB


@pytest.mark.parametrize(("expandable", "kept"), [(False, 40 * MIB), (True, 20 * MIB)])
def test_before_it_takes_more_than_there_is_an_allocator_gives_back_what_is_free(
    expandable: bool, kept: int
) -> None:
    allocator = Allocator(expandable=expandable, limit=100 * MIB)
    for piece in [allocator.allocate(40 * MIB, stream) for stream in "ab"]:
        allocator.free(piece)
    allocator.allocate(20 * MIB, "a")
    assert allocator.given_back == 0
    allocator.allocate(60 * MIB, "a")
    assert allocator.given_back == 1
    assert allocator.reserved == kept + 60 * MIB
    allocator.allocate(100 * MIB, "a")
    assert allocator.peak > 100 * MIB


def test_a_gather_beside_computation_is_exposed_only_where_it_is_longer() -> None:
    hardware = replace(hardware_of("h100"), host_seconds=0.0)
    call = Collective("all_gather", 8 * 10**9, torch.bfloat16, 8)
    sends = send_seconds(call, hardware)
    assert sends == pytest.approx(7 * 10**9 / hardware.host_link_bytes_per_s, rel=0.01)
    assert send_seconds(replace(call, group_size=1), hardware) == 0
    apart = send_seconds(call, hardware, stride=8)  # on a host of its own each, beside seven such groups
    assert apart == pytest.approx(7 * 10**9 / (hardware.network_bytes_per_s / 8), rel=0.01)
    far = send_seconds(Collective("all_gather", 16, torch.bfloat16, 16), hardware)  # two hosts of eight
    assert far == pytest.approx(7 * hardware.host_latency_s + hardware.network_latency_s, rel=1e-3)
    rate = hardware.memory_bytes_per_s * hardware.bandwidth_efficiency
    for longer in (0.5, 2.0):
        computes = Compute("add", 0, int(longer * sends * rate), "bfloat16", COMPUTATION)
        mark = Mark()
        events = [Send(call, "", "all-gather"), Record(mark, "all-gather"), computes, Wait(mark, COMPUTATION)]
        segment = Segment(Place(0, 0, "forward", None), [*events, computes])
        times = time_of(Recording(1, [segment], 0, 0, ()), hardware, 1)
        assert times.exposed == pytest.approx(max(0.0, 1 - longer) * sends, rel=1e-6)
        assert times.step == pytest.approx((max(1, longer) + longer) * sends, rel=1e-6)


@pytest.mark.parametrize("longer", [0.5, 2.0])
def test_in_pieces_a_gather_or_a_reduction_is_beside_the_matmul_but_for_one(longer: float) -> None:
    hardware = replace(hardware_of("h100"), host_seconds=0.0)
    gather = Send(Collective("all_gather", 8 * 10**9, torch.bfloat16, 8), TENSOR_PARALLEL, TENSOR_PARALLEL)
    sends = send_seconds(gather.collective, hardware)
    rate = hardware.memory_bytes_per_s * hardware.bandwidth_efficiency
    matmul = Compute("mm", 1, int(longer * sends * rate), "bfloat16", COMPUTATION)  # its bytes take longer
    reduce = gather._replace(collective=replace(gather.collective, kind="reduce_scatter"))
    orders = ([], gather, [matmul]), ([matmul], reduce, [])
    for before, send, after in orders:
        marks = Mark(), Mark()
        waits = [Record(marks[0], COMPUTATION), Wait(marks[0], TENSOR_PARALLEL), send]
        waits += [Record(marks[1], TENSOR_PARALLEL), Wait(marks[1], COMPUTATION)]
        recording = Recording(1, [Segment(Place(0, 0, "forward", 0), [*before, *waits, *after])], 0, 0, ())
        whole, pieces = (time_of(recording, hardware, 1, pieces=n).step for n in (1, 4))
        assert whole == pytest.approx((1 + longer) * sends, rel=1e-6)
        adds = 0 if send is gather else 9 * 10**9 / rate  # what came from eight ranks
        assert pieces == pytest.approx((max(1, longer) + min(1, longer) / 4) * sends + adds, rel=1e-6)


@pytest.mark.parametrize(("host_seconds", "bound"), [(1e-6, 0), (1e-2, 1)])
def test_blocks_that_the_host_issues_more_slowly_than_the_device_computes_are_named(
    host_seconds: float, bound: int
) -> None:
    hardware = replace(hardware_of("h100"), host_seconds=host_seconds)
    computes = Compute("add", 0, int(hardware.memory_bytes_per_s * 1e-3), "bfloat16", COMPUTATION)
    segments = [Segment(Place(0, 0, "forward", layer), [computes, computes]) for layer in range(3)]
    found = list(host_bound(time_of(Recording(3, segments, 0, 0, ()), hardware, 1)))
    assert len(found) == bound
    assert all("forward of 3 blocks: the host takes 20.00 ms" in words for words in found)


@pytest.mark.parametrize(("ahead", "kept"), [(2, 2), (1, 1), (0, 0)])
def test_memory_of_a_collective_is_kept_while_the_host_is_ahead_of_it(
    ahead: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block frees what its collective used; the queue lets the host be so many blocks ahead."""
    hardware = replace(hardware_of("h100"), host_seconds=1e-9)
    segments = []
    for layer in range(8):
        memory, mark = Memory(MIB, COMPUTATION), Mark()
        send = Send(Collective("all_gather", 10**9, torch.bfloat16, 8), TENSOR_PARALLEL, TENSOR_PARALLEL)
        events = [Allocate(memory), send, Record(mark, TENSOR_PARALLEL), Free(memory, mark)]
        segments.append(Segment(Place(0, 0, "forward", layer), events))
    commands = 3 * ahead + 2 if ahead else 1  # of a block: a collective, its mark, that of what is freed
    monkeypatch.setattr("shardwise.planner.timing.QUEUED", commands)
    late = delay_frees(Recording(8, segments, 0, 0, ()), hardware)
    assert max(moment.alive_bytes for moment in moments(late)) == (1 + kept) * MIB
    of = [[event for one in found for event in one.events] for found in (segments, late.segments)]
    assert sorted(map(id, of[0])) == sorted(map(id, of[1]))


def test_a_plan_keeps_memory_of_collectives_only_where_the_host_is_ahead() -> None:
    setup = Setup(ranks=8, tensor=2, sequence=512, micro_batch=8, checkpointing="full")
    streams = replace(setup, record_streams=True)
    of = model_of("llama3-8b", sequence=setup.sequence)
    recording, _ = recording_of(of, streams)
    hardware = hardware_of("h100-96gb")
    whole, late = (plan_of(recording, of, one, hardware) for one in (setup, streams))
    assert late.peak_bytes > 1.02 * whole.peak_bytes
    assert late.reserved_bytes > 1.02 * whole.reserved_bytes
    assert replace(late.times, spans=[]) == replace(whole.times, spans=[])
    for slow_or_none in (replace(hardware, host_seconds=1.0), None):  # without hardware there is no time
        assert plan_of(recording, of, streams, slow_or_none).moments == whole.moments


def test_a_device_clips_in_as_many_operators_whatever_the_size_of_gradients() -> None:
    """On a CPU norms are taken part by part; what is planned for a device runs on fake tensors of a CPU."""
    clipped, whole = (
        plan("llama3-8b", hardware="h100", sequence=16, clip_norm=clip_norm).step_times.host
        for clip_norm in (True, False)
    )
    parameters = 291
    assert clipped - whole < 4 * parameters * hardware_of("h100").host_seconds
