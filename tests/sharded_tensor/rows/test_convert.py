"""Rows to whole tensors, to DTensors and to other rows, and back."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from pieces import (
    ANY_RANKS,
    FOUR_RANKS,
    Cut,
    all_on_last,
    by_counts,
    even,
    local_rows,
    on_cuts,
    sharded,
    uneven,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ranks import on_ranks
from shardwise import fully_shard
from shardwise.comm.count import CommCounter
from shardwise.errors import RankMismatchError, ShardingError
from shardwise.sharded_tensor.rows import ShardedRows

WHOLES = [
    torch.arange(35.0).view(7, 5),
    torch.arange(6.0).bfloat16(),
    torch.arange(5).view(1, 5).to(torch.int16),
    torch.arange(40).view(5, 2, 4) % 3 == 0,
    torch.empty(0, 4),
]


def moved_bytes(counter: CommCounter) -> int:
    """Sent in messages between two ranks, but for the word that each tells each."""
    assert {call.kind for call in counter.calls} <= {"send", "recv"}
    return counter.bytes("send") - 8 * (dist.get_world_size() - 1)


@on_cuts(1, 2, 3)
def test_full_tensor_gives_the_whole(cut: Cut) -> None:
    for whole in WHOLES[:2] if cut.__name__ in ("rowwise", "columnwise") else WHOLES:
        rows = sharded(whole, cut)
        found = rows.full_tensor()
        assert type(found) is Tensor
        assert found.dtype == whole.dtype
        assert torch.equal(found, whole)
        found.zero_()
        assert torch.equal(rows.full_tensor(), whole)


@on_ranks(4)
def test_rows_on_one_rank_are_broadcast_without_padding_and_others_gathered_at_once() -> None:
    for cut, kind in ((all_on_last, "broadcast"), (even, "all_gather")):
        rows = sharded(WHOLES[0], cut)
        with CommCounter() as counter:
            rows.full_tensor()
        assert [call.kind for call in counter.calls] == [kind]
        assert cut is even or counter.bytes() == WHOLES[0].nbytes


@on_ranks(2)
def test_what_cannot_move_is_refused_on_every_rank() -> None:
    rows = sharded(WHOLES[0], uneven)
    other = sharded(torch.zeros(7, 5), even if dist.get_rank() else all_on_last)
    with pytest.raises(RankMismatchError, match="disagree about the rows to move"):
        other.copy_(rows)
    smaller = distribute_tensor(torch.zeros(3, 5), init_device_mesh("cpu", (2,)), [Shard(0)])
    with pytest.raises(ShardingError, match="expected a DTensor of shape"):
        ShardedRows.from_dtensor(smaller, rows.piece)
    with pytest.raises(ShardingError, match="full_tensor"):
        torch.zeros(7, 5).copy_(rows)


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
            kept = rows.box.intersect(even(tuple(whole.shape)).box)
            kept_bytes = (kept.sizes[0] if kept else 0) * row_bytes
            assert moved_bytes(counter) == rows.local.nbytes - kept_bytes
            assert isinstance(dtensor, DTensor)
            assert dtensor.placements == (Shard(0),)
            assert dtensor.shape == whole.shape
            expected = distribute_tensor(whole.clone(), mesh, [Shard(0)])
            assert torch.equal(dtensor.to_local(), expected.to_local())
        with CommCounter() as counter:
            back = ShardedRows.from_dtensor(dtensor, rows.piece)
        assert moved_bytes(counter) == dtensor.to_local().nbytes - kept_bytes
        assert torch.equal(back.local, rows.local)
        rows.zero_()
        rows.copy_(dtensor)
        assert torch.equal(rows.local, back.local)


@on_ranks(4)
@pytest.mark.parametrize("cut", FOUR_RANKS, ids=lambda cut: cut.__name__)
def test_any_dtensor_becomes_any_rows_and_they_even_ones_on_any_mesh(cut: Cut) -> None:
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
    assert torch.equal(target.zero_().copy_(sharded(whole, uneven)).full_tensor(), whole)
    for given in (None, line, mesh):
        made = rows.to_dtensor(given)
        assert set(made.placements) == {Shard(0)}
        assert torch.equal(made.full_tensor(), whole)


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
    kept = source.box.intersect(other.box)
    kept_bytes = (kept.numel if kept else 0) * source.dtype.itemsize
    assert moved_bytes(counter) == source.local.nbytes - kept_bytes
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


@on_ranks(3)
def test_a_rank_to_which_tensor_parallelism_leaves_no_columns_has_the_whole_too() -> None:
    """Four columns over three ranks: 2, 2 and none, of which no rows are cut."""
    mesh = init_device_mesh("cpu", (1, 3), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(20.0).view(5, 4)
    model = nn.Linear(4, 5, bias=False)
    model.weight = nn.Parameter(distribute_tensor(whole, mesh["tp"], [Shard(1)]))
    fully_shard(model, mesh=mesh["dp"], layout="contiguous")
    param = model.weight
    assert torch.equal(param.full_tensor(), whole)
    (param.full_tensor() * 2).sum().backward()
    assert torch.equal(param.grad.full_tensor(), torch.full((5, 4), 2.0))
    again = distribute_tensor(whole + 1, param.device_mesh, param.placements)
    assert isinstance(again, ShardedRows)
    assert torch.equal(again.full_tensor(), whole + 1)
    assert param.placements[1] == Shard(1)
