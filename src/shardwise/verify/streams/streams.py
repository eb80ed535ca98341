"""Streams and events of the simulated device, and which stream is current.

In backward, the current stream is that of the running node; `with stream:` inside a node changes it as usual.
Autograd's engine runs nodes on streams, as its notes on streaming backwards and its `InputBuffer` say:

    a node             runs on its forward's stream, after the nodes that give it gradients; the first nodes
                       run after what the caller of backward issued
    a leaf's gradient  is accumulated on the stream on which the oldest graph alive first used the leaf
    sums               gradients from several nodes for one node are added on the receiving node's stream
    memory             of a gradient for a node on another stream is not reused until that stream has used it
    the caller         continues after the streams of leaves, and of tensors whose gradients it requested
"""

from __future__ import annotations

import sys
import sysconfig
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from shardwise import _compat
from shardwise.errors import LifecycleError
from shardwise.verify.streams.clocks import HOST, Clock, Line, Operation, merge

ACCUMULATES = 1 << 62  # first number of nodes that accumulate gradients
_STREAM = "shardwise.stream"  # in their metadata
_STANDARD = f"{sysconfig.get_path('stdlib')}/"
# The package's wrappers of the user's and torch's calls do not count as places either.
_WRAPPERS = (
    "shardwise/verify/streams/",
    "shardwise/_compat/",
    "shardwise/fsdp/module.py",
    "shardwise/sharded_tensor/",
)
_INSIDE = (*_WRAPPERS, "/torch/", "<frozen", "<string>", "typing_extensions.py")


def place_in_code() -> str:
    """Return the innermost line of code outside torch, the simulation and sharded tensors.

    If there is none, return a line of the torch optimizer that the simulation steps.
    """
    frame = sys._getframe(1)
    inner = None
    while frame is not None:
        name = frame.f_code.co_filename
        if name.endswith("shardwise/verify/streams/training.py"):
            break
        standard = name.startswith(_STANDARD) and "-packages/" not in name
        inside = standard or any(part in name for part in _INSIDE)
        if not inside or "/torch/distributed/fsdp/" in name:
            short = "/".join(name.rsplit("/", 3)[-3:])
            inner = f"{short}:{frame.f_lineno}, {frame.f_code.co_name}"
            break
        if inner is None and "/torch/optim/" in name:
            inner = f"torch/optim/{name.rpartition('/')[2]}:{frame.f_lineno}, {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    if (node := _compat.autograd_node()) is not None:
        return f"{inner}, in {node.name()}" if inner else f"backward of {node.name()}"
    return inner or "outside Python"


class Stream:
    """Stand-in for `torch.Stream`: operations issued while it is entered are issued to it."""

    device_index, device_type = 0, 0

    def __init__(
        self, device: Any = None, *, priority: int = 0, name: str = "", stream_id: int | None = None, **_: Any
    ) -> None:
        self.device, self.priority = torch.device("lazy", 0), priority
        if stream_id is None:
            self.call(name or f"the stream made at {place_in_code()}")
        else:
            self._timeline, self._line = active(), active().lines[stream_id]
            self._name = self._line.name

    def call(self, name: str) -> None:
        """Name the stream, for findings."""
        self._name, self._timeline = name, active()
        self._line = self._timeline.line(name)

    @property
    def timeline(self) -> Timeline:
        """The running simulation's timeline; a stream of an earlier simulation becomes a new stream in it."""
        if self._timeline is not active():
            self.call(self._name)
        return self._timeline

    @property
    def line(self) -> Line:
        assert self.timeline is self._timeline
        return self._line

    @property
    def stream_id(self) -> int:
        return self.line.number

    def is_capturing(self) -> bool:
        return False

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
        if not isinstance(event, OwnEvent):  # which torch.Stream takes for one that was never recorded
            self.go_after(event)

    def wait_stream(self, stream: Stream) -> None:
        self.go_after(stream.record_event(Event()))

    def go_after(self, event: Event) -> None:
        """Make operations issued from now on run after the event."""
        merge(self.line.clock, event.clock)

    def synchronize(self) -> None:
        self.timeline.host_waits(dict(self.line.clock))

    def query(self) -> bool:
        return self.timeline.host_asks(dict(self.line.clock))


class Event:
    """Stand-in for `torch.Event`: a moment of a stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._recorded: tuple[Timeline, Clock] = (active(), {})

    @property
    def clock(self) -> Clock:
        """The clock at which this was recorded; empty if that was in an earlier simulation."""
        timeline, clock = self._recorded
        return clock if timeline is active() else {}

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or active().current()
        self._recorded = stream.timeline, dict(stream.line.clock)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or active().current()).go_after(self)

    def synchronize(self) -> None:
        active().host_waits(self.clock)

    def query(self) -> bool:
        return active().host_asks(self.clock)

    def elapsed_time(self, end: Event) -> float:
        return 0.0


class OwnStream(Stream):
    """Stand-in for a device's own stream class, such as `torch.cuda.Stream`."""

    def record_event(self, event: Event | None = None) -> Event:
        return super().record_event(OwnEvent() if event is None else event)

    def wait_event(self, event: Event) -> None:
        event.wait(self)


class OwnEvent(Event):
    """Stand-in for a device's own event class, such as `torch.cuda.Event`.

    A plain `torch.Stream` does not see that it was recorded, and it reads fields that a plain stream lacks.
    """

    def wait(self, stream: Stream | None = None) -> None:
        if stream is not None and not isinstance(stream, OwnStream):
            raise TypeError(
                "a torch.Stream that waits for a device's own event crashes on CUDA; use a torch.Event"
            )
        super().wait(stream)


class Backward:
    """One call of the engine."""

    def __init__(
        self,
        roots: Sequence[Any],
        requested: Sequence[Any],
        caller: Stream,
        stream_of: Callable[[int], Stream],
        record_stream: Callable[[torch.Tensor, Stream], None],
    ) -> None:
        self.caller = self.stream = caller  # streams: current at the call, and of the running node
        self.parent = _compat.autograd_node()  # that made the call, if any
        self._stream_of_number, self._record_stream = stream_of, record_stream
        self._roots, self._requested = {id(node) for node in roots}, list(requested)
        self._began: Clock = dict(caller.line.clock)
        self._arrivals: dict[int, Clock] = {}  # of the gradients that a node receives
        self._received: set[tuple[int, int]] = set()  # nodes and places that have a gradient already
        # Nodes whose gradients the engine adds next, after the last node that ended.
        self._sums: deque[Any] = deque()
        self._running: Any = None
        self._has_ended = self._is_over = False
        self._first_uses: dict[int, int] = {}  # of leaves: the number of the first node that used it
        self._leaves: dict[int, Any] = {}
        self._nodes = self._graph(roots)

    def _graph(self, roots: Sequence[Any]) -> dict[int, Any]:
        nodes, pending = {}, list(roots)
        while pending:
            node = pending.pop()
            if id(node) in nodes:
                continue
            nodes[id(node)] = node
            number = _compat.node_number(node)
            if not node.next_functions:
                self._leaves[id(node)] = node
            for following, _ in node.next_functions:
                if following is not None:
                    first = self._first_uses.get(id(following), number)
                    self._first_uses[id(following)] = min(first, number)
                    pending.append(following)
        return nodes

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Follow the nodes while the engine runs; the caller continues after them unless one fails."""
        handles = []
        for node in self._nodes.values():
            if _compat.node_number(node) < ACCUMULATES:
                handles.append(node.register_prehook(partial(self._start, node)))
                handles.append(node.register_hook(partial(self._end, node)))
        try:
            yield
            self._finish()
        finally:
            for handle in handles:
                handle.remove()

    def follow(self, node: Any) -> bool:
        """Return whether a node of this call is running, and set `stream`; begin a node that is new."""
        if node is None or node is self.parent or id(node) not in self._nodes:
            if self._running is not None:
                self._finish()  # callbacks at the end of backward
            return False
        if node is not self._running:
            self._running, self._has_ended = node, False
            self._begin(node)
        elif self._has_ended and self._sums:
            self._begin(self._sums[0])
        return True

    def record_operation(self) -> None:
        """Record an issued operation; it belongs to the engine if the running node has ended."""
        if self._has_ended and self._sums:
            merge(self._arrivals.setdefault(id(self._sums.popleft()), {}), self.stream.line.clock)

    def _begin(self, node: Any) -> None:
        self.stream = self._stream_of(node)
        if id(node) in self._roots:
            merge(self.stream.line.clock, self._began)
        merge(self.stream.line.clock, self._arrivals.get(id(node), {}))

    def _start(self, node: Any, _: Any) -> None:
        self.follow(node)

    def _end(self, node: Any, gradients: Sequence[Any], _: Any) -> None:
        self.follow(node)
        self._has_ended = True
        self._sums.clear()
        for (following, place), gradient in zip(node.next_functions, gradients, strict=False):
            if following is None or gradient is None:
                continue
            merge(self._arrivals.setdefault(id(following), {}), self.stream.line.clock)
            if (consumer := self._stream_of(following)).line is not self.stream.line:
                self._record_stream(gradient, consumer)
            if (id(following), place) in self._received:
                self._sums.append(following)
            self._received.add((id(following), place))

    def _finish(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        for node in (*self._leaves.values(), *self._requested):
            line = self._stream_of(node).line
            merge(line.clock, self._arrivals.get(id(node), {}))
            merge(self.caller.line.clock, line.clock)

    def _stream_of(self, node: Any) -> Stream:
        number = _compat.node_number(node)
        if number >= ACCUMULATES:
            if (stream := node.metadata.get(_STREAM)) is not None:
                return stream  # type: ignore[no-any-return]
            # Functions may use a leaf without an operator.
            number = self._first_uses.get(id(node), number)
        return self.caller if number >= ACCUMULATES else self._stream_of_number(number)


class Timeline:
    """The lines of a device: its streams, those of process groups, and the host."""

    def __init__(self) -> None:
        self.host = Line(HOST, "the host")
        self.lines = [self.host]
        self._name_counts = Counter[str]()  # streams by the names they were given
        self._current: list[tuple[Stream, int | None]] = []  # entered streams, and inside which node
        # Upper bounds of node numbers, and their streams.
        self._node_streams: tuple[list[int], list[Stream]] = ([], [])
        self._backwards: list[Backward] = []  # each called by a node of the one before
        self.on_wait: Callable[[Clock], None] | None = None  # called with what the host waits for
        self._last_query: Clock | None = None  # what the host last asked about
        # Called with each operation, and the clock of what it comes after.
        self.listener: Callable[[Operation, Clock], None] | None = None
        # Called with a tensor, and with a stream that it must outlive.
        self.record_stream: Callable[[torch.Tensor, Stream], None] = lambda tensor, stream: None

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Create streams on this timeline inside the context."""
        if _active:
            raise LifecycleError("a simulation is already running; leave its context before starting another")
        _active.append(self)
        self.computation = Stream(name="the computing stream")
        try:
            yield
        finally:
            _active.remove(self)

    # The current stream

    def current(self) -> Stream:
        """Return the stream that operators are issued to."""
        node = self._node()
        if self._current and self._current[-1][1] == node:
            return self._current[-1][0]
        return self._outer if node is None else self._backwards[-1].stream

    @property
    def _outer(self) -> Stream:
        if self._backwards:
            return self._backwards[-1].caller
        return self._current[-1][0] if self._current else self.computation

    def enter(self, stream: Stream) -> None:
        self._note_nodes()
        self._current.append((stream, self._node()))

    def leave(self) -> None:
        self._note_nodes()
        self._current.pop()

    def set(self, stream: Stream) -> None:
        """Make a stream current until another is set."""
        self._note_nodes()
        if self._current:
            self._current.pop()
        self._current.append((stream, self._node()))

    # Autograd

    def note_leaf(self, leaf: torch.Tensor) -> None:
        """Record where a leaf that an operator uses gets its gradient, while a graph with it lives."""
        _compat.data_of_accumulation(leaf).setdefault(_STREAM, self.current())

    def _note_nodes(self) -> None:
        """Record a change of the current stream: nodes made since the last change are on it."""
        numbers, streams = self._node_streams
        number, current = _compat.next_node_number(), self.current()
        if not numbers or number > numbers[-1]:
            numbers.append(number)
            streams.append(current)

    def _stream_of_node(self, number: int) -> Stream:
        numbers, streams = self._node_streams
        index = bisect_right(numbers, number)
        return streams[index] if index < len(numbers) else self._outer

    def _node(self) -> int | None:
        node = _compat.autograd_node()
        return id(node) if self._backwards and self._backwards[-1].follow(node) else None

    def backward(self, engine: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap autograd's engine to follow its nodes."""

        def call(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            requested = _compat.nodes_of(args[3] or ()) if len(args) > 3 else []
            self._note_nodes()
            roots, caller = _compat.nodes_of(outputs), self.current()
            run = Backward(roots, requested, caller, self._stream_of_node, self.record_stream)
            self._backwards.append(run)
            try:
                with run.watch():
                    return engine(outputs, *args, **kwargs)
            finally:
                self._backwards.remove(run)

        return call

    # Waiting

    def line(self, name: str, group: str | None = None) -> Line:
        """Return a new line, of a stream or of the named process group."""
        if group is None:
            self._name_counts[name] += 1
            name += f" ({self._name_counts[name]})" if self._name_counts[name] > 1 else ""
        key = f"stream{self._name_counts.total()}" if group is None else group
        line = Line(len(self.lines), name, key)
        self.lines.append(line)
        return line

    def issue(self, line: Line, name: str) -> Operation:
        operation = line.issue(name, place_in_code(), self.host.clock)
        if self.listener is not None:
            self.listener(operation, dict(line.clock))
        if self._backwards:
            self._backwards[-1].record_operation()
        return operation

    def host_waits(self, clock: Clock) -> None:
        """Make the host wait for all that comes before `clock`."""
        merge(self.host.clock, clock)
        if self.on_wait is not None:
            self.on_wait(clock)

    def host_asks(self, clock: Clock) -> bool:
        """Return whether all that `clock` comes after has ended: false unless the host has waited for it.

        A second query of the same clock counts as polling, and so waits.
        """
        repeated = self._last_query == clock
        self._last_query = dict(clock)
        if repeated:
            self.host_waits(clock)
        return all(self.host.clock.get(line, 0) >= tick for line, tick in clock.items())

    def synchronize(self) -> None:
        for line in self.lines:
            self.host_waits(dict(line.clock))


_active: list[Timeline] = []


def is_active() -> bool:
    return bool(_active)


def active() -> Timeline:
    """Return the timeline of the simulated device."""
    if not _active:
        raise LifecycleError("no simulation is running: the device exists only inside `with simulated():`")
    return _active[-1]
