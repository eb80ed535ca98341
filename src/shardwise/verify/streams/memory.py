"""Memory of the simulated device, and the unordered operations that touch it.

Accesses are matched by address, as several storages may share memory. Two accesses that overlap, one of them
a write, must be ordered. The same holds for memory that is reused: the caching allocator may at once give
freed memory to the next allocation on the stream that it was allocated on. In the worst case, each allocation
reuses memory that other streams still use.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.verify.streams.clocks import Clock, Line, Operation, comes_after, latest, merge

# The earlier operation, the later one, the block, an address in it, whether it was reused in between.
Report = Callable[[Operation, Operation, "Block", int, bool], None]
_LOW = attrgetter("low")


@dataclass(frozen=True, slots=True)
class Extent:
    """The bytes of a tensor: those from `low` to `high`, or some of them."""

    low: int
    high: int
    steps: tuple[tuple[int, int], ...] = ()  # sizes and strides in bytes, if it skips bytes in between
    itemsize: int = 1  # bytes per element

    def overlaps(self, other: Extent) -> bool:
        """Return whether the two have any byte in common; exact."""
        low, high = max(self.low, other.low), min(self.high, other.high)
        if low >= high:
            return False
        parts = [part for extent in (self, other) if (part := extent._within(low, high)) is not None]
        if len(parts) == 2:
            return bool(np.isin(parts[0], parts[1]).any())
        return all(part.size for part in parts)

    def covers(self, other: Extent) -> bool:
        """Return whether this extent certainly includes all bytes of another."""
        if self.steps:
            return self == other
        return self.low <= other.low and other.high <= self.high

    def _within(self, low: int, high: int) -> npt.NDArray[np.int64] | None:
        """Return the addresses of its bytes from `low` to `high`, or None for all of them."""
        if not self.steps:
            return None
        addresses = np.arange(self.low, self.low + self.itemsize)
        for size, stride in self.steps:
            addresses = (addresses[:, None] + np.arange(size) * stride).reshape(-1)
        return addresses[(addresses >= low) & (addresses < high)]


@dataclass(slots=True)
class Access:
    extent: Extent
    operation: Operation
    writes: bool


@dataclass(slots=True, eq=False)
class Block:
    """An allocation, from when it is made until it is freed."""

    low: int
    high: int
    owner: int  # line on which it was allocated, and to which it returns
    origin: str  # its shape and place, in words
    # The last operation of each line on memory that may have been here before.
    needs: dict[int, Operation] = field(default_factory=dict)
    accesses: list[Access] = field(default_factory=list)
    guarded: set[int] = field(default_factory=set)  # lines passed to `record_stream`
    guard: Clock = field(default_factory=dict)  # once freed: their moment then; reuse comes after it
    shadow: Any = None  # for `values`: its contents when operations run in another order


class Memory:
    """The blocks of a device."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._blocks: list[Block] = []  # by address
        # By owner: operations that its next allocation must follow.
        self._freed: dict[int, dict[int, Operation]] = {}

    def allocate(self, low: int, nbytes: int, *, owner: int, origin: str) -> Block:
        """Allocate a new block. Forget old blocks there, whose free was missed."""
        first = max(0, bisect_right(self._blocks, low, key=_LOW) - 1)
        last = bisect_right(self._blocks, low + nbytes - 1, key=_LOW)
        for old in [block for block in self._blocks[first:last] if low < block.high]:
            self._blocks.remove(old)
        block = Block(low, low + nbytes, owner, origin, dict(self._freed.get(owner, {})))
        insort(self._blocks, block, key=_LOW)
        return block

    def free(self, block: Block, lines: Sequence[Line]) -> None:
        """Return a block to the line on which it was allocated, one of a device's."""
        if not self.forget(block):
            return
        for line in block.guarded:
            merge(block.guard, lines[line].clock)
        uses = [a.operation for a in block.accesses if not comes_after(block.guard, a.operation)]
        last_of_owner = lines[block.owner].last
        pool = self._freed.get(block.owner, {})
        last = [] if last_of_owner is None or not uses else [last_of_owner]
        self._freed[block.owner] = latest([*pool.values(), *block.needs.values(), *uses, *last])

    def forget(self, block: Block) -> bool:
        """Forget a block, so that nothing has to wait for it; return whether it was known."""
        is_present = block in self._blocks
        if is_present:
            self._blocks.remove(block)
        return is_present

    def living(self) -> list[Block]:
        return list(self._blocks)

    def at(self, address: int) -> Block | None:
        index = bisect_right(self._blocks, address, key=_LOW) - 1
        block = self._blocks[index] if index >= 0 else None
        return block if block is not None and address < block.high else None

    def access(self, extent: Extent, operation: Operation, clock: Clock, *, writes: bool) -> None:
        """Record that `operation`, on a line with `clock`, reads or writes these bytes."""
        block = self.at(extent.low)
        if block is None or extent.low >= extent.high:
            return
        for earlier in list(block.needs.values()):
            if not comes_after(clock, earlier):
                del block.needs[earlier.line]
                self._report(earlier, operation, block, extent.low, True)
        accesses = []
        for prior in block.accesses:
            if prior.operation is operation or not prior.extent.overlaps(extent):
                accesses.append(prior)
                continue
            if (writes or prior.writes) and not comes_after(clock, prior.operation):
                self._report(prior.operation, operation, block, max(extent.low, prior.extent.low), False)
            replaced = writes or (not prior.writes and prior.operation.line == operation.line)
            if not (replaced and extent.covers(prior.extent)):
                accesses.append(prior)
        accesses.append(Access(extent, operation, writes))
        block.accesses = accesses
