"""Boxes meet where their elements meet, and cover a tensor exactly or say why not."""

from __future__ import annotations

import itertools
import math
import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tilings import boxes_in, elements, tilings

from shardwise.errors import ShardingError
from shardwise.layout import Box, cover, index
from shardwise.layout.messages import subtract

relaxed = settings(max_examples=100)
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


exact_covers = shapes.flatmap(lambda shape: st.tuples(st.just(shape), tilings(shape)))


@given(st.data())
@relaxed
def test_the_intersection_holds_exactly_the_common_elements(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    a, b = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    common = a.intersect(b)
    assert (set() if common is None else {*elements(common)}) == {*elements(a)} & {*elements(b)}
    assert common == b.intersect(a)
    assert common is None or not common.is_empty


@given(exact_covers)
@relaxed
def test_an_exact_cover_is_accepted_in_any_order(tiles: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = tiles
    cover(boxes, shape)


@given(exact_covers, st.data())
@relaxed
def test_a_cover_without_one_filled_box_is_refused(
    tiles: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = tiles
    filled = [i for i, box in enumerate(boxes) if not box.is_empty]
    if not filled:
        return
    lost = boxes.pop(data.draw(st.sampled_from(filled)))
    held, total = math.prod(shape) - lost.numel, math.prod(shape)
    with pytest.raises(ShardingError, match=f"cover {held} of the {total} elements"):
        cover(boxes, shape)


@given(exact_covers, st.data())
@relaxed
def test_a_box_too_many_is_refused_with_both_boxes_named(
    tiles: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = tiles
    extra = data.draw(boxes_in(shape))
    if extra.is_empty:
        return
    with pytest.raises(ShardingError, match="overlap") as error:
        cover([*boxes, extra], shape)
    assert str(extra) in str(error.value)
    assert any(box.intersect(extra) and str(box) in str(error.value) for box in boxes)


@given(st.data())
@relaxed
def test_cover_agrees_with_counting_every_element(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    boxes = data.draw(st.lists(boxes_in(shape), max_size=4))
    held = sorted(e for box in boxes for e in elements(box))
    if held == sorted(itertools.product(*map(range, shape))):
        cover(boxes, shape)
    else:
        with pytest.raises(ShardingError, match=r"overlap|cover"):
            cover(boxes, shape)


@pytest.mark.parametrize(
    ("box", "shape"),
    [
        (Box((3,), (2,)), (4,)),
        (Box((0, 0), (4, 7)), (4, 6)),
        (Box((5,), (0,)), (4,)),
        (Box((), ()), (1,)),
        (Box((0, 0), (2, 2)), (4,)),
    ],
)
def test_a_box_that_leaves_the_tensor_is_named(box: Box, shape: tuple[int, ...]) -> None:
    with pytest.raises(ShardingError, match=re.escape(f"{box} extends outside the tensor of shape {shape}")):
        cover([box], shape)


def test_a_scalar_is_covered_by_one_box_and_not_by_none_or_two() -> None:
    scalar = Box((), ())
    assert scalar.numel == 1
    assert not scalar.is_empty
    assert scalar.intersect(scalar) == scalar
    cover([scalar], ())
    with pytest.raises(ShardingError, match="cover 0 of the 1 elements"):
        cover([], ())
    with pytest.raises(ShardingError, match="overlap"):
        cover([scalar, scalar], ())


def test_a_tensor_without_elements_is_covered_by_nothing_and_by_empty_boxes() -> None:
    cover([], (0, 3))
    cover([Box((0, 0), (0, 3)), Box((0, 1), (0, 1))], (0, 3))


@pytest.mark.parametrize(
    ("offsets", "sizes", "message"),
    [
        ((0,), (1, 2), "1 offsets but 2 sizes"),
        ((-1,), (2,), "negative"),
        ((0, 0), (2, -3), "negative"),
    ],
)
def test_an_impossible_box_is_refused(offsets: tuple[int, ...], sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(ShardingError, match=message):
        Box(offsets, sizes)


# Many boxes


def tiles(*counts: int) -> tuple[tuple[int, ...], list[Box]]:
    """A shape and as many equal boxes along each dim, in a mixed order."""
    sizes = tuple(range(2, 2 + len(counts)))
    places = itertools.product(*map(range, counts))
    boxes = [Box(tuple(p * s for p, s in zip(place, sizes, strict=True)), sizes) for place in places]
    random.Random(0).shuffle(boxes)
    return tuple(c * s for c, s in zip(counts, sizes, strict=True)), boxes


@pytest.mark.parametrize("counts", [(4096, 1, 1), (1, 4096, 1), (64, 64), (16, 16, 16)])
def test_of_many_tiles_each_is_compared_with_few_others_and_only_for_an_error(
    counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = 0
    meets = index._meets

    def counting(starts: Any, ends: Any, asked: Any, *others: Any) -> Any:
        nonlocal compared
        compared += len(asked)
        return meets(starts, ends, asked, *others)

    monkeypatch.setattr(index, "_meets", counting)
    shape, boxes = tiles(*counts)
    cover(boxes, shape)
    assert compared == 0
    with pytest.raises(ShardingError, match=f"cover {math.prod(shape) - boxes[-1].numel} of the"):
        cover(boxes[:-1], shape)
    assert compared < 200 * len(boxes)
    extra = Box(boxes[1000].offsets, (1,) * len(shape))
    with pytest.raises(ShardingError, match=re.escape(f"{boxes[1000]} and {extra} overlap")):
        cover([*boxes, extra], shape)


def test_boxes_that_have_the_corners_of_the_whole_but_lie_twice_are_refused() -> None:
    box = Box((0, 0), (3, 4))
    with pytest.raises(ShardingError, match="overlap"):
        cover([box, box], (3, 4))


def test_boxes_cut_in_too_many_dims_for_their_corners_to_be_counted_are_compared() -> None:
    whole = Box.whole((2,) * 30)
    corner = Box.whole((1,) * 30)
    boxes = [corner, *subtract(whole, corner)]
    cover(boxes, whole.sizes)
    with pytest.raises(ShardingError, match="overlap"):
        cover([*boxes, corner], whole.sizes)
