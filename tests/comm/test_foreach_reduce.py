"""One reduction turns every rank's whole gradients into each rank's shard of their mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ranks import on_ranks
from shardwise.comm import DefaultReduceScatter, ReduceResult, divide_factors, foreach_reduce
from shardwise.comm.count import Collective, CommCounter
from shardwise.comm.foreach import Reduction
from shardwise.errors import ShardingError
from shardwise.layout import EvenShard

CPU = torch.device("cpu")
FP32, FP64, BF16 = torch.float32, torch.float64, torch.bfloat16
Shapes = list[tuple[tuple[int, ...], int]]  # shape and the dim that is cut


def grads_of(rank: int, shapes: Shapes, *, step: int = 0, dtype: torch.dtype = FP32) -> list[Tensor]:
    """Whole numbers, so that sums are exact in any order."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randint(-9, 9, shape, generator=generator).to(dtype) for shape, _ in shapes]


def plan(
    shard: dist.ProcessGroup | None = None, replicate: dist.ProcessGroup | None = None, **how: Any
) -> Reduction:
    dtype = how.get("dtype", FP32)
    made = divide_factors(
        shard_size=shard.size() if shard else 1,
        replicate_size=replicate.size() if replicate else 1,
        reduce_dtype=dtype,
        backend="gloo",
    )
    defaults: dict[str, Any] = {"dtype": dtype, "result_dtype": FP32, "factors": made, "device": CPU}
    return Reduction(shard, replicate, **(defaults | {"comm": DefaultReduceScatter()} | how))


def reduce(grads: list[Tensor], shapes: Shapes, how: Reduction, **more: Any) -> ReduceResult:
    return foreach_reduce(grads, [dim for _, dim in shapes], how, **more)


def expected_shard(whole: Sequence[Tensor], shapes: Shapes, *, rank: int, ranks: int) -> Tensor:
    """`rank`'s padded pieces of `whole`, end to end."""
    pieces = []
    for tensor, (shape, dim) in zip(whole, shapes, strict=True):
        box = EvenShard(dim).box(shape, rank=rank, ranks=ranks)
        stored = tensor.new_zeros(EvenShard(dim).padded_shape(shape, ranks=ranks))
        stored.narrow(dim, 0, box.sizes[dim]).copy_(tensor.narrow(dim, box.offsets[dim], box.sizes[dim]))
        pieces.append(stored.reshape(-1))
    return torch.cat(pieces)


def mean(shapes: Shapes, ranks: Sequence[int], *, steps: Sequence[int] = (0,)) -> list[Tensor]:
    every = [grads_of(r, shapes, step=s, dtype=FP64) for r in ranks for s in steps]
    return [torch.stack(same).sum(0) / len(ranks) for same in zip(*every, strict=True)]


UNEVEN: Shapes = [((5, 3), 0), ((1,), 0), ((7,), 0), ((2, 2, 2), 0)]
WITH_EMPTY: Shapes = [((0, 4), 0), ((5, 3), 0), ((3, 0), 0)]
ONLY_EMPTY: Shapes = [((0, 4), 0), ((0,), 0)]
OTHER_DIMS: Shapes = [((5, 6), 1), ((5, 3), 0), ((2, 3, 12), 2), ((3, 6, 1), 1)]


@on_ranks(1, 2, 3)
@pytest.mark.parametrize(
    "shapes", [UNEVEN, OTHER_DIMS, WITH_EMPTY, ONLY_EMPTY], ids=["uneven", "dims", "with empty", "only empty"]
)
def test_each_rank_gets_its_padded_pieces_of_the_mean(shapes: Shapes) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    expected = expected_shard(mean(shapes, range(ranks)), shapes, rank=rank, ranks=ranks)
    known = sum(torch.Size(EvenShard(d).padded_shape(s, ranks=ranks)).numel() for s, d in shapes)
    for shard_numel in (None, known):
        grads = grads_of(rank, shapes)
        with CommCounter() as counter:
            result = reduce(grads, shapes, plan(dist.group.WORLD), shard_numel=shard_numel)
        assert grads == []
        assert result.partial is None
        torch.testing.assert_close(result.shard, expected.to(FP32), rtol=2**-23, atol=0)
        call = Collective("reduce_scatter", ranks * known * 4, FP32, ranks)
        assert counter.calls == ([call] if ranks > 1 else [])


@on_ranks(2)
def test_gradients_are_reduced_in_one_dtype_and_returned_in_another() -> None:
    rank = dist.get_rank()
    expected = expected_shard(mean(UNEVEN, range(2)), UNEVEN, rank=rank, ranks=2)
    with CommCounter() as counter:
        result = reduce(
            grads_of(rank, UNEVEN, dtype=BF16), UNEVEN, plan(dist.group.WORLD, dtype=FP32, result_dtype=BF16)
        )
    assert {call.dtype for call in counter.calls} == {FP32}
    assert result.staged.dtype == FP32
    assert result.shard is not None
    assert result.shard.dtype == BF16
    assert torch.equal(result.shard.double(), expected)  # halves of small whole numbers


@on_ranks(3)
def test_each_ranks_slice_is_padded_to_the_alignment() -> None:
    rank, shapes = dist.get_rank(), [((5, 3), 0), ((1,), 0)]  # 6 + 1 elements a rank
    expected = expected_shard(mean(shapes, range(3)), shapes, rank=rank, ranks=3)
    for dtype, padded in [(FP32, 8), (FP64, 8), (BF16, 8)]:
        with CommCounter() as counter:
            how = plan(dist.group.WORLD, dtype=dtype, result_dtype=FP64, align_bytes=16)
            result = reduce(grads_of(rank, shapes), shapes, how)
        assert counter.calls == [Collective("reduce_scatter", 3 * padded * dtype.itemsize, dtype, 3)]
        assert result.shard is not None
        torch.testing.assert_close(result.shard[:7], expected, rtol=2**-7, atol=0)
        assert torch.equal(result.shard[7:], torch.zeros(padded - 7, dtype=FP64))
        assert padded * dtype.itemsize % 16 == 0


def replicas() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Shard and replicate group of this rank on a 2 x 2 mesh."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return mesh.get_group("shard"), mesh.get_group("replicate")


@on_ranks(4)
def test_a_hybrid_sharded_gradient_is_the_mean_over_both_axes() -> None:
    shard, replicate = replicas()
    expected = expected_shard(mean(UNEVEN, range(4)), UNEVEN, rank=shard.rank(), ranks=2)
    with CommCounter() as counter:
        result = reduce(grads_of(dist.get_rank(), UNEVEN), UNEVEN, plan(shard, replicate))
    torch.testing.assert_close(result.shard, expected.to(FP32), rtol=2**-22, atol=0)
    size = expected.numel() * 4
    assert counter.calls == [
        Collective("reduce_scatter", 2 * size, FP32, 2),
        Collective("all_reduce", size, FP32, 2),
    ]


@on_ranks(4)
def test_steps_without_all_reduce_add_up_until_one_all_reduces() -> None:
    rank, (shard, replicate) = dist.get_rank(), replicas()
    later, now = plan(shard, replicate, all_reduce=False), plan(shard, replicate)
    with CommCounter() as counter:
        first = reduce(grads_of(rank, UNEVEN, step=0), UNEVEN, later)
        second = reduce(grads_of(rank, UNEVEN, step=1), UNEVEN, later, partial=first.partial)
        last = reduce(grads_of(rank, UNEVEN, step=2), UNEVEN, now, partial=second.partial)
    assert [call.kind for call in counter.calls] == [*["reduce_scatter"] * 3, "all_reduce"]
    assert first.shard is None
    assert second.shard is None
    assert first.partial is not None
    assert last.partial is None
    expected = expected_shard(mean(UNEVEN, range(4), steps=range(3)), UNEVEN, rank=shard.rank(), ranks=2)
    torch.testing.assert_close(last.shard, expected.to(FP32), rtol=2**-20, atol=2**-20)


@on_ranks(2)
def test_without_a_shard_axis_whole_gradients_are_all_reduced() -> None:
    with CommCounter() as counter:
        result = reduce(grads_of(dist.get_rank(), UNEVEN), UNEVEN, plan(None, dist.group.WORLD))
    expected = torch.cat([t.reshape(-1) for t in mean(UNEVEN, range(2))]).to(FP32)
    assert torch.equal(result.shard, expected)
    assert counter.calls == [Collective("all_reduce", expected.numel() * 4, FP32, 2)]


@on_ranks(4)
def test_the_users_hook_sees_the_reduced_shard_and_may_change_it() -> None:
    rank, (shard, replicate) = dist.get_rank(), replicas()
    seen: list[Tensor] = []

    def hook(reduced: Tensor) -> None:
        seen.append(reduced.clone())
        reduced.mul_(2)

    both = expected_shard(mean(UNEVEN, range(4)), UNEVEN, rank=shard.rank(), ranks=2).to(FP32)
    one_axis = expected_shard(
        mean(UNEVEN, dist.get_process_group_ranks(shard)), UNEVEN, rank=shard.rank(), ranks=2
    ).to(FP32)
    cases = [(plan(shard, replicate, hook=hook), both), (plan(shard, hook=hook), one_axis)]
    for how, expected in cases:
        result = reduce(grads_of(rank, UNEVEN), UNEVEN, how)
        torch.testing.assert_close(seen.pop(), expected, rtol=2**-22, atol=0)
        torch.testing.assert_close(result.shard, 2 * expected, rtol=2**-22, atol=0)
    reduce(grads_of(rank, UNEVEN), UNEVEN, plan(shard, replicate, hook=hook, all_reduce=False))
    assert seen == []  # a partial gradient is not reduced yet


@on_ranks(2)
def test_a_users_own_reduce_scatter_allocates_and_reduces() -> None:
    log: list[Any] = []

    class AllReduces:
        """Reduce-scatter as an all-reduce of everything."""

        def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
            log.append(("allocate", tuple(size), dtype))
            return torch.zeros(*size, dtype=dtype, device=device)

        def __call__(
            self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
        ) -> None:
            log.append(("reduce", op == dist.ReduceOp.AVG))
            dist.all_reduce(input_tensor, op=op, group=group)
            output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])

    rank = dist.get_rank()
    expected = expected_shard(mean(UNEVEN, range(2)), UNEVEN, rank=rank, ranks=2)
    result = reduce(grads_of(rank, UNEVEN), UNEVEN, plan(dist.group.WORLD, comm=AllReduces()))
    assert torch.equal(result.shard, expected.to(FP32))
    numel = expected.numel()
    assert log == [("allocate", (2 * numel,), FP32), ("allocate", (numel,), FP32), ("reduce", True)]


@on_ranks(2)
def test_gradients_of_several_dtypes_are_reduced_in_one() -> None:
    mixed = [torch.full((4,), 1 + 2**-20), torch.ones(4, dtype=BF16)]
    with CommCounter() as counter:
        result = foreach_reduce(mixed, [0, 0], plan(dist.group.WORLD))
    assert counter.count("reduce_scatter") == 1
    assert result.shard is not None
    assert result.shard.tolist() == [1 + 2**-20] * 2 + [1.0] * 2


@on_ranks(2)
def test_gradients_that_cannot_be_cut_are_refused_before_any_collective() -> None:
    rank, how = dist.get_rank(), plan(dist.group.WORLD)
    with CommCounter() as counter:  # noqa: SIM117
        with pytest.raises(ShardingError, match=rf"rank {rank}: .*\(4, 3\) does not divide over 2 .*dim 1"):
            foreach_reduce([torch.ones(4, 3)], [1], how)
    assert counter.calls == []


@on_ranks(2)
def test_gradients_that_record_a_graph_are_reduced_without_recording() -> None:
    grad = torch.arange(4.0, requires_grad=True) * 2
    result = foreach_reduce([grad], [0], plan(dist.group.WORLD))
    assert result.shard is not None
    assert not result.shard.requires_grad
    assert result.shard.tolist() == ([0.0, 2.0] if dist.get_rank() == 0 else [4.0, 6.0])
