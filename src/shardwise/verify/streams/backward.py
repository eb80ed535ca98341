"""The streams on which autograd's engine runs backward nodes, and what they wait for.

    a node             runs on its forward's stream, after the nodes that give it gradients; the first nodes
                       run after what the caller of backward issued
    a leaf's gradient  is accumulated on the stream on which the graph first used the leaf
    sums               gradients from several nodes for one node are added on the receiving node's stream
    memory             of a gradient for a node on another stream is not reused until that stream has used it
    the caller         continues after the streams of leaves, and of tensors whose gradients it requested

Source of the rules: the engine's notes on streaming backwards, and its `InputBuffer`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from shardwise import _compat
from shardwise.verify.streams.clocks import Clock, merge

ACCUMULATES = 1 << 62  # first number of nodes that accumulate gradients


Stream = Any  # of `streams`, which imports this module


class Backward:
    """One call of the engine."""

    def __init__(
        self,
        roots: Sequence[Any],
        requested: Sequence[Any],
        caller: Stream,
        stream_of: Callable[[int], Stream],
        record_stream: Callable[[Tensor, Stream], None],
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
            number = self._first_uses.get(id(node), number)
        return self.caller if number >= ACCUMULATES else self._stream_of_number(number)
