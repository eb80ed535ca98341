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
from itertools import pairwise
from typing import Any

from torch.fx.experimental.symbolic_shapes import statically_known_true

from shardwise.layout.regroup import Groups, regrouped

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
    """`ranges[rank]`: the intervals of `dim` that a rank holds, begin and end, one after another.

    With a `block`, they are intervals of each `block` elements of the dim, of which there are as many as
    there turn out to be: what heads become when a batch of unknown size is merged with them.
    """

    dim: int
    ranges: Ranges
    block: int | None = None

    def size(self, rank: int) -> int:
        """How many elements of the dim, or of each block of it, `rank` holds."""
        return sum(end - begin for begin, end in self.ranges[rank])

    def on(self, dim: int) -> Split:
        """The same cut of another dim."""
        return Split(dim, self.ranges, self.block)

    def scaled(self, factor: int) -> Split:
        """The cut of a dim in which every element has become `factor` elements."""
        ranges = tuple(tuple((b * factor, e * factor) for b, e in held) for held in self.ranges)
        return Split(self.dim, ranges, None if self.block is None else self.block * factor)

    def within(self, begin: int, end: int) -> Split:
        """The cut of the elements from `begin` to `end`, counted from there."""
        return Split(
            self.dim,
            tuple(
                normal(
                    [(max(b, begin) - begin, min(e, end) - begin) for b, e in held if b < end and e > begin]
                )
                for held in self.ranges
            ),
        )

    @property
    def disjoint(self) -> bool:
        """Does no element lie on two ranks?"""
        intervals = sorted(interval for held in self.ranges for interval in held)
        return all(one[1] <= other[0] for one, other in pairwise(intervals))

    def once(self) -> Split:
        """Every element on the first of the ranks that have it."""
        taken: list[Interval] = []
        ranges = []
        for held in self.ranges:
            own = [piece for interval in held for piece in _without(interval, taken)]
            ranges.append(normal(own))
            taken += own
        return Split(self.dim, tuple(ranges), self.block)

    def inside(self, other: Split) -> bool:
        """Does every rank that holds `other` hold all of this?"""
        if self.dim != other.dim or self.block != other.block:
            return False
        return all(
            any(b <= begin and end <= e for b, e in held)
            for mine, held in zip(self.ranges, other.ranges, strict=True)
            for begin, end in mine
        )


Placement = Replicate | Partial | Split

REPLICATE, PARTIAL = Replicate(), Partial()


def local_shape(placement: Placement | None, shape: Sequence[Any], rank: int) -> list[Any]:
    """The shape of a rank's part of a value."""
    if not isinstance(placement, Split):
        return list(shape)
    return with_dim(shape, placement.dim, placement.size(rank))


def with_dim(sizes: Sequence[Any], dim: int, size: Any) -> list[Any]:
    """`sizes` with another one at `dim`."""
    return [*sizes[:dim], size, *sizes[dim + 1 :]]


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


def _without(interval: Interval, taken: Sequence[Interval]) -> list[Interval]:
    """The parts of `interval` outside of all of `taken`."""
    begin, end = interval
    found = []
    for b, e in sorted(taken):
        if begin < min(b, end):
            found.append((begin, min(b, end)))
        begin = max(begin, e)
    return [*found, (begin, end)] if begin < end else found


def covers_once(ranges: Ranges, size: int) -> bool:
    """Does every element of a dim of `size` lie on exactly one rank?"""
    intervals = sorted(interval for held in ranges for interval in held)
    return normal(intervals) == (((0, size),) if size else ())


def regroup(at: Split, old: Sequence[Any], new: Sequence[Any]) -> Split | None:
    """Where a value of sizes `old`, cut by `at`, is cut in sizes `new`; None where no one dim says it.

    Sizes are numbers, or symbols of which only what always holds is used.
    """
    for before, after in groups(old, new):
        if at.dim not in before:
            continue
        place = before.index(at.dim)
        flat = _flat(at, [old[d] for d in before], place)
        found = None if flat is None else _unflat(flat[0], flat[1], [new[d] for d in after])
        return None if found is None else found.on(after[found.dim])
    return None


def groups(old: Sequence[Any], new: Sequence[Any]) -> Groups:
    """Dims of `old` and of `new` that hold the same elements, as few at a time as possible."""
    return regrouped(old, new, same=same_size, hint=hint)


def hint(size: Any) -> int:
    """A size as a number: one not known before the program runs is as it was when it was exported."""
    if isinstance(size, int):
        return size
    known = size.node.hint
    return 1009 if known is None else int(known)  # depends on data: a number that is no product


def same_size(one: Any, other: Any) -> bool:
    """Are two sizes equal, whatever their symbols turn out to be?"""
    if isinstance(one, int) and isinstance(other, int):
        return one == other
    return statically_known_true(one == other)


def _flat(at: Split, sizes: Sequence[Any], place: int) -> tuple[Ranges, int] | None:
    """The intervals of each so many elements of what `sizes`, cut at `place`, merge into."""
    inner = math.prod(sizes[place + 1 :])
    block = at.block or sizes[place]
    if not isinstance(inner, int) or not isinstance(block, int):
        return None
    return at.scaled(inner).ranges, block * inner


def _unflat(ranges: Ranges, block: int, sizes: Sequence[Any]) -> Split | None:
    """Which of the dims of `sizes`, cut how, gives `ranges` of every `block` elements when merged."""
    for dim, size in enumerate(sizes):
        inner = math.prod(sizes[dim + 1 :])
        if not isinstance(inner, int) or inner == 0 or (isinstance(size, int) and size == 1 != block):
            continue
        found: Ranges | None = ranges
        own = None
        if not isinstance(size, int):
            first = all(isinstance(each, int) and each == 1 for each in sizes[:dim])
            own, found = block // inner, ranges if first and block % inner == 0 else None
        elif size == 0:
            return None
        elif block % (size * inner) == 0:
            found = _repeating(ranges, block, size * inner)
        elif size * inner % block == 0:
            found = tuple(
                normal(
                    [(n * block + b, n * block + e) for n in range(size * inner // block) for b, e in held]
                )
                for held in ranges
            )
        else:
            found = None
        if found is None or any(value % inner for held in found for interval in held for value in interval):
            continue
        return Split(dim, tuple(normal([(b // inner, e // inner) for b, e in held]) for held in found), own)
    return None


def _repeating(ranges: Ranges, block: int, smaller: int) -> Ranges | None:
    """`ranges` of a block as the intervals of each `smaller` elements, if these are alike."""
    first = Split(0, ranges).within(0, smaller).ranges
    alike = all(Split(0, ranges).within(at, at + smaller).ranges == first for at in range(0, block, smaller))
    return first if alike else None
