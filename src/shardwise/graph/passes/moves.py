"""Moves in a graph that do not change what it computes.

AOTAutograd's graphs are functional except for a few writes to inputs, so a node may be anywhere between its
inputs and its users; no move here crosses an operator that writes. A collective moves together with the nodes
that only lay out memory around it: casts, views, copies, divisions (`is_layout`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from torch.fx import Node

from shardwise import _compat
from shardwise.comm.kinds import REDUCE
from shardwise.fsdp.traced import STAGED
from shardwise.graph.nodes import Collective, kind_of, operator_name

_LAYOUT = {
    *("view", "_unsafe_view", "reshape", "as_strided", "alias", "detach", "expand", "squeeze", "unsqueeze"),
    *("t", "permute", "transpose", "slice", "select", "split", "split_with_sizes", "unbind", "chunk"),
    *("cat", "stack", "clone", "contiguous", "_to_copy", "constant_pad_nd", "div", "lift_fresh_copy"),
    *("full", "zeros", "empty", "new_zeros", "new_empty", "full_like", "zeros_like", "split_with_sizes_copy"),
}


def is_layout(node: Node) -> bool:
    """Return whether `node` only casts, views, copies, fills or divides."""
    if node.target is operator.getitem:
        return True
    name = operator_name(node)
    space, _, short = name.partition("::")
    return (space == "aten" and short in _LAYOUT) or name in ("prims::convert_element_type", STAGED)


def writes(node: Node) -> bool:
    """Return whether `node` changes memory that other nodes may read."""
    if node.op != "call_function":
        return node.op in ("call_module", "call_method")
    schema = _compat.schema(node.target)
    if schema is None:
        return "mutation" in str(node.target)  # of operators without a schema, Triton kernels write
    return bool(schema.is_mutable)


def pack(issue: Node) -> tuple[list[Node], list[Node]]:
    """Return the nodes that lay out a collective's input, in graph order, and the nodes they start from."""
    layout: dict[Node, None] = {}
    starts: dict[Node, None] = {}
    todo = list(issue.all_input_nodes)
    while todo:
        node = todo.pop()
        if node in layout or node in starts:
            continue
        if is_layout(node):
            layout[node] = None
            todo += node.all_input_nodes
        else:
            starts[node] = None
    return sorted(layout), sorted(starts)


def staging(reduction: Collective) -> Node | None:
    """Return the node that copies gradients into the staging buffer that `reduction` reduces, or None."""
    copies = [n for n in pack(reduction.issue)[0] if operator_name(n) == STAGED] if reduction.op else []
    return copies[-1] if copies else None


def is_of_inputs(issue: Node) -> bool:
    """Return whether a collective sends the graph's inputs, and nothing that the graph computes."""
    return all(node.op in ("placeholder", "get_attr") for node in pack(issue)[1])


def tail(collective: Collective) -> list[Node]:
    """Return the waits for a collective and the nodes that only lay out its result, in graph order.

    The tail of a reduction includes, as its end, an all-reduce of the result.
    """
    nodes = {*collective.waits}
    for node in collective.issue.users:
        if node.target is operator.getitem:
            nodes.add(node)
    todo = list(nodes)
    while todo:
        for user in todo.pop().users:
            if user in nodes or not all(node in nodes for node in user.all_input_nodes):
                continue
            if is_layout(user):
                todo.append(user)
            elif kind_of(user) != REDUCE or not collective.op:
                continue
            nodes.add(user)
    return sorted(nodes)


def uses(nodes: Iterable[Node]) -> list[Node]:
    """Return the nodes outside `nodes` that use one of them, in graph order."""
    inside = set(nodes)
    return sorted({user for node in inside for user in node.users} - inside)


def sink(nodes: list[Node], anchor: Node) -> list[Node]:
    """Move the nodes that are before `anchor` to right before it; return them in graph order.

    They do not cross an operator that writes.
    """
    early = [node for node in nodes if node < anchor]
    if not early:
        return []
    anchor = first_write(early[0], anchor) or anchor
    early = [node for node in early if node < anchor]
    if all(node.next is behind for node, behind in pairwise([*early, anchor])):
        return []
    for node in early:
        anchor.prepend(node)
    return early


def hoist(nodes: list[Node], anchor: Node) -> list[Node]:
    """Move the nodes that are after `anchor` to right after it; return them in graph order.

    They do not cross an operator that writes.
    """
    late = [node for node in nodes if anchor < node]
    if not late:
        return []
    while (write := first_write(anchor, late[-1])) is not None:
        anchor = write
    late = [node for node in late if anchor < node]
    while late and late[0] is anchor.next:  # these need not move
        anchor = late.pop(0)
    move_behind(late, anchor)
    return late


def move_behind(nodes: list[Node], anchor: Node) -> Node:
    """Move `nodes` to right after `anchor`, in their order; return the last of them, or `anchor`."""
    for node in nodes:
        anchor.append(node)
        anchor = node
    return anchor


def first_write(start: Node, end: Node) -> Node | None:
    """Return the first node after `start` and before `end` that writes to memory."""
    node = start.next
    while node is not end and node.op != "output":
        if writes(node):
            return node
        node = node.next
    return None


def label(collective: Collective) -> str:
    """Name a collective for a user: by the module that first uses its result, else by its inputs."""
    for user in uses(tail(collective)):
        stack: Any = user.meta.get("nn_module_stack")
        if stack:
            return f"{collective.issue.name} (for {list(stack.values())[-1][0]})"
    starts = ", ".join(node.name for node in pack(collective.issue)[1])
    return f"{collective.issue.name} (of {starts})"
