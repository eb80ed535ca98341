"""Placements of a program's values: whole on every rank, cut over ranks, or as terms of a sum.

`Split` lists, for every rank, the intervals of one dim that it holds, in order. So it can express what equal
chunks cannot: whole attention heads, in equal or unequal numbers; the query, key and value parts of a fused
projection; key heads that several ranks share; ranks that hold nothing::

    6 heads of 8 over 4 ranks              ((0, 16),), ((16, 32),), ((32, 40),), ((40, 48),)
    q, k, v of 2 heads of 8 each, 2 ranks  ((0, 8), (16, 24), (32, 40)), ((8, 16), (24, 32), (40, 48))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any

from torch.fx.experimental.symbolic_shapes import statically_known_true

from shardwise.layout.placement import even_intervals
from shardwise.layout.regroup import Groups, regrouped

Interval = tuple[int, int]
Ranges = tuple[tuple[Interval, ...], ...]


@dataclass(frozen=True)
class Replicate:
    """The value is whole and equal on every rank."""


@dataclass(frozen=True)
class Partial:
    """Every rank has a term; the value is the sum of the terms."""


@dataclass(frozen=True)
class Split:
    """The value is cut: `ranges[rank]` are the intervals (begin, end) of `dim` that `rank` holds."""

    dim: int
    ranges: Ranges

    def size(self, rank: int) -> int:
        """Count the elements of the dim that `rank` holds."""
        return sum(end - begin for begin, end in self.ranges[rank])

    def on_rank(self, rank: int, index: int) -> int:
        """Return the position on `rank` of the dim's `index`, which it holds or which would come next."""
        return sum(min(end, index) - begin for begin, end in self.ranges[rank] if begin <= index)

    def on(self, dim: int) -> Split:
        """Return the same cut of another dim."""
        return Split(dim, self.ranges)

    def each(self, change: Callable[[int, int], Interval]) -> Split:
        return Split(self.dim, tuple(normal([change(b, e) for b, e in part]) for part in self.ranges))

    def scaled(self, factor: int) -> Split:
        """Return the cut of a dim in which every element has become `factor` elements."""
        return self.each(lambda begin, end: (begin * factor, end * factor))

    def divided(self, factor: int) -> Split | None:
        """Return the cut of a dim in which every `factor` elements became one; None if ranks share one."""
        cut = self.each(lambda begin, end: (begin // factor, end // factor))
        return cut if cut.scaled(factor) == self else None

    def within(self, begin: int, end: int) -> Split:
        """Return the cut of the elements from `begin` to `end`, counted from there."""

        def inside(edge: int) -> int:
            return min(max(edge, begin), end) - begin

        return self.each(lambda b, e: (inside(b), inside(e)))

    @property
    def disjoint(self) -> bool:
        """Whether no element lies on two ranks."""
        intervals = sorted(interval for part in self.ranges for interval in part)
        return all(left[1] <= right[0] for left, right in pairwise(intervals))

    def once(self) -> Split:
        """Return every element on the first of the ranks that have it."""
        if self.disjoint:
            return self
        ranges: list[list[Interval]] = [[] for _ in self.ranges]
        for begin, end, ranks in self.holders():
            ranges[ranks[0]].append((begin, end))
        return Split(self.dim, tuple(map(normal, ranges)))

    def holders(self) -> Iterator[tuple[int, int, list[int]]]:
        """Yield intervals of which the same ranks hold every element, in order, and these ranks."""
        edges = sorted({edge for part in self.ranges for interval in part for edge in interval})
        for begin, end in pairwise(edges):
            ranks = [r for r, part in enumerate(self.ranges) if any(b <= begin < e for b, e in part)]
            if ranks:
                yield begin, end, ranks

    def inside(self, other: Split) -> bool:
        """Return whether every rank that holds `other` holds all of this."""
        return self.dim == other.dim and all(
            any(b <= begin and end <= e for b, e in outer)
            for inner, outer in zip(self.ranges, other.ranges, strict=True)
            for begin, end in inner
        )


Placement = Replicate | Partial | Split

REPLICATE = Replicate()
PARTIAL = Partial()


def local_shape(placement: Placement | None, shape: Sequence[Any], rank: int) -> list[Any]:
    if not isinstance(placement, Split):
        return list(shape)
    return with_dim(shape, placement.dim, placement.size(rank))


def with_dim(sizes: Sequence[Any], dim: int, size: Any) -> list[Any]:
    return [*sizes[:dim], size, *sizes[dim + 1 :]]


def even(size: int, ranks: int) -> Ranges:
    """Return a dim of `size` cut as evenly as possible; if uneven, the first ranks have one more."""
    return tuple(normal([interval]) for interval in even_intervals(size, ranks))


def end_to_end(parts: Sequence[tuple[int, Ranges]]) -> Ranges:
    """Return the ranges of a dim that is made of parts, one after another: of each its size and ranges."""
    begins = accumulate((size for size, _ in parts), initial=0)
    shifted = [
        [[(begin + b, begin + e) for b, e in part] for part in ranges]
        for begin, (_, ranges) in zip(begins, parts, strict=False)
    ]
    return tuple(normal([*chain(*of_rank)]) for of_rank in zip(*shifted, strict=True))


def normal(intervals: Sequence[Interval]) -> tuple[Interval, ...]:
    """Drop empty intervals, and join those that touch or overlap."""
    joined: list[Interval] = []
    for begin, end in intervals:
        if joined and joined[-1][0] <= begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        elif begin < end:
            joined.append((begin, end))
    return tuple(joined)


def regroup(cut: Split, old: Sequence[Any], new: Sequence[Any]) -> Split | None:
    """Return what `cut` becomes when `old` is viewed as `new`; None if no single dim expresses it.

    Sizes are numbers or symbols. Also None if a cut dim merges with one whose size is a symbol.
    """
    old_dims, new_dims = next(group for group in groups(old, new) if cut.dim in group[0])
    if len(old_dims) == len(new_dims) == 1:
        return cut.on(new_dims[0])
    sizes, new_sizes = [old[d] for d in old_dims], [new[d] for d in new_dims]
    total = math.prod(sizes)
    if total == 0 or not all(isinstance(size, int) for size in (total, *new_sizes)):
        return None
    place = old_dims.index(cut.dim)
    inner = math.prod(sizes[place + 1 :])
    block = sizes[place] * inner
    merged = _tile(cut.scaled(inner).ranges, total // block, block)
    for index, size in enumerate(new_sizes):
        inner = math.prod(new_sizes[index + 1 :])
        part = Split(new_dims[index], merged).within(0, size * inner)
        repeats = _tile(part.ranges, total // (size * inner), size * inner) == merged
        divided = part.divided(inner)
        if repeats and divided is not None and (size != 1 or block == 1):
            return divided
    return None


def _tile(ranges: Ranges, count: int, block: int) -> Ranges:
    """Return the intervals in `count` consecutive blocks, each of which has the intervals `ranges`."""
    return tuple(
        normal([(n * block + b, n * block + e) for n in range(count) for b, e in part]) for part in ranges
    )


def groups(old: Sequence[Any], new: Sequence[Any]) -> Groups:
    """Return the dims of `old` and of `new` that hold the same elements, as few at a time as possible."""
    return regrouped(old, new, same=same_size, hint=hint)


def hint(size: Any) -> int:
    """Return a size as a number; a size not known before the program runs counts as at export."""
    if isinstance(size, int):
        return size
    value = size.node.hint
    return 1009 if value is None else int(value)  # depends on data: a prime matches no other size


def same_size(a: Any, b: Any) -> bool:
    """Return whether two sizes are equal, whatever their symbols turn out to be."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return statically_known_true(a == b)
