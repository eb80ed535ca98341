"""Vector clocks of streams, events and the host: which operation runs after which.

A stream runs its operations in order. Only waits order it after another stream:

    stream.wait_event(event)      after all that came before the event on its stream, and what that waited for
    event.synchronize(), .item()  the host waits; whatever it issues later comes after

A clock counts, for each line (a stream, or the host), the operations that certainly come before. An operation
comes after another if its line's clock has reached the other's tick. This module knows nothing of tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

HOST = 0
Clock = dict[int, int]  # ticks by line


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
