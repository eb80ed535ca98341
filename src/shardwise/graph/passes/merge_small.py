"""Merge several small collectives, each of which costs the same latency, into one.

    shard a -> gather -> wait -> a            shard a --+                            +-> copy -> a
    shard b -> gather -> wait -> b            shard b --+-> cat -> gather -> wait -> +-> copy -> b

An all-gather outputs all of rank 0, then all of rank 1, so each original result is a column of the merged
one's ranks x (a + b), and is copied out. A reduce-scatter takes its inputs in this layout. All-reduces are
laid end to end. Users of a result may rely on its having its own memory, so every result is copied out.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node, map_arg

from shardwise.comm.kinds import GATHER, REDUCE, SCATTER
from shardwise.graph.nodes import Collective, collectives, is_coalesced, values
from shardwise.graph.passes.moves import (
    first_write,
    hoist,
    is_of_inputs,
    move_behind,
    pack,
    tail,
    uses,
    writes,
)

_aten: Any = torch.ops.aten


def merge_small(graph: Graph, *, nbytes: int) -> list[list[str]]:
    """Merge each run of collectives of one kind, group, dtype and op into one of at most `nbytes` bytes.

    A run is merged only if the graph allows it: gathers must be of the graph's inputs, and a reduction's
    result must not be used before the run's last is issued. Collectives of one kind keep their order. Values
    are the same, except that a reduction over more than two ranks may add in another order.

    Args:
        graph: its nodes need fake tensors in their meta.
        nbytes: the most bytes of one merged collective, as `Collective.bytes` counts.

    Returns:
        The names of the collectives that were merged, by run.
    """
    merged = []
    for kind in (GATHER, SCATTER, REDUCE):
        for run in _runs(graph, kind, nbytes):
            merged.append([c.issue.name for c in run])
            _merge(graph, run)
    return merged


def _runs(graph: Graph, kind: str, nbytes: int) -> list[list[Collective]]:
    listed = collectives(graph)
    reductions = {c.issue: c for c in listed if c.kind in (SCATTER, REDUCE)}
    runs: list[list[Collective]] = []
    for c in listed:
        if c.kind != kind:
            continue
        run = runs[-1] if runs else []
        if run and sum(o.bytes for o in run) + c.bytes <= nbytes and _can_merge([*run, c], reductions):
            run.append(c)
        else:
            runs.append([c])
    return [run for run in runs if len(run) > 1]


def _can_merge(run: list[Collective], reductions: dict[Node, Collective]) -> bool:
    """Return whether `run`, but for its last known to merge, can be issued where one of it is.

    That is the first of gathers, and the last of reductions, among all `reductions` of the graph.
    """
    first, last = run[0], run[-1]
    for c in (first, last):
        if is_coalesced(c.issue) or writes(c.issue) or len(c.waits) != 1:
            return False
        shapes = [values(node)[0] for node in (*c.inputs, c.wait)]
        if not all(isinstance(size, int) for value in shapes for size in value.shape):
            return False
        if not all(value.is_contiguous() for value in shapes):
            return False
    if (first.group, first.dtype, first.op) != (last.group, last.dtype, last.op):
        return False
    if first_write(first.issue, last.issue) is not None:
        return False
    if first.kind == GATHER:
        return is_of_inputs(first.issue) and is_of_inputs(last.issue)
    chains = [_chain(c, reductions) for c in run[:-1]]
    own = {c.issue for c in run} | {node for chain in chains for node in chain}
    if any(first.issue < node < last.issue and node not in own for node in reductions):
        return False  # an all-reduce after these would move past it
    return all(last.issue < user for chain in chains for user in uses(chain)[:1])


def _chain(reduction: Collective, reductions: dict[Node, Collective]) -> list[Node]:
    """Return the nodes after a reduction that may move past others: its tail, and that of its all-reduce."""
    chain = tail(reduction)
    for node in list(chain):
        if node in reductions:
            chain += _chain(reductions[node], reductions)
    return sorted(set(chain))


def _merge(graph: Graph, run: list[Collective]) -> None:
    """Merge a run: inputs side by side, a row per target of a reduce-scatter; results, a row per sender."""
    first = run[0]
    if first.kind == GATHER:
        place = first.issue
        for c in run[1:]:
            hoist(pack(c.issue)[0], place.prev)
    else:
        anchor = place = run[-1].issue
        reductions = {c.issue: c for c in collectives(graph) if c.kind in (SCATTER, REDUCE)}
        for c in run[:-1]:
            anchor = move_behind([node for node in _chain(c, reductions) if node < place], anchor)
    targets, senders = (first.ranks if first.kind == kind else 1 for kind in (SCATTER, GATHER))
    sizes = [values(c.inputs[0])[0].numel() // targets for c in run]
    with graph.inserting_before(place):
        parts = [_call(graph, _aten.reshape.default, c.inputs[0], [targets, -1]) for c in run]
        whole = _call(graph, _aten.view.default, _call(graph, _aten.cat.default, parts, 1), [-1])
        issue = _call(graph, first.issue.target, whole, *first.issue.args[1:], **first.issue.kwargs)
    with graph.inserting_before(min(c.wait for c in run)):
        wait = _call(graph, first.wait.target, issue)
        rows = _call(graph, _aten.view.default, wait, [senders, -1])
        split = _call(graph, _aten.split_with_sizes.default, rows, sizes, 1)
    for index, c in enumerate(run):
        with graph.inserting_before(c.wait):
            part = _call(graph, operator.getitem, split, index)
            # a copy: what a graph returns must have its own memory
            part = _call(graph, _aten.clone.default, part, memory_format=torch.contiguous_format)
            part = _call(graph, _aten.view.default, part, list(values(c.wait)[0].shape))
        c.wait.replace_all_uses_with(part)
        graph.erase_node(c.wait)
        graph.erase_node(c.issue)


def _call(graph: Graph, target: Any, *args: Any, **kwargs: Any) -> Node:
    node = graph.call_function(target, args, kwargs)
    values_, named = map_arg((args, kwargs), lambda n: n.meta["val"])
    node.meta["val"] = target(*values_, **named)
    return node
