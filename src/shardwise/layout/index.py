"""Which boxes overlap given ones, by a spatial index; whether boxes cover a tensor exactly once.

Boxes, columns of first elements and ends [dims, boxes], are sorted along a space-filling curve (Morton's, by
the ranks of their midpoints), so that neighbours are mostly adjacent. Every 8 neighbours have a bounding box,
every 8 of those another, up to a single one; overlaps are searched from the top, below those that overlap.
So for tiles of any number of dims, time grows with their number and that of overlaps, up to a logarithmic
factor. Columns are compared in portions: memory grows with the overlaps.

A cover is found without comparing boxes. A box is a sum of signed quadrants, one starting at each of its
corners; quadrants that start at different points are linearly independent functions. So boxes count every
element of a whole once, and no other, if and only if their signed corners add up to those of the whole:

    +1    -1+1    -1         two boxes side by side: shared corners cancel
    -1    +1-1    +1
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from shardwise.errors import ShardingError
from shardwise.layout.box import Box

Ints = npt.NDArray[np.int64]

_AROUND = 8  # boxes per bounding box
_PORTION = 1 << 16  # pairs of boxes compared at a time
_KEY_BITS = 62  # of a position on the curve
_CORNERS = 1 << 24  # if there are more corners, the boxes are compared instead
_NUMBERS = 1 << 62


def corners(boxes: Sequence[Box], ndim: int) -> tuple[Ints, Ints]:
    """Return the offsets and sizes [dims, boxes]."""
    count = ndim * len(boxes)
    offsets = np.fromiter(itertools.chain.from_iterable(box.offsets for box in boxes), np.int64, count)
    sizes = np.fromiter(itertools.chain.from_iterable(box.sizes for box in boxes), np.int64, count)
    return offsets.reshape(-1, ndim).T.copy(), sizes.reshape(-1, ndim).T.copy()


class Index:
    """Finds which of its boxes, none of them empty and all of at least one dim, overlap given ones."""

    def __init__(self, starts: Ints, ends: Ints) -> None:
        self._order = _along_curve(starts + ends)
        self._levels = [(starts[:, self._order], ends[:, self._order])]
        while self._levels[-1][0].shape[1] > 1:
            low, high = self._levels[-1]
            begins = np.arange(0, low.shape[1], _AROUND)
            around = (np.minimum.reduceat(low, begins, axis=1), np.maximum.reduceat(high, begins, axis=1))
            self._levels.append(around)

    def meeting(self, starts: Ints, ends: Ints) -> Iterator[tuple[Ints, Ints]]:
        """Yield pairs (given column, own column) that overlap; all of one in one portion, in own order."""
        if not len(self._order):
            return
        columns = np.arange(starts.shape[1])
        pending = [(len(self._levels) - 1, columns, np.zeros_like(columns))]
        while pending:
            level, query, hit = pending.pop()
            cut = _between_columns(query)
            if cut:
                pending += [(level, query[cut:], hit[cut:]), (level, query[:cut], hit[:cut])]
                continue
            low, high = self._levels[level]
            common = _meets(starts, ends, query, low, high, hit)
            query, hit = query[common], hit[common]
            if not level:
                yield query, self._order[hit]
                continue
            children = (hit[:, None] * _AROUND + np.arange(_AROUND)).ravel()
            valid = children < self._levels[level - 1][0].shape[1]
            pending.append((level - 1, np.repeat(query, _AROUND)[valid], children[valid]))


def _meets(starts: Ints, ends: Ints, query: Ints, low: Ints, high: Ints, hit: Ints) -> Ints:
    """Return the indices of the pairs of columns (query, hit) that have elements in common."""
    common = np.arange(len(query))
    for dim in range(len(starts)):
        q, h = query[common], hit[common]
        common = common[(low[dim][h] < ends[dim][q]) & (starts[dim][q] < high[dim][h])]
    return common


def _between_columns(query: Ints) -> int:
    """Return the index at which to divide too many pairs, between two columns; 0 to keep them together."""
    if len(query) <= _PORTION:
        return 0
    mid = query[len(query) // 2]
    cut = int(np.searchsorted(query, mid, side="left")) or int(np.searchsorted(query, mid, side="right"))
    return cut % len(query)


def _along_curve(middles: Ints) -> Ints:
    """Return the order of points [dims, points] along Morton's curve over their ranks in each dim."""
    ranks = [np.unique(middle, return_inverse=True)[1].astype(np.int64) for middle in middles]
    varying = [rank for rank in ranks if rank.max(initial=0)][:_KEY_BITS]
    key = np.zeros(middles.shape[1], np.int64)
    if varying:
        bits = _KEY_BITS // len(varying)
        shifts = [bits - int(rank.max()).bit_length() for rank in varying]
        scaled = [rank << max(n, 0) >> max(-n, 0) for rank, n in zip(varying, shifts, strict=True)]
        for bit in range(bits - 1, -1, -1):
            for rank in scaled:
                key = key << 1 | rank >> bit & 1
    order: Ints = np.argsort(key, kind="stable")
    return order


def disjoint(boxes: Sequence[Box]) -> None:
    """Raise a ShardingError that names two of `boxes`, of equally many dims, with an element in common."""
    filled = [box for box in boxes if not box.is_empty]
    if len(filled) < 2:
        return
    ndim = len(filled[0].sizes)
    if not ndim:
        raise ShardingError(f"{filled[0]} and {filled[1]} overlap")
    starts, sizes = corners(filled, ndim)
    if _add_up(starts, starts + sizes):
        return
    for query, hit in Index(starts, starts + sizes).meeting(starts, starts + sizes):
        pairs = np.flatnonzero(query != hit)
        if len(pairs):
            first, second = sorted((int(query[pairs[0]]), int(hit[pairs[0]])))
            raise ShardingError(f"{filled[first]} and {filled[second]} overlap")


def cover(boxes: Sequence[Box], shape: Sequence[int]) -> None:
    """Check that `boxes` cover a tensor of `shape` exactly once.

    Raises a ShardingError that names the box that extends outside the shape, the two boxes that overlap, or
    the number of elements that the boxes cover.
    """
    for box in boxes:
        if len(box.sizes) != len(shape) or any(end > size for end, size in zip(box.ends, shape, strict=True)):
            raise ShardingError(f"{box} extends outside the tensor of shape {tuple(shape)}")
    disjoint(boxes)
    covered, whole = sum(box.numel for box in boxes), math.prod(shape)
    if covered != whole:
        raise ShardingError(f"the boxes cover {covered} of the {whole} elements of shape {tuple(shape)}")


def _add_up(starts: Ints, ends: Ints) -> bool:
    """Return whether boxes [dims, boxes], none empty, fill the box around them once; False for too many."""
    low, high = starts.min(axis=1, keepdims=True), ends.max(axis=1, keepdims=True)
    cut = [d for d in range(len(starts)) if (starts[d] > low[d]).any() or (ends[d] < high[d]).any()]
    if starts.shape[1] << len(cut) > _CORNERS:
        return False
    starts, ends = np.append(starts, low, axis=1), np.append(ends, high, axis=1)
    signs = np.ones((1, starts.shape[1]), np.int64)  # of a corner of each box
    signs[0, -1] = -1  # the opposite sign for the box around them
    places, points = np.zeros_like(signs), 1  # that corner's point as a number; the count of numbers
    for d in cut:
        values, edges = np.unique(np.stack([starts[d], ends[d]]), return_inverse=True)
        if points > _NUMBERS // len(values):
            return False
        places = (places * len(values) + edges.reshape(2, 1, -1)).reshape(-1, starts.shape[1])
        signs, points = np.concatenate([signs, -signs]), points * len(values)
    order = np.argsort(places, axis=None)
    first = np.flatnonzero(np.diff(places.ravel()[order], prepend=-1))
    return not np.add.reduceat(signs.ravel()[order], first).any()
