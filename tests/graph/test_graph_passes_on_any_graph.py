"""Of any graph, passes change neither values nor the order of a kind, and hold no more than they should."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import Graph

from graph.drawings import ATEN, RANKS, SIZE, Drawing, assert_same, computed, most_unsharded
from graph.held import held_bytes
from shardwise.comm.kinds import GATHER
from shardwise.errors import ShardingError
from shardwise.graph.nodes import collectives
from shardwise.graph.passes import (
    Passes,
    bound_unsharded,
    merge_small,
    prefetch,
    prefetch_in_turn,
    sink_waits,
)
from shardwise.graph.passes.bound_unsharded import last_use
from shardwise.graph.passes.moves import tail, uses


@st.composite
def drawings(draw: st.DrawFn) -> Graph:
    """Gathers, reductions and compute in any order, with several uses of everything."""
    drawing = Drawing()
    shards = [drawing.input(f"shard_{i}", draw(st.sampled_from([SIZE, 2 * SIZE]))) for i in range(6)]
    wide = [drawing.input("x", RANKS * SIZE)]
    gathered, reduced = [], []
    for i in range(draw(st.integers(1, 14))):
        kind = draw(st.sampled_from("ggsmmmr"))
        a, b = (draw(st.sampled_from([*wide, *gathered][-5:])) for _ in range(2))
        if kind == "g":
            full = drawing.gather(str(i), draw(st.sampled_from(shards)))
            gathered.append(drawing.call(f"view_{i}", ATEN.view.default, full, [-1]))
        elif kind == "m":
            wide.append(drawing.mul(f"mul_{i}", a, drawing.call(f"sum_{i}", ATEN.sum.default, b)))
        elif kind == "s":
            reduced.append(drawing.scatter(str(i), drawing.stage(str(i), a)))
            if draw(st.booleans()):
                reduced[-1] = drawing.reduce(str(i), reduced[-1])
        elif reduced:
            total = drawing.call(f"total_{i}", ATEN.sum.default, draw(st.sampled_from(reduced)))
            wide.append(drawing.mul(f"scaled_{i}", a, total))
    return drawing.returns(wide[-1], *reduced)


@settings(max_examples=25)
@given(graph=drawings())
def test_gathering_in_turn_holds_no_more_than_other_settings(graph: Graph) -> None:
    values = computed(graph)
    early = copy.deepcopy(graph)
    Passes(prefetch=1)(early)
    sink_waits(graph)
    order, late = issues(graph), max(held_bytes(graph))
    prefetch_in_turn(graph)
    check(graph, values)
    assert issues(graph) == order
    assert max(held_bytes(graph)) <= max(late, max(held_bytes(early)))


@settings(max_examples=25)
@given(
    graph=drawings(), ahead=st.integers(0, 3), limit=st.integers(1, 4), nbytes=st.sampled_from([0, 150, 9999])
)
def test_passes_keep_values_and_orders_and_hold_their_bound(
    graph: Graph, ahead: int, limit: int, nbytes: int
) -> None:
    values = computed(graph)
    merge_small(graph, nbytes=nbytes)
    check(graph, values)
    steps: list[Callable[[], Any]] = [lambda: prefetch(graph, ahead=ahead), lambda: sink_waits(graph)]
    for step in steps:
        kinds = issues(graph)
        step()
        check(graph, values)
        assert issues(graph) == kinds
    kinds = issues(graph)
    if limit < needed(graph):
        with pytest.raises(ShardingError, match="no more than"):
            bound_unsharded(graph, limit=limit)
    else:
        bound_unsharded(graph, limit=limit)
        assert most_unsharded(graph) <= limit
    check(graph, values)
    assert issues(graph) == kinds


def needed(graph: Graph) -> int:
    """How many groups are held at a time if each is gathered as late as the order of gathers allows."""
    gathers = [one for one in collectives(graph) if one.kind == GATHER]
    first = [uses(tail(one))[:1] for one in gathers]
    most = 0
    for i in range(len(gathers)):
        later = [node for nodes in first[i:] for node in nodes]
        if later:
            held = [one for one, nodes in zip(gathers, first[: i + 1], strict=False) if nodes]
            most = max(most, sum(last_use(one) >= min(later) for one in held))
    return most


def check(graph: Graph, values: list[Tensor]) -> None:
    graph.lint()
    assert_same(computed(graph), values)


def issues(graph: Graph) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for one in collectives(graph):
        found.setdefault(one.kind, []).append(one.issue.name)
    return found
