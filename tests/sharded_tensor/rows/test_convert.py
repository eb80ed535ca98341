"""Rows to whole tensors, to DTensors and to other rows, and back."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from pieces import (
    ANY_RANKS,
    FOUR_RANKS,
    Cut,
    all_on_last,
    boxes_of,
    by_counts,
    even,
    local_rows,
    sharded,
    uneven,
)
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ranks import on_ranks
from shardwise.comm.count import CommCounter
from shardwise.errors import ShardingError
from shardwise.sharded_tensor.rows import ShardedRows
from shardwise.sharded_tensor.rows.convert import overlaps

WHOLES = [
    torch.arange(35.0).view(7, 5),
    torch.arange(6.0).bfloat16(),
    torch.arange(5).view(1, 5).to(torch.int16),
    torch.arange(40).view(5, 2, 4) % 3 == 0,
    torch.empty(0, 4),
]

counts = st.lists(st.integers(0, 9), min_size=1, max_size=6)


@st.composite
def two_cuts(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two ways to cut the same rows over the same ranks."""
    first = draw(counts)
    ends = sorted(draw(st.integers(0, sum(first))) for _ in first[1:])
    return first, [b - a for a, b in zip([0, *ends], [*ends, sum(first)], strict=True)]


@given(two_cuts())
def test_what_one_rank_sends_another_expects_and_all_rows_arrive_once(
    cuts: tuple[list[int], list[int]],
) -> None:
    rows = torch.arange(sum(cuts[0]))
    source, target = (boxes_of((len(rows), 2), cut) for cut in cuts)
    sends = [overlaps(box, target) for box in source]
    for rank, box in enumerate(target):
        receives = overlaps(box, source)
        assert [count for _, count in receives] == [sends[other][rank][1] for other in range(len(source))]
        found = torch.full((box.sizes[0],), -1)
        for other, (start, count) in enumerate(receives):
            first = source[other].offsets[0] + sends[other][rank][0]
            assert bool((found[start : start + count] == -1).all())
            found[start : start + count] = rows[first : first + count]
        assert torch.equal(found, rows[box.offsets[0] : box.ends[0]])


def check_full_tensor(cut: Cut) -> None:
    for whole in WHOLES[:2] if cut.__name__ in ("rowwise", "columnwise") else WHOLES:
        rows = sharded(whole, cut)
        found = rows.full_tensor()
        assert type(found) is Tensor
        assert found.dtype == whole.dtype
        assert torch.equal(found, whole)
        found.zero_()
        assert torch.equal(rows.full_tensor(), whole)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("cut", ANY_RANKS, ids=lambda cut: cut.__name__)
def test_full_tensor_gives_the_whole(cut: Cut) -> None:
    check_full_tensor(cut)


@on_ranks(4)
@pytest.mark.parametrize("cut", FOUR_RANKS[3:], ids=lambda cut: cut.__name__)
def test_full_tensor_gives_the_whole_on_a_mesh(cut: Cut) -> None:
    check_full_tensor(cut)


@on_ranks(4)
def test_rows_on_one_rank_are_broadcast_without_padding() -> None:
    rows = sharded(WHOLES[0], all_on_last)
    with CommCounter() as counter:
        rows.full_tensor()
    assert [call.kind for call in counter.calls] == ["broadcast"]
    assert counter.bytes() == WHOLES[0].nbytes


@on_ranks(4)
def test_rows_on_all_ranks_are_gathered_at_once() -> None:
    rows = sharded(WHOLES[0], even)
    with CommCounter() as counter:
        rows.full_tensor()
    assert [call.kind for call in counter.calls] == ["all_gather"]


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("cut", ANY_RANKS, ids=lambda cut: cut.__name__)
def test_dtensors_and_rows_convert_both_ways_moving_each_row_at_most_once(cut: Cut) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for whole in WHOLES[:2]:
        rows = sharded(whole, cut)
        row_bytes = whole[0].nbytes
        for given_mesh in (mesh, None):
            with CommCounter() as counter:
                dtensor = rows.to_dtensor(given_mesh)
            assert [call.kind for call in counter.calls] == ["all_to_all"]
            assert counter.bytes() == rows.local.shape[0] * row_bytes  # what this rank sends, itself included
            assert isinstance(dtensor, DTensor)
            assert dtensor.placements == (Shard(0),)
            assert dtensor.shape == whole.shape
            expected = distribute_tensor(whole.clone(), mesh, [Shard(0)])
            assert torch.equal(dtensor.to_local(), expected.to_local())
        with CommCounter() as counter:
            back = ShardedRows.from_dtensor(dtensor, rows.piece)
        assert [call.kind for call in counter.calls] == ["all_to_all"]
        assert counter.bytes() == dtensor.to_local().nbytes
        assert torch.equal(back.local, rows.local)
        rows.zero_()
        rows.load_dtensor(dtensor)
        assert torch.equal(rows.local, back.local)


@on_ranks(4)
@pytest.mark.parametrize("cut", FOUR_RANKS, ids=lambda cut: cut.__name__)
def test_any_dtensor_becomes_any_rows(cut: Cut) -> None:
    whole = WHOLES[0]
    piece = cut((7, 5))
    mesh = init_device_mesh("cpu", (2, 2))
    line = init_device_mesh("cpu", (4,))
    for dtensor in (
        distribute_tensor(whole, mesh, [Shard(0), Shard(1)]),
        distribute_tensor(whole, mesh, [Replicate(), Replicate()]),
        distribute_tensor(whole, line, [Shard(1)]),
        distribute_tensor(whole, line, [Shard(0)]),
    ):
        rows = ShardedRows.from_dtensor(dtensor, piece)
        assert torch.equal(rows.local, local_rows(whole, piece))
        target = ShardedRows.wrap(torch.zeros_like(rows.local), piece)
        assert torch.equal(target.copy_(dtensor).local, rows.local)


@on_ranks(2)
def test_conversions_that_do_not_fit_are_refused() -> None:
    rows = sharded(WHOLES[0], uneven)
    with pytest.raises(ShardingError, match="1-D mesh of ranks"):
        rows.to_dtensor(init_device_mesh("cpu", (1, 2)))
    other = distribute_tensor(torch.zeros(3, 5), init_device_mesh("cpu", (2,)), [Shard(0)])
    with pytest.raises(ShardingError, match="expected a DTensor of shape"):
        ShardedRows.from_dtensor(other, rows.piece)


@on_ranks(4)
def test_rows_cut_over_several_axes_do_not_become_dtensors() -> None:
    for cut in FOUR_RANKS[3], FOUR_RANKS[5]:
        with pytest.raises(ShardingError, match="over one mesh axis"):
            sharded(WHOLES[0], cut).to_dtensor()


# copy_


@on_ranks(3)
def test_copy_takes_its_rows_of_a_whole_tensor() -> None:
    rows = sharded(torch.zeros(7, 5), uneven)
    with CommCounter() as counter:
        rows.copy_(WHOLES[0])
    assert counter.calls == []
    assert torch.equal(rows.full_tensor(), WHOLES[0])
    rows.copy_(torch.tensor(2.0))
    rows += torch.arange(5.0)
    assert torch.equal(rows.full_tensor(), (2 + torch.arange(5.0)).expand(7, 5))


@on_ranks(3)
def test_copy_between_rows_cut_alike_is_local_and_between_others_moves_each_row_once() -> None:
    source = sharded(WHOLES[0], uneven)
    alike, other = sharded(torch.zeros(7, 5), uneven), sharded(torch.zeros(7, 5).double(), even)
    with CommCounter() as counter:
        alike.copy_(source)
    assert counter.calls == []
    with CommCounter() as counter:
        other.copy_(source)
    assert [call.kind for call in counter.calls] == ["all_to_all"]
    assert counter.bytes() == source.local.nbytes
    assert torch.equal(alike.full_tensor(), WHOLES[0])
    assert torch.equal(other.full_tensor(), WHOLES[0].double())


@on_ranks(3)
def test_ranks_agree_that_cuts_differ_where_some_hold_the_same_rows() -> None:
    source = sharded(WHOLES[0], lambda shape: by_counts(shape, [3, 3, 1]))
    target = sharded(torch.zeros(7, 5), lambda shape: by_counts(shape, [3, 1, 3]))
    assert source.piece != target.piece
    assert torch.equal(target.copy_(source).full_tensor(), WHOLES[0])
    with pytest.raises(ShardingError, match="cut differently"):
        source + target


@on_ranks(4)
def test_copy_between_a_mesh_and_a_line() -> None:
    for cut in FOUR_RANKS[3:]:
        target = sharded(torch.zeros(7, 5), cut)
        assert torch.equal(target.copy_(sharded(WHOLES[0], uneven)).full_tensor(), WHOLES[0])


@on_ranks(2)
def test_copy_into_a_plain_tensor_is_refused() -> None:
    with pytest.raises(ShardingError, match="full_tensor"):
        torch.zeros(7, 5).copy_(sharded(WHOLES[0], uneven))
