"""Issue each gather of parameters early, so that it runs beside the compute before it."""

from __future__ import annotations

from torch.fx import Graph, Node

from shardwise.comm.kinds import GATHER
from shardwise.graph.collectives import collectives
from shardwise.graph.passes.moves import hoist, is_of_inputs, pack


def prefetch(graph: Graph, *, ahead: int = 1) -> list[Node]:
    """Issue every gather of the graph's inputs before the wait of the gather `ahead` before it, or the first.

    The casts of its shard come along. Gathers of what the graph computes stay; gathers keep their order.

    Returns:
        The nodes that moved, in their order.
    """
    moved: list[Node] = []
    last: Node | None = None  # the gather before, of whatever kind
    waits: list[Node] = []
    for gather in collectives(graph):
        if gather.kind != GATHER:
            continue
        if is_of_inputs(gather.issue):
            if last is not None and waits and ahead > 0:
                anchor = max(last, waits[-ahead:][0].prev)
                moved += hoist([*pack(gather.issue)[0], gather.issue], anchor)
            waits.append(gather.wait)
        last = gather.issue
    return moved
