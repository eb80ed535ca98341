"""Cuts of a dim, seen in other shapes of the same elements."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.tensor_parallel.placement import Split, even, normal, regroup
from shardwise.tensor_parallel.training import _shared_pieces


@st.composite
def shapes(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two shapes of as many elements, whose dims are products of the same factors."""
    factors = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=5))

    def grouped() -> list[int]:
        ends = sorted(draw(st.sets(st.integers(1, len(factors)))) | {len(factors)})
        return [math.prod(factors[b:e]) for b, e in zip([0, *ends], ends, strict=False)]

    return grouped(), grouped()


@st.composite
def cuts(draw: st.DrawFn, size: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """For each of some ranks any intervals of a dim, in order."""
    ranges = []
    for _ in range(draw(st.integers(1, 4))):
        edges = sorted(draw(st.sets(st.integers(0, size), max_size=4)))
        ranges.append(tuple(zip(edges[::2], edges[1::2], strict=False)))
    return tuple(ranges)


def _take(whole: torch.Tensor, split: Split, rank: int) -> torch.Tensor:
    intervals = split.ranges[rank] or ((0, 0),)
    return torch.cat([whole.narrow(split.dim, b, e - b) for b, e in intervals], split.dim)


@settings(max_examples=300)
@given(st.data())
def test_a_cut_seen_in_another_shape_has_the_same_elements_in_the_same_order(data: st.DataObject) -> None:
    old, new = data.draw(shapes())
    dim = data.draw(st.integers(0, len(old) - 1))
    split = Split(dim, data.draw(cuts(old[dim])))
    new_split = regroup(split, old, new)
    if new_split is None:
        return
    whole = torch.arange(math.prod(old))
    for rank in range(len(split.ranges)):
        expected = _take(whole.view(old), split, rank)
        assert _take(whole.view(new), new_split, rank).flatten().tolist() == expected.flatten().tolist()


def test_of_dims_without_elements_that_are_merged_nothing_is_said() -> None:
    split = Split(1, (((0, 2),), ((2, 4),)))
    assert regroup(split, [0, 4], [4, 0]) is None
    assert regroup(split, [0, 4], [0, 4]) == split


@settings(max_examples=100)
@given(st.data())
def test_a_cut_along_whole_heads_is_found_again_after_heads_are_merged_and_parted(
    data: st.DataObject,
) -> None:
    batch, heads, width, ranks = (data.draw(st.integers(2, 5)) for _ in range(4))
    split = Split(1, even(heads, ranks))
    merged = regroup(split, [batch, heads, width], [batch, heads * width])
    assert merged is not None
    assert regroup(merged, [batch, heads * width], [batch, heads, width]) == split
    together = regroup(split, [batch, heads, width], [batch * heads, width])
    assert together is not None
    assert regroup(together, [batch * heads, width], [batch, heads, width]) == split


@settings(max_examples=100)
@given(size=st.integers(0, 40), ranks=st.integers(1, 6))
def test_an_even_cut_gives_every_element_to_one_rank_and_none_two_more_than_another(
    size: int, ranks: int
) -> None:
    ranges = even(size, ranks)
    assert normal([interval for part in ranges for interval in part]) == (((0, size),) if size else ())
    sizes = [Split(0, ranges).size(rank) for rank in range(ranks)]
    assert max(sizes) - min(sizes) <= 1


@settings(max_examples=200)
@given(st.data())
def test_a_part_of_a_cut_dim_is_cut_as_the_dim_is(data: st.DataObject) -> None:
    split = Split(0, data.draw(cuts(12)))
    begin = data.draw(st.integers(0, 12))
    end = data.draw(st.integers(begin, 12))
    part, whole = split.within(begin, end), torch.arange(12)
    for rank in range(len(split.ranges)):
        expected = [x for x in _take(whole, split, rank).tolist() if begin <= x < end]
        assert _take(whole[begin:end], part, rank).tolist() == expected


@settings(max_examples=100)
@given(st.data())
def test_a_rank_finds_elements_where_they_lie_and_units_where_they_are_whole(data: st.DataObject) -> None:
    split = Split(0, data.draw(cuts(12)))
    for rank in range(len(split.ranges)):
        elements = _take(torch.arange(12), split, rank).tolist()
        assert [split.on_rank(rank, index) for index in elements] == list(range(len(elements)))
    assert split.scaled(3).divided(3) == split
    shifted = split.scaled(3).each(lambda begin, end: (begin + 1, end + 1))
    assert shifted.divided(3) is None or not any(split.ranges)


def test_elements_that_several_ranks_have_get_a_place_each_that_all_of_them_know() -> None:
    cut = Split(0, (((0, 4),), ((2, 6), (8, 9)), ((3, 5), (8, 9))))
    pieces = [_shared_pieces(cut, rank) for rank in range(3)]
    assert [total for _, total in pieces] == [4, 4, 4]
    assert pieces[0][0] == [2, 1, 0, 3, 1, 1]  # begin on the rank, length, place
    assert pieces[1][0] == [0, 1, 0, 1, 1, 1, 2, 1, 2, 4, 1, 3]
    assert pieces[2][0] == [0, 1, 1, 1, 1, 2, 2, 1, 3]
