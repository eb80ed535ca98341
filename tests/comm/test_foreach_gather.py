"""One all-gather brings every rank's shards to every rank, whatever their number, sizes and dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ranks import on_ranks
from shardwise.comm import (
    AllGatherResult,
    CommStreams,
    DefaultAllGather,
    DefaultReduceScatter,
    ProcessGroupAllocAllGather,
    ProcessGroupAllocReduceScatter,
    foreach_all_gather,
    foreach_all_gather_copy_out,
)
from shardwise.comm.api import SymmetricAllGather
from shardwise.comm.count import Collective, CommCounter
from shardwise.comm.foreach import gather_dtype
from shardwise.errors import ShardingError

CPU = torch.device("cpu")
FP32, FP64, BF16, INT64, BYTES = torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8


def shard_of(rank: int, index: int, numel: int, dtype: torch.dtype) -> Tensor:
    """What `rank` sends of parameter `index`: whole numbers that tell rank, parameter and place."""
    return (torch.arange(numel) + 40 * rank + 10 * index).to(dtype)


def gather(shards: Sequence[Tensor], dtypes: Sequence[torch.dtype], **how: Any) -> AllGatherResult:
    how = {"group": dist.group.WORLD, "comm": DefaultAllGather(), "device": CPU} | how
    return foreach_all_gather(shards, dtypes=dtypes, **how)


def copied_out(result: AllGatherResult, sizes: Sequence[int], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Each parameter as [ranks, size]; bytes are viewed in the parameter's dtype again."""
    travels_as, ranks = gather_dtype(dtypes), dist.get_world_size()
    scale = [d.itemsize if travels_as == BYTES else 1 for d in dtypes]
    lengths = [n * s for n, s in zip(sizes, scale, strict=True)]
    outs = [torch.full((ranks, n), 77, dtype=travels_as) for n in lengths]
    foreach_all_gather_copy_out(result, lengths, outs, ranks=ranks)
    return [out.view(dtype) for out, dtype in zip(outs, dtypes, strict=True)]


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_every_rank_reads_every_shard_after_one_all_gather(async_op: bool) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for sizes, stored, wanted in [
        ([5], [FP32], [FP32]),
        ([5], [FP32], [BF16]),
        ([4, 0, 3], [FP32] * 3, [FP32] * 3),
        ([4, 3], [FP32] * 2, [BF16] * 2),
        ([4, 3], [BF16, FP32], [FP32] * 2),
        ([3, 2, 1], [BF16, FP32, INT64], [BF16, FP32, INT64]),
        ([3, 2], [FP32, FP32], [BF16, FP64]),
        ([2, 3], [BYTES, BYTES], [BYTES, BYTES]),
    ]:
        shards = [shard_of(rank, i, n, d) for i, (n, d) in enumerate(zip(sizes, stored, strict=True))]
        before = [shard.clone() for shard in shards]
        with CommCounter() as counter:
            found = copied_out(gather(shards, wanted, async_op=async_op), sizes, wanted)
        for i, (n, out, dtype) in enumerate(zip(sizes, found, wanted, strict=True)):
            assert torch.equal(out, torch.stack([shard_of(r, i, n, dtype) for r in range(ranks)]))
        assert all(torch.equal(a, b) for a, b in zip(shards, before, strict=True))
        size = ranks * sum(n * d.itemsize for n, d in zip(sizes, wanted, strict=True))
        expected = [Collective("all_gather", size, gather_dtype(wanted), ranks)] if ranks > 1 else []
        assert counter.calls == expected


@on_ranks(2)
def test_an_asynchronous_gather_hands_out_its_work_and_a_synchronous_one_none() -> None:
    shards = [torch.ones(3), torch.ones(2)]
    result = gather(shards, [FP32, FP32], async_op=True)
    assert isinstance(result.work, dist.Work)
    assert result.event is None
    result.work.wait()
    assert torch.equal(result.output, torch.ones(10))
    assert gather(shards, [FP32, FP32]).work is None


@on_ranks(2)
def test_a_single_shard_is_sent_from_where_it_lies_and_several_from_the_output() -> None:
    sent: list[Tensor] = []

    class Spy(DefaultAllGather):
        def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *rest: Any, **more: Any) -> Any:
            sent.append(input_tensor)
            return super().__call__(output_tensor, input_tensor, *rest, **more)

    rank, shard = dist.get_rank(), torch.ones(4)
    gather([shard], [FP32], comm=Spy())
    assert sent.pop().data_ptr() == shard.data_ptr()
    for shards, dtypes in [([shard], [BF16]), ([shard, shard], [FP32, FP32])]:
        result = gather(shards, dtypes, comm=Spy())
        own = result.output.chunk(2)[rank]
        assert sent.pop().data_ptr() == own.data_ptr()


@on_ranks(2)
def test_a_users_own_communication_allocates_and_moves_the_buffers() -> None:
    log: list[Any] = []

    class Broadcasts:
        """All-gather as one broadcast a rank."""

        def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
            log.append(("allocate", tuple(size), dtype, device))
            return torch.zeros(*size, dtype=dtype, device=device)

        def __call__(
            self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
        ) -> None:
            log.append(("gather", async_op))
            pieces = output_tensor.chunk(group.size())
            pieces[group.rank()].copy_(input_tensor)
            for source, piece in enumerate(pieces):
                dist.broadcast(piece, source, group=group)

    shards = [shard_of(dist.get_rank(), i, n, FP32) for i, n in enumerate([4, 3])]
    with CommCounter() as counter:
        found = copied_out(gather(shards, [FP32] * 2, comm=Broadcasts(), async_op=True), [4, 3], [FP32] * 2)
    assert torch.equal(found[1], torch.stack([shard_of(r, 1, 3, FP32) for r in range(2)]))
    assert log == [("allocate", (14,), FP32, CPU), ("gather", True)]
    assert [call.kind for call in counter.calls] == ["broadcast", "broadcast"]


@on_ranks(1)
def test_a_rank_alone_reads_its_shards_without_any_collective() -> None:
    shard = torch.arange(6.0)
    with CommCounter() as counter:
        one = gather([shard], [FP32], group=None)
        cast = gather([shard], [BF16], group=None)
        two = gather([shard, shard + 6], [FP32, FP32], group=None)
    assert one.output is shard
    assert torch.equal(cast.output, shard.to(BF16))
    assert torch.equal(two.output, torch.arange(12.0))
    assert counter.calls == []


@on_ranks(3)
def test_a_gather_over_some_ranks_takes_their_shards_in_group_order() -> None:
    group, rank = dist.new_group([0, 2]), dist.get_rank()
    if rank == 1:
        return
    result = gather([torch.tensor([float(rank)]), torch.tensor([rank + 10.0])], [FP32] * 2, group=group)
    assert result.output.tolist() == [0.0, 10.0, 2.0, 12.0]


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [([FP32], FP32), ([BF16, BF16], BF16), ([BF16, FP32], BYTES), ([BYTES, BYTES], BYTES)],
)
def test_shards_travel_in_their_common_dtype_or_as_bytes(dtypes: list[Any], expected: torch.dtype) -> None:
    assert gather_dtype(dtypes) == expected


@on_ranks(2)
def test_buffers_asked_of_a_group_without_an_allocator_come_from_the_device() -> None:
    group = dist.group.WORLD
    for comm in (
        DefaultAllGather(),
        DefaultReduceScatter(),
        ProcessGroupAllocAllGather(group),
        ProcessGroupAllocReduceScatter(group),
    ):
        buffer = comm.allocate((3, 4), dtype=BF16, device=CPU)
        assert (buffer.shape, buffer.dtype, buffer.device) == ((3, 4), BF16, CPU)
        buffer.fill_(1)
    rank = dist.get_rank()
    shards = [shard_of(rank, i, n, FP32) for i, n in enumerate([4, 3])]
    result = gather(shards, [FP32] * 2, comm=ProcessGroupAllocAllGather(group))
    assert torch.equal(copied_out(result, [4, 3], [FP32] * 2)[0][1], shard_of(1, 0, 4, FP32))
    out = torch.empty(2)
    ProcessGroupAllocReduceScatter(group)(out, torch.arange(4.0), group, dist.ReduceOp.SUM)
    assert out.tolist() == ([0.0, 2.0] if rank == 0 else [4.0, 6.0])


@on_ranks(2)
def test_symmetric_memory_is_refused_on_gloo_with_what_it_needs() -> None:
    for backend, device in [("NCCL", CPU), ("NVSHMEM", CPU), ("NCCL", torch.device("cuda"))]:
        with pytest.raises(ShardingError) as error:
            SymmetricAllGather(dist.group.WORLD, backend, device)
        message = str(error.value)
        assert f"rank {dist.get_rank()}: symmetric memory needs backend 'NCCL' on CUDA devices" in message
        assert f"got {backend!r} with the process group's backend 'gloo' on {device.type}" in message
        assert "leave set_symm_mem_for_comm out" in message


def test_devices_without_streams_get_none() -> None:
    assert CommStreams.create(CPU) is None
    assert CommStreams.create(torch.device("meta")) is None
