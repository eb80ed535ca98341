"""Boxes after a reshape, an index or an expansion are what numpy makes of their elements."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.layout import Box
from shardwise.layout.regroup import expand_box, pick_box, reshape_boxes

SIZES = st.lists(st.sampled_from([1, 2, 2, 3, 4, 6]), max_size=4)


@st.composite
def boxes_in(draw: st.DrawFn, shape: list[int], *, empty: bool) -> Box:
    offsets, sizes = [], []
    for size in shape:
        offset = draw(st.integers(0, size if empty else max(size - 1, 0)))
        offsets.append(offset)
        whole = draw(st.booleans())
        least = 0 if empty else min(1, size)
        sizes.append(size - offset if whole else draw(st.integers(min(least, size - offset), size - offset)))
    return Box(tuple(offsets), tuple(sizes))


@st.composite
def shapes_of(draw: st.DrawFn, numel: int) -> list[int]:
    shape = []
    while numel > 1 and draw(st.integers(0, 4)):
        factor = draw(st.sampled_from([d for d in range(1, numel + 1) if numel % d == 0]))
        shape.append(factor)
        numel //= factor
    return [*shape, numel] if numel != 1 or draw(st.booleans()) else shape


def marks(box: Box, shape: list[int]) -> np.ndarray:
    marked = np.zeros(shape, dtype=bool)
    marked[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))] = True
    return marked


def as_box(marked: np.ndarray) -> Box | None:
    """The box of the marked elements, if they are one."""
    where = np.argwhere(marked)
    first, last = where.min(axis=0), where.max(axis=0)
    box = Box(tuple(map(int, first)), tuple(map(int, last - first + 1)))
    return box if box.numel == len(where) else None


@settings(max_examples=200)
@given(st.data())
def test_a_box_stays_a_box_under_a_reshape_exactly_if_its_elements_are_one(data: st.DataObject) -> None:
    old = data.draw(SIZES)
    new = data.draw(shapes_of(math.prod(old)))
    box = data.draw(boxes_in(old, empty=False))
    (found,) = reshape_boxes([box], old=old, new=new)
    expected = as_box(marks(box, old).reshape(new))
    assert found == expected
    if found is not None:  # and its elements are in the same order
        numbers = np.arange(math.prod(old))
        taken = numbers.reshape(old)[marks(box, old)]
        assert np.array_equal(taken, numbers.reshape(new)[marks(found, new)])


@settings(max_examples=100)
@given(st.data())
def test_an_empty_box_stays_empty_within_the_new_shape_unless_that_is_a_scalar(data: st.DataObject) -> None:
    old = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    box = data.draw(boxes_in(old, empty=True).filter(lambda b: b.is_empty))
    new = data.draw(shapes_of(math.prod(old))) if math.prod(old) else data.draw(st.permutations([*old, 3]))
    (found,) = reshape_boxes([box], old=old, new=new)
    if not new:
        assert found is None
        return
    assert found is not None
    assert found.is_empty
    assert len(found.sizes) == len(new)
    assert all(end <= size for end, size in zip(found.ends, new, strict=True))


def test_rows_cut_between_ranks_stay_rows_when_they_are_split_in_two() -> None:
    rows = [Box((0, 0), (2, 6)), Box((2, 0), (2, 6)), Box((4, 0), (0, 6))]
    assert reshape_boxes(rows, old=(4, 6), new=(2, 2, 6)) == [
        Box((0, 0, 0), (1, 2, 6)),
        Box((1, 0, 0), (1, 2, 6)),
        Box((2, 0, 0), (0, 2, 6)),
    ]
    assert reshape_boxes(rows, old=(4, 6), new=(4, 2, 3))[1] == Box((2, 0, 0), (2, 2, 3))
    columns = Box((0, 3), (4, 3))
    assert reshape_boxes([columns], old=(4, 6), new=(24,)) == [None]
    assert reshape_boxes([columns], old=(4, 6), new=(4, 2, 3)) == [Box((0, 1, 0), (4, 1, 3))]


@settings(max_examples=200)
@given(st.data())
def test_what_an_index_leaves_of_a_box_lies_where_numpy_puts_its_elements(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 5), max_size=3))
    box = data.draw(boxes_in(shape, empty=True))
    picks: list[int | range | None] = []
    for size in shape:
        if data.draw(st.integers(0, 4)) == 0:
            picks.append(None)
        if size and data.draw(st.integers(0, 3)) == 0:
            picks.append(data.draw(st.integers(0, size - 1)))
        else:
            bounds = st.one_of(st.none(), st.integers(-6, 6))
            chosen = slice(data.draw(bounds), data.draw(bounds), data.draw(st.integers(1, 3)))
            picks.append(range(*chosen.indices(size)))
    index = tuple(slice(p.start, p.stop, p.step) if isinstance(p, range) else p for p in picks)
    values = np.arange(1, math.prod(shape) + 1).reshape(shape)
    held = np.where(marks(box, shape), values, 0)
    expected = np.asarray(held[index])
    part = pick_box(box, picks)
    if part is None:
        assert not expected.any()
        return
    place, local = part
    assert all(end <= size for end, size in zip(place.ends, expected.shape, strict=True))
    found = np.zeros(expected.shape, dtype=int)
    inside = values[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]
    at = tuple(slice(o, o + s) for o, s in zip(place.offsets, place.sizes, strict=True))
    assert inside[local].shape == place.sizes
    found[at] = inside[local]
    assert np.array_equal(found, expected)


@settings(max_examples=60)
@given(st.data())
def test_a_box_is_expanded_where_its_dims_of_size_one_are(data: st.DataObject) -> None:
    old = data.draw(st.lists(st.integers(1, 3), max_size=3))
    grown = [data.draw(st.integers(0, 3)) if size == 1 else size for size in old]
    new = [*data.draw(st.lists(st.integers(0, 3), max_size=2)), *grown]
    box = data.draw(boxes_in(old, empty=True))
    found = expand_box(box, old=old, new=new)
    assert np.array_equal(marks(found, new), np.broadcast_to(marks(box, old), new))
    assert np.broadcast_to(np.empty(box.sizes), found.sizes).shape == found.sizes


def test_a_reshape_of_nothing_may_lose_its_dims_without_elements() -> None:
    assert reshape_boxes([Box((0, 0, 0), (0, 0, 1))], old=(0, 0, 1), new=(0, 1)) == [Box((0, 0), (0, 1))]
