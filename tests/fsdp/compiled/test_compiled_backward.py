"""Compiled functions that call `backward`: hooks run outside the graph, and gradients are the eager ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard as fsdp2

from fake_ranks import as_one_of
from fsdp.compiled.harness import local
from fsdp.models import update
from shardwise import fully_shard
from shardwise.comm import DefaultAllGather
from shardwise.errors import LifecycleError


class Mine(DefaultAllGather):
    pass


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 3))


def with_own_gather(model: nn.Module, **options: Any) -> nn.Module:
    fully_shard(model, **options).set_custom_all_gather(Mine())
    return model


def with_loss(model: nn.Module, rows: Tensor) -> Tensor:
    loss = model(rows).square().mean()
    loss.backward()
    return loss.detach()


def gradients(model: nn.Module, step: Callable[..., Tensor], steps: int = 2) -> list[Tensor]:
    """Losses and gradients of some steps; drops the counts of graphs made before."""
    counters.clear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for number in range(steps):
        made = torch.Generator().manual_seed(10 * dist.get_rank() + number)
        found.append(step(model, torch.randn(4, 6, generator=made)))
        grads = [param.grad for param in model.parameters()]
        found += [local(grad).clone() for grad in grads if grad is not None]
        update(optimizer)
    return found


def breaks() -> int:
    return sum(counters["graph_break"].values())


def in_both_layouts(model: nn.Module) -> nn.Module:
    fully_shard(model[0], layout="interleaved")
    return fully_shard(model, layout="contiguous")


zero2 = partial(fully_shard, layout="contiguous", strategy="zero2")


@as_one_of(2)
@pytest.mark.parametrize(
    ("shard", "broken"),
    [(in_both_layouts, 1), (partial(with_own_gather, layout="interleaved"), 2), (zero2, 2)],
)
def test_backward_in_a_compiled_function_runs_hooks_outside_of_graphs(shard: Any, broken: int) -> None:
    """Also where modules gather and reduce outside of graphs; one more break is at the call of backward."""
    expected = gradients(shard(small()), with_loss)
    found = gradients(shard(small()), torch.compile(with_loss, backend="eager"))
    assert breaks() == broken
    assert counters["stats"]["unique_graphs"] > 1
    assert len(found) == len(expected) == 2 * 5
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class Net(nn.Sequential):
    """With a forward of its own."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 7), nn.Linear(7, 3))

    def forward(self, rows: Tensor) -> Tensor:
        return self[1](torch.relu(self[0](rows)))


@as_one_of(2)
def test_graphs_break_once_for_each_module_that_no_graph_can_hold_as_fsdp2s_do() -> None:
    def count(model: nn.Module, sharded: list[nn.Module], shard: Callable[..., Any]) -> int:
        torch.compiler.reset()
        for module in sharded:
            shard(module)
        gradients(model, torch.compile(with_loss, backend="eager"))
        return breaks()

    def cases() -> Iterator[tuple[nn.Module, list[nn.Module]]]:
        for model in (small(), Net()):
            yield model, [model]
        for model in (small(), Net()):
            yield model, [*(one for one in model.children() if type(one) is nn.Linear), model]

    theirs = [count(*case, fsdp2) for case in cases()]
    for shard in (partial(with_own_gather, layout="interleaved"), zero2):
        assert [count(*case, shard) for case in cases()] == theirs
    with pytest.raises(Unsupported, match="strategy zero2"):
        torch.compile(zero2(Net()), backend="eager", fullgraph=True)(torch.ones(4, 6))
    net = Net()
    zero2(net[0])
    with pytest.raises(Unsupported, match="strategy zero2"):
        torch.compile(fully_shard(net), backend="eager", fullgraph=True)(torch.ones(4, 6))


@as_one_of(2)
def test_compiled_autograd_takes_graphs_alone() -> None:
    with torch._dynamo.config.patch(compiled_autograd=True):
        step = torch.compile(with_loss, backend="eager")
        found = gradients(fully_shard(small(), layout="contiguous"), step)
        torch.compiler.reset()
        with pytest.raises(LifecycleError, match="compiled_autograd = False"):
            gradients(with_own_gather(small(), layout="contiguous"), step)
    expected = gradients(fully_shard(small(), layout="contiguous"), with_loss)
    assert len(found) == len(expected) == 2 * 5
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
