"""Which operations touch the same memory without an order between them.

Accesses are matched by address: several storages may lie over the same memory. Two that overlap, one of them
a write, must be ordered. So must be whatever touches memory that is given out again: the caching allocator
may give what was freed to the next allocation of the stream that it was allocated on, at once, so at worst
each allocation follows on all that other streams still do with anything freed there.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from shardwise.verify.streams.clocks import Clock, Operation, comes_after, latest

# The earlier operation, the later one, the block, an address in it, and was it given out again between them?
Report = Callable[[Operation, Operation, "Block", int, bool], None]
_LOW = attrgetter("low")


@dataclass(slots=True)
class Access:
    low: int
    high: int
    operation: Operation
    writes: bool


@dataclass(slots=True, eq=False)
class Block:
    """An allocation, from when it is made until it is freed.

    Attributes:
        owner: the line that it was allocated on; it goes back there.
        needs: the last operation of each line on what may have lain there before.
        made: shape and place of what was allocated, in words.
    """

    low: int
    high: int
    owner: int
    made: str
    needs: dict[int, Operation] = field(default_factory=dict)
    accesses: list[Access] = field(default_factory=list)
    guarded: set[int] = field(default_factory=set)  # lines that the allocator was told of (`record_stream`)
    shadow: Any = None  # of `values`: what lies there where operations run in another order


class Memory:
    """All blocks of a device."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._blocks: list[Block] = []  # by address
        self._freed: dict[int, dict[int, Operation]] = {}  # by owner: what its next allocation must follow

    def allocate(self, low: int, nbytes: int, *, owner: int, made: str) -> Block:
        """A new block. What was there and was never seen to be freed is forgotten."""
        for old in self._overlapping(low, low + nbytes):
            self._blocks.remove(old)
        block = Block(low, low + nbytes, owner, made, dict(self._freed.get(owner, {})))
        insort(self._blocks, block, key=_LOW)
        return block

    def free(self, block: Block, last_of_owner: Operation | None) -> None:
        """Give a block back to the line that it was allocated on."""
        if block not in self._blocks:
            return
        self._blocks.remove(block)
        used = [a.operation for a in block.accesses if a.operation.line not in block.guarded]
        pool = self._freed.get(block.owner, {})
        own = [] if last_of_owner is None or not used else [last_of_owner]
        self._freed[block.owner] = latest([*pool.values(), *block.needs.values(), *used, *own])

    def living(self) -> list[Block]:
        """What has not been freed."""
        return list(self._blocks)

    def at(self, address: int) -> Block | None:
        """The block that has this address."""
        index = bisect_right(self._blocks, address, key=_LOW) - 1
        found = self._blocks[index] if index >= 0 else None
        return found if found is not None and address < found.high else None

    def _overlapping(self, low: int, high: int) -> list[Block]:
        first = max(0, bisect_right(self._blocks, low, key=_LOW) - 1)
        last = bisect_right(self._blocks, high - 1, key=_LOW)
        return [block for block in self._blocks[first:last] if block.low < high and low < block.high]

    def access(self, low: int, high: int, operation: Operation, clock: Clock, *, writes: bool) -> None:
        """`operation`, of a line that has `clock`, reads or writes `[low, high)`."""
        block = self.at(low)
        if block is None or low >= high:
            return
        for earlier in list(block.needs.values()):
            if not comes_after(clock, earlier):
                del block.needs[earlier.line]
                self._report(earlier, operation, block, low, True)
        kept = []
        for known in block.accesses:
            if known.low >= high or low >= known.high or known.operation is operation:
                kept.append(known)
                continue
            ordered = comes_after(clock, known.operation)
            if (writes or known.writes) and not ordered:
                self._report(known.operation, operation, block, max(low, known.low), False)
            covered = low <= known.low and known.high <= high
            replaced = writes or (not known.writes and known.operation.line == operation.line)
            if not (covered and replaced):
                kept.append(known)
        kept.append(Access(low, high, operation, writes))
        block.accesses = kept
