"""What a graph holds is counted exactly, by hand-built graphs and by sharded models of a fake group."""

from __future__ import annotations

import functools
import gc
import itertools
import operator
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.fx import Graph, GraphModule, Node
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise
from shardwise import _compat, fully_shard
from shardwise.errors import ShardingError
from shardwise.graph import Counts, GraphReport, ModelReport, graph_report, inspect_graph, record
from shardwise.graph.passes import Passes
from shardwise.graph.reports import _panel

RANKS, FLOAT = 4, 4  # processes of the fake group; bytes
BLOCKS = 2
aten, c10d, inductor = torch.ops.aten, torch.ops._c10d_functional, torch.ops.inductor


# ---------------------------------------------------------------- graphs built by hand


class Builder:
    """A graph whose nodes know the shapes of their outputs."""

    def __init__(self) -> None:
        self.graph = Graph()

    def input(self, name: str, *shape: int) -> Node:
        return self._with(self.graph.placeholder(name), torch.empty(shape, device="meta"))

    def call(self, target: Any, *args: Any, shape: tuple[int, ...] | None = None, **kwargs: Any) -> Node:
        node = self.graph.call_function(target, args, kwargs)
        if shape is not None:
            return self._with(node, torch.empty(shape, device="meta"))
        values = torch.fx.node.map_arg((args, kwargs), lambda one: one.meta["val"])
        return self._with(node, target(*values[0], **values[1]))

    def gather(self, shard: Node) -> Node:
        """Issue and wait; returns the wait."""
        return self.wait(self.issue(shard))

    def issue(self, shard: Node) -> Node:
        numel = RANKS * shard.meta["val"].numel()
        return self.call(c10d.all_gather_into_tensor.default, shard, RANKS, "0", shape=(numel,))

    def wait(self, issue: Node) -> Node:
        return self.call(c10d.wait_tensor.default, issue, shape=tuple(issue.meta["val"].shape))

    def output(self, *nodes: Node | None) -> Graph:
        self.graph.output(nodes)
        return self.graph

    def _with(self, node: Node, value: Any) -> Node:
        node.meta["val"] = value
        return node


def test_every_node_is_counted_once_and_collectives_have_their_places() -> None:
    build = Builder()
    shard, x = build.input("shard", 6), build.input("x", 4, 4)  # places 0, 1
    issue = build.issue(shard)  # 2
    early = build.call(aten.mul.Tensor, x, x)  # 3
    late = build.call(aten.relu.default, early)  # 4
    full = build.wait(issue)  # 5
    parts = build.call(aten.split_with_sizes.default, full, [16, 8])  # 6
    weight = build.call(operator.getitem, parts, 0)  # 7
    square = build.call(aten.view.default, weight, [4, 4])  # 8
    product = build.call(aten.mm.default, late, square)  # 9
    flat = build.call(aten.view.default, product, [16])  # 10
    both = build.call(aten.cat.default, [flat, flat])  # 11
    scatter = build.call(c10d.reduce_scatter_tensor.default, both, "avg", RANKS, "0", shape=(8,))  # 12
    shared = build.call(c10d.all_reduce.default, build.wait(scatter), "sum", "1", shape=(8,))  # 13, 14
    done = build.wait(shared)  # 15
    wide = build.call(aten._to_copy.default, done, dtype=torch.float64)  # 16
    build.call(inductor.resize_storage_bytes_.default, x, 0, shape=())  # 17
    report = inspect_graph(build.output(wide, None))  # 18

    assert report.kind == "forward"
    assert report.counts == Counts(
        gathers=1, reduce_scatters=1, all_reduces=1, waits=3, copies=2, resizes=1, computes=3, views=4
    )
    gather, scattered, reduced = report.collectives
    assert (gather.kind, gather.name) == ("all_gather", issue.name)
    assert (gather.ranks, gather.bytes) == (RANKS, 24 * FLOAT)
    assert (gather.issue, gather.wait, gather.overlap, gather.first_use, gather.last_use) == (2, 5, 2, 9, 9)
    assert (scattered.kind, scattered.bytes) == ("reduce_scatter", 32 * FLOAT)
    assert (scattered.issue, scattered.wait) == (12, 13)
    assert (scattered.overlap, scattered.first_use, scattered.last_use) == (0, 14, 14)
    assert (reduced.kind, reduced.group, reduced.bytes, reduced.wait) == ("all_reduce", "1", 8 * FLOAT, 15)
    assert [one.of_parameters for one in report.collectives] == [True, False, False]
    assert report.of("all_reduce") == (reduced,)
    # Gathered from its issue to the product.
    assert [place for place, held in enumerate(report.unsharded_bytes) if held] == list(range(2, 10))
    assert (report.peak_unsharded_bytes, report.peak_groups) == (24 * FLOAT, 1)
    assert (report.saved, report.saved_bytes, report.unsharded_inputs) == ((), 0, ())


def test_unsharded_memory_is_followed_through_views_and_copies_to_its_last_use() -> None:
    build = Builder()
    first, second = build.input("first", 2), build.input("second", 4)  # 0, 1
    one = build.gather(first)  # 2, 3: 8 elements
    two = build.gather(second)  # 4, 5: 16 elements
    turned = build.call(aten.t.default, build.call(aten.view.default, one, [2, 4]))  # 6, 7
    own = build.call(aten.clone.default, turned, memory_format=torch.contiguous_format)  # 8: 8 elements more
    shape = build.call(aten._unsafe_view.default, own, [8])  # 9
    used = build.call(aten.relu.default, build.call(aten.slice.Tensor, two, 0, 0, 8))  # 10, 11
    total = build.call(aten.add.Tensor, used, shape)  # 12
    mixed = build.call(aten.cat.default, [total, shape])  # 13: not of parameters only
    report = inspect_graph(build.output(mixed))  # 14

    held = {2: 8, 3: 8, 4: 24, 5: 24, 6: 24, 7: 24, 8: 32, 9: 24, 10: 24, 11: 24, 12: 8, 13: 8}
    assert report.unsharded_bytes == tuple(FLOAT * held.get(place, 0) for place in range(15))
    assert (report.peak_unsharded_bytes, report.peak_groups) == (32 * FLOAT, 2)
    assert (report.counts.parameter_copies, report.counts.copies) == (1, 1)
    assert [(one.first_use, one.last_use) for one in report.collectives] == [(8, 13), (11, 11)]


def test_a_gather_of_what_the_graph_computes_brings_no_parameters() -> None:
    build = Builder()
    x = build.input("x", 4)
    full = build.gather(build.call(aten.relu.default, x))
    report = inspect_graph(build.output(build.call(aten.clone.default, full)))
    assert report.counts == Counts(gathers=1, waits=1, copies=1, computes=1)
    assert not report.collectives[0].of_parameters
    assert report.peak_unsharded_bytes == report.peak_groups == 0


def test_inputs_that_receive_unsharded_parameters_are_named() -> None:
    build = Builder()
    shard, whole, other, buffer = (build.input(name, n) for name, n in zip("swob", (2, 8, 8, 8), strict=True))
    full = build.gather(shard)
    build.call(aten.copy_.default, whole, full)
    build.call(aten.copy_.default, other, build.call(aten.relu.default, full))  # new values
    into = build.call(c10d.all_gather_into_tensor_out.default, shard, RANKS, "0", out=buffer, shape=(8,))
    report = inspect_graph(build.output(build.call(aten.relu.default, build.wait(into))))
    assert [one.first_use for one in report.collectives] == [6, 11]  # 9 is the second gather itself
    assert report.unsharded_inputs == ("w", "b")
    assert report.unsharded_bytes[0] == 8 * FLOAT  # the buffer, which is there from the start


def test_what_forward_returns_unsharded_is_counted_in_backward() -> None:
    build = Builder()
    shard, x = build.input("shard", 2), build.input("x", 2)
    full = build.gather(shard)
    low, high = (build.call(aten.slice.Tensor, full, 0, begin, begin + 2) for begin in (0, 2))
    result = build.call(aten.mul.Tensor, build.call(aten.mul.Tensor, x, low), high)
    forward = inspect_graph(build.output(result, x, low, high))
    assert [(one.name, one.buffer, one.bytes) for one in forward.saved] == [
        (low.name, full.args[0].name, 8 * FLOAT),
        (high.name, full.args[0].name, 8 * FLOAT),
    ]
    assert forward.saved_bytes == 8 * FLOAT
    assert forward.collectives[0].last_use == len(build.graph.nodes) - 1

    build = Builder()
    names = ("x", "renamed", "high", "tangents_1")
    x, low, high, tangent = (build.input(name, 2) for name in names)
    first = build.call(aten.mul.Tensor, tangent, high)
    second = build.call(aten.mul.Tensor, first, low)
    graph = build.output(build.call(aten.mul.Tensor, second, x))
    assert inspect_graph(graph).kind == "backward"
    assert inspect_graph(graph).peak_unsharded_bytes == 0
    backward = graph_report(graph, forward=forward)
    assert backward.unsharded_bytes == (*[8 * FLOAT] * 6, 0, 0)  # to the second product
    assert backward.peak_groups == 1


def test_graphs_that_are_not_of_operators_are_refused_by_name() -> None:
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ShardingError, match=r"node _0 is a call_module.*shardwise\.graph\.record"):
        inspect_graph(traced)
    with pytest.raises(ShardingError, match="example inputs with a model"):
        inspect_graph(traced, torch.ones(2))  # type: ignore[call-overload]
    with pytest.raises(ShardingError, match="'eager' cannot be recorded"):
        record("eager")


# ---------------------------------------------------------------- sharded models


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(x)))


class Words(nn.Module):
    def __init__(self, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return x


class Noisy(Words):
    """Counts its calls and draws random numbers."""

    def __init__(self) -> None:
        super().__init__(blocks=1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, words: Tensor, scale: Tensor) -> Tensor:
        self.calls.add_(1)
        return F.dropout(super().forward(words), 0.5) * scale


class Breaking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, **options)
    options.pop("reshard_after_forward", None)  # the root stays gathered unless told otherwise
    return fully_shard(model, **options)


@pytest.fixture(scope="module", autouse=True)
def fake_group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=RANKS)
    yield
    torch.compiler.reset()
    dist.destroy_process_group()


WORDS = torch.arange(10).view(2, 5)
GROUPS = BLOCKS + 1  # the blocks, and the root with the embedding
EMBEDDING = 12 * 8 * FLOAT
# The contiguous layout cuts rows of 8 and 16 elements at 288 per block, of which padding fills up to 4 ranks;
# the interleaved one pads nothing here.
BLOCK = {"contiguous": 288 * FLOAT, "interleaved": (2 * 8 * 16 + 8 + 16) * FLOAT}


@functools.cache
def report_of(layout: str, reshard: bool) -> ModelReport:
    return inspect_graph(sharded(Words(), layout=layout, reshard_after_forward=reshard), WORDS)


CASES = pytest.mark.parametrize(
    ("layout", "reshard"), list(itertools.product(("contiguous", "interleaved"), (True, False)))
)


def both(layout: str, reshard: bool) -> tuple[GraphReport, GraphReport]:
    report = report_of(layout, reshard)
    assert (report.traced, report.graph_breaks, report.recompiles) == (1, 0, 0)
    (forward,), (backward,) = report.forward, report.backward
    return forward, backward


@CASES
def test_each_group_is_gathered_reduced_and_gathered_again_only_where_it_was_freed(
    layout: str, reshard: bool
) -> None:
    forward, backward = both(layout, reshard)
    counts, block = forward.counts, BLOCK[layout]
    assert (counts.gathers, counts.waits) == (GROUPS, GROUPS)
    assert (counts.reduce_scatters, counts.all_reduces) == (0, 0)
    again = GROUPS - 1 if reshard else 0  # backward of an embedding does not need its weight
    counts = backward.counts
    assert (counts.gathers, counts.reduce_scatters, counts.waits) == (again, GROUPS, again + GROUPS)
    assert counts.resizes == forward.counts.resizes == 0
    assert forward.unsharded_inputs == backward.unsharded_inputs == ()
    # Groups are gathered in the order of forward, again and reduced in the reverse order.
    assert [one.bytes for one in forward.of("all_gather")] == [EMBEDDING, *[block] * BLOCKS]
    assert [one.bytes for one in backward.of("all_gather")] == [block] * again
    assert [one.bytes for one in backward.of("reduce_scatter")] == [*[block] * BLOCKS, EMBEDDING]
    assert all(one.ranks == RANKS for one in (*forward.collectives, *backward.collectives))
    names = [one.name for one in forward.of("all_gather")]
    assert [one.name for one in backward.of("all_gather")] == names[:0:-1][:again]


@CASES
def test_the_contiguous_layout_copies_no_parameter_and_each_gradient_once(layout: str, reshard: bool) -> None:
    forward, backward = both(layout, reshard)
    contiguous = layout == "contiguous"
    # The interleaved one has rows of all ranks in each parameter: 4 copies a block; the embedding lies whole.
    assert forward.counts.parameter_copies == (0 if contiguous else 4 * (GROUPS - 1))
    assert forward.counts.copies == 0
    # Backward of a block needs its weights only.
    assert backward.counts.parameter_copies == (0 if contiguous or not reshard else 2 * (GROUPS - 1))
    assert backward.counts.copies == GROUPS  # of gradients into a buffer


@CASES
def test_the_most_unsharded_bytes_are_those_of_one_block_or_of_all(layout: str, reshard: bool) -> None:
    forward, backward = both(layout, reshard)
    block, weight = BLOCK[layout], 8 * 16 * FLOAT
    if layout == "contiguous":
        held = block if reshard else BLOCKS * block
        assert forward.peak_unsharded_bytes == backward.peak_unsharded_bytes == held
        assert forward.saved_bytes == (0 if reshard else BLOCKS * block)
    else:  # a block's copies stand beside its gathered buffer; what stays are copies of the weights
        before = 0 if reshard else (BLOCKS - 1) * (2 * weight)
        assert forward.peak_unsharded_bytes == before + 2 * block
        assert forward.saved_bytes == (0 if reshard else BLOCKS * (2 * weight))
        assert backward.peak_unsharded_bytes == (block + weight if reshard else BLOCKS * (2 * weight))
    assert forward.peak_groups == backward.peak_groups == (1 if reshard else BLOCKS)
    assert len(forward.saved) == (0 if reshard else 2 * BLOCKS)
    assert forward.unsharded_bytes[0] == 0
    assert backward.unsharded_bytes[0] == forward.saved_bytes
    assert backward.unsharded_bytes[-1] == 0


def test_the_table_says_what_the_report_holds() -> None:
    report = report_of("contiguous", True)
    text = str(report)
    assert "1 traced graphs, 0 graph breaks, 0 recompiles" in text
    assert f"unsharded: {BLOCK['contiguous']:,} bytes of 1 gathers at the most" in text
    assert "inputs filled with unsharded parameters: none" in text
    assert str(report.forward[0]) in text
    rows = [line for line in text.splitlines() if "│" in line]
    assert len(rows) == len(report.graphs[0].collectives) + len(report.graphs[1].collectives)
    first = report.forward[0].collectives[0]
    cells = [cell.strip() for cell in rows[0].strip("│").split("│")]
    assert cells[:4] == [first.name, "all_gather", "4", f"{EMBEDDING:,}"]
    assert cells[4:] == [str(n) for n in (first.issue, first.wait, 0, first.first_use, first.last_use)]
    assert report.counts == report.graphs[0].counts + report.graphs[1].counts


def test_the_timeline_has_a_row_for_compute_one_for_each_collective_and_a_line_of_bytes(
    tmp_path: Path,
) -> None:
    report = report_of("interleaved", True)
    svg = "{http://www.w3.org/2000/svg}"
    for one, graphs in ((report, report.graphs), (report.forward[0], report.forward)):
        root = ElementTree.parse(one.timeline(tmp_path / "new" / "graph.svg")).getroot()
        assert root.tag == f"{svg}svg"
        rows = root.findall(f"{svg}g[@class='row']")
        assert len(rows) == sum(1 + len(graph.collectives) for graph in graphs)
        lines = root.findall(f"{svg}polyline")
        assert len(lines) == len(graphs)
        width, height = map(float, root.attrib["viewBox"].split()[2:])
        for bar in root.iter(f"{svg}rect"):
            assert 0 <= float(bar.attrib["x"]) <= float(bar.attrib["x"]) + float(bar.attrib["width"]) <= width
            assert 0 <= float(bar.attrib["y"]) <= height
    graph = report.forward[0]
    rows = _panel(graph, 0.0, len(graph.unsharded_bytes))["rows"]
    place = (rows[1]["x"] - rows[0]["x"]) / (graph.collectives[1].issue - graph.collectives[0].issue)
    for row, one in zip(rows, graph.collectives, strict=True):
        assert one.wait is not None
        assert row["width"] == pytest.approx((one.wait + 1 - one.issue) * place, abs=0.02)
    levels = {float(point.split(",")[1]) for point in lines[0].attrib["points"].split()}
    assert len(levels) == len(set(report.forward[0].unsharded_bytes))


def bits(grads: list[Tensor | None]) -> list[Tensor]:
    """A copy, in which NaN equals NaN: a fake group gathers whatever is in memory."""
    return [_compat.local_of(grad).view(torch.int32).clone() for grad in grads if grad is not None]


def test_inspection_leaves_a_model_its_compiled_form_and_its_gradients_as_they_were() -> None:
    model = sharded(Noisy(), layout="contiguous")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    scale = torch.ones((), requires_grad=True)

    def step() -> None:
        compiled(WORDS, scale).sum().backward()

    step()
    parameters = [*model.parameters(), scale]
    grads = [parameter.grad for parameter in parameters]
    values = bits(grads)
    random, graphs = torch.get_rng_state(), counters["stats"]["unique_graphs"]
    report = inspect_graph(model, WORDS, scale)
    assert (report.counts.gathers, report.counts.reduce_scatters) == (2 + 1, 2)
    assert all(parameter.grad is grad for parameter, grad in zip(parameters, grads, strict=True))
    assert all(torch.equal(now, value) for now, value in zip(bits(grads), values, strict=True))
    assert torch.equal(torch.get_rng_state(), random)
    assert model.calls.item() == 1
    step()
    assert counters["stats"]["unique_graphs"] == graphs + 1  # the inspection's own

    with torch.no_grad():
        report = inspect_graph(model, words=WORDS, scale=scale)
    assert [graph.kind for graph in report.graphs] == ["forward"]

    grads = [parameter.grad for parameter in parameters]
    values = bits(grads)
    model.unshard()  # as an evaluation may leave it
    inspect_graph(model, WORDS, scale)
    assert all(parameter.grad is grad for parameter, grad in zip(parameters, grads, strict=True))
    assert all(torch.equal(now, value) for now, value in zip(bits(grads), values, strict=True))


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch.compile has no isolate_recompiles")
def test_graphs_of_earlier_inspections_do_not_count() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Breaking())
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=1):
        found = [inspect_graph(model, torch.ones(2)) for _ in range(2)]
    assert [len(report.graphs) for report in found] == [2, 2]


def test_an_inspected_model_is_freed_as_any_other() -> None:
    alive = weakref.ref(model := sharded(Words(1), layout="contiguous"))
    inspect_graph(model, WORDS)
    del model
    gc.collect()
    assert alive() is None


def test_a_recorder_keeps_the_graphs_of_training_and_counts_breaks_and_recompiles() -> None:
    seen: list[Graph] = []
    recorder = record("aot_eager_decomp_partition", passes=(Passes(prefetch=1), seen.append))
    model = sharded(Words(2), layout="contiguous")
    step = torch.compile(model, backend=recorder, fullgraph=True, dynamic=False)
    for _ in range(3):
        step(WORDS).sum().backward()
    assert [(one.kind, one.traced) for one in recorder.graphs] == [("forward", 0), ("backward", 0)]
    assert [module.graph for module in recorder.modules] == seen
    assert all(isinstance(module, GraphModule) for module in recorder.modules)
    step(WORDS[:1]).sum().backward()
    assert [(one.kind, one.traced) for one in recorder.graphs[2:]] == [("forward", 1), ("backward", 1)]
    report = recorder.report()
    assert (report.traced, report.graph_breaks, report.recompiles) == (2, 0, 1)
    assert [graph.kind for graph in report.graphs] == ["forward", "backward"] * 2
    assert [graph.counts.gathers for graph in report.graphs] == [3, 2, 3, 2]
    # Each gather but the first is in flight while the group before it computes.
    assert [[one.overlap > 0 for one in graph.of("all_gather")] for graph in report.forward] == [
        [False, True, True]
    ] * 2
    assert [graph.peak_groups for graph in report.graphs] == [2] * 4

    def broken(x: Tensor) -> Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    recorder = record()
    torch.compile(broken, backend=recorder)(torch.ones(2))
    assert (recorder.report().traced, recorder.graph_breaks, recorder.recompiles) == (2, 1, 0)


def test_inspect_graph_is_public() -> None:
    assert shardwise.inspect_graph is inspect_graph
