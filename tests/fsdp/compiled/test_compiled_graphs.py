"""What the graphs of compiled sharded models hold, counted in one process of a fake group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp.compiled.harness import batch, by_block, loss_of
from fsdp.compiled.models import Attention, Mlp, Nested, Transformer, shard_nested
from shardwise import fully_shard
from shardwise.fsdp.traced import Collectives
from shardwise.graph import GraphReport, record


@pytest.fixture(scope="module", autouse=True)
def fake_group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    torch.compiler.reset()
    dist.destroy_process_group()
    graphs_of.cache_clear()


@cache
def graphs_of(
    make: Callable[[], nn.Module], shard: Callable[..., Any], backend: str = "aot_eager", **options: Any
) -> tuple[GraphReport, GraphReport]:
    """The forward and the backward graph, of which there must be one each after two steps."""
    torch.compiler.reset()
    model = make()
    shard(model, **options)
    recorder = record(backend)
    compiled = torch.compile(model, backend=recorder, fullgraph=True)
    for step in range(2):
        loss_of(compiled, batch(step, 4, 5)).backward()
    report = recorder.report()
    assert (report.traced, report.graph_breaks, report.recompiles) == (1, 0, 0)
    forward, backward = report.graphs
    assert forward.unsharded_inputs == ()
    return forward, backward


def pairs(graphs: tuple[GraphReport, GraphReport]) -> list[tuple[int, int]]:
    """Gathers and reduce-scatters of forward and of backward."""
    return [(graph.counts.gathers, graph.counts.reduce_scatters) for graph in graphs]


def group_bytes(model: nn.Module) -> int:
    return sum(param.numel() * param.element_size() for param in model.parameters())


def test_nccls_multiplied_sum_is_a_sum_and_a_division_in_a_graph() -> None:
    def shard(model: nn.Module, **options: Any) -> None:
        fully_shard(model, **options)
        model.set_gradient_divide_factor(7.0)  # type: ignore[operator]

    found: list[Any] = []

    def seen(*args: Any, **kwargs: Any) -> Any:
        found.append(Collectives(*args, **kwargs))
        return found[-1]

    with (
        mock.patch("shardwise.fsdp.reduction.backend_of", return_value="nccl"),
        mock.patch("shardwise.fsdp.trace_plan.Collectives", seen),
    ):
        graphs_of(Mlp, shard, layout="contiguous")
    assert {(one.scatter_op, one.before, one.after) for one in found} == {("sum", None, "7.0")}


def test_a_group_is_gathered_once_and_again_in_backward_if_it_was_freed() -> None:
    # The other layout, and groups that are not freed, are counted in tests/graph/test_graph_inspect.py.
    freed = pairs(graphs_of(Transformer, by_block, layout="contiguous"))
    assert freed == [(3, 0), (2, 3)]  # the root's stays
    assert pairs(graphs_of(Mlp, fully_shard, layout="interleaved")) == [(1, 0), (0, 1)]


def test_every_use_of_a_module_reduces_its_gradients() -> None:
    # One root; the block and its second part run twice, its first part four times: 1 + 2 + 2 + 4.
    graphs = graphs_of(Nested, shard_nested, layout="contiguous")  # the other: test_compiled_numbers.py
    # Equal gathers of one graph are one. Such a one is used in several checkpointed regions, and since
    # 2.14 torch keeps what is.
    again = 0 if torch.torch_version.TorchVersion(torch.__version__) >= "2.14" else 3
    assert pairs(graphs) == [(4, 0), (again, 9)]


def test_contiguous_parameters_are_used_where_they_are_gathered() -> None:
    graphs = graphs_of(Transformer, by_block, layout="contiguous")
    for graph in graphs:
        assert graph.counts.parameter_copies == graph.counts.resizes == 0
    single = graphs_of(Mlp, fully_shard, layout="contiguous")
    assert [graph.counts.copies for graph in single] == [0, 1]  # gradients into the reduction's one buffer
    # Of the interleaved layout each parameter is copied out.
    forward, _ = graphs_of(Mlp, fully_shard, layout="interleaved")
    assert forward.counts.parameter_copies == 4


def test_as_few_groups_are_gathered_at_a_time_as_in_the_eager_path() -> None:
    attends = partial(Transformer, Attention)
    model = attends()
    block = group_bytes(model.blocks[0])
    root = group_bytes(model) - 2 * block
    padding = 64
    forward, backward = graphs_of(attends, by_block, layout="contiguous")
    # Eagerly the root and two blocks, of which one is gathered ahead.
    assert forward.peak_groups == 2
    assert backward.peak_groups == 1
    assert max(forward.peak_unsharded_bytes, backward.peak_unsharded_bytes) <= root + block + padding
    assert root <= forward.saved_bytes <= root + padding  # and no block


def test_decomposed_graphs_communicate_alike() -> None:
    attends = partial(Transformer, Attention, depth=1)
    graphs = graphs_of(attends, by_block, backend="aot_eager_decomp_partition", layout="contiguous")
    assert pairs(graphs) == [(2, 0), (1, 2)]
    assert [graph.counts.parameter_copies for graph in graphs] == [0, 0]


def test_frozen_groups_are_not_reduced_and_replicas_are_all_reduced() -> None:
    def frozen_but_one() -> nn.Module:
        model = Transformer(depth=3)
        for name, param in model.named_parameters():
            param.requires_grad_(name.startswith("blocks.1.") and "weight" in name)
        return model

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for layout, more in (("contiguous", 1), ("interleaved", 0)):  # what trains is apart from what does not
        graphs = graphs_of(frozen_but_one, by_block, layout=layout, mesh=mesh)
        # What runs before the block that trains has no backward, and what runs behind it no gradients.
        forward, backward = pairs(graphs)
        assert forward == (4 + more, 0)
        assert backward[1] == graphs[1].counts.all_reduces == 1


def test_parameters_add_no_checks_before_a_step() -> None:
    found = []
    for bias in (False, True):
        torch.compiler.reset()
        model = fully_shard(nn.Linear(4, 8, bias=bias), layout="contiguous")
        names: list[str] = []

        def count(guards: Any, names: list[str] = names) -> list[bool]:
            names += [one.name for one in guards]
            return [True] * len(guards)

        compiled = torch.compile(model, backend="eager", options={"guard_filter_fn": count})
        compiled(torch.randn(2, 4)).sum().backward()
        none = [] if bias else [name for name in names if name.endswith("['bias']")]  # that there is none
        found.append(sum("traced[0]" in name for name in names) - len(none))
    assert found[0] == found[1] > 0
