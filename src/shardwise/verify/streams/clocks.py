"""Vector clocks of streams, events and the host: which operation runs after which.

A stream runs its operations in order. Only waits order it after another stream:

    stream.wait_event(event)      after all that came before the event on its stream, and what that waited for
    event.synchronize(), .item()  the host waits; whatever it issues later comes after

A clock counts, for each line (a stream, or the host), the operations that certainly come before. An operation
comes after another if its line's clock has reached the other's tick. An `Order` says which operations of a
simulated device run early, and which late. This module knows nothing of tensors.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

HOST = 0
Clock = dict[int, int]  # ticks by line
_STALLS = 0.05  # share of the operations that stall, if a seed chooses them


@dataclass(slots=True, eq=False)
class Operation:
    """One operation of a line."""

    line: int
    tick: int
    name: str
    place: str  # in the code
    stream: str  # the line's name

    def __str__(self) -> str:
        return f"{self.name} on {self.stream} ({self.place})"


def merge(target: Clock, source: Clock) -> None:
    """Update `target` to come after everything that `source` comes after."""
    for line, tick in source.items():
        if target.get(line, 0) < tick:
            target[line] = tick


def comes_after(clock: Clock, operation: Operation) -> bool:
    """Return whether `operation` happens before the moment of `clock`."""
    return clock.get(operation.line, 0) >= operation.tick


def latest(operations: Iterable[Operation]) -> dict[int, Operation]:
    """Return the last operation of each line."""
    result: dict[int, Operation] = {}
    for operation in operations:
        current = result.get(operation.line)
        if current is None or current.tick < operation.tick:
            result[operation.line] = operation
    return result


@dataclass(eq=False)
class Line:
    """Clock of a stream, of a process group's asynchronous collectives, or of the host."""

    number: int
    name: str
    key: str = ""  # its name on all ranks, even if some ranks make lines that others do not
    clock: Clock = field(default_factory=dict)
    last: Operation | None = None

    def issue(self, name: str, place: str, host: Clock) -> Operation:
        """Issue the next operation. The host issues it, so it comes after everything the host waited for."""
        merge(self.clock, host)
        tick = self.clock[self.number] = self.clock.get(self.number, 0) + 1
        self.last = Operation(self.number, tick, name, place, self.name)
        return self.last


@dataclass(frozen=True)
class Order:
    """The operations that run as soon as they can. All others run when something that must run needs them."""

    early: frozenset[int] = frozenset()  # lines (streams by number) whose operations run as soon as they can
    others: bool = False  # whether those of all other lines do, instead of `early`
    # (line, tick) of operations that run late, with all that follows them; all others run early.
    stalled: frozenset[tuple[int, int]] = frozenset()
    seed: int | None = None  # chooses lines or stalled operations, and the order among needed operations

    @staticmethod
    def at_once() -> Order:
        """Run everything as soon as possible."""
        return Order(others=True)

    @staticmethod
    def as_needed() -> Order:
        """Run nothing before the host waits for it."""
        return Order()

    @staticmethod
    def first(line: int) -> Order:
        """Run a line's operations as soon as possible, everything else as late as possible."""
        return Order(frozenset([line]))

    @staticmethod
    def last(line: int) -> Order:
        """Run a line's operations as late as possible, everything else as soon as possible."""
        return Order(frozenset([line]), others=True)

    @staticmethod
    def without(*operations: Operation) -> Order:
        """Run given operations of an earlier run as late as possible, everything else at once.

        What does not wait for one overtakes it, while all memory that it uses still exists. Two operations
        that race have both begun before either runs.
        """
        return Order(stalled=frozenset((operation.line, operation.tick) for operation in operations))

    @staticmethod
    def of(seed: int) -> Order:
        """Choose early and late lines, or stalled operations, by `seed`."""
        return Order(seed=seed)

    def runs_at_once(
        self, op: Operation, clock: Clock, stalled: list[Operation], chance: random.Random
    ) -> bool:
        """Return whether an operation that follows `clock` runs now; add one that stalls to `stalled`."""
        if self.seed is None and not self.stalled:
            return (op.line in self.early) is not self.others
        if self.seed is not None and self.seed % 2:
            often = random.Random(self.seed * 1009 + op.line).choice((0.0, 0.5, 1.0))
            return chance.random() < often
        if (op.line, op.tick) in self.stalled or (self.seed is not None and chance.random() < _STALLS):
            stalled.append(op)
        return not any(comes_after(clock, late) for late in stalled)


def all_orders(lines: int, *, seeds: int) -> list[Order]:
    """List orders: each line first and last, all at once, all as needed, and some chosen by seeds."""
    of_lines = [order(line) for line in range(HOST + 1, lines) for order in (Order.first, Order.last)]
    return [Order.at_once(), Order.as_needed(), *of_lines, *map(Order.of, range(seeds))]
