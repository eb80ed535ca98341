"""An even shard is the chunk that torch.chunk and DTensor's Shard would give the rank."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Shard

from shardwise.errors import ShardingError
from shardwise.layout import Box, EvenShard

relaxed = settings(max_examples=100)
Case = tuple[tuple[int, ...], int, int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A shape, the dim that is cut, the number of ranks."""
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=1, max_size=3)))
    return shape, draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 9))


def piece(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


@given(cases())
@relaxed
def test_pieces_are_those_of_torch_chunk(case: Case) -> None:
    shape, dim, ranks = case
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    chunks = list(whole.chunk(ranks, dim))
    chunks += [whole.narrow(dim, 0, 0)] * (ranks - len(chunks))
    for rank, chunk in enumerate(chunks):
        box = EvenShard(dim).box(shape, rank=rank, ranks=ranks)
        assert torch.equal(piece(whole, box), chunk)


@given(cases())
@relaxed
def test_sizes_and_offsets_are_those_of_dtensor(case: Case) -> None:
    shape, dim, ranks = case
    for rank in range(ranks):
        box = EvenShard(dim).box(shape, rank=rank, ranks=ranks)
        size, offset = Shard.local_shard_size_and_offset(shape[dim], ranks, rank)
        assert (box.sizes[dim], box.offsets[dim]) == (size, offset)
        assert [s for d, s in enumerate(box.sizes) if d != dim] == [*shape[:dim], *shape[dim + 1 :]]


@given(cases())
@relaxed
def test_every_rank_stores_as_much_as_the_first_holds(case: Case) -> None:
    shape, dim, ranks = case
    placement = EvenShard(dim)
    padded = placement.padded_shape(shape, ranks=ranks)
    sizes = [placement.box(shape, rank=r, ranks=ranks).sizes for r in range(ranks)]
    assert padded == sizes[0]
    assert all(size[dim] <= padded[dim] for size in sizes)


def test_rows_run_out_on_the_last_ranks() -> None:
    boxes = [EvenShard().box((5, 2), rank=r, ranks=4) for r in range(4)]
    assert [box.sizes for box in boxes] == [(2, 2), (2, 2), (1, 2), (0, 2)]
    assert [box.offsets for box in boxes] == [(0, 0), (2, 0), (4, 0), (5, 0)]


def test_dims_are_counted_from_the_first() -> None:
    with pytest.raises(ShardingError, match="got dim -1"):
        EvenShard(-1)
