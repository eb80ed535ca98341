"""What a caching allocator reserves for a sequence of allocations: a model of CUDA's in PyTorch.

Sizes are rounded to 512 bytes. Up to 1 MiB comes from segments of 2 MiB, up to 10 MiB from segments of 20
MiB, more from a segment of its own, rounded to 2 MiB. A request takes the smallest free piece that is large
enough, of its own stream; what is left over stays a piece where it is worth it; neighbours that are free
become one. Nothing is given back. With expandable segments there is one segment for each stream and kind,
which grows.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

MIB = 2**20
ROUND, SMALL, MEDIUM = 512, MIB, 10 * MIB
SMALL_SEGMENT, LARGE_SEGMENT, LARGE_ROUND = 2 * MIB, 20 * MIB, 2 * MIB


@dataclass(slots=True, eq=False)
class Piece:
    size: int
    pool: Pool
    number: int
    free: bool = False
    before: Piece | None = None
    after: Piece | None = None


@dataclass(slots=True)
class Pool:
    small: bool
    pieces: list[tuple[int, int, Piece]] = field(default_factory=list)  # free ones, by size
    last: Piece | None = None  # of an expandable segment


class Allocator:
    """`reserved` bytes now and at most (`peak`)."""

    def __init__(self, *, expandable: bool = False) -> None:
        self.reserved = self.peak = 0
        self.expandable = expandable
        self._pools: dict[tuple[str, bool], Pool] = {}
        self._count = 0

    def allocate(self, nbytes: int, stream: str) -> Piece:
        size = max(ROUND, -(-nbytes // ROUND) * ROUND)
        small = size <= SMALL
        pool = self._pools.setdefault((stream, small), Pool(small))
        at = bisect_left(pool.pieces, (size, -1))
        if at < len(pool.pieces):
            piece = pool.pieces.pop(at)[2]
        else:
            piece = self._grow(pool, size) if self.expandable else self._segment(pool, size)
        piece.free = False
        left = piece.size - size
        if left >= (ROUND if small else SMALL + 1):
            rest = self._piece(left, pool)
            piece.size = size
            self._link(rest, piece.after)
            self._link(piece, rest)
            if pool.last is piece:
                pool.last = rest
            self._put(rest)
        return piece

    def free(self, piece: Piece) -> None:
        before, after = piece.before, piece.after
        if before is not None and before.free:
            self._take(before)
            piece.size += before.size
            piece.before = before.before
            if piece.before is not None:
                piece.before.after = piece
        if after is not None and after.free:
            self._take(after)
            piece.size += after.size
            self._link(piece, after.after)
            if piece.pool.last is after:
                piece.pool.last = piece
        self._put(piece)

    def _segment(self, pool: Pool, size: int) -> Piece:
        if pool.small:
            whole = SMALL_SEGMENT
        else:
            whole = LARGE_SEGMENT if size < MEDIUM else -(-size // LARGE_ROUND) * LARGE_ROUND
        return self._reserve(whole, pool)

    def _grow(self, pool: Pool, size: int) -> Piece:
        """Add pages at the end of the pool's segment, to what is free there."""
        page = SMALL_SEGMENT if pool.small else LARGE_SEGMENT
        end = pool.last
        there = end.size if end is not None and end.free else 0
        piece = self._reserve(-(-(size - there) // page) * page, pool)
        if end is not None and end.free:
            self._take(end)
            piece.size += end.size
            end = end.before
        if end is not None:
            self._link(end, piece)
        pool.last = piece
        return piece

    def _reserve(self, size: int, pool: Pool) -> Piece:
        self.reserved += size
        self.peak = max(self.peak, self.reserved)
        return self._piece(size, pool)

    def _piece(self, size: int, pool: Pool) -> Piece:
        self._count += 1
        return Piece(size, pool, self._count)

    @staticmethod
    def _link(first: Piece, second: Piece | None) -> None:
        first.after = second
        if second is not None:
            second.before = first

    @staticmethod
    def _put(piece: Piece) -> None:
        piece.free = True
        insort(piece.pool.pieces, (piece.size, piece.number, piece))

    @staticmethod
    def _take(piece: Piece) -> None:
        at = bisect_left(piece.pool.pieces, (piece.size, piece.number))
        piece.pool.pieces.pop(at)
        piece.free = False
