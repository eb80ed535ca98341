"""Nodes of an fx graph: collectives, where they are issued and waited for, their size; and aliased memory.

In the graphs of operators that a compiler makes of a model, a collective is a node that issues it and a wait
for each of its outputs::

    gather = all_gather_into_tensor(shard)      gather = all_gather_into_tensor_coalesced([a, b])
    full = wait_tensor(gather)                  full_a = wait_tensor(gather[0])
                                                full_b = wait_tensor(gather[1])

Nodes between issue and wait overlap the collective. Code that reads a graph or moves its nodes finds
collectives with this module.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from shardwise import _compat
from shardwise.comm.graphs import group_of
from shardwise.comm.kinds import FUNCTIONAL, GATHER, REDUCE, SCATTER, WAIT, form_of
from shardwise.errors import ShardingError

_KINDS = (GATHER, SCATTER, REDUCE, "all_to_all", "broadcast")
_WAIT = f"{FUNCTIONAL}::{WAIT}"


@dataclass(frozen=True)
class Collective:
    """One collective of a graph."""

    kind: str  # "all_gather", "reduce_scatter", "all_reduce", "all_to_all" or "broadcast"
    issue: Node  # starts it
    waits: tuple[Node, ...]  # in graph order; one for each tensor if it is coalesced; none if nothing waits
    group: str  # the name of its process group, which differs from rank to rank
    ranks: int  # size of the group; 0 if the operator does not give it and the group is unknown here
    op: str  # of a reduction, "sum" or "avg" and so on; else ""
    dtype: torch.dtype  # of its (first) tensor
    bytes: int  # of its whole buffer: an all-gather's output, the input of all others

    @property
    def wait(self) -> Node:
        """The first node that waits for it; the issue itself if none does."""
        return self.waits[0] if self.waits else self.issue

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The tensors it sends: one, or several if it is coalesced."""
        sent: Any = self.issue.args[0]
        return (sent,) if isinstance(sent, Node) else tuple(sent)


def collectives(graph: Graph) -> list[Collective]:
    """List the collectives of `graph` in the order of issue, except sends and receives.

    Works on forward and backward graphs of AOTAutograd, and on inductor's versions of them before it
    generates code. Nodes need the fake tensors that tracing leaves in `meta`.

    Raises:
        ShardingError: a collective whose input or output has no known shape.
    """
    place = {node: i for i, node in enumerate(graph.nodes)}
    return [_collective(node, kind, place) for node in graph.nodes if (kind := kind_of(node)) in _KINDS]


def kind_of(node: Node) -> str | None:
    """Return the kind of collective that `node` issues, or None if it issues none."""
    namespace, _, name = operator_name(node).partition("::")
    form = form_of(namespace, name) if namespace == FUNCTIONAL else None
    return None if form is None else form.kind


def is_wait(node: Node) -> bool:
    return operator_name(node) == _WAIT


def is_coalesced(node: Node) -> bool:
    """Return whether the collective that `node` issues takes a list of tensors."""
    return not isinstance(node.args[0], Node)


def operator_name(node: Node) -> str:
    """Return `"namespace::name"` of the operator that a node calls, without overload, or ""."""
    target: Any = node.target
    if node.op != "call_function":
        return ""
    if _compat.is_operator(target):
        return str(target.name()).partition(".")[0]
    # Graphs of Dynamo, before AOTAutograd, name no overload.
    return str(target).replace(".", "::", 1) if hasattr(target, "overloads") else ""


def nbytes(node: Node) -> int:
    """Return the bytes of a node's tensor or tensors; sizes that vary count as they were traced."""
    return sum(_numel(value) * value.element_size() for value in values(node))


def values(node: Node) -> list[Tensor]:
    """Return the fake tensors of a node's outputs, as tracing left them.

    Raises ShardingError if it left none.
    """
    value = node.meta.get("val", node.meta.get("example_value"))
    tensors = [value] if isinstance(value, Tensor) else value
    if not isinstance(tensors, (list, tuple)) or not all(isinstance(item, Tensor) for item in tensors):
        raise ShardingError(
            f"node {node.name} ({node.target}) has no fake tensor in its meta, but {value!r}; shardwise.graph"
            " takes graphs as AOTAutograd or inductor leave them"
        )
    return list(tensors)


def _collective(issue: Node, kind: str, place: dict[Node, int]) -> Collective:
    arguments = arguments_of(issue)
    inputs = arguments["inputs"] if is_coalesced(issue) else [arguments["input"]]
    outputs = [issue]
    if is_coalesced(issue):
        outputs = [user for user in issue.users if user.target is operator.getitem]
    waits = [user for node in outputs for user in node.users if is_wait(user)]
    group = str(arguments["group_name"])
    pg = None if "group_size" in arguments else _compat.group_known_as(group)  # an all-reduce has no size
    return Collective(
        kind,
        issue,
        tuple(sorted(waits, key=place.__getitem__)),
        group_of(group),
        ranks=int(arguments.get("group_size", 0 if pg is None else pg.size())),
        op=str(arguments.get("reduce_op", "")),
        dtype=values(inputs[0])[0].dtype,
        bytes=nbytes(issue) if kind == GATHER else sum(nbytes(node) for node in inputs),
    )


def arguments_of(node: Node) -> dict[str, Any]:
    """Return the arguments of a node's operator by name, with defaults, in the order of its schema."""
    target: Any = node.target
    schema: Any = _compat.schema(target if _compat.is_operator(target) else target.default)
    defaults = {argument.name: argument.default_value for argument in schema.arguments}
    return {**defaults, **dict(zip(defaults, node.args, strict=False)), **node.kwargs}


def _numel(value: Tensor) -> int:
    numel: Any = value.numel()
    return int(numel.node.hint or 0) if isinstance(numel, torch.SymInt) else int(numel)


def aliased(node: Node) -> Node | None:
    """Return the input in whose memory a node's output lies, as its operator's schema says."""
    if node.op != "call_function":
        return None
    # getitem takes part of a tuple; the others share memory though their schemas do not say so.
    if node.target is operator.getitem or is_wait(node) or operator_name(node) == "aten::_unsafe_view":
        return node.args[0] if isinstance(node.args[0], Node) else None
    schema = _compat.schema(node.target)
    infos = [value.alias_info for value in (schema.returns if schema else []) if value.alias_info]
    returned = {name for info in infos for name in info.before_set}
    for argument, nodes in _nodes_by_argument(node):
        info = argument.alias_info
        if info and nodes and (not info.is_write or returned & set(info.before_set)):
            return nodes[0]
    return None


def is_view(node: Node) -> bool:
    """Return whether a node computes nothing: its output is an input's memory, unchanged."""
    return aliased(node) is not None and not written(node)


def written(node: Node) -> list[Node]:
    """Return the inputs that a node's operator writes to."""
    return [
        source
        for argument, nodes in _nodes_by_argument(node)
        if argument.alias_info is not None and argument.alias_info.is_write
        for source in nodes
    ]


def _nodes_by_argument(node: Node) -> list[tuple[Any, list[Node]]]:
    """Return the arguments in the schema of a node's operator, and the nodes given for each."""
    schema = _compat.schema(node.target)
    if schema is None:
        return []
    given = [x if isinstance(x, (list, tuple)) else [x] for x in arguments_of(node).values()]
    nodes = ([item for item in items if isinstance(item, Node)] for items in given)
    return list(zip(schema.arguments, nodes, strict=True))
