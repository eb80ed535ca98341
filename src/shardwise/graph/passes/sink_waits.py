"""Wait for collectives late and issue reductions early, so that they run beside compute."""

from __future__ import annotations

from torch.fx import Graph, Node

from shardwise.comm.kinds import REDUCE, SCATTER
from shardwise.graph.collectives import Collective, collectives
from shardwise.graph.passes.moves import hoist, pack, sink, staging, tail, uses


def sink_waits(graph: Graph) -> list[Node]:
    """Put every wait right before its first use; what only lays out its result comes along.

    A reduction is issued right behind the last gradient it takes. The wait for one that nothing else in the
    graph uses goes before the next one's staging buffer is made, so that there is one at a time; or behind
    the next issue where no gradients are staged: at most two buffers of gradients are then in flight. An
    all-reduce of what a reduce-scatter leaves goes behind the next reduce-scatter as well.

    Returns:
        The nodes that moved, one after another; a node may move twice.
    """
    moved = issue_reductions(graph)
    # An all-reduce stands between a reduce-scatter's wait and its own: that must make room before and follow.
    for kind in (REDUCE, SCATTER, REDUCE):
        found = [one for one in collectives(graph) if one.kind == kind]
        for i, one in enumerate(found):
            moved += _sink(one, found[i + 1] if i + 1 < len(found) else None)
    for one in collectives(graph):
        if one.kind not in (REDUCE, SCATTER):
            moved += _sink(one, None)
    return moved


def issue_reductions(graph: Graph) -> list[Node]:
    """Issue every reduce-scatter as early as its inputs are there, and not before the one before it."""
    moved: list[Node] = []
    heads = [node for node in graph.nodes if node.op == "placeholder"][-1:]
    last: Node | None = None
    for one in collectives(graph):
        if one.kind != SCATTER:
            continue
        layout, starts = pack(one.issue)
        anchor = max([*starts, *heads, *([] if last is None else [last])])
        moved += hoist([*layout, one.issue], anchor)
        last = one.issue
    return moved


def _sink(one: Collective, after: Collective | None) -> list[Node]:
    chain = tail(one)
    anchors = uses(chain)[:1]
    if after is not None and after.issue not in chain:
        anchors.append(staging(after) or after.issue.next)
    return sink(chain, min(anchors)) if anchors else []
