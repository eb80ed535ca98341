"""Transfers bring every wanted element once, from the nearest rank that holds it, and ranks agree on them."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tilings import Element, boxes_in, elements, tilings

from shardwise.errors import ShardingError
from shardwise.layout import index
from shardwise.layout.box import Box
from shardwise.layout.messages import Message, subtract, transfer

relaxed = settings(max_examples=120)
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)

Boxes = list[list[Box]]


def view(array: np.ndarray, box: Box, whole: Box | None = None) -> np.ndarray:
    """The part of `array`, which has the elements of `whole` (of the tensor), that has those of `box`."""
    starts = whole.offsets if whole else (0,) * len(box.sizes)
    places = zip(box.offsets, box.sizes, starts, strict=True)
    return array[(..., *(slice(offset - start, offset - start + size) for offset, size, start in places))]


@st.composite
def covers(draw: st.DrawFn, shape: tuple[int, ...], ranks: int) -> Boxes:
    """Boxes that cover the shape once, on random ranks."""
    held: Boxes = [[] for _ in range(ranks)]
    for box in draw(tilings(shape)):
        held[draw(st.integers(0, ranks - 1))].append(box)
    return held


@st.composite
def held_by_ranks(draw: st.DrawFn, shape: tuple[int, ...], ranks: int) -> Boxes:
    """A cover, and on top copies of its boxes and boxes that overlap them."""
    held = draw(covers(shape, ranks))
    known = [box for boxes in held for box in boxes]
    for _ in range(draw(st.integers(0, 6))):
        box = draw(st.sampled_from(known) | boxes_in(shape))
        held[draw(st.integers(0, ranks - 1))].append(box)
    return held


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], Boxes, Boxes]:
    """A shape, what ranks hold (all of it, parts maybe often), and what they want."""
    shape, ranks = draw(shapes), draw(st.integers(1, 6))
    source = draw(held_by_ranks(shape, ranks))
    target: Boxes = [[] for _ in range(ranks)]
    for _ in range(draw(st.integers(0, 8))):
        target[draw(st.integers(0, ranks - 1))].append(draw(boxes_in(shape)))
    return shape, source, draw(covers(shape, ranks) | st.just(target))


def check_delivered(shape: Sequence[int], source: Boxes, target: Boxes, messages: list[Message]) -> None:
    """Carry out the messages between arrays: all that is wanted arrives, once, and has its value."""
    tensor = np.arange(math.prod(shape)).reshape(shape)
    held = [[view(tensor, box) for box in boxes] for boxes in source]
    arrived = [[np.full(box.sizes, -1) for box in boxes] for boxes in target]
    for message in messages:
        assert not message.box.is_empty
        start = source[message.sender][message.source]
        end = target[message.receiver][message.target]
        assert message.box.intersect(start) == message.box == message.box.intersect(end)
        into = view(arrived[message.receiver][message.target], message.box, end)
        assert (into == -1).all()
        into[...] = view(held[message.sender][message.source], message.box, start)
    for boxes, buffers in zip(target, arrived, strict=True):
        for box, buffer in zip(boxes, buffers, strict=True):
            assert (buffer == view(tensor, box)).all()


def holders(source: Boxes) -> dict[Element, list[int]]:
    found: dict[Element, list[int]] = {}
    for rank, boxes in enumerate(source):
        for box in boxes:
            for element in elements(box):
                found.setdefault(element, []).append(rank)
    return found


@given(cases())
@relaxed
def test_every_wanted_element_arrives_once_with_its_value(
    case: tuple[tuple[int, ...], Boxes, Boxes],
) -> None:
    shape, source, target = case
    check_delivered(shape, source, target, transfer(source, target))


@given(cases())
@relaxed
def test_every_element_comes_from_the_receiver_or_else_the_nearest_holder(
    case: tuple[tuple[int, ...], Boxes, Boxes],
) -> None:
    _, source, target = case
    found = holders(source)
    for message in transfer(source, target):
        for element in elements(message.box):
            nearest = min((abs(rank - message.receiver), rank) for rank in found[element])
            assert message.sender == nearest[1]


@given(cases())
@relaxed
def test_a_rank_alone_finds_its_part_of_the_whole_plan_in_the_same_order(
    case: tuple[tuple[int, ...], Boxes, Boxes],
) -> None:
    _, source, target = case
    plan = transfer(source, target)
    assert plan == sorted(plan, key=lambda m: (m.sender, m.receiver, m.target, m.box.offsets))
    for rank in range(len(source)):
        assert transfer(source, target, rank=rank) == [m for m in plan if rank in (m.sender, m.receiver)]


@given(st.data())
@relaxed
def test_what_ranks_hold_already_does_not_move(data: st.DataObject) -> None:
    boxes = data.draw(covers(data.draw(shapes), data.draw(st.integers(1, 6))))
    assert transfer(boxes, boxes) == [
        Message(rank, rank, box, place, place)
        for rank, own in enumerate(boxes)
        for place, box in enumerate(own)
        if not box.is_empty
    ]


@given(cases(), st.data())
@relaxed
def test_an_element_that_nobody_holds_is_named_with_the_box_and_rank_that_want_it(
    case: tuple[tuple[int, ...], Boxes, Boxes], data: st.DataObject
) -> None:
    shape, source, target = case
    filled = [(rank, box) for rank, boxes in enumerate(target) for box in boxes if not box.is_empty]
    if not filled:
        return
    lost = data.draw(st.sampled_from(elements(data.draw(st.sampled_from(filled))[1])))
    hole = Box(lost, (1,) * len(shape))
    source = [[part for box in boxes for part in subtract(box, hole)] for boxes in source]
    lacking = [(rank, box) for rank, box in filled if box.intersect(hole)]
    rank, box = lacking[0]
    error = f"rank {rank} wants {box} (its box {target[rank].index(box)}), but no rank holds {hole};"
    with pytest.raises(ShardingError, match=re.escape(error)):
        transfer(source, target)
    for rank in range(len(source)):
        if any(lacks == rank for lacks, _ in lacking):
            with pytest.raises(ShardingError, match=rf"rank {rank} wants .* but no rank holds"):
                transfer(source, target, rank=rank)
        else:
            transfer(source, target, rank=rank)


@given(shapes.flatmap(lambda shape: st.tuples(boxes_in(shape), boxes_in(shape))))
@relaxed
def test_a_difference_is_few_disjoint_boxes_of_the_elements_in_the_first_only(boxes: tuple[Box, Box]) -> None:
    box, other = boxes
    rest = subtract(box, other)
    assert len(rest) <= max(1, 2 * len(box.sizes))
    assert not any(part.is_empty for part in rest)
    left = sorted(element for part in rest for element in elements(part))
    assert left == sorted(set(elements(box)) - set(elements(other)))


def test_equal_distances_go_to_the_lower_rank_and_equal_boxes_of_one_rank_to_the_first() -> None:
    box = Box((0,), (4,))
    assert transfer([[box, box], [], [box]], [[], [box], []]) == [Message(0, 1, box, 0, 0)]


def test_a_farther_replica_sends_what_the_nearer_one_lacks() -> None:
    near, far = Box((2, 2), (2, 2)), Box((0, 0), (6, 6))
    plan = transfer([[], [near], [far]], [[far], [], []])
    assert [(m.sender, m.box) for m in plan] == [
        (1, near),
        (2, Box((0, 0), (2, 6))),
        (2, Box((2, 0), (2, 2))),
        (2, Box((2, 4), (2, 2))),
        (2, Box((4, 0), (2, 6))),
    ]


def test_boxes_of_one_rank_that_overlap_are_each_filled() -> None:
    held = Box((0,), (6,))
    wanted = [Box((0,), (4,)), Box((2,), (4,))]
    assert transfer([[held], []], [[], wanted]) == [
        Message(0, 1, wanted[0], 0, 0),
        Message(0, 1, wanted[1], 0, 1),
    ]


def test_scalars_go_from_the_nearest_holder_to_all_who_want_them() -> None:
    scalar = Box((), ())
    assert transfer([[scalar], [], [scalar]], [[scalar]] * 3) == [
        Message(0, 0, scalar, 0, 0),
        Message(0, 1, scalar, 0, 0),
        Message(2, 2, scalar, 0, 0),
    ]
    with pytest.raises(ShardingError, match=r"rank 1 wants .* no rank holds"):
        transfer([[], []], [[], [scalar]])


def test_nothing_is_sent_where_nothing_is_wanted_or_nobody_is_there() -> None:
    empty = Box((3, 0), (0, 4))
    assert transfer([], []) == []
    assert transfer([[], []], [[], []]) == transfer([[], []], [[], []], rank=1) == []
    assert transfer([[Box((0, 0), (2, 4))], []], [[], [empty]]) == transfer([[], []], [[empty], []]) == []


@pytest.mark.parametrize(
    ("source", "target", "rank", "message"),
    [
        ([[]], [[], []], None, "source has boxes for 1 ranks, target for 2"),
        ([[]], [[]], 1, "expected a rank from 0 to 0"),
        ([[]], [[]], -1, "expected a rank from 0 to 0"),
        ([[], [Box((), ())]], [[Box((0,), (0,))], []], None, "rank 0 wants .* has 1 dims, but .* has 0"),
        ([[Box((0,), (1,))], [Box((0, 0), (1, 1))]], [[], []], 0, "rank 1 holds .* has 2 dims"),
    ],
)
def test_lists_that_do_not_fit_each_other_are_refused(
    source: Boxes, target: Boxes, rank: int | None, message: str
) -> None:
    with pytest.raises(ShardingError, match=message):
        transfer(source, target, rank=rank)


# Many ranks


def uneven(total: int, ranks: int) -> list[int]:
    """Where `ranks` ranges that cover `total` begin and end, almost none where even ones do."""
    return [0, *(total * r // ranks - 1 - r % 3 for r in range(1, ranks)), total]


def grid(rows: Sequence[int], columns: Sequence[int], *, margin: int = 0) -> Boxes:
    """A box for each rank between neighbouring rows and columns, wider by `margin` where there is room."""
    return [
        [Box((top, left), (bottom - top, right - left))]
        for top, bottom in _spans(rows, margin)
        for left, right in _spans(columns, margin)
    ]


def _spans(cuts: Sequence[int], margin: int) -> list[tuple[int, int]]:
    return [(max(0, a - margin), min(cuts[-1], b + margin)) for a, b in itertools.pairwise(cuts)]


def test_rows_cut_elsewhere_take_as_many_messages_as_there_are_pieces_between_cuts() -> None:
    ranks, width = 4096, 5
    even, other = range(0, 8 * ranks + 1, 8), uneven(8 * ranks, ranks)
    plan = transfer(grid(even, (0, width)), grid(other, (0, width)))
    cuts = sorted({*even, *other})
    assert len(plan) == len(cuts) - 1 == 2 * ranks - 1
    by_row = sorted((m.box.offsets[0], m.box.sizes) for m in plan)
    assert by_row == [(a, (b - a, width)) for a, b in itertools.pairwise(cuts)]


def test_a_grid_cut_elsewhere_takes_as_many_messages_as_there_are_pieces_between_cuts() -> None:
    side = 64
    even, other = range(0, 8 * side + 1, 8), uneven(8 * side, side)
    source, target = grid(even, even), grid(other, other)
    plan = transfer(source, target)
    assert len(plan) == (2 * side - 1) ** 2
    check_delivered((8 * side, 8 * side), source, target, plan)


def test_one_of_many_ranks_exchanges_rows_for_columns_with_each_other_one() -> None:
    ranks, rank = 4096, 1000
    cuts = range(0, 2 * ranks + 1, 2)
    plan = transfer(grid(cuts, (0, 2 * ranks)), grid((0, 2 * ranks), cuts), rank=rank)
    assert len(plan) == 2 * ranks - 1
    assert all(m.box == Box((2 * m.sender, 2 * m.receiver), (2, 2)) for m in plan)
    assert [m.receiver for m in plan if m.sender == rank] == list(range(ranks))
    assert [m.sender for m in plan if m.receiver == rank] == list(range(ranks))


def test_a_box_of_more_pieces_than_are_compared_at_a_time_gets_them_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(index, "_PORTION", 2)
    pieces = [Box((place,), (1,)) for place in range(5)]
    wanted = [Box((0,), (5,)), Box((3,), (1,))]
    assert transfer([[], pieces], [wanted, []]) == [
        *(Message(1, 0, box, place, 0) for place, box in enumerate(pieces)),
        Message(1, 0, pieces[3], 3, 1),
    ]


def test_boxes_are_compared_with_those_near_them_only(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0
    meets = index._meets

    def counted(starts: Any, ends: Any, asked: Any, *others: Any) -> Any:
        nonlocal compared
        compared += len(asked)
        return meets(starts, ends, asked, *others)

    monkeypatch.setattr(index, "_meets", counted)
    a_message = []
    for side in (16, 64):
        even, other = range(0, 8 * side + 1, 8), uneven(8 * side, side)
        compared = 0
        messages = len(transfer(grid(even, even), grid(other, other)))
        a_message.append(compared / messages)
    assert a_message[1] < 1.6 * a_message[0] < 80  # 16 times the boxes, another level of the index


def test_tiles_that_share_their_margins_move_only_what_a_rank_lacks() -> None:
    side = 24
    even, other = range(0, 8 * side + 1, 8), uneven(8 * side, side)
    source, target = grid(even, even, margin=2), grid(other, other, margin=1)
    plan = transfer(source, target)
    check_delivered((8 * side, 8 * side), source, target, plan)
    for rank, ([held], [wanted]) in enumerate(zip(source, target, strict=True)):
        kept = wanted.intersect(held)
        assert [m.box for m in plan if m.sender == m.receiver == rank] == [kept]
    assert transfer(source, target, rank=100) == [m for m in plan if 100 in (m.sender, m.receiver)]
