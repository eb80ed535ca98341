"""The direct exchanges over gloo: right to the last bit, of the least bytes, in any company, and in time."""

from __future__ import annotations

import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from comm.allocations import Allocations
from ranks import on_ranks
from shardwise.comm.api import DefaultAllGather, DefaultReduceScatter
from shardwise.comm.auto import AutoAllGather, AutoReduceScatter, over_gloo
from shardwise.comm.count import CommCounter
from shardwise.comm.gloo import STAGED_SLICES, GlooAllGather, GlooReduceScatter
from shardwise.errors import ShardingError

CPU = torch.device("cpu")
FP32, FP64, FP16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
FLOATS = (FP32, FP64, FP16, BF16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
COMBINE = {
    ReduceOp.SUM: lambda a, b: a + b,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.PRODUCT: lambda a, b: a * b,
}
NUMEL = 1002  # of a shard: not a multiple of 4, so that slices are unaligned


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def values(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """What `rank` holds: values whose sum depends on the order of additions."""
    generator = torch.Generator().manual_seed(100 + rank)
    if dtype in FLOATS:
        return (torch.randn(numel, generator=generator) * 3).to(dtype)
    return torch.randint(0, 100, (numel,), generator=generator).to(dtype)


def emulated(
    rank: int, ranks: list[int], numel: int, dtype: torch.dtype, op: Any, scale: float = 1
) -> Tensor:
    """Rank `ranks[rank]`'s slice, added here in the documented order: backwards round the ring, own last."""
    n = len(ranks)
    slices = [(values(r, numel * n, dtype) * scale).to(dtype).split(numel)[rank] for r in ranks]
    total = slices[(rank - 1) % n].clone()
    for step in range(2, n + 1):
        total = COMBINE[ReduceOp.SUM if op == ReduceOp.AVG else op](total, slices[(rank - step) % n])
    return total / n if op == ReduceOp.AVG else total


def world() -> tuple[int, int, Any]:
    return dist.get_rank(), dist.get_world_size(), dist.group.WORLD


# ---------------------------------------------------------------- values


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_a_gather_is_c10ds_bit_for_bit_in_every_dtype_from_anywhere(async_op: bool) -> None:
    rank, ranks, group = world()
    for dtype in (*FLOATS, *INTEGERS):
        shard = values(rank, NUMEL, dtype)
        expected, separate, in_place = (torch.full((NUMEL * ranks,), 77, dtype=dtype) for _ in range(3))
        DefaultAllGather()(bits(expected), bits(shard), group)  # c10d's lacks int16
        own = in_place.narrow(0, NUMEL * rank, NUMEL)
        own.copy_(shard)
        before = shard.clone()
        for output, source in [(separate, shard), (in_place, own)]:
            work = GlooAllGather()(output, source, group, async_op)
            assert (work is not None) == async_op
            if work is not None:
                work.wait()
            assert torch.equal(bits(output), bits(expected))
        assert torch.equal(bits(shard), bits(before))


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_a_reduction_adds_in_the_documented_order_and_leaves_its_input(async_op: bool) -> None:
    rank, ranks, group = world()
    cases = [(dtype, op) for dtype in FLOATS for op in (*COMBINE, ReduceOp.AVG)]
    cases += [(dtype, op) for dtype in INTEGERS for op in COMBINE]
    for dtype, op in cases:
        whole, output = values(rank, NUMEL * ranks, dtype), torch.full((NUMEL,), 77, dtype=dtype)
        before = whole.clone()
        work = GlooReduceScatter()(output, whole, group, op, async_op)
        assert (work is not None) == async_op
        if work is not None:
            work.wait()
        assert torch.equal(bits(output), bits(emulated(rank, [*range(ranks)], NUMEL, dtype, op)))
        assert torch.equal(bits(whole), bits(before))


@on_ranks(2, 3, 5)
def test_a_reduction_is_c10ds_bit_for_bit_wherever_its_ring_cuts_the_buffer() -> None:
    rank, ranks, group = world()
    several_segments = (3 << 18) + 1  # of 1 MiB, which slices do not divide into
    cases = [(numel, FP32, ReduceOp.AVG) for numel in (1, 2, 3, 7, several_segments)]
    cases += [
        (NUMEL + 1, dtype, op) for dtype in (*FLOATS, torch.int32) for op in (ReduceOp.SUM, ReduceOp.MAX)
    ]
    for numel, dtype, op in cases:
        whole = values(rank, numel * ranks, dtype)
        ours, c10ds = torch.empty(numel, dtype=dtype), torch.empty(numel, dtype=dtype)
        GlooReduceScatter()(ours, whole, group, op)
        DefaultReduceScatter()(c10ds, whole, group, op)
        assert torch.equal(bits(ours), bits(c10ds)), (numel, dtype, op)


@on_ranks(1, 3)
def test_empty_shards_need_no_message() -> None:
    group = dist.group.WORLD
    empty = torch.empty(0)
    with CommCounter() as counter:
        assert GlooAllGather()(empty, torch.empty(0), group) is None
        assert GlooReduceScatter()(empty, torch.empty(0), group, ReduceOp.SUM) is None
        work = GlooReduceScatter()(empty, torch.empty(0), group, ReduceOp.AVG, async_op=True)
        assert work is not None
        assert work.wait()
    assert counter.calls == []


# ---------------------------------------------------------------- several at once


@on_ranks(2, 3, 4, 5)
def test_exchanges_in_flight_together_do_not_mix_whatever_order_they_are_awaited_in() -> None:
    rank, ranks, group = world()
    everyone = [*range(ranks)]
    for backwards in (False, True):
        gathers, reductions, works = [], [], []
        users_in, users_out = torch.empty(NUMEL), torch.full((NUMEL,), float(rank))
        receive = dist.irecv(users_in, (rank - 1) % ranks)
        for turn in range(3):
            shard, gathered = values(rank, NUMEL, FP32) + turn, torch.empty(NUMEL * ranks)
            works.append(GlooAllGather()(gathered, shard, group, async_op=True))
            gathers.append(gathered)
            whole, reduced = values(rank, NUMEL * ranks, FP32) * (turn + 1), torch.empty(NUMEL)
            works.append(GlooReduceScatter()(reduced, whole, group, ReduceOp.SUM, async_op=True))
            reductions.append(reduced)
        send = dist.isend(users_out, (rank + 1) % ranks)
        total = torch.ones(1)
        dist.all_reduce(total)  # a collective of c10d's between
        assert total.item() == ranks
        for work in reversed(works) if backwards else works:
            assert work is not None
            assert not work.is_completed()
            work.wait()
            assert work.is_completed()
            work.wait()  # once more changes nothing
        receive.wait()
        send.wait()
        assert torch.equal(users_in, torch.full((NUMEL,), float((rank - 1) % ranks)))
        for turn in range(3):
            expected = torch.cat([values(r, NUMEL, FP32) + turn for r in everyone])
            assert torch.equal(gathers[turn], expected)
            expected = emulated(rank, everyone, NUMEL, FP32, ReduceOp.SUM, scale=turn + 1)
            assert torch.equal(reductions[turn], expected)


@on_ranks(3, 4)
def test_a_rank_may_wait_late_for_its_reduction_without_holding_up_others() -> None:
    rank, ranks, group = world()
    whole, reduced, token = values(rank, NUMEL * ranks, FP32), torch.empty(NUMEL), torch.zeros(1)
    work = GlooReduceScatter()(reduced, whole, group, ReduceOp.SUM, async_op=True)
    assert work is not None
    if rank == 0:
        for peer in range(1, ranks):
            dist.recv(token, peer)  # which they send once their own wait is over
        work.wait()
    else:
        work.wait()
        dist.send(token, 0)
    assert torch.equal(reduced, emulated(rank, [*range(ranks)], NUMEL, FP32, ReduceOp.SUM))


@on_ranks(3)
def test_some_ranks_exchange_among_themselves_in_group_order() -> None:
    rank = dist.get_rank()
    members = [1, 2]
    pair, everyone = dist.new_group(members), dist.new_group([0, 1, 2])
    shard, gathered = values(rank, NUMEL, BF16), torch.empty(NUMEL * 3, dtype=BF16)
    whole, reduced = values(rank, NUMEL * 3, BF16), torch.empty(NUMEL, dtype=BF16)
    works = [GlooAllGather()(gathered, shard, everyone, async_op=True)]
    if rank in members:
        of_pair, of_pair_reduced = torch.empty(NUMEL * 2, dtype=BF16), torch.empty(NUMEL, dtype=BF16)
        works.append(GlooAllGather()(of_pair, shard, pair, async_op=True))
        half = values(rank, NUMEL * 2, BF16)
        works.append(GlooReduceScatter()(of_pair_reduced, half, pair, ReduceOp.AVG, async_op=True))
    works.append(GlooReduceScatter()(reduced, whole, everyone, ReduceOp.SUM, async_op=True))
    for work in works:
        assert work is not None
        work.wait()
    assert torch.equal(gathered, torch.cat([values(r, NUMEL, BF16) for r in range(3)]))
    assert torch.equal(reduced, emulated(rank, [0, 1, 2], NUMEL, BF16, ReduceOp.SUM))
    if rank in members:
        assert torch.equal(of_pair, torch.cat([values(r, NUMEL, BF16) for r in members]))
        place = members.index(rank)
        assert torch.equal(of_pair_reduced, emulated(place, members, NUMEL, BF16, ReduceOp.AVG))


@on_ranks(2)
def test_a_backward_thread_and_the_main_thread_may_take_turns() -> None:
    rank, ranks, group = world()
    reduced = [torch.empty(NUMEL) for _ in range(4)]

    def reduce(output: Tensor) -> None:
        GlooReduceScatter()(output, values(rank, NUMEL * ranks, FP32), group, ReduceOp.SUM)

    for index, output in enumerate(reduced):
        if index % 2:
            thread = threading.Thread(target=reduce, args=(output,))
            thread.start()
            thread.join()
        else:
            reduce(output)
    expected = emulated(rank, [0, 1], NUMEL, FP32, ReduceOp.SUM)
    assert all(torch.equal(output, expected) for output in reduced)


# ---------------------------------------------------------------- bytes and memory


@on_ranks(2, 3, 4)
def test_each_rank_sends_all_but_one_of_n_slices_and_not_a_byte_more() -> None:
    _, ranks, group = world()
    for dtype in (FP32, BF16, torch.uint8):
        whole, shard = torch.ones(NUMEL * ranks, dtype=dtype), torch.ones(NUMEL, dtype=dtype)
        for comm, args in [
            (GlooAllGather(), (whole, shard, group)),
            (GlooReduceScatter(), (shard, whole, group, ReduceOp.SUM)),
        ]:
            with CommCounter() as counter:
                comm(*args)
            assert counter.bytes("send") == counter.wire_bytes() == (ranks - 1) * NUMEL * dtype.itemsize
            assert counter.bytes("recv") == (ranks - 1) * NUMEL * dtype.itemsize
            assert {call.kind for call in counter.calls} == {"send", "recv"}


@on_ranks(2, 3, 4, 5)
def test_a_reduction_stages_two_slices_at_most_and_a_gather_none() -> None:
    _, ranks, group = world()
    whole, shard = torch.ones(NUMEL * ranks), torch.empty(NUMEL)
    with Allocations() as allocations:
        torch.zeros(3)
    assert allocations.bytes == [12]  # it does notice
    with Allocations() as allocations:
        GlooReduceScatter()(shard, whole, group, ReduceOp.AVG)
    assert STAGED_SLICES == 2
    assert allocations.bytes == [NUMEL * 4] * min(ranks - 2, STAGED_SLICES)
    assert torch.equal(shard, torch.ones(NUMEL))
    with Allocations() as allocations:
        GlooAllGather()(whole, shard, group)
    assert allocations.bytes == []


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@on_ranks(4)
def test_sixty_exchanges_leave_no_memory_behind() -> None:
    _, ranks, group = world()
    numel = 64 * 1024  # 256 kB a slice
    whole, shard = torch.ones(numel * ranks), torch.ones(numel)

    def both() -> None:
        GlooAllGather()(whole, shard, group)
        GlooReduceScatter()(shard, whole, group, ReduceOp.AVG)

    for _ in range(20):
        both()
    before = resident_bytes()
    for _ in range(60):
        both()
    # One slice leaked a call would be 15 MB; the allocator may keep or return a few slices.
    assert resident_bytes() - before < 4_000_000


# ---------------------------------------------------------------- errors


@on_ranks(2)
def test_buffers_that_do_not_fit_are_refused_before_anything_is_sent() -> None:
    rank, _, group = world()
    gather, reduce = GlooAllGather(), GlooReduceScatter()
    whole, shard = torch.ones(8), torch.ones(4)

    def refused(match: str, call: Any) -> None:
        with CommCounter() as counter, pytest.raises(ShardingError, match=match):
            call()
        assert counter.calls == []

    refused(
        rf"rank {rank}: .*of 4 elements .*needs .* 8 elements .*got 7",
        lambda: gather(torch.ones(7), shard, group),
    )
    refused("got 8 of torch.float64", lambda: gather(whole.double(), shard, group))
    refused("got 7 of", lambda: reduce(shard, torch.ones(7), group, ReduceOp.SUM))
    refused("got 8 of torch.bfloat16", lambda: reduce(shard, whole.bfloat16(), group, ReduceOp.SUM))
    refused("1-D contiguous", lambda: gather(torch.ones(16)[::2], shard, group))
    refused("on meta", lambda: gather(whole.to("meta"), shard.to("meta"), group))
    refused("overlap", lambda: gather(whole, whole[2:6], group))
    refused("overlap", lambda: reduce(whole[:4], whole, group, ReduceOp.SUM))
    for op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
        refused(f"int64 by .*{op.name}", lambda op=op: reduce(shard.long(), whole.long(), group, op))
    refused("AVG", lambda: reduce(shard.long(), whole.long(), group, ReduceOp.AVG))
    refused("bool", lambda: reduce(shard.bool(), whole.bool(), group, ReduceOp.SUM))


@on_ranks(3)
def test_a_rank_that_never_comes_raises_on_the_others_within_the_groups_timeout() -> None:
    rank = dist.get_rank()
    exchanges = [
        lambda group: GlooAllGather()(torch.empty(3 * NUMEL), torch.ones(NUMEL), group),
        lambda group: GlooReduceScatter()(torch.empty(NUMEL), torch.ones(3 * NUMEL), group, ReduceOp.SUM),
    ]
    dist.barrier()  # that making the groups takes no longer than they wait
    groups = [dist.new_group([0, 1, 2], timeout=timedelta(seconds=0.5)) for _ in exchanges]
    if rank == 1:
        return
    for exchange, group in zip(exchanges, groups, strict=True):
        begin = time.monotonic()
        with pytest.raises(RuntimeError, match=r"[Tt]imed out|timeout|[Cc]onnection closed"):
            exchange(group)
        assert time.monotonic() - begin < 0.5 + 1.0  # generous: the machine may be busy


# ---------------------------------------------------------------- the choice


@on_ranks(2)
def test_the_automatic_choice_exchanges_large_buffers_and_leaves_small_ones_to_c10d() -> None:
    rank, _, group = world()
    gather, reduce = AutoAllGather(min_bytes=64), AutoReduceScatter(min_bytes=64)
    for numel, exchanged in [(16, True), (14, False)]:
        whole, shard = torch.empty(numel), values(rank, numel // 2, FP32)
        with CommCounter() as counter:
            gather(whole, shard, group)
            reduce(shard, whole, group, ReduceOp.SUM)
        one = ["send", "recv"]
        kinds = one * 2 if exchanged else ["all_gather", "reduce_scatter"]
        assert [call.kind for call in counter.calls] == kinds
        assert torch.equal(whole, torch.cat([values(r, numel // 2, FP32) for r in range(2)]))
        assert torch.equal(shard, 2 * whole.chunk(2)[rank])
    with CommCounter() as counter:  # an op that the exchange does not know
        reduce(torch.ones(16).int(), torch.ones(32).int(), group, ReduceOp.BAND)
        work = gather(torch.empty(32), torch.ones(16), group, async_op=True)
        assert work is not None
        work.wait()
    assert [call.kind for call in counter.calls] == ["reduce_scatter", *one]


@on_ranks(1)
def test_the_backend_of_a_group_decides_and_is_looked_up_once() -> None:
    group = dist.group.WORLD
    mixed = dist.new_group([0], backend="cpu:gloo")
    fake = dist.new_group([0], backend="fake")
    assert [over_gloo(g) for g in (group, mixed, fake)] == [True, True, False]
    with mock.patch.object(dist, "get_backend_config", None):
        assert [over_gloo(g) for g in (group, mixed, fake)] == [True, True, False]


@on_ranks(2)
@pytest.mark.skipif(
    sys.platform != "linux" or torch.__version__ < "2.13",
    reason="other systems have no such policy, and in older torch the threads no name",
)
def test_input_threads_of_gloo_groups_in_use_take_over_no_core_when_they_wake() -> None:
    group = dist.new_group([0, 1])

    def inputs() -> list[int]:
        threads = Path("/proc/self/task").glob("*/comm")
        return [int(one.parent.name) for one in threads if one.read_text().strip() == "gloo_tcp_loop"]

    def policies() -> set[int]:
        return {os.sched_getscheduler(one) for one in inputs()}

    deadline = time.monotonic() + 5
    while not inputs() and time.monotonic() < deadline:
        time.sleep(0.01)  # a thread names itself when it begins
    for one in inputs():  # groups may share it
        os.sched_setscheduler(one, os.SCHED_OTHER, os.sched_param(0))
    assert policies() == {os.SCHED_OTHER}
    assert over_gloo(group)
    assert policies() == {os.SCHED_BATCH}


def test_all_allocate_with_the_devices_own_allocator() -> None:
    for comm in (GlooAllGather(), GlooReduceScatter(), AutoAllGather(), AutoReduceScatter()):
        made = comm.allocate((3, 2), dtype=BF16, device=CPU)
        assert (made.shape, made.dtype, made.device) == ((3, 2), BF16, CPU)
