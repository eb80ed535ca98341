"""In the contiguous layout, the shards of all ranks one after another are the parameters."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import ShardingError
from shardwise.layout import (
    Box,
    ContiguousLayout,
    EvenShard,
    Owned,
    ParamSpec,
    Placement,
    RaggedShard,
)

relaxed = settings(max_examples=100)
FP32, BF16 = torch.float32, torch.bfloat16
DTYPES = [FP32, BF16, torch.float64, torch.uint8]
ROWS = RaggedShard()


def spec(
    name: str,
    *shape: int,
    dtype: torch.dtype = FP32,
    gather: torch.dtype | None = None,
    placement: Placement = ROWS,
    trainable: bool = True,
) -> ParamSpec:
    return ParamSpec(name, shape, dtype, gather or dtype, placement, trainable)


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[ParamSpec], int]:
    """Parameters and a number of ranks."""
    ranks = draw(st.integers(1, 6))
    placements = st.one_of(
        st.just(EvenShard()),
        st.integers(1, 5).map(RaggedShard),
        st.just(Owned()),
        st.integers(0, ranks - 1).map(Owned),
    )
    key = st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES), st.booleans())
    keys = st.sampled_from(draw(st.lists(key, min_size=1, max_size=2)))  # few, so that many lie in one buffer
    specs = []
    for i in range(draw(st.integers(0, 6))):
        dtype, gather, trainable = draw(keys)
        shape = draw(st.lists(st.integers(0, 7), min_size=1, max_size=3))
        specs.append(
            spec(
                f"p{i}",
                *shape,
                dtype=dtype,
                gather=gather,
                placement=draw(placements),
                trainable=trainable,
            )
        )
    return specs, ranks


def layouts(group: tuple[list[ParamSpec], int]) -> list[ContiguousLayout]:
    specs, ranks = group
    return [ContiguousLayout(specs, ranks=ranks, rank=rank) for rank in range(ranks)]


@given(groups())
@relaxed
def test_boxes_are_whole_rows_and_end_at_blocks(group: tuple[list[ParamSpec], int]) -> None:
    specs, ranks = group
    layout = ContiguousLayout(specs, ranks=ranks, rank=0)
    for index, wanted in enumerate(specs):
        boxes = [layout.box(index, rank) for rank in range(ranks)]
        assert all(box.sizes[1:] == wanted.shape[1:] and not any(box.offsets[1:]) for box in boxes)
        filled = [rank for rank, box in enumerate(boxes) if not box.is_empty]
        if isinstance(wanted.placement, Owned):
            assert len(filled) == (math.prod(wanted.shape) > 0)
            assert wanted.placement.rank is None or filled in ([], [wanted.placement.rank])
        else:
            block = wanted.placement.block if isinstance(wanted.placement, RaggedShard) else 1
            assert all(boxes[rank].offsets[0] % block == 0 for rank in filled)


@given(groups())
@relaxed
def test_the_shards_of_all_ranks_end_to_end_are_the_parameters(group: tuple[list[ParamSpec], int]) -> None:
    """The drawing in the module's docstring, done with tensors."""
    specs, _ = group
    whole = [torch.arange(1, math.prod(s.shape) + 1).view(s.shape) for s in specs]
    every = layouts(group)
    for segments in zip(*(layout.segments for layout in every), strict=True):
        shards = []
        for segment in segments:
            shard = torch.zeros(segment.shard_numel, dtype=torch.int64)
            for place in segment.places:
                first, rows = place.box.offsets[0], place.box.sizes[0]
                mine = whole[place.index][first : first + rows].flatten()
                shard[place.shard_offset : place.shard_offset + mine.numel()].copy_(mine)
            shards.append(shard)
        gathered = torch.cat(shards)
        assert gathered.numel() == segments[0].unsharded_numel
        for place in segments[0].places:
            found = gathered[place.start : place.start + place.numel].view(specs[place.index].shape)
            assert torch.equal(found, whole[place.index])
        assert int((gathered == 0).sum()) == segments[0].padding


@given(groups())
@relaxed
def test_each_parameter_has_one_place_among_those_of_its_dtypes_and_training(
    group: tuple[list[ParamSpec], int],
) -> None:
    specs, ranks = group
    segments = ContiguousLayout(specs, ranks=ranks, rank=0).segments
    assert sorted(p.index for s in segments for p in s.places) == list(range(len(specs)))
    keys = [(s.dtype, s.gather_dtype, s.trainable) for s in segments]
    assert keys == list(dict.fromkeys((s.dtype, s.gather_dtype, s.trainable) for s in specs))
    for key, segment in zip(keys, segments, strict=True):
        of = [specs[place.index] for place in segment.places]
        assert all((s.dtype, s.gather_dtype, s.trainable) == key for s in of)
        assert [place.start for place in segment.places] == sorted(place.start for place in segment.places)


@given(groups())
@relaxed
def test_ranks_differ_only_in_the_boxes_they_hold(group: tuple[list[ParamSpec], int]) -> None:
    every = layouts(group)
    for rank, layout in enumerate(every):
        assert layout.describe() == every[0].describe()
        for mine, first in zip(layout.segments, every[0].segments, strict=True):
            assert mine.shard_numel == first.shard_numel
            assert [(p.index, p.start, p.numel) for p in mine.places] == [
                (p.index, p.start, p.numel) for p in first.places
            ]
            assert all(place.box == every[0].box(place.index, rank) for place in mine.places)
            assert all(place.shard_offset == 0 for place in mine.places if place.box.is_empty)


@given(groups())
@relaxed
def test_parameters_and_shards_begin_at_16_bytes_in_both_dtypes(group: tuple[list[ParamSpec], int]) -> None:
    for layout in layouts(group):
        for segment in layout.segments:
            for itemsize in (segment.dtype.itemsize, segment.gather_dtype.itemsize):
                assert segment.shard_numel * itemsize % 16 == 0
                assert all(place.start * itemsize % 16 == 0 for place in segment.places)
                assert all(place.shard_offset * itemsize % 16 == 0 for place in segment.places)


def test_the_drawing_of_two_parameters_over_two_ranks() -> None:
    specs = [spec("a", 4, 4), spec("b", 2, 4)]
    first, second = layouts((specs, 2))
    assert [place.box for place in first.segments[0].places] == [Box((0, 0), (3, 4)), Box((0, 0), (0, 4))]
    assert [place.box for place in second.segments[0].places] == [Box((3, 0), (1, 4)), Box((0, 0), (2, 4))]
    assert [place.shard_offset for place in second.segments[0].places] == [0, 4]
    assert first.segments[0].shard_numel == 12
    assert first.segments[0].padding == 0


def test_rows_that_go_on_from_an_earlier_rank_begin_its_shard() -> None:
    layout = ContiguousLayout([spec("a", 2, 4), spec("b", 4, 4)], ranks=2, rank=1)
    a, b = layout.segments[0].places
    assert (b.start, b.box, b.shard_offset) == (8, Box((1, 0), (3, 4)), 0)
    assert (a.box.is_empty, a.shard_offset) == (True, 0)


def test_parameters_without_elements_have_empty_boxes_everywhere() -> None:
    specs = [
        spec("no_rows", 0, 3),
        spec("no_columns", 3, 0),
        spec("some", 4),
        spec("owned", 0, placement=Owned(1)),
    ]
    layout = ContiguousLayout(specs, ranks=2, rank=1)
    for rank in range(2):
        assert layout.box(0, rank) == Box((0, 0), (0, 3))
        assert layout.box(1, rank).sizes == (0, 0)
        assert layout.box(3, rank) == Box((0,), (0,))
    assert layout.segments[0].unsharded_numel == 8


def test_even_shards_of_dim_0_are_ragged_by_single_rows() -> None:
    shapes = [(5, 3), (7,), (4, 9)]
    even, ragged = (
        ContiguousLayout([spec("p", *s, placement=how) for s in shapes], ranks=3, rank=1)
        for how in (EvenShard(0), RaggedShard(1))
    )
    assert even.segments == ragged.segments
    assert even.describe() == ragged.describe()


def test_a_cut_on_another_dim_is_refused_with_the_other_layout_named() -> None:
    with pytest.raises(ShardingError, match=r"cannot shard 'w\.a' on dim 1.*interleaved"):
        ContiguousLayout([spec("w.a", 2, 2, placement=EvenShard(1))], ranks=2, rank=0)


def test_an_owner_outside_the_axis_is_refused() -> None:
    with pytest.raises(ShardingError, match=r"rank 2 cannot own 'w': .* 2 ranks"):
        ContiguousLayout([spec("w", 2, 2, placement=Owned(2))], ranks=2, rank=0)


def test_groups_alike_but_for_their_names_share_one_arithmetic() -> None:
    one, other = (
        ContiguousLayout([spec(f"{name}.a", 4, 4), spec(f"{name}.b", 4)], ranks=2, rank=0)
        for name in ("first", "second")
    )
    assert one.segments is other.segments
    assert "first.a" in one.describe()
    assert "second.a" in other.describe()


def test_the_description_says_where_everything_lies() -> None:
    specs = [
        spec("w", 6, 4, gather=BF16, placement=RaggedShard(2)),
        spec("head", 4, placement=Owned(), trainable=False),
    ]
    lines = ContiguousLayout(specs, ranks=2, rank=0).describe().splitlines()
    assert lines == [
        "torch.float32 gathered as torch.bfloat16, trained: 16 elements on each of 2 ranks",
        "w: shape [6, 4], torch.float32 gathered as torch.bfloat16, row block 2, from element 0",
        "torch.float32 gathered as torch.float32, frozen: 4 elements on each of 2 ranks",
        "head: shape [4], torch.float32 gathered as torch.float32, whole on one rank, from element 0",
    ]
