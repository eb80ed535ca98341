"""Passes move, delay and merge collectives, and change neither values nor the order of any kind."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.fx import Graph, GraphModule

from graph.drawings import (
    ATEN,
    C10D,
    RANKS,
    SIZE,
    Drawing,
    assert_same,
    backward,
    computed,
    deep_backward,
    forward,
    most_unsharded,
    names,
)
from graph.held import held_bytes
from ranks import on_ranks
from shardwise.comm.kinds import GATHER, REDUCE, SCATTER
from shardwise.errors import RankMismatchError, ShardingError
from shardwise.graph.nodes import collectives
from shardwise.graph.passes import (
    Passes,
    bound_unsharded,
    check_order,
    merge_small,
    order_text,
    prefetch,
    sink_waits,
)
from shardwise.graph.passes.check_order import graphs_in


def test_collectives_are_found_with_their_waits_and_sizes() -> None:
    drawing = Drawing()
    a, b = drawing.input("a", 5), drawing.input("b", 2)
    full = drawing.gather("a", a)
    both = drawing.call("both", C10D.all_gather_into_tensor_coalesced.default, [a, b], RANKS, "0")
    parts = [drawing.call(f"part_{i}", operator.getitem, both, i) for i in range(2)]
    waits = [drawing.call(f"wait_{i}", C10D.wait_tensor.default, part) for i, part in enumerate(parts)]
    reduced = drawing.scatter("r", full, op="avg")
    again = drawing.call("again", C10D.wait_tensor.default, reduced.args[0])
    summed = drawing.reduce("s", reduced)
    graph = drawing.returns(*waits, again, summed)
    found = collectives(graph)
    assert [(one.kind, one.issue.name, [w.name for w in one.waits]) for one in found] == [
        (GATHER, "gather_a", ["full_a"]),
        (GATHER, "both", ["wait_0", "wait_1"]),
        (SCATTER, "scatter_r", ["reduced_r", "again"]),
        (REDUCE, "reduce_s", ["summed_s"]),
    ]
    assert [one.bytes for one in found] == [4 * 20, 4 * 28, 4 * 20, 4 * 5]
    assert [one.group for one in found] == ["0", "0", "0", "1"]
    assert [one.op for one in found] == ["", "", "avg", "sum"]
    assert [[node.name for node in one.inputs] for one in found[:2]] == [["a"], ["a", "b"]]


def test_a_node_without_a_fake_tensor_is_named() -> None:
    graph = forward(blocks=1)
    for node in graph.nodes:
        node.meta.clear()
    with pytest.raises(ShardingError, match=r"node shard_0 .* has no fake tensor"):
        collectives(graph)


def test_prefetch_issues_each_gather_before_the_wait_before_it() -> None:
    graph = forward(cast=True)
    assert names(graph) == [
        *("cast_0", "gather_0", "full_0", "weight_0", "mul_0"),
        *("cast_1", "gather_1", "full_1", "weight_1", "mul_1"),
        *("cast_2", "gather_2", "full_2", "weight_2", "mul_2"),
    ]
    moved = prefetch(graph)
    graph.lint()
    assert [node.name for node in moved] == ["cast_1", "gather_1", "cast_2", "gather_2"]
    assert names(graph) == [
        *("cast_0", "gather_0", "cast_1", "gather_1", "full_0", "weight_0", "mul_0"),
        *("cast_2", "gather_2", "full_1", "weight_1", "mul_1"),
        *("full_2", "weight_2", "mul_2"),
    ]


def test_prefetch_goes_as_many_gathers_ahead_as_it_is_told() -> None:
    graph = forward(blocks=4)
    prefetch(graph, ahead=2)
    assert [name for name in names(graph) if "weight" not in name] == [
        *("gather_0", "gather_1", "gather_2", "full_0", "mul_0"),
        *("gather_3", "full_1", "mul_1", "full_2", "mul_2", "full_3", "mul_3"),
    ]
    before = names(forward())
    graph = forward()
    assert prefetch(graph, ahead=0) == []
    assert names(graph) == before


def test_a_gather_ahead_takes_the_place_of_the_gradients_that_are_being_reduced() -> None:
    late, graph, early = deep_backward(), deep_backward(), deep_backward()
    Passes(prefetch=0)(late)
    Passes()(graph)
    Passes(prefetch=1)(early)
    graph.lint()
    assert [name for name in names(graph) if "weight_b" not in name and "weight_a" not in name] == [
        *("gather_2", "gather_1", "full_2", "grad_b_2", "weight_grad_b_2", "grad_a_2", "weight_grad_a_2"),
        *("staged_2", "scatter_2"),
        *("full_1", "grad_b_1", "weight_grad_b_1", "reduced_2", "gather_0", "grad_a_1", "weight_grad_a_1"),
        *("staged_1", "scatter_1"),
        *("full_0", "grad_b_0", "weight_grad_b_0", "grad_a_0", "weight_grad_a_0"),
        *("reduced_1", "staged_0", "scatter_0", "reduced_0"),
    ]
    group, shard = 4 * 2 * RANKS * SIZE, 4 * 2 * SIZE
    # Where gradients are staged: these, the staging buffer, the next block's parameters, what is reduced.
    assert max(held_bytes(graph)) == 3 * group + shard
    # One parameter and one gradient of a block more, and one less.
    assert max(held_bytes(early)) == 3 * group + group // 2 + shard
    assert max(held_bytes(late)) == 2 * group + group // 2 + 2 * shard
    assert_same(computed(graph), computed(deep_backward()))


def test_prefetch_leaves_gathers_of_what_the_graph_computes_and_their_order() -> None:
    drawing = Drawing()
    a, b, x = drawing.input("a", SIZE), drawing.input("b", SIZE), drawing.input("x", SIZE)
    full = drawing.gather("a", a)
    y = drawing.mul("y", x, x)
    wide = drawing.gather("y", y)
    z = drawing.mul("z", wide, full)
    graph = drawing.returns(drawing.mul("out", z, drawing.gather("b", b)))
    assert [node.name for node in prefetch(graph)] == ["gather_b"]
    assert names(graph) == ["gather_a", "full_a", "y", "gather_y", "gather_b", "full_y", "z", "full_b", "out"]


def test_nothing_moves_across_an_operator_that_writes() -> None:
    drawing = Drawing()
    a, b = drawing.input("a", SIZE), drawing.input("b", SIZE)
    full = drawing.gather("a", a)
    write = drawing.call("write", ATEN.copy_.default, b, a)
    graph = drawing.returns(drawing.mul("out", full, drawing.gather("b", b)), write)
    before = names(graph)
    assert prefetch(graph) == []
    assert merge_small(graph, nbytes=1000) == []
    sink_waits(graph)
    assert names(graph) == ["gather_a", "full_a", "write", "gather_b", "full_b", "out"] == before


def test_waits_of_gathers_go_before_their_first_use() -> None:
    drawing = Drawing()
    shard, x = drawing.input("shard", SIZE), drawing.input("x", RANKS * SIZE)
    full = drawing.gather("a", shard)
    view = drawing.call("view", ATEN.view.default, full, [RANKS, SIZE])
    row = drawing.call("row", ATEN.view.default, view, [-1])
    y = drawing.mul("y", x, x)
    graph = drawing.returns(drawing.mul("out", y, row))
    assert [node.name for node in sink_waits(graph)] == ["full_a", "view", "row"]
    assert names(graph) == ["gather_a", "y", "full_a", "view", "row", "out"]


def test_waits_of_reductions_go_behind_the_issue_of_the_next() -> None:
    graph = backward()
    assert names(graph)[:7] == [
        *("gather_2", "full_2", "weight_grad_2", "grad_2", "flat_2", "scatter_2", "reduced_2")
    ]
    sink_waits(graph)
    graph.lint()
    assert names(graph) == [
        *("gather_2", "weight_grad_2", "flat_2", "scatter_2", "full_2", "grad_2"),
        *("gather_1", "weight_grad_1", "flat_1", "scatter_1", "reduced_2", "mean_2", "full_1", "grad_1"),
        *("gather_0", "weight_grad_0", "flat_0", "scatter_0", "reduced_1", "mean_1", "full_0", "grad_0"),
        *("reduced_0", "mean_0"),
    ]


def test_all_reduces_of_reduce_scatters_run_beside_compute_as_well() -> None:
    graph = backward(blocks=4, replicated=True)
    sink_waits(graph)
    graph.lint()
    kept = ("scatter", "reduce", "summed", "mean")
    assert [name for name in names(graph) if name.startswith(kept)] == [
        *("scatter_3", "scatter_2", "reduced_3", "reduce_3"),
        *("scatter_1", "reduced_2", "reduce_2", "summed_3", "mean_3"),
        *("scatter_0", "reduced_1", "reduce_1", "summed_2", "mean_2"),
        *("reduced_0", "reduce_0", "summed_1", "mean_1", "summed_0", "mean_0"),
    ]


def test_a_bound_delays_gathers_until_others_are_used() -> None:
    graph = forward(blocks=4)
    prefetch(graph, ahead=3)
    assert most_unsharded(graph) == 4
    moved = bound_unsharded(graph, limit=2)
    graph.lint()
    assert most_unsharded(graph) == 2
    assert [node.name for node in moved if node.name.startswith("gather")] == ["gather_2", "gather_3"]
    assert [name for name in names(graph) if "weight" not in name] == [
        *("gather_0", "gather_1", "full_0", "mul_0"),
        *("gather_2", "full_1", "mul_1", "gather_3", "full_2", "mul_2", "full_3", "mul_3"),
    ]
    bound_unsharded(graph, limit=1)
    assert most_unsharded(graph) == 1
    assert names(graph) == names(forward(blocks=4))


def test_an_impossible_bound_names_the_groups() -> None:
    drawing = Drawing()
    shards = [drawing.input(f"shard_{i}", SIZE) for i in range(3)]
    full = [drawing.gather(str(i), shard) for i, shard in enumerate(shards)]
    both = drawing.mul("both", full[0], full[1])
    both.meta["nn_module_stack"] = {"key": ("L['self'].blocks.0", torch.nn.Linear)}
    graph = drawing.returns(drawing.mul("end", both, full[2]))
    with pytest.raises(
        ShardingError,
        match=r"no more than 1 groups .* where gather_1 \(for L\['self'\].blocks.0\) is needed the graph"
        r" still uses gather_0 \(for .*; allow 2 or more",
    ):
        bound_unsharded(graph, limit=1)
    bound_unsharded(graph, limit=2)
    graph.lint()
    assert names(graph) == [
        *("gather_0", "full_0", "gather_1", "full_1", "both", "gather_2", "full_2", "end")
    ]


def test_gathers_keep_their_order_where_one_is_delayed_behind_another_that_nothing_uses() -> None:
    drawing = Drawing()
    x, *shards = [drawing.input("x", RANKS * SIZE), *(drawing.input(f"shard_{i}", SIZE) for i in range(4))]
    full = drawing.gather("0", shards[0])
    unused = drawing.call("gather_1", C10D.all_gather_into_tensor.default, shards[1], RANKS, "0")
    drawing.gather("2", shards[2])
    used = drawing.mul("used", x, full)
    full = drawing.gather("3", shards[3])
    drawing.call("full_1", C10D.wait_tensor.default, unused)
    graph = drawing.returns(drawing.mul("end", used, full))
    bound_unsharded(graph, limit=2)
    graph.lint()
    assert most_unsharded(graph) == 2
    assert [name for name in names(graph) if "gather" in name] == [f"gather_{i}" for i in range(4)]


def test_parameters_that_a_graph_returns_are_held_to_its_end() -> None:
    drawing = Drawing()
    a, b = drawing.input("a", SIZE), drawing.input("b", SIZE)
    kept = drawing.gather("a", a)
    graph = drawing.returns(drawing.mul("out", kept, drawing.gather("b", b)), kept)
    assert most_unsharded(graph) == 2
    with pytest.raises(ShardingError, match=r"where gather_b .* still uses gather_a"):
        bound_unsharded(graph, limit=1)


def test_small_gathers_become_one() -> None:
    graph = forward()
    values = computed(graph)
    size = 4 * RANKS * SIZE
    assert merge_small(graph, nbytes=2 * size) == [["gather_0", "gather_1"]]
    graph.lint()
    assert [(one.kind, one.bytes) for one in collectives(graph)] == [(GATHER, 2 * size), (GATHER, size)]
    assert_same(computed(graph), values)
    assert merge_small(graph, nbytes=2 * size) == []


def test_what_lays_out_a_later_gathers_shard_moves_to_the_first_gather() -> None:
    graph = forward(cast=True)
    values = computed(graph)
    assert merge_small(graph, nbytes=10_000) == [["gather_0", "gather_1", "gather_2"]]
    graph.lint()
    assert_same(computed(graph), values)


@pytest.mark.parametrize("replicated", [False, True])
def test_small_reductions_become_one_where_the_last_was(replicated: bool) -> None:
    graph = backward(replicated=replicated)
    values = computed(graph)
    scatters = [f"scatter_{i}" for i in (2, 1, 0)]
    expected = [["gather_2", "gather_1", "gather_0"], scatters]
    if replicated:
        expected.append(["reduce_2", "reduce_1", "reduce_0"])
    assert merge_small(graph, nbytes=10_000) == expected
    graph.lint()
    assert [one.kind for one in collectives(graph)] == [GATHER, SCATTER, *([REDUCE] if replicated else [])]
    assert_same(computed(graph), values)


@pytest.mark.parametrize(
    "differ",
    [{"group": "1"}, {"op": "avg"}, {"dtype": torch.float64}, {"used": True}, {"reduced_between": True}],
    ids=str,
)
def test_reductions_that_differ_or_are_used_between_stay_apart(differ: dict[str, Any]) -> None:
    drawing = Drawing()
    a = drawing.input("a", RANKS * SIZE)
    b = drawing.input("b", RANKS * SIZE, dtype=differ.get("dtype", torch.float32))
    first = drawing.scatter("a", a)
    outputs = [first]
    if "used" in differ:
        b = drawing.mul("b2", b, drawing.call("wide", ATEN.sum.default, first))
    if "reduced_between" in differ:
        first = drawing.reduce("a", first)
        outputs = [first, drawing.reduce("b", drawing.mul("bb", b, b))]
    second = drawing.scatter("b", b, op=differ.get("op", "sum"), group=differ.get("group", "0"))
    graph = drawing.returns(*outputs, second)
    assert [run for run in merge_small(graph, nbytes=10_000) if "scatter_a" in run] == []


def test_the_text_of_an_order_names_groups_by_size() -> None:
    graph = backward(blocks=1)
    assert order_text(graph) == (
        "1. all_gather of 48 bytes, float32, over 4 ranks\n"
        "2. reduce_scatter by sum of 48 bytes, float32, over 4 ranks"
    )
    assert order_text([graph, graph], groups=[]).splitlines()[2:] == [
        "3. all_gather over 4 ranks",
        "4. reduce_scatter by sum over 4 ranks",
    ]


def test_graphs_within_graphs_are_found_once() -> None:
    inner = GraphModule(torch.nn.Module(), forward(blocks=1))
    root = torch.nn.Module()
    root.body = inner
    graph = Graph()
    for _ in range(2):
        graph.get_attr("body")
    graph.output(())
    outer = GraphModule(root, graph)
    assert graphs_in(outer) == [outer.graph, outer.body.graph]


@on_ranks(3)
def test_ranks_with_other_orders_all_raise() -> None:
    group, device = dist.group.WORLD, torch.device("cpu")
    check_order(forward(), groups=[group], device=device)
    graph = forward() if dist.get_rank() != 1 else backward(blocks=2)
    with pytest.raises(RankMismatchError, match=r"Only on rank \d:\n  2\. "):
        check_order(graph, groups=[group], device=device)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prefetch": -1}, "prefetch is -1"),
        ({"max_unsharded": 0}, "max_unsharded is 0; expected a whole number of 1 or more"),
        ({"merge_bytes": -2}, "merge_bytes is -2"),
    ],
)
def test_settings_that_say_nothing_are_refused(wrong: dict[str, int], message: str) -> None:
    with pytest.raises(ShardingError, match=message):
        Passes(**wrong)


def test_caches_tell_settings_apart() -> None:
    assert Passes().uuid == Passes(prefetch=None).uuid
    assert len({Passes(prefetch=n).uuid for n in (None, 0, 1, 2)} | {Passes(merge_bytes=1).uuid}) == 5
