"""Boxes: hyper-rectangles of a logical tensor.

A box is the unit in which this library describes which rank holds what. Every placement of a tensor
over ranks is a list of boxes, one or more per rank, and a valid placement is an exact, disjoint
cover of the tensor's shape::

    shape (4, 6) over two ranks     rank 0: Box((0, 0), (2, 6))     rank 1: Box((2, 0), (2, 6))

A scalar is a box with no dims (one element). A box with a zero size may lie anywhere inside the shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.errors import ShardingError


@dataclass(frozen=True, slots=True)
class Box:
    """`sizes[d]` elements from `offsets[d]` on, in every dim of a global tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.sizes):
            raise ShardingError(f"box has {len(self.offsets)} offsets but {len(self.sizes)} sizes")
        if min(*self.offsets, *self.sizes, 0, 0) < 0:
            raise ShardingError(
                f"box has a negative offset or size: offsets {self.offsets}, sizes {self.sizes}"
            )

    @staticmethod
    def whole(shape: Sequence[int]) -> Box:
        """Return the box of all elements of a tensor of `shape`."""
        return Box((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def is_empty(self) -> bool:
        return self.numel == 0

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(o + s for o, s in zip(self.offsets, self.sizes, strict=True))

    def shifted(self, by: Sequence[int]) -> Box:
        """Return the box moved by `by[d]` elements in every dim `d`."""
        return Box(tuple(o + shift for o, shift in zip(self.offsets, by, strict=True)), self.sizes)

    def intersect(self, other: Box) -> Box | None:
        """Return the box of elements in both boxes, or None if there are none."""
        starts = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(min(a, b) - s for a, b, s in zip(self.ends, other.ends, starts, strict=True))
        return Box(starts, sizes) if all(size > 0 for size in sizes) else None
