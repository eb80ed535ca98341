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
            merged.append([one.issue.name for one in run])
            _merge(graph, run)
    return merged


def _runs(graph: Graph, kind: str, nbytes: int) -> list[list[Collective]]:
    found = collectives(graph)
    reductions = {one.issue: one for one in found if one.kind in (SCATTER, REDUCE)}
    runs: list[list[Collective]] = []
    for one in found:
        if one.kind != kind:
            continue
        run = runs[-1] if runs else []
        fits = run and sum(o.bytes for o in run) + one.bytes <= nbytes and _can_merge(run[0], one)
        if fits and (_can_gather(run[0], one) if kind == GATHER else _can_reduce([*run, one], reductions)):
            run.append(one)
        else:
            runs.append([one])
    return [run for run in runs if len(run) > 1]


def _can_merge(first: Collective, one: Collective) -> bool:
    for each in (first, one):
        if is_coalesced(each.issue) or writes(each.issue) or len(each.waits) != 1:
            return False
        shapes = [values(node)[0] for node in (*each.inputs, each.wait)]
        if not all(isinstance(size, int) for value in shapes for size in value.shape):
            return False
        if not all(value.is_contiguous() for value in shapes):
            return False
    return (first.group, first.dtype, first.op) == (one.group, one.dtype, one.op)


def _can_gather(first: Collective, one: Collective) -> bool:
    """Return whether `one` can be issued where `first` is."""
    if not is_of_inputs(first.issue) or not is_of_inputs(one.issue):
        return False
    return first_write(first.issue, one.issue) is None


def _can_reduce(run: list[Collective], reductions: dict[Node, Collective]) -> bool:
    """Return whether all of `run` can be issued where the last is, among all `reductions` of the graph."""
    first, last = run[0], run[-1]
    chains = [_chain(one, reductions) for one in run[:-1]]
    own = {one.issue for one in run} | {node for chain in chains for node in chain}
    if first_write(first.issue, last.issue) is not None:
        return False
    if any(first.issue < node < last.issue and node not in own for node in reductions):
        return False  # an all-reduce after these would move past it
    return all(last.issue < user for chain in chains for user in uses(chain)[:1])


def _chain(one: Collective, reductions: dict[Node, Collective]) -> list[Node]:
    """Return the nodes after a reduction that may move past others: its tail, and that of its all-reduce."""
    chain = tail(one)
    for node in list(chain):
        if node in reductions:
            chain += _chain(reductions[node], reductions)
    return sorted(set(chain))


def _merge(graph: Graph, run: list[Collective]) -> None:
    """Merge a run: inputs side by side, a row per target of a reduce-scatter; results, a row per sender."""
    first = run[0]
    if first.kind == GATHER:
        at = first.issue
        for one in run[1:]:
            hoist(pack(one.issue)[0], at.prev)
    else:
        anchor = at = run[-1].issue
        reductions = {one.issue: one for one in collectives(graph) if one.kind in (SCATTER, REDUCE)}
        for one in run[:-1]:
            anchor = move_behind([node for node in _chain(one, reductions) if node < at], anchor)
    to, by = (first.ranks if first.kind == kind else 1 for kind in (SCATTER, GATHER))
    sizes = [values(one.inputs[0])[0].numel() // to for one in run]
    with graph.inserting_before(at):
        parts = [_call(graph, _aten.reshape.default, one.inputs[0], [to, -1]) for one in run]
        whole = _call(graph, _aten.view.default, _call(graph, _aten.cat.default, parts, 1), [-1])
        issue = _call(graph, first.issue.target, whole, *first.issue.args[1:], **first.issue.kwargs)
    with graph.inserting_before(min(one.wait for one in run)):
        wait = _call(graph, first.wait.target, issue)
        rows = _call(graph, _aten.view.default, wait, [by, -1])
        split = _call(graph, _aten.split_with_sizes.default, rows, sizes, 1)
    for index, one in enumerate(run):
        _replace(graph, one, split, index)


def _replace(graph: Graph, one: Collective, split: Node, index: int) -> None:
    """Make users of `one` use a copy of its part: what a graph returns must have its own memory."""
    with graph.inserting_before(one.wait):
        part = _call(graph, operator.getitem, split, index)
        part = _call(graph, _aten.clone.default, part, memory_format=torch.contiguous_format)
        part = _call(graph, _aten.view.default, part, list(values(one.wait)[0].shape))
    one.wait.replace_all_uses_with(part)
    graph.erase_node(one.wait)
    graph.erase_node(one.issue)


def _call(graph: Graph, target: Any, *args: Any, **kwargs: Any) -> Node:
    """Return a new node, with its fake tensor."""
    node = graph.call_function(target, args, kwargs)
    given, named = map_arg((args, kwargs), lambda one: one.meta["val"])
    node.meta["val"] = target(*given, **named)
    return node
