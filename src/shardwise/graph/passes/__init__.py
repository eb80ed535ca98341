"""Passes over fx graphs of operators: when collectives are issued and waited for, how many, how large.

Each is a function that changes a graph in place and returns what it moved. They decide from the graph alone,
so ranks with equal graphs make equal ones of them, and never change the order of collectives of one kind.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.fx import Graph

from shardwise import _compat
from shardwise.errors import ShardingError
from shardwise.graph.passes.bound_unsharded import bound_unsharded, most_unsharded
from shardwise.graph.passes.check_order import check_order, order_text
from shardwise.graph.passes.merge_small import merge_small
from shardwise.graph.passes.prefetch import prefetch
from shardwise.graph.passes.sink_waits import sink_waits

__all__ = [
    "Passes",
    "bound_unsharded",
    "check_order",
    "merge_small",
    "most_unsharded",
    "order_text",
    "prefetch",
    "sink_waits",
]


@dataclass(frozen=True)
class Passes:
    """The passes that `shardwise.compile` runs, in the order in which they build on each other.

    Attributes:
        prefetch: how many gathers ahead parameters are gathered; 0: where they are needed.
        max_unsharded: how many groups may be gathered at a time; None: as many as that takes.
        merge_bytes: collectives are merged up to this size; 0: none is.

    Raises:
        ShardingError: numbers that say nothing.
    """

    prefetch: int = 1
    max_unsharded: int | None = None
    merge_bytes: int = 0

    def __post_init__(self) -> None:
        for name, value, least in (
            ("prefetch", self.prefetch, 0),
            ("max_unsharded", self.max_unsharded, 1),
            ("merge_bytes", self.merge_bytes, 0),
        ):
            if value is not None and value < least:
                raise ShardingError(f"{name} is {value!r}; expected a whole number of {least} or more")

    def __call__(self, graph: Graph) -> None:
        """Run them over a forward or backward graph of operators, in place.

        Raises ShardingError if the graph itself needs more than `max_unsharded` groups at a time.
        """
        if self.merge_bytes:
            merge_small(graph, nbytes=self.merge_bytes)
        prefetch(graph, ahead=self.prefetch)
        sink_waits(graph)
        if self.max_unsharded is not None:
            bound_unsharded(graph, limit=self.max_unsharded)

    def inductor_options(self) -> dict[str, Any]:
        """What runs them over inductor's graphs, behind its own passes, and keeps what they made."""
        return {
            "post_grad_custom_post_pass": _compat.inductor_pass(self, self.uuid),
            "reorder_for_peak_memory": False,  # which would move collectives, each rank as it sees fit
        }

    @property
    def uuid(self) -> str:
        """What these passes do, for caches of compiled graphs: their settings and their source."""
        here = Path(__file__).parent
        sources = [*sorted(here.glob("*.py")), here.parent / "collectives.py"]
        text = b"".join(source.read_bytes() for source in sources) + repr(self).encode()
        return hashlib.sha256(text).hexdigest()
