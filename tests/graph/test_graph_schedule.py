"""Inductor runs collectives where the passes put them, and a recorder shows the order in which it does."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor.async_compile import AsyncCompile
from torch.fx import Graph
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

from graph.held import held_bytes
from shardwise import fully_shard
from shardwise.graph import record
from shardwise.graph.nodes import collectives, operator_name
from shardwise.graph.passes import Passes
from shardwise.graph.passes.moves import staging

RANKS, WIDTH = 4, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


@pytest.fixture
def fake_group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=RANKS)
    yield
    torch.compiler.reset()
    dist.destroy_process_group()


def order(graph: Graph) -> list[Any]:
    """Issues and waits one by one, with the matrix products between them."""
    named = {node: one.kind for one in collectives(graph) for node in (one.issue, *one.waits)}
    found: list[Any] = [set()]
    for node in graph.nodes:
        if node in named:
            found += [node.name, set()]
        elif operator_name(node) in ("aten::mm", "aten::addmm"):
            found[-1].add(node.name)
    return found


def test_inductor_schedules_collectives_where_the_passes_put_them(
    fake_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for compiler in ("cpp", "cpp_pybinding"):  # nothing runs: what is compiled is of no interest
        monkeypatch.setattr(AsyncCompile, compiler, lambda *source: lambda *args: None)
    model = nn.Sequential(Block(), Block(), Block())
    for module in (*model, model):
        fully_shard(module, layout="contiguous")
    decided: list[Any] = []
    most: list[int] = []

    def look(graph: Graph) -> None:
        late = copy.deepcopy(graph)
        Passes(prefetch=0)(late)
        Passes()(graph)
        most.append(max(held_bytes(late)))
        decided.append(order(graph))

    recorder = record("inductor", passes=(look,))
    torch.compile(model, backend=recorder, fullgraph=True)(torch.randn(3, WIDTH)).sum().backward()
    assert [order(one.module.graph) for one in recorder.graphs] == decided
    forward, backward = recorder.report().graphs
    assert (forward.kind, forward.counts.gathers, forward.counts.reduce_scatters) == ("forward", 3, 0)
    assert (backward.kind, backward.counts.gathers, backward.counts.reduce_scatters) == ("backward", 3, 3)
    assert all(one.overlap > 0 for one in backward.of("reduce_scatter")[:2])
    assert all(one.overlap > 0 for one in backward.of("all_gather")[1:])
    # A staging buffer is filled where its reduction is issued, not from the first gradient on.
    graph = recorder.graphs[1].module.graph
    assert all(one.issue.prev is staging(one) for one in collectives(graph) if one.op)
    group = sum(param.numel() for param in Block().parameters()) * 4
    # The next block's parameters take the place of the gradients before; those of a norm come after that.
    assert max(held_bytes(graph)) - most[1] <= 4 * 2 * WIDTH
    shards = 2 * group // RANKS
    assert 3 * group <= most[1] <= 3 * group + shards
