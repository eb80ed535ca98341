"""The check that boxes cover a tensor exactly once.

A box is a sum of signed quadrants, one starting at each of its corners. Quadrants that start at different
points are linearly independent functions. So boxes count every element of a whole once, and no other, if and
only if their signed corners add up to the corners of the whole:

    +1    -1+1    -1         two boxes side by side: shared corners cancel
    -1    +1-1    +1

The check sorts all corners, whatever the boxes. Boxes are compared only if the corners do not add up, to name
two that overlap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from shardwise.errors import ShardingError
from shardwise.layout.box import Box
from shardwise.layout.index import Index, Ints, corners

_CORNERS = 1 << 24  # if there are more corners, the boxes are compared instead
_NUMBERS = 1 << 62


def disjoint(boxes: Sequence[Box]) -> None:
    """Check that no two of `boxes`, of equally many dims, have an element in common.

    Raises a ShardingError that names two that do.
    """
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
    covered = sum(box.numel for box in boxes)
    if covered != math.prod(shape):
        raise ShardingError(
            f"the boxes cover {covered} of the {math.prod(shape)} elements of shape {tuple(shape)}"
        )


def _add_up(starts: Ints, ends: Ints) -> bool:
    """Return whether boxes, columns of [dims, boxes] and none empty, fill the box around them exactly once.

    Also returns False if there are too many corners to count, or too many points to number.
    """
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
