"""Recompute in one graph's backward what a checkpointed region of its forward computed.

A compiler that splits forward from backward recomputes what lies in checkpointed regions: the gathers of
sharded modules that free their parameters after forward, and what users checkpoint. A graph with both in it
is not split, and would keep all of that from forward to backward. Tracing marks what lies in such a region
and where backward begins; here nodes so marked are copied in front of their first use in backward::

    gather -> wait -> views -> linear ... | loss | ... gather' -> wait' -> views' -> gradient of linear

Random numbers are not drawn again, and views of what is recomputed are taken again with it.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from shardwise import _compat
from shardwise.graph.memory import is_view

_AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def recompute(graph: Graph) -> list[Node]:
    """Let backward compute again what forward's checkpointed regions computed; returns the copies.

    Does nothing for a graph that has no backward in it. What the graph returns is not computed again.
    """
    nodes = list(graph.nodes)
    start = next((i for i, node in enumerate(nodes) if node.meta.get("autograd_backward")), len(nodes))
    place = {node: i for i, node in enumerate(nodes)}
    again: set[Node] = set()
    for node in nodes[:start]:
        # A view of what is computed again would keep it.
        if _is_marked(node) or (is_view(node) and all(one in again for one in node.all_input_nodes)):
            again.add(node)
    copies: dict[Node, Node] = {}
    for node in nodes[start:]:
        if node.op == "output":
            continue
        needed = [one for one in node.all_input_nodes if one in again]
        for one in sorted(_missing(needed, again, copies), key=place.__getitem__):
            with graph.inserting_before(node):
                copies[one] = graph.node_copy(one, lambda source: copies.get(source, source))
        for one in needed:
            node.replace_input_with(one, copies[one])
    return list(copies.values())


def _missing(needed: list[Node], again: set[Node], copies: dict[Node, Node]) -> set[Node]:
    """Return the nodes that `needed` is computed from and that have no copy yet."""
    found: set[Node] = set()
    todo = list(needed)
    while todo:
        node = todo.pop()
        if node in again and node not in copies and node not in found:
            found.add(node)
            todo += node.all_input_nodes
    return found


def _is_marked(node: Node) -> bool:
    """Return whether `node` lies in a checkpointed region and may be computed twice."""
    if node.op != "call_function" or node.meta.get("recompute") not in _AGAIN:
        return False
    schema = _compat.schema(node.target)
    if schema is None:
        return node.target is operator.getitem
    return not schema.is_mutable and torch.Tag.nondeterministic_seeded not in node.target.tags  # type: ignore[union-attr]
