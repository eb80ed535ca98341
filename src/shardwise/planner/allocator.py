"""A model of PyTorch's caching allocator for CUDA: the memory that it reserves for a sequence of allocations.

Sizes are rounded to 512 bytes. Requests of up to 1 MiB come from segments of 2 MiB, up to 10 MiB from
segments of 20 MiB, and larger ones from their own segment, rounded to 2 MiB. A request takes the smallest
free piece of its stream that is large enough, and among equal ones the first in memory. A remainder that is
large enough stays a piece; adjacent free pieces are merged. With expandable segments there is one growing
segment per stream and kind, whose end counts as the largest piece. Before the allocator reserves more than
`limit`, it gives back all free whole segments, or free whole pages of expandable ones.
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
    address: int
    free: bool = False
    before: Piece | None = None
    after: Piece | None = None


@dataclass(slots=True)
class Pool:
    small: bool
    pieces: list[tuple[int, int, Piece]] = field(default_factory=list)  # free ones, by size
    last: Piece | None = None  # of an expandable segment


class Allocator:
    """The allocator: bytes `reserved` now and at most (`peak`), above `limit` only if memory is too small."""

    def __init__(self, *, expandable: bool = False, limit: int | None = None) -> None:
        self.reserved = self.peak = 0
        self.expandable, self.limit = expandable, limit
        self.given_back = 0  # number of times; each time the device waits for all of its work
        self._addresses = 0
        self._pools: dict[tuple[str, bool], Pool] = {}

    def allocate(self, nbytes: int, stream: str) -> Piece:
        size = max(ROUND, -(-nbytes // ROUND) * ROUND)
        small = size <= SMALL
        pool = self._pools.setdefault((stream, small), Pool(small))
        at = bisect_left(pool.pieces, (size, -1))
        if at + 1 < len(pool.pieces) and pool.pieces[at][2] is pool.last:
            at += 1
        if at < len(pool.pieces):
            piece = pool.pieces.pop(at)[2]
        else:
            if self.limit is not None and self.reserved + self._missing_bytes(pool, size) > self.limit:
                self._give_back()
            piece = self._grow(pool, size)
        piece.free = False
        remainder = piece.size - size
        if remainder >= (ROUND if small or self.expandable else SMALL + 1):
            rest = Piece(remainder, pool, piece.address + size)
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
            piece.address = before.address
            self._link(before.before, piece)
        if after is not None and after.free:
            self._take(after)
            piece.size += after.size
            self._link(piece, after.after)
            if piece.pool.last is after:
                piece.pool.last = piece
        self._put(piece)

    def _missing_bytes(self, pool: Pool, size: int) -> int:
        """Return the bytes to reserve for a request of `size` for which no piece is large enough."""
        if self.expandable:
            page = SMALL_SEGMENT if pool.small else LARGE_SEGMENT
            free_bytes = pool.last.size if pool.last is not None and pool.last.free else 0
            return -(-(size - free_bytes) // page) * page
        if pool.small:
            return SMALL_SEGMENT
        return LARGE_SEGMENT if size < MEDIUM else -(-size // LARGE_ROUND) * LARGE_ROUND

    def _grow(self, pool: Pool, size: int) -> Piece:
        """Add a segment, or pages at the end of the pool's segment, merged with free memory there."""
        nbytes = self._missing_bytes(pool, size)
        piece = Piece(nbytes, pool, self._addresses)
        self._addresses += nbytes
        self.reserved += nbytes
        self.peak = max(self.peak, self.reserved)
        if self.expandable:
            end, pool.last = pool.last, piece
            if end is not None and end.free:
                self._take(end)
                piece.size += end.size
                piece.address = end.address
                end = end.before
            self._link(end, piece)
        return piece

    def _give_back(self) -> None:
        self.given_back += 1
        for pool in self._pools.values():
            page = SMALL_SEGMENT if pool.small else LARGE_SEGMENT
            for _, _, piece in pool.pieces[:]:
                is_segment = piece.before is None and piece.after is None
                nbytes = piece.size // page * page if self.expandable else piece.size * is_segment
                if not nbytes:
                    continue
                self.reserved -= nbytes
                self._take(piece)
                piece.size -= nbytes
                if piece.size:
                    self._put(piece)
                    continue
                if pool.last is piece:
                    pool.last = piece.before
                self._link(piece.before, None)
                self._link(None, piece.after)

    @staticmethod
    def _link(first: Piece | None, second: Piece | None) -> None:
        if first is not None:
            first.after = second
        if second is not None:
            second.before = first

    @staticmethod
    def _put(piece: Piece) -> None:
        piece.free = True
        insort(piece.pool.pieces, (piece.size, piece.address, piece))

    @staticmethod
    def _take(piece: Piece) -> None:
        at = bisect_left(piece.pool.pieces, (piece.size, piece.address))
        piece.pool.pieces.pop(at)
        piece.free = False
