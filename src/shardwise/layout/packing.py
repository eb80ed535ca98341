"""Packing parameters end to end so that rank boundaries fall between their blocks.

The gathered buffer of a group has `ranks` shards of S elements. A parameter of `numel` elements lies in it
in one piece, and a rank boundary may cut it only between two of its blocks::

    rank boundaries    |0         |S         |2S        |3S
    parameters         [AA AA AA AA AA][BBB BBB BBB].[c]

Packing finds starts, and an S near the least possible: an all-gather moves the whole gathered buffer, so
padding costs bandwidth and memory. Starts and S are multiples of an alignment; inside this file they are
counted in units of it.

Arithmetic limits S. A parameter with `numel > 2 S` contains two boundaries wherever it starts, so S must be a
multiple of its block. One with `S < numel <= 2 S` contains at least one boundary; for exactly one, a multiple
of the block must lie between `numel - S` and S. The least S that passes for every parameter is
`least_shard_numel`. From there on, S grows until a greedy placement succeeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, islice, takewhile

_WINDOW = 16  # kinds of parameter that one greedy step chooses from
_REFINEMENTS = 10  # bisections between the last S that failed and the first that did not


@dataclass(frozen=True)
class Packing:
    """The start of each parameter in the gathered buffer, and the number of elements of a rank's shard."""

    starts: tuple[int, ...]
    shard_numel: int


@dataclass(frozen=True)
class _Item:
    index: int
    size: int  # units of the alignment
    step: int  # units between positions where a boundary may fall, counted from the start
    owner: int | None


@lru_cache(maxsize=1024)
def pack(
    numels: tuple[int, ...],
    blocks: tuple[int, ...],
    *,
    ranks: int,
    align: int,
    owners: tuple[int | None, ...] | None = None,
) -> Packing:
    """Choose starts for parameters of `numels` elements, cut between blocks of `blocks`; equal on all ranks.

    Args:
        numels: elements of each parameter, in registration order; may be 0.
        blocks: elements of each parameter's block; at least its numel to keep it on one rank.
        ranks: size of the shard axis.
        align: starts and the shard's size are multiples of this many elements.
        owners: for each parameter, the rank that must hold all of it, or None.
    """
    items = _items(numels, blocks, align, owners)
    if not items:
        return Packing((0,) * len(numels), 0)
    size, starts = _search(items, ranks)
    offsets = [0] * len(numels)
    for index, start in starts.items():
        offsets[index] = start * align
    return Packing(tuple(offsets), size * align)


def least_shard_numel(
    numels: tuple[int, ...],
    blocks: tuple[int, ...],
    *,
    ranks: int,
    align: int,
    owners: tuple[int | None, ...] | None = None,
) -> int:
    """Return a lower bound on shard sizes over all packings, in elements; arguments as for `pack`."""
    items = _items(numels, blocks, align, owners)
    return _smallest_shard(items, ranks) * align if items else 0


def _items(
    numels: Sequence[int], blocks: Sequence[int], align: int, owners: Sequence[int | None] | None
) -> list[_Item]:
    """Return the parameters that have elements, in units of `align`."""
    params = zip(numels, blocks, owners or [None] * len(numels), strict=True)
    return [
        _Item(index, -(-numel // align), math.lcm(block, align) // align, owner)
        for index, (numel, block, owner) in enumerate(params)
        if numel
    ]


def _kinds(items: Iterable[_Item]) -> list[tuple[int, int]]:
    """Return the distinct (size, step), the largest first."""
    return sorted({(item.size, item.step) for item in items}, reverse=True)


def _smallest_shard(items: Sequence[_Item], ranks: int) -> int:
    even = -(-sum(item.size for item in items) // ranks)
    owned = _by_owner(items).values()
    # Given j * ranks + 1 parameters that are not cut, some rank holds j + 1 of them.
    whole = sorted((item.size for item in items if item.step >= item.size), reverse=True)
    sets = (whole[j * ranks - j : j * ranks + 1] for j in range(1, (len(whole) - 1) // ranks + 1))
    sums = (sum(item.size for item in group) for group in owned)
    return _next_possible(max(even, 1, *sums, *map(sum, sets)), _kinds(items))


def _by_owner(items: Sequence[_Item]) -> dict[int, list[_Item]]:
    by_owner: dict[int, list[_Item]] = {}
    for item in items:
        if item.owner is not None:
            by_owner.setdefault(item.owner, []).append(item)
    return by_owner


def _next_possible(shard: int, kinds: Sequence[tuple[int, int]]) -> int:
    """Return the least size, at least `shard`, at which every kind of parameter can be cut."""
    while True:
        several = [(size, step) for size, step in kinds if size > 2 * shard]  # these contain two boundaries
        multiple = 1
        for _, step in several:
            if multiple <= kinds[0][0]:  # a larger one need not be exact
                multiple = math.lcm(multiple, step)
        if shard % multiple:
            shard = min(shard + -shard % multiple, -(-several[-1][0] // 2))
            continue
        # Kinds of which no start puts all boundaries inside between blocks, and the whole blocks of a shard.
        stuck = [
            (size, step, shard // step)
            for size, step in kinds
            if shard < size > shard // step * step + shard and shard % step
        ]
        if not stuck:
            return shard
        shard = max(min(size - whole * step, (whole + 1) * step) for size, step, whole in stuck)


def _search(items: Sequence[_Item], ranks: int) -> tuple[int, dict[int, int]]:
    """Return the first candidate size at which a placement succeeds, and its starts."""
    kinds = _kinds(items)
    failed = 0
    for shard in _candidates(_smallest_shard(items, ranks), kinds):
        starts = _place(items, shard, ranks)
        if starts is not None:
            break
        failed = shard
    for _ in range(_REFINEMENTS if failed else 0):
        middle = _next_possible((failed + shard + 1) // 2, kinds)
        if not failed < middle < shard:
            break
        refined = _place(items, middle, ranks)
        if refined is None:
            failed = middle
        else:
            shard, starts = middle, refined
    assert starts is not None
    return shard, starts


def _candidates(smallest: int, kinds: Sequence[tuple[int, int]]) -> Iterator[int]:
    """Yield the possible sizes in ascending order, without end.

    One series has any size; others have multiples of common multiples of the largest parameters' steps, at
    which these are cut without loss. All series take strides of at least 0.1%, longer as failures mount.
    """
    common = accumulate((step for _, step in kinds), math.lcm, initial=1)
    multiples = list(dict.fromkeys(takewhile(lambda multiple: multiple <= kinds[0][0], common)))
    series = [smallest + -smallest % m for m in multiples]  # the next of each
    previous = tried = 0
    while True:
        shard = _next_possible(min(series), kinds)
        if shard != previous:
            yield shard
            previous, tried = shard, tried + 1
        stride = max(1, (shard >> 10) << (tried // 16))
        for j, m in enumerate(multiples):
            if series[j] <= shard:
                low = max(series[j] + stride, shard + 1)
                series[j] = low + -low % m


def _place(items: Sequence[_Item], shard: int, ranks: int) -> dict[int, int] | None:
    for strategy in _STRATEGIES:
        space = _Space(items, shard, ranks)
        if strategy(space, [item for item in items if item.owner is None]):
            return space.starts
    return None


class _Space:
    """The gathered buffer while it is filled: a cursor, free space after it, and gaps before it.

    Owned parameters are in it from the beginning, at the shard's start on even ranks and at its end on odd
    ranks, so that the space in between is as long as possible.
    """

    def __init__(self, items: Sequence[_Item], shard: int, ranks: int) -> None:
        self.shard = shard
        self.end = shard * ranks
        self.cursor = 0
        self.gaps: list[tuple[int, int]] = []
        self.largest_gap = 0
        self.starts: dict[int, int] = {}
        for rank, owned in sorted(_by_owner(items).items()):
            total = sum(item.size for item in owned)
            start = rank * shard if rank % 2 == 0 else (rank + 1) * shard - total
            self.add_gap(self.cursor, start)
            for item in owned:
                self.starts[item.index] = start
                start += item.size
            self.cursor = start

    def first_start(self, position: int, size: int, step: int) -> int:
        """Return the first position from `position` on where a parameter may begin."""
        shard = self.shard
        while True:
            room = shard - position % shard
            if size <= room:
                return position
            cut = room - room % step
            if cut and (size <= cut + shard or shard % step == 0):
                return position + room - cut
            position += room

    def add_gap(self, begin: int, end: int) -> None:
        if begin < end:
            self.gaps.append((begin, end))
            self.largest_gap = max(self.largest_gap, end - begin)

    def fill_gap(self, item: _Item) -> bool:
        """Place `item` in the first gap that has room for it."""
        if item.size > self.largest_gap:
            return False
        for position, (begin, end) in enumerate(self.gaps):
            if item.size > end - begin:
                continue
            start = self.first_start(begin, item.size, item.step)
            if start + item.size <= end:
                self.starts[item.index] = start
                rest = [(begin, start), (start + item.size, end)]
                self.gaps[position : position + 1] = [(low, high) for low, high in rest if low < high]
                return True
        return False

    def append(self, item: _Item) -> bool:
        start = self.first_start(self.cursor, item.size, item.step)
        self.add_gap(self.cursor, start)
        self.starts[item.index] = start
        self.cursor = start + item.size
        return self.cursor <= self.end

    def add(self, item: _Item) -> bool:
        return self.fill_gap(item) or self.append(item)


def _least_push(space: _Space, items: Sequence[_Item]) -> bool:
    """Always place the parameter that leaves the smallest gap; those that can be cut anywhere come last."""
    waiting: dict[tuple[int, int], list[_Item]] = {}
    for item in sorted(items, key=lambda item: (-item.step, -item.size)):
        if item.step == 1 or not space.fill_gap(item):
            waiting.setdefault((item.size, item.step), []).append(item)
    for queue in waiting.values():
        queue.reverse()
    while window := [kind for kind in islice(waiting, _WINDOW) if kind[1] > 1]:
        kind = min(window, key=lambda kind: space.first_start(space.cursor, *kind))
        if not space.append(waiting[kind].pop()):
            return False
        if not waiting[kind]:
            del waiting[kind]
    return all(space.add(item) for queue in waiting.values() for item in reversed(queue))


# Each places the parameters without an owner; equal ones in order of registration.
_STRATEGIES: tuple[Callable[[_Space, Sequence[_Item]], bool], ...] = (
    lambda space, items: all(map(space.add, sorted(items, key=lambda item: -item.step))),
    _least_push,
    lambda space, items: all(map(space.add, sorted(items, key=lambda item: (-item.size, -item.step)))),
)
