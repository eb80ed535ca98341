"""Limit how many groups of parameters are gathered at a time."""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Graph, Node

from shardwise.comm.kinds import GATHER
from shardwise.errors import ShardingError, here
from shardwise.graph.nodes import Collective, collectives
from shardwise.graph.passes.moves import (
    is_layout,
    is_of_inputs,
    label,
    move_behind,
    pack,
    sink,
    tail,
    uses,
    writes,
)


def bound_unsharded(graph: Graph, *, limit: int, saved: Mapping[str, str] | None = None) -> list[Node]:
    """Delay gathers until fewer than `limit` others are held, each counted from issue to last use.

    Values that a graph returns, such as parameters that stay gathered until backward, are held to its end.
    Gathers of values that the graph computes are not counted and stay; gathers keep their order. A merged
    gather counts as one.

    Args:
        saved: for a backward graph, the inputs that forward gathered, by name, each with a label of its
            gather (`saved_gathers` of the forward graph); each is held until its last use.

    Returns:
        The nodes that moved, in their order.

    Raises:
        ShardingError: the graph itself uses more than `limit` at a time. Names the gathers held where no more
            fit, and the one needed there. Nothing has moved.
    """
    gathers = [c for c in collectives(graph) if c.kind == GATHER]
    moved: list[Node] = []
    for index, (gather, anchor) in enumerate(
        zip(gathers, _plan(graph, gathers, limit, saved or {}), strict=True)
    ):
        overtakes = index > 0 and gather.issue < gathers[index - 1].issue  # which has just been delayed
        if gather.issue <= anchor or overtakes:
            if index:
                previous = gathers[index - 1]
                anchor = max(anchor, previous.issue if uses(tail(previous)) else last_use(previous))
            moved += _delay(gather, anchor)
    return moved


def saved_gathers(graph: Graph) -> dict[int, str]:
    """Return the gather of each gathered parameter that a graph returns, by its place among the outputs."""
    returned = graph.output_node().args[0]
    places = enumerate(returned if isinstance(returned, (list, tuple)) else [returned])
    labels = {
        node: label(gather)
        for gather in collectives(graph)
        if gather.kind == GATHER and is_of_inputs(gather.issue)
        for node in [gather.issue, *tail(gather)]
    }
    return {place: labels[node] for place, node in places if isinstance(node, Node) and node in labels}


def _ends_of_saved(graph: Graph, saved: Mapping[str, str]) -> dict[Collective | str, Node]:
    """Return, by gather, the last use of the inputs that forward saved from it."""
    chains: dict[Collective | str, list[Node]] = {}
    for node in graph.find_nodes(op="placeholder"):
        if node.name in saved:
            chains.setdefault(saved[node.name], []).append(node)
    for chain in chains.values():
        for node in chain:  # which grows
            chain += [user for user in node.users if is_layout(user) and user not in chain]
    return {name: max([*chain, *uses(chain)]) for name, chain in chains.items()}


def last_use(gather: Collective) -> Node:
    """Return the last node that uses a gather's result; the graph's output if it is returned."""
    chain = [gather.issue, *tail(gather)]
    return max([*chain, *uses(chain)])


def _plan(graph: Graph, gathers: list[Collective], limit: int, saved: Mapping[str, str]) -> list[Node]:
    """Return, by gather, the node after which it may be issued; its present place if that is later."""
    planned: list[Node] = []
    held = _ends_of_saved(graph, saved)  # with their last uses
    for gather, deadline in zip(gathers, _deadlines(graph, gathers), strict=True):
        anchor = max([gather.issue.prev, *planned[-1:]])
        if is_of_inputs(gather.issue):
            while len(held := {g: last for g, last in held.items() if anchor < last}) >= limit:
                anchor = min(held.values())
                if anchor >= deadline:
                    names = ", ".join(item if isinstance(item, str) else label(item) for item in held)
                    raise ShardingError(
                        f"{here()}: no more than {limit} groups of parameters shall be gathered at a time,"
                        f" but where {label(gather)} is needed the graph still uses {names}; allow"
                        f" {len(held) + 1} or more, or shard these modules such that each frees its"
                        " parameters (reshard_after_forward=True) before the next"
                    )
            dropped = gather.issue <= anchor and not uses(tail(gather))
            held[gather] = anchor if dropped else last_use(gather)
        planned.append(anchor)
    return planned


def _deadlines(graph: Graph, gathers: list[Collective]) -> list[Node]:
    """Return, by gather, the first node that needs it or a later gather, as gathers keep their order."""
    end = graph.output_node()
    written = [node for node in graph.nodes if writes(node)]
    deadlines: list[Node] = []
    for gather in reversed(gathers):
        if is_of_inputs(gather.issue):
            end = min([end, *uses(tail(gather))[:1], *[node for node in written if gather.issue < node][:1]])
        else:
            end = min(end, gather.issue)  # which stays
        deadlines.append(end)
    return deadlines[::-1]


def _delay(gather: Collective, anchor: Node) -> list[Node]:
    late = {gather.issue}
    for node in reversed(pack(gather.issue)[0]):
        if all(user in late for user in node.users):
            late.add(node)
    chain = tail(gather)
    moved = sorted(late)
    move_behind(moved, anchor)
    first = uses(chain)[:1]
    early = [node for node in chain if not first or node < gather.issue]
    move_behind(early, gather.issue)
    return [*moved, *early, *(sink(chain, first[0]) if first else [])]
