"""Memory of nodes: the tensor in which an output lies, and those written, by operators' schemas."""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor
from torch.fx import Node

from shardwise import _compat
from shardwise.graph.collectives import is_wait, operator_name


def aliased(node: Node) -> Node | None:
    """Return the input in whose memory a node's output lies, as its operator's schema says."""
    if node.op != "call_function":
        return None
    # The first makes a tuple's part, the others share memory though their schemas do not say so.
    if node.target is operator.getitem or is_wait(node) or operator_name(node) == "aten::_unsafe_view":
        return node.args[0] if isinstance(node.args[0], Node) else None
    schema = _compat.schema(node.target)
    infos = [made.alias_info for made in (schema.returns if schema else []) if made.alias_info]
    returned = {name for info in infos for name in info.before_set}
    for argument, nodes in _arguments(node):
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
        one
        for argument, nodes in _arguments(node)
        if argument.alias_info is not None and argument.alias_info.is_write
        for one in nodes
    ]


def read_by(node: Node) -> list[Node]:
    """Return the inputs of an operator that it does not write to."""
    targets = written(node)
    return [one for one in node.all_input_nodes if one not in targets and not _is_size(one)]


def _is_size(node: Node) -> bool:
    return not isinstance(node.meta.get("val"), (Tensor, list, tuple, type(None)))


def _arguments(node: Node) -> list[tuple[Any, list[Node]]]:
    """Return the arguments in the schema of a node's operator, and the nodes given for each."""
    schema = _compat.schema(node.target)
    if schema is None:
        return []
    found = []
    for index, argument in enumerate(schema.arguments):
        value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
        nodes = value if isinstance(value, (list, tuple)) else [value]
        found.append((argument, [one for one in nodes if isinstance(one, Node)]))
    return found
