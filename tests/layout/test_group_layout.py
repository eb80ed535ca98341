"""A group's parameters lie end to end in its buffers: nothing overlaps, and only padding is unused."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.layout import EvenShard, InterleavedLayout, ParamSpec, Segment, Slot

relaxed = settings(max_examples=100)
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.uint8]
FP32 = torch.float32


def spec(
    name: str, *shape: int, dim: int = 0, dtype: torch.dtype = FP32, gather: torch.dtype | None = None
) -> ParamSpec:
    return ParamSpec(name, shape, dtype, gather or dtype, EvenShard(dim))


@st.composite
def groups(draw: st.DrawFn) -> list[ParamSpec]:
    made = []
    for i in range(draw(st.integers(1, 6))):
        shape = draw(st.lists(st.integers(0, 6), min_size=1, max_size=3))
        dtype, gather = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DTYPES))
        made.append(
            spec(f"p{i}", *shape, dim=draw(st.integers(0, len(shape) - 1)), dtype=dtype, gather=gather)
        )
    return made


ranks_and_align = st.tuples(st.integers(1, 6), st.sampled_from([1, 16, 256]))


def layouts(specs: list[ParamSpec], ranks: int, align_bytes: int) -> list[InterleavedLayout]:
    return [InterleavedLayout(specs, ranks=ranks, rank=r, align_bytes=align_bytes) for r in range(ranks)]


@given(groups(), ranks_and_align)
@relaxed
def test_slots_fill_each_shard_buffer_up_to_its_padding(specs: list[ParamSpec], how: tuple[int, int]) -> None:
    for layout in layouts(specs, *how):
        for segment in layout.segments:
            end = 0
            for slot in segment.slots:
                assert slot.shard_offset == end
                end += slot.padded_shard_numel
            assert end + segment.padding == segment.shard_numel


@given(groups(), ranks_and_align)
@relaxed
def test_unsharded_parameters_follow_each_other_at_multiples_of_16_bytes(
    specs: list[ParamSpec], how: tuple[int, int]
) -> None:
    for layout in layouts(specs, *how):
        for segment in layout.segments:
            end, size = 0, segment.gather_dtype.itemsize
            for slot in segment.slots:
                assert slot.unsharded_offset * size % 16 == 0
                assert 0 <= (slot.unsharded_offset - end) * size < 16
                end = slot.unsharded_offset + layout.ranks * slot.padded_shard_numel
                assert layout.ranks * slot.padded_shard_numel >= math.prod(specs[slot.index].shape)
            assert end == segment.unsharded_numel


@given(groups(), ranks_and_align)
@relaxed
def test_each_parameter_has_one_slot_among_those_of_its_dtypes(
    specs: list[ParamSpec], how: tuple[int, int]
) -> None:
    for layout in layouts(specs, *how):
        found = [slot.index for segment in layout.segments for slot in segment.slots]
        assert sorted(found) == list(range(len(specs)))
        keys = [(segment.dtype, segment.gather_dtype) for segment in layout.segments]
        assert len(set(keys)) == len(keys)
        for key, segment in zip(keys, layout.segments, strict=True):
            indices = [slot.index for slot in segment.slots]
            assert indices == [i for i, s in enumerate(specs) if (s.dtype, s.gather_dtype) == key]


@given(groups(), ranks_and_align)
@relaxed
def test_ranks_differ_only_in_the_pieces_they_hold(specs: list[ParamSpec], how: tuple[int, int]) -> None:
    def common(segment: Segment) -> Segment:
        slots = tuple(dataclasses.replace(slot, shard_shape=(), begin=0) for slot in segment.slots)
        return dataclasses.replace(segment, slots=slots)

    every = layouts(specs, *how)
    first = [common(segment) for segment in every[0].segments]
    assert all([common(segment) for segment in layout.segments] == first for layout in every)
    for i, wanted in enumerate(specs):
        slots = [s for layout in every for seg in layout.segments for s in seg.slots if s.index == i]
        boxes = [wanted.placement.box(wanted.shape, rank=r, ranks=how[0]) for r in range(how[0])]
        assert [slot.shard_shape for slot in slots] == [box.sizes for box in boxes]
        padded = wanted.placement.padded_shape(wanted.shape, ranks=how[0])
        assert {slot.padded_shard_shape for slot in slots} == {padded}


@given(groups(), ranks_and_align)
@relaxed
def test_every_rank_sends_a_multiple_of_the_alignment(specs: list[ParamSpec], how: tuple[int, int]) -> None:
    ranks, align_bytes = how
    for segment in InterleavedLayout(specs, ranks=ranks, rank=0, align_bytes=align_bytes).segments:
        for dtype in (segment.dtype, segment.gather_dtype):
            assert segment.shard_numel * dtype.itemsize % align_bytes == 0
        smallest = min(segment.dtype.itemsize, segment.gather_dtype.itemsize)
        assert segment.padding * smallest < align_bytes
        assert align_bytes > 1 or segment.padding == 0


@given(groups(), st.integers(1, 4))
@relaxed
def test_gathering_and_copying_out_by_slots_gives_back_every_parameter(
    specs: list[ParamSpec], ranks: int
) -> None:
    """The drawing in the module's docstring, done with tensors."""
    whole = [torch.arange(1, 1 + math.prod(s.shape)).view(s.shape) for s in specs]
    every = layouts(specs, ranks, 16)
    for n, segment in enumerate(every[0].segments):
        gathered = torch.zeros(ranks, segment.shard_numel, dtype=torch.int64)

        def stored(rank: int, slot: Slot, gathered: torch.Tensor = gathered) -> torch.Tensor:
            flat = gathered[rank].narrow(0, slot.shard_offset, slot.padded_shard_numel)
            return flat.view(slot.padded_shard_shape)

        for rank, layout in enumerate(every):
            for slot in layout.segments[n].slots:
                wanted = specs[slot.index]
                dim = wanted.placement.dim
                box = wanted.placement.box(wanted.shape, rank=rank, ranks=ranks)
                piece = whole[slot.index].narrow(dim, box.offsets[dim], box.sizes[dim])
                stored(rank, slot).narrow(dim, 0, box.sizes[dim]).copy_(piece)
        for slot in segment.slots:
            wanted = specs[slot.index]
            dim = wanted.placement.dim
            found = torch.cat([stored(rank, slot) for rank in range(ranks)], dim)
            assert torch.equal(found.narrow(dim, 0, wanted.shape[dim]), whole[slot.index])


def test_the_example_of_two_parameters_over_two_ranks() -> None:
    layout = InterleavedLayout([spec("a", 4, 3), spec("b", 3)], ranks=2, rank=1, align_bytes=16)
    (segment,) = layout.segments
    a, b = segment.slots
    assert (a.shard_shape, a.padded_shard_shape, a.shard_offset, a.unsharded_offset) == ((2, 3), (2, 3), 0, 0)
    assert (b.shard_shape, b.padded_shard_shape, b.shard_offset, b.unsharded_offset) == ((1,), (2,), 6, 12)
    assert (segment.padding, segment.shard_numel, segment.unsharded_numel) == (0, 8, 16)


def test_without_parameters_there_is_no_segment() -> None:
    layout = InterleavedLayout([], ranks=2, rank=0)
    assert layout.segments == ()
    assert layout.describe() == ""


@given(groups(), ranks_and_align)
@relaxed
def test_every_rank_describes_the_group_in_the_same_words(
    specs: list[ParamSpec], how: tuple[int, int]
) -> None:
    every = layouts(specs, *how)
    assert {layout.describe() for layout in every} == {every[0].describe()}
    assert [line.partition(":")[0] for line in every[0].describe().splitlines()] == [s.name for s in specs]


BASE = [spec("weight", 4, 3), spec("bias", 4)]


@pytest.mark.parametrize(
    ("specs", "ranks"),
    [
        (BASE[::-1], 2),
        (BASE[:1], 2),
        (BASE, 4),
        ([spec("w", 4, 3), BASE[1]], 2),
        ([spec("weight", 4, 4), BASE[1]], 2),
        ([spec("weight", 3, 4), BASE[1]], 2),
        ([spec("weight", 12), BASE[1]], 2),
        ([spec("weight", 4, 3, dim=1), BASE[1]], 2),
        ([spec("weight", 4, 3, dtype=torch.bfloat16), BASE[1]], 2),
        ([spec("weight", 4, 3, gather=torch.bfloat16), BASE[1]], 2),
    ],
    ids=["order", "missing", "ranks", "name", "shape", "turned", "flat", "dim", "dtype", "gather"],
)
def test_groups_that_would_communicate_differently_are_described_differently(
    specs: list[ParamSpec], ranks: int
) -> None:
    base = InterleavedLayout(BASE, ranks=2, rank=0).describe()
    assert InterleavedLayout(BASE, ranks=2, rank=1).describe() == base
    assert InterleavedLayout(specs, ranks=ranks, rank=0).describe() != base
