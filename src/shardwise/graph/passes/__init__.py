"""Passes over fx graphs of operators: they move, merge and bound collectives.

Each is a function that changes a graph in place and returns what it moved. Passes decide from the graph
alone, so graphs equal on all ranks stay equal, and never change the order of collectives of one kind.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from torch.fx import Graph

from shardwise.errors import ShardingError
from shardwise.graph.passes.bound_unsharded import bound_unsharded, saved_gathers
from shardwise.graph.passes.check_order import check_order, order_text
from shardwise.graph.passes.merge_small import merge_small
from shardwise.graph.passes.prefetch import prefetch, prefetch_in_turn, sink_waits

__all__ = [
    "Passes",
    "bound_unsharded",
    "check_order",
    "merge_small",
    "order_text",
    "prefetch",
    "prefetch_in_turn",
    "saved_gathers",
    "sink_waits",
]


@dataclass(frozen=True)
class Passes:
    """The passes that `shardwise.compile` runs, in the order in which they build on each other.

    Attributes:
        prefetch: how many gathers ahead parameters are gathered; 0: where they are needed. None: one, in turn
            with reductions.
        max_unsharded: the most groups gathered at a time; None: as many as `prefetch` takes.
        merge_bytes: size up to which collectives are merged; 0: merge none.

    Raises:
        ShardingError: values that are not whole numbers, or too small.
    """

    prefetch: int | None = None
    max_unsharded: int | None = None
    merge_bytes: int = 0
    # For each forward graph: the names of its outputs, and the gathers of those that are gathered.
    _forwards: deque[tuple[set[str], dict[str, str]]] = field(
        default_factory=lambda: deque(maxlen=64), init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        for name, value, minimum in (
            ("prefetch", self.prefetch, 0),
            ("max_unsharded", self.max_unsharded, 1),
            ("merge_bytes", self.merge_bytes, 0),
        ):
            if value is not None and (not isinstance(value, int) or value < minimum):
                raise ShardingError(f"{name} is {value!r}; expected a whole number of {minimum} or more")

    def __call__(self, graph: Graph) -> None:
        """Run the passes over a forward or backward graph of operators, in place.

        Raises ShardingError if the graph itself needs more than `max_unsharded` groups at a time.
        """
        returned = graph.output_node().args[0]  # names before the passes, which may change them
        names = [getattr(v, "name", "") for v in returned] if isinstance(returned, (list, tuple)) else []
        if self.merge_bytes:
            merge_small(graph, nbytes=self.merge_bytes)
        if self.prefetch is not None:
            prefetch(graph, ahead=self.prefetch)
        sink_waits(graph)
        if self.prefetch is None:
            prefetch_in_turn(graph)
        if self.max_unsharded is not None:
            # A backward graph takes its forward's outputs, by the same names, and tangents.
            inputs = {node.name for node in graph.find_nodes(op="placeholder")}
            values = {name for name in inputs if not name.startswith("tangents_")}
            match = (s for outputs, s in reversed(self._forwards) if values != inputs and values <= outputs)
            bound_unsharded(graph, limit=self.max_unsharded, saved=next(match, {}))
            if saved := saved_gathers(graph):
                self._forwards.append((set(names), {names[place]: name for place, name in saved.items()}))

    @property
    def uuid(self) -> str:
        """Hash of the settings and source of these passes and `recompute`, for caches of compiled graphs."""
        folder = Path(__file__).parent
        helpers = [folder.parent / name for name in ("nodes.py", "step.py")]
        sources = [*sorted(folder.glob("*.py")), *helpers]
        text = b"".join(source.read_bytes() for source in sources) + repr(self).encode()
        return hashlib.sha256(text).hexdigest()
