"""Inductor runs collectives where the passes put them, and a recorder shows the order in which it does."""

from __future__ import annotations

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

from shardwise import fully_shard
from shardwise.graph import record
from shardwise.graph.collectives import collectives, operator_name
from shardwise.graph.passes import Passes

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
    model = nn.Sequential(Block(), Block())
    for module in (*model, model):
        fully_shard(module, layout="contiguous")
    decided: list[Any] = []
    recorder = record("inductor", passes=(Passes(), lambda graph: decided.append(order(graph))))
    torch.compile(model, backend=recorder, fullgraph=True)(torch.randn(3, WIDTH)).sum().backward()
    assert [order(one.module.graph) for one in recorder.graphs] == decided
    forward, backward = recorder.report().graphs
    assert (forward.kind, forward.counts.gathers, forward.counts.reduce_scatters) == ("forward", 2, 0)
    assert (backward.kind, backward.counts.gathers, backward.counts.reduce_scatters) == ("backward", 2, 2)
    assert backward.of("reduce_scatter")[0].overlap > 0
