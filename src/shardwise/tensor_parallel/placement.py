"""Where the elements of a value of the program are: on every rank, cut over them, or as parts of a sum.

`Split` says for every rank which intervals of one dim it holds, in order. So it can say what equal chunks
cannot: whole attention heads, as many on one rank as on another or not; the query, key and value parts of a
fused projection; key heads that several ranks share; nothing at all::

    6 heads of 8 over 4 ranks              ((0, 16),), ((16, 32),), ((32, 40),), ((40, 48),)
    q, k, v of 2 heads of 8 each, 2 ranks  ((0, 8), (16, 24), (32, 40)), ((8, 16), (24, 32), (40, 48))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Interval = tuple[int, int]
Ranges = tuple[tuple[Interval, ...], ...]


@dataclass(frozen=True)
class Replicate:
    """Whole and equal on every rank."""


@dataclass(frozen=True)
class Partial:
    """Every rank has a term; the value is their sum."""


@dataclass(frozen=True)
class Split:
    """`ranges[rank]`: the intervals of `dim` that a rank holds, begin and end, one after another."""

    dim: int
    ranges: Ranges

    def size(self, rank: int) -> int:
        """How many elements of the dim `rank` holds."""
        return sum(end - begin for begin, end in self.ranges[rank])

    def on(self, dim: int) -> Split:
        """The same cut of another dim."""
        return Split(dim, self.ranges)


Placement = Replicate | Partial | Split

REPLICATE, PARTIAL = Replicate(), Partial()


def shares(count: int, ranks: int) -> list[Interval]:
    """`count` things over `ranks` as evenly as possible, the first ranks having one more."""
    least, more = divmod(count, ranks)
    begins = [rank * least + min(rank, more) for rank in range(ranks + 1)]
    return [(begins[rank], begins[rank + 1]) for rank in range(ranks)]


def even(size: int, ranks: int, *, unit: int = 1) -> Ranges:
    """A dim of `size` cut into whole units of `unit` elements, as evenly as possible."""
    return tuple(
        normal([(begin * unit, min(end * unit, size))]) for begin, end in shares(-(-size // unit), ranks)
    )


def normal(intervals: Sequence[Interval]) -> tuple[Interval, ...]:
    """Without empty intervals, neighbours joined."""
    joined: list[Interval] = []
    for begin, end in intervals:
        if begin == end:
            continue
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return tuple(joined)


def covers_once(ranges: Ranges, size: int) -> bool:
    """Does every element of a dim of `size` lie on exactly one rank?"""
    intervals = sorted(interval for held in ranges for interval in held)
    return normal(intervals) == (((0, size),) if size else ())


def merged(split: Split, sizes: Sequence[int], *, dim: int) -> Ranges:
    """The cut of the one dim that dims of `sizes` merge into, where the one at index `dim` is cut by `split`."""
    inner = math.prod(sizes[dim + 1 :])
    block = sizes[dim] * inner
    outer = math.prod(sizes[:dim])
    return tuple(
        normal([(o * block + b * inner, o * block + e * inner) for o in range(outer) for b, e in held])
        for held in split.ranges
    )


def unmerged(ranges: Ranges, sizes: Sequence[int]) -> tuple[int, Ranges] | None:
    """Which of the dims of `sizes`, cut how, gives the cut `ranges` of the dim they merge into; None if none does."""
    for dim, size in enumerate(sizes):
        inner = math.prod(sizes[dim + 1 :])
        block = size * inner
        first = [[(b, min(e, block)) for b, e in held if b < block] for held in ranges]
        if size == 1 or any(value % inner for held in first for interval in held for value in interval):
            continue
        found = tuple(normal([(b // inner, e // inner) for b, e in held]) for held in first)
        if merged(Split(dim, found), sizes, dim=dim) == tuple(normal(held) for held in ranges):
            return dim, found
    return None
