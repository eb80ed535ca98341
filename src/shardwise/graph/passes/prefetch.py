"""Issue each gather of parameters early, so that it runs beside the compute before it."""

from __future__ import annotations

from collections import Counter

from torch.fx import Graph, Node

from shardwise.comm.kinds import GATHER
from shardwise.fsdp.traced import STAGED
from shardwise.graph.collectives import Collective, collectives, nbytes, operator_name
from shardwise.graph.memory import aliased
from shardwise.graph.passes.moves import hoist, is_of_inputs, pack, staging


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


def prefetch_in_turn(graph: Graph) -> list[Node]:
    """Prefetch by one gather, in turn with reductions of the gradients of the module before.

    While a module runs backward, those lie in a staging buffer. Their reduction is waited for amid that
    backward, and the next gather issued there: so both have a share of it by their bytes to run beside, and
    the graph holds one of them at a time. Progress of backward is measured by the bytes of gradients that
    are there: sizes of parameters are equal on all ranks, as those of activations may not be. Runs behind
    `sink_waits`, which puts waits where they belong without it.

    Returns:
        The nodes that moved, in their order.
    """
    found = collectives(graph)
    reductions = [one for one in found if staging(one) is not None]
    made = _gradients(graph)
    moved: list[Node] = []
    last: Node | None = None
    before: Collective | None = None
    for gather in found:
        if gather.kind != GATHER:
            continue
        if is_of_inputs(gather.issue):
            if last is not None and before is not None:
                anchor = max(last, before.wait.prev)
                for one in reductions:
                    if one.issue < before.wait < one.wait < gather.issue:
                        share = one.bytes / (one.bytes + gather.bytes)
                        moved += hoist(list(one.waits), _amid(before.wait, one.wait, share, made))
                        anchor = max(anchor, *one.waits)
                moved += hoist([*pack(gather.issue)[0], gather.issue], anchor)
            before = gather
        last = gather.issue
    return moved


def _gradients(graph: Graph) -> Counter[Node]:
    """Return the bytes of staged gradients, by the node whose memory they lie in."""
    found: Counter[Node] = Counter()
    for node in graph.nodes:
        for grad in node.args[0] if operator_name(node) == STAGED else ():
            size = nbytes(grad)
            while (source := aliased(grad)) is not None:
                grad = source
            found[grad] += size
    return found


def _amid(begin: Node, end: Node, share: float, made: Counter[Node]) -> Node:
    """Return the first node from `begin` to `end` by which this share of the gradients is there."""
    between = [begin]
    while between[-1].next is not end:
        between.append(between[-1].next)
    left = share * sum(made[node] for node in between)
    for node in between:
        left -= made[node]
        if left <= 0:
            return node
    return between[-1]
