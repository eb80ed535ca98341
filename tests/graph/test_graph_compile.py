"""`shardwise.compile` changes when a model communicates and no number, and ranks agree about its graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters

import shardwise
from fake_ranks import as_one_of
from ranks import on_ranks
from shardwise import RankMismatchError, ShardingError, fully_shard
from shardwise.comm.count import CommCounter
from shardwise.graph import record
from shardwise.graph.passes import Passes

WIDTH, STEPS = 6, 2
LAYOUTS = ("contiguous", "interleaved")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, blocks: int = 3, *, backwards: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.backwards = backwards

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in reversed(self.blocks) if self.backwards else self.blocks:
            x = block(x)
        return x


def sharded(net: Net, **options: Any) -> Net:
    for block in net.blocks:
        fully_shard(block, **options)
    return fully_shard(net, **options)


def trained(net: nn.Module, call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Outputs of some steps, then the parameters."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, foreach=True)
    generator = torch.Generator().manual_seed(dist.get_rank())
    found = []
    for _ in range(STEPS):
        output = call(torch.randn(4, WIDTH, generator=generator))
        output.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(output.detach().clone())
    return [*found, *(param.full_tensor().detach() for param in net.parameters())]


@on_ranks(2)
def test_passes_change_no_bit() -> None:
    for layout in LAYOUTS:
        start = Net(blocks=2)
        eager = sharded(copy.deepcopy(start), layout=layout)
        expected = trained(eager, eager)
        options: Any = {"prefetch": 2, "merge_bytes": 1 << 20, "backend": "aot_eager"}
        if layout == "contiguous":
            options = {"prefetch": 2, "max_unsharded": 2, "backend": "aot_eager_decomp_partition"}
        net = sharded(copy.deepcopy(start), layout=layout)
        compiled = shardwise.compile(net, **options)
        assert compiled is not net
        found = trained(net, compiled)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), layout
        torch.compiler.reset()


@on_ranks(2)
def test_equal_regions_share_one_graph_between_the_collectives_of_the_uncompiled_model() -> None:
    for options in ({"layout": "interleaved"}, {"layout": "contiguous", "strategy": "zero2"}):
        start = Net(blocks=2)
        found, sent = [], []
        for compiles in (False, True):
            net = sharded(copy.deepcopy(start), **options)
            counters.clear()
            if compiles:
                assert shardwise.compile(net, backend="aot_eager", mode="regional") is net
            for block in net.blocks:
                block.up.bias.requires_grad_(False)
            with CommCounter() as counter:
                steps = trained(net, net)
                graphs = counters["stats"]["unique_graphs"]
                for block in net.blocks:
                    block.up.bias.requires_grad_(True)
                found.append(steps + trained(net, net))
            sent.append(counter.calls)
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), options
        assert graphs == 1
        assert not counters["graph_break"]
        assert sent[1] == sent[0]
        torch.compiler.reset()


@on_ranks(2)
def test_graphs_that_differ_on_one_rank_are_an_error_on_all() -> None:
    net = Net(backwards=dist.get_rank() == 1)
    net.blocks[1].down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
    net.blocks[2].down = nn.Identity()
    net.blocks[2].up = nn.Linear(WIDTH, WIDTH)
    compiled = shardwise.compile(sharded(net), backend="aot_eager")
    for _ in range(2):  # and again
        with pytest.raises(RankMismatchError, match=r"Only on rank \d:\n  3\. all_gather of \d+ bytes"):
            compiled(torch.randn(2, WIDTH))


@as_one_of(2)
def test_sizes_may_be_dynamic_from_the_first_call_on() -> None:
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(4, 4))
    made = shardwise.compile(model, backend="aot_eager", dynamic=True)
    for rows in (3, 5):
        x = torch.randn(rows, 4)
        expected = model(x)
        assert torch.equal(made(x), expected)
    made(x).sum().backward()
    assert model.weight.grad is not None


@as_one_of(2)
def test_a_bound_that_the_model_breaks_is_an_error_when_it_is_called() -> None:
    net = Net()
    for block in net.blocks:
        fully_shard(block, reshard_after_forward=False)
    compiled = shardwise.compile(fully_shard(net), backend="aot_eager", max_unsharded=2)
    with pytest.raises(ShardingError, match=r"no more than 2 groups .*blocks"):
        compiled(torch.randn(2, WIDTH))


@on_ranks(2)
def test_a_rank_may_compile_again_alone() -> None:
    net = sharded(Net(1))
    compiled = shardwise.compile(net, backend="aot_eager", dynamic=False)
    compiled(torch.randn(2, WIDTH)).sum().backward()
    counters.clear()
    compiled(torch.randn(2 + dist.get_rank(), WIDTH)).sum().backward()
    assert counters["stats"].get("unique_graphs", 0) == dist.get_rank()


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(ShardingError, match=r"no module of this Linear is sharded; call fully_shard before"):
        shardwise.compile(nn.Linear(2, 2))
    with pytest.raises(ShardingError, match=r"mode 'partial' is unknown; expected one of full, regional"):
        shardwise.compile(nn.Linear(2, 2), mode="partial")


@on_ranks(1)
def test_unknown_backends_and_options_are_refused() -> None:
    net = sharded(Net(1))
    with pytest.raises(ShardingError, match=r"backend 'induktor' is unknown; expected one of inductor"):
        shardwise.compile(net, backend="induktor")
    with pytest.raises(ShardingError, match=r"options are inductor's; backend 'aot_eager' takes none"):
        shardwise.compile(net, backend="aot_eager", options={"max_autotune": True})
    with pytest.raises(ShardingError, match=r"option reorder_for_peak_memory is shardwise.compile's own"):
        shardwise.compile(net, options={"reorder_for_peak_memory": True})
    with pytest.raises(ShardingError, match=r"prefetch is -1"):
        shardwise.compile(net, prefetch=-1)
    with pytest.raises(ShardingError, match=r'are of mode "full"; .* set_modules_to_forward_prefetch'):
        shardwise.compile(net, mode="regional", merge_bytes=1 << 20)


@on_ranks(1)
def test_other_backends_are_called_with_the_graph() -> None:
    called = []

    def backend(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        called.append(len(inputs))
        return module

    net = sharded(Net(1))
    x = torch.randn(2, WIDTH)
    expected = net(x)
    assert torch.equal(shardwise.compile(net, backend=backend)(x), expected)
    assert len(called) == 1
    assert torch.equal(shardwise.compile(net, backend="eager")(x), expected)


@as_one_of(2)
def test_a_bound_in_backward_counts_what_forward_saved() -> None:
    layers = [nn.Linear(6, 6) for _ in range(3)]
    for layer in layers:
        fully_shard(layer, layout="contiguous", reshard_after_forward=layer is not layers[0])
    model = fully_shard(nn.Sequential(*layers), layout="contiguous")
    for limit, most in ((None, 3), (2, 2)):
        recorder = record(passes=(Passes(prefetch=3, max_unsharded=limit),))
        compiled = torch.compile(model, backend=recorder, fullgraph=True)
        compiled(torch.randn(2, 6, requires_grad=True)).square().sum().backward()
        report = recorder.report()
        assert len({one.gathers for one in report.forward[0].saved}) == 1
        assert report.backward[0].peak_groups == most
