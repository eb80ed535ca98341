"""Boxes drawn at random within a shape, alone or as a cover of it."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st

from shardwise.layout import Box

Element = tuple[int, ...]


def elements(box: Box) -> list[Element]:
    return list(itertools.product(*(range(o, e) for o, e in zip(box.offsets, box.ends, strict=True))))


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    bounds = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    return Box(tuple(low for low, _ in bounds), tuple(high - low for low, high in bounds))


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Boxes that cover the shape once: the whole, cut again and again at random places."""
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, box.sizes[dim]))
        sizes, offsets, rest = list(box.sizes), list(box.offsets), list(box.sizes)
        sizes[dim], offsets[dim], rest[dim] = cut, offsets[dim] + cut, rest[dim] - cut
        boxes += [Box(box.offsets, tuple(sizes)), Box(tuple(offsets), tuple(rest))]
    return draw(st.permutations(boxes))
