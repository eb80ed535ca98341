"""How many bytes a graph holds of unsharded parameters and of gradients, at each of its nodes."""

from __future__ import annotations

from itertools import accumulate

from torch.fx import Graph, Node

from shardwise.comm.kinds import GATHER
from shardwise.fsdp.traced import STAGED
from shardwise.graph.nodes import aliased, collectives, nbytes, operator_name, written
from shardwise.graph.passes.moves import is_of_inputs, pack, staging, tail


def held_bytes(graph: Graph) -> list[int]:
    """At each node of `graph`: gathered parameters, copies of them, gradients and what carries those.

    A gather is held from its issue to the last use of what it brings; a gradient until it is staged; a
    staging buffer until its reduction is waited for; a reduced shard until the end.
    """
    nodes = list(graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    root, last = roots(graph), {}
    for node in nodes:
        last[root[node]] = place[node]
        for one in node.all_input_nodes if aliased(node) is None or written(node) else ():
            last[root[one]] = place[node]
    spans: dict[Node, tuple[int, int, int]] = {}  # by root: first and last place, bytes

    def hold(node: Node, until: int = 0) -> None:
        made = root[node]
        spans[made] = (place[made], max(last[made], until), nbytes(made))

    for one in collectives(graph):
        if one.kind == GATHER and is_of_inputs(one.issue):
            for node in (one.issue, *tail(one)):
                hold(node)
        elif (staged := staging(one)) is not None:
            hold(one.issue)
            for node in pack(one.issue)[0]:
                if node >= staged:
                    hold(node)
            hold(one.inputs[0], until=place[one.wait])
    changes = [0] * (len(nodes) + 1)
    grads = [
        (place[root[grad]], place[node], nbytes(grad))
        for node in nodes
        for grad in (node.args[0] if operator_name(node) == STAGED else ())
    ]
    for begin, end, size in (*spans.values(), *grads):
        changes[begin] += size
        changes[end + 1] -= size
    return list(accumulate(changes))[:-1]


def roots(graph: Graph) -> dict[Node, Node]:
    """By node, the one that made the memory in which its output lies."""
    root: dict[Node, Node] = {}
    for node in graph.nodes:
        shared = aliased(node)
        root[node] = node if shared is None else root[shared]
    return root
