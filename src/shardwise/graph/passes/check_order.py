"""Checks that all ranks' graphs issue the same collectives in the same order.

Ranks with different graphs would wait for each other forever, or exchange garbage of equal size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

import torch
from torch.distributed import ProcessGroup
from torch.fx import Graph, GraphModule

from shardwise.comm.agree import agree
from shardwise.graph.nodes import Collective, collectives


def order_text(graphs: Graph | Iterable[Graph], *, groups: Sequence[str] | None = None) -> str:
    """Return the collectives of `graphs` in order, a line each, equal on ranks that communicate the same way.

    A group is named by its size, as its name differs from rank to rank.

    Args:
        graphs: one, or several that run one after another.
        groups: names of the process groups whose ranks must agree about sizes; None: all. Collectives over
            other groups may carry different amounts on these ranks, so only their kind is listed.
    """
    listed = [c for graph in ([graphs] if isinstance(graphs, Graph) else graphs) for c in collectives(graph)]
    return "\n".join(f"{i}. {_describe(c, groups)}" for i, c in enumerate(listed, 1))


def graphs_in(module: GraphModule) -> list[Graph]:
    """Return the graphs of `module` and of the graphs it calls, each once, in order of their first call.

    Dynamo's graphs hold the bodies of checkpoints and autograd functions as such inner graphs.
    """
    graphs: dict[Graph, None] = {module.graph: None}
    for node in module.graph.nodes:
        if node.op in ("get_attr", "call_module"):
            inner = attrgetter(str(node.target))(module)
            if isinstance(inner, GraphModule):
                graphs |= dict.fromkeys(graphs_in(inner))
    return list(graphs)


def check_order(
    graphs: Graph | Iterable[Graph] | str, *, groups: Sequence[ProcessGroup], device: torch.device
) -> None:
    """Compare the collectives of this rank's graphs with those of the ranks of `groups`.

    Collective over each group in turn.

    Args:
        graphs: as of `order_text`, or what it returned for them.
        groups: process groups to compare over.
        device: the device of the groups' backends.

    Raises:
        RankMismatchError: on every rank of the groups, naming the first difference: ranks' graphs differ.
    """
    names = [group.group_name for group in groups]
    agree(
        graphs if isinstance(graphs, str) else order_text(graphs, groups=names),
        group=groups,
        subject="the collectives of a compiled graph, in order",
        device=device,
        advice="Build the same model, with the same fully_shard calls in the same order, on every rank.",
    )


def _describe(collective: Collective, groups: Sequence[str] | None) -> str:
    words = f"{collective.kind} by {collective.op}" if collective.op else collective.kind
    if groups is None or collective.group in groups:
        words += f" of {collective.bytes} bytes, {str(collective.dtype).removeprefix('torch.')},"
    return f"{words} over {collective.ranks or '?'} ranks"
