"""Issue collectives early and wait for them late, so that they overlap compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch.fx import Graph, Node

from shardwise.comm.kinds import GATHER, REDUCE, SCATTER
from shardwise.fsdp.traced import STAGED
from shardwise.graph.nodes import Collective, aliased, collectives, nbytes, operator_name
from shardwise.graph.passes.moves import hoist, is_of_inputs, pack, sink, staging, tail, uses


def prefetch(graph: Graph, *, ahead: int = 1, reductions: Sequence[Collective] = ()) -> list[Node]:
    """Issue every gather of the graph's inputs before the wait of the gather `ahead` before it, or the first.

    The casts of its shard come along. Gathers of what the graph computes stay; gathers keep their order.

    Args:
        reductions: after whose waits gathers are issued that they would overlap.

    Returns:
        The nodes that moved, in their order.
    """
    gradients = _gradients(graph)
    moved: list[Node] = []
    issues: list[Node] = []  # of all gathers before
    waits: list[Node] = []  # of gathers of the graph's inputs
    for gather in collectives(graph):
        if gather.kind != GATHER:
            continue
        if is_of_inputs(gather.issue):
            if waits and ahead > 0:
                begin = waits[-ahead:][0]
                anchor = max(issues[-1], begin.prev)
                for reduction in reductions:
                    if reduction.issue < begin < reduction.wait < gather.issue:
                        share = reduction.bytes / (reduction.bytes + gather.bytes)
                        moved += hoist(list(reduction.waits), _amid(begin, reduction.wait, share, gradients))
                        anchor = max(anchor, *reduction.waits)
                moved += hoist([*pack(gather.issue)[0], gather.issue], anchor)
            waits.append(gather.wait)
        issues.append(gather.issue)
    return moved


def prefetch_in_turn(graph: Graph) -> list[Node]:
    """Prefetch by one gather, in turn with the reduction of the previous module's gradients.

    While a module runs backward, the previous module's gradients are in a staging buffer. In the middle of
    that backward, the graph waits for their reduction, then issues the next gather. So each overlaps a share
    of the backward in proportion to its bytes, and the graph holds one of them at a time. Progress of
    backward is measured in bytes of gradients made: parameters have equal sizes on all ranks, activations may
    not. Runs after `sink_waits`, which places waits as they belong without this pass.

    Returns:
        The nodes that moved, in their order.
    """
    return prefetch(graph, reductions=[c for c in collectives(graph) if staging(c) is not None])


def _gradients(graph: Graph) -> Counter[Node]:
    """Return the bytes of staged gradients, by the node whose memory they lie in."""
    sizes: Counter[Node] = Counter()
    for node in graph.nodes:
        for grad in node.args[0] if operator_name(node) == STAGED else ():
            size = nbytes(grad)
            while (source := aliased(grad)) is not None:
                grad = source
            sizes[grad] += size
    return sizes


def _amid(begin: Node, end: Node, share: float, gradients: Counter[Node]) -> Node:
    """Return the first node from `begin` to `end` by which this share of the gradients is made."""
    between = [begin]
    while between[-1].next is not end:
        between.append(between[-1].next)
    remaining = share * sum(gradients[node] for node in between)
    for node in between:
        remaining -= gradients[node]
        if remaining <= 0:
            return node
    return between[-1]


def sink_waits(graph: Graph) -> list[Node]:
    """Move every wait right before its first use, with the nodes that only lay out its result.

    A reduction is issued right after the last gradient that it takes. If nothing else in the graph uses its
    result, its wait goes before the next reduction's staging buffer is made, so that one exists at a time. If
    no gradients are staged, the wait goes after the next issue: at most two buffers of gradients are then in
    flight. An all-reduce of a reduce-scatter's result also goes after the next reduce-scatter.

    Returns:
        The nodes that moved, one after another; a node may move twice.
    """
    moved: list[Node] = []
    before = [node for node in graph.nodes if node.op == "placeholder"][-1:]
    for reduction in collectives(graph):  # as soon as its inputs are ready, but not before the previous one
        if reduction.kind == SCATTER:
            layout, starts = pack(reduction.issue)
            moved += hoist([*layout, reduction.issue], max([*starts, *before]))
            before.append(reduction.issue)
    # An all-reduce lies between a reduce-scatter's wait and its own wait: it must make room, then follow.
    for kind in (REDUCE, SCATTER, REDUCE):
        same_kind = [c for c in collectives(graph) if c.kind == kind]
        for i, collective in enumerate(same_kind):
            moved += _sink(collective, same_kind[i + 1] if i + 1 < len(same_kind) else None)
    for collective in collectives(graph):
        if collective.kind not in (REDUCE, SCATTER):
            moved += _sink(collective, None)
    return moved


def _sink(collective: Collective, following: Collective | None) -> list[Node]:
    chain = tail(collective)
    anchors = uses(chain)[:1]
    if following is not None and following.issue not in chain:
        anchors.append(staging(following) or following.issue.next)
    return sink(chain, min(anchors)) if anchors else []
