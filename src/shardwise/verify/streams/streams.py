"""Streams and events of the simulated device, and which stream is current.

Autograd runs a node of backward on the stream that its forward was issued to, after the nodes that its
gradients come from; backward begins after what its caller issued, and whoever called it goes on after all of
it. Inside a node `with stream:` changes the current stream as anywhere.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardwise import _compat
from shardwise.errors import LifecycleError
from shardwise.verify.streams.clocks import HOST, Clock, Line, Operation, merge

_ACCUMULATES = 1 << 62  # from here on: numbers of nodes that accumulate gradients
_INSIDE = ("shardwise/verify/streams/", "/torch/", "<frozen", "<string>", "contextlib.py")


def place_in_code() -> str:
    """The innermost line of code that is neither torch's nor the simulation's."""
    frame = sys._getframe(1)
    inner = None
    while frame is not None:
        name = frame.f_code.co_filename
        if not any(part in name for part in _INSIDE) or "/torch/distributed/fsdp/" in name:
            short = "/".join(name.rsplit("/", 3)[-3:])
            inner = f"{short}:{frame.f_lineno}, {frame.f_code.co_name}"
            break
        frame = frame.f_back  # type: ignore[assignment]
    if (node := _compat.autograd_node()) is not None:
        return f"{inner}, in {node.name()}" if inner else f"backward of {node.name()}"
    return inner or "outside of Python"


class Stream:
    """In the place of `torch.Stream`: what is issued while it is entered is issued to it."""

    def __init__(self, device: Any = None, *, priority: int = 0, name: str = "", **_: Any) -> None:
        self.timeline = active()
        self.line = self.timeline.line(name or f"the stream made at {place_in_code()}")
        self.device, self.priority = torch.device("lazy", 0), priority

    @property
    def stream_id(self) -> int:
        return self.line.number

    def __enter__(self) -> Stream:
        self.timeline.enter(self)
        return self

    def __exit__(self, *error: object) -> None:
        self.timeline.leave()

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        merge(self.line.clock, self.timeline.host.clock)
        merge(self.line.clock, event.clock)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        self.timeline.host_waits(dict(self.line.clock))

    def query(self) -> bool:
        return False  # it may always still run


class Event:
    """In the place of `torch.Event`: a moment of a stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.timeline = active()
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        self.clock = dict((stream or self.timeline.current()).line.clock)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.timeline.current()).wait_event(self)

    def synchronize(self) -> None:
        self.timeline.host_waits(self.clock)

    def query(self) -> bool:
        return False

    def elapsed_time(self, end: Event) -> float:
        return 0.0


class Timeline:
    """All lines of a device: its streams, those of process groups, and the host."""

    def __init__(self) -> None:
        self.host = Line(HOST, "the host")
        self.lines = [self.host]
        self._current: list[tuple[Stream, int | None]] = []  # entered, and inside of which node
        self._made: tuple[list[int], list[Stream]] = ([], [])  # nodes below a number, on which stream
        self._node: int | None = None  # the one that backward runs
        self._began: Clock = {}  # what came before backward
        self._ended: Clock = {}  # all of what the nodes of this backward have done
        self._arrivals: dict[int, Clock] = {}  # of the gradients that a node is given
        self.waited: Callable[[Clock], None] | None = None  # told what the host waits for
        self._nexts: tuple[int, ...] = ()  # to whom the one that runs gives gradients
        # Told of each operation, with how many of each line it comes after.
        self.listener: Callable[[Operation, Clock], None] | None = None

    @contextmanager
    def used(self) -> Iterator[None]:
        """Make streams here, meanwhile."""
        if _active:
            raise LifecycleError("a device is simulated already")
        _active.append(self)
        self.computation = self._node_stream = Stream(name="the computing stream")
        try:
            yield
        finally:
            _active.remove(self)

    # The current stream

    def current(self) -> Stream:
        """The stream that operators are issued to."""
        node = self._follow_autograd()
        if self._current and self._current[-1][1] == node:
            return self._current[-1][0]
        return self._outer if node is None else self._node_stream

    @property
    def _outer(self) -> Stream:
        return self._current[-1][0] if self._current else self.computation

    def enter(self, stream: Stream) -> None:
        self._note_nodes()
        self._current.append((stream, self._follow_autograd()))

    def leave(self) -> None:
        self._note_nodes()
        self._current.pop()

    def set(self, stream: Stream) -> None:
        """Make it current until further notice."""
        self._note_nodes()
        if self._current:
            self._current.pop()
        self._current.append((stream, self._follow_autograd()))

    # Autograd

    def _note_nodes(self) -> None:
        """The current stream changes: the nodes made since it last did were made on it."""
        numbers, streams = self._made
        now, current = _compat.next_node_number(), self.current()
        if not numbers or now > numbers[-1]:
            numbers.append(now)
            streams.append(current)

    def _stream_of(self, node: Any) -> Stream:
        numbers, streams = self._made
        number = _compat.node_number(node)
        if number >= _ACCUMULATES:  # torch's are of the stream that first used the leaf
            return self._outer
        at = bisect_right(numbers, number)
        return streams[at] if at < len(numbers) else self._outer

    def _follow_autograd(self) -> int | None:
        node = _compat.autograd_node()
        number = None if node is None else _key(node)
        if number == self._node:
            return number
        if self._node is None:
            self._began, self._ended = dict(self._outer.line.clock), {}
            self._arrivals.clear()
        else:
            done = self._node_stream.line.clock
            for following in self._nexts:
                merge(self._arrivals.setdefault(following, {}), done)
            merge(self._ended, done)
        self._node = number
        if node is None:
            merge(self._outer.line.clock, self._ended)
            return None
        self._node_stream = self._stream_of(node)
        merge(self._node_stream.line.clock, self._arrivals.pop(_key(node), self._began))
        self._nexts = tuple(_key(following) for following, _ in node.next_functions if following is not None)
        return number

    # Waiting

    def line(self, name: str) -> Line:
        made = Line(len(self.lines), name)
        self.lines.append(made)
        return made

    def issue(self, line: Line, name: str) -> Operation:
        operation = line.issue(name, place_in_code(), self.host.clock)
        if self.listener is not None:
            self.listener(operation, dict(line.clock))
        return operation

    def host_waits(self, clock: Clock) -> None:
        """The host goes on after what `clock` comes after."""
        merge(self.host.clock, clock)
        if self.waited is not None:
            self.waited(clock)

    def synchronize(self) -> None:
        """The host waits for everything."""
        for line in self.lines:
            self.host_waits(dict(line.clock))


def _key(node: Any) -> int:
    return hash((_compat.node_number(node), node.name()))


_active: list[Timeline] = []


def is_active() -> bool:
    """Is a device simulated now?"""
    return bool(_active)


def active() -> Timeline:
    """The timeline of the device that is simulated now."""
    if not _active:
        raise LifecycleError("streams of the simulated device were asked for when none is simulated")
    return _active[-1]
