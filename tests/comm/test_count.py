"""The counter sees every collective, whoever issues it, and changes nothing."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed import fsdp as peer
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import shardwise
from ranks import on_ranks
from shardwise.comm.count import Collective, CommCounter

FLOAT = 4  # bytes


def one_of_each(n: int) -> tuple[list[Any], list[Collective]]:
    """Calls of torch.distributed on n ranks, and what each should be recorded as."""
    shard, full = torch.ones(6), torch.ones(6 * n)
    shards = [torch.ones(6) for _ in range(n)]
    root = dist.get_rank() == 0
    calls = [
        lambda: dist.all_reduce(shard),
        lambda: dist.broadcast(shard, 0),
        lambda: dist.reduce(shard, 0),
        lambda: dist.all_gather_into_tensor(full, shard),
        lambda: dist.all_gather(shards, shard),
        lambda: dist.reduce_scatter_tensor(shard, full),
        lambda: dist.reduce_scatter(shard, shards),
        lambda: dist.all_to_all_single(full, full.clone()),
        lambda: dist.gather(shard, shards if root else None),
        lambda: dist.scatter(shard, shards if root else None),
        lambda: dist.barrier(),
    ]
    kinds = ["all_reduce", "broadcast", "reduce", *["all_gather"] * 2, *["reduce_scatter"] * 2]
    once = [Collective(kind, 6 * FLOAT, torch.float32, n) for kind in kinds[:3]]
    whole = [*kinds[3:], "all_to_all", "gather", "scatter"]
    return calls, [*once, *[Collective(k, 6 * n * FLOAT, torch.float32, n) for k in whole],
                   Collective("barrier", 0, None, n)]  # fmt: skip


@on_ranks(1, 2, 3)
def test_each_collective_is_recorded_with_the_bytes_of_its_full_buffer() -> None:
    calls, expected = one_of_each(dist.get_world_size())
    for call, record in zip(calls, expected, strict=True):
        with CommCounter() as counter:
            call()
        assert counter.calls == [record]


@on_ranks(2)
def test_sends_and_receives_are_recorded() -> None:
    rank, buffer = dist.get_rank(), torch.ones(5, dtype=torch.float64)
    with CommCounter() as counter:
        if rank == 0:
            dist.send(buffer, 1)
        else:
            dist.recv(buffer)
        both = [dist.P2POp(dist.isend, buffer, 1 - rank), dist.P2POp(dist.irecv, buffer.clone(), 1 - rank)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
    kinds = ["send" if rank == 0 else "recv", "send", "recv"]
    assert counter.calls == [Collective(kind, 40, torch.float64, 2) for kind in kinds]


@on_ranks(3)
def test_a_subgroup_counts_its_own_size() -> None:
    group = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        return
    with CommCounter() as counter:
        dist.all_reduce(torch.ones(3), group=group)
        functional.all_reduce(torch.ones(3), "sum", group).sum()
    assert counter.calls == [Collective("all_reduce", 12, torch.float32, 2)] * 2


@on_ranks(2)
def test_operators_count_once_with_all_their_bytes_forward_and_backward() -> None:
    parts, name = [torch.ones(2), torch.ones(4)], dist.group.WORLD.group_name
    x, plain = torch.ones(4, 3, requires_grad=True), torch.ops._c10d_functional
    with CommCounter() as counter:
        functional.all_reduce_coalesced(parts, "sum", dist.group.WORLD)[0].sum()
        for out in plain.reduce_scatter_tensor_coalesced(parts, "sum", 2, name):
            plain.wait_tensor(out)
        for out in plain.all_gather_into_tensor_coalesced(parts, 2, name):
            plain.wait_tensor(out)
        gathered = torch.ops._c10d_functional_autograd.all_gather_into_tensor(x, 2, name)
        plain.wait_tensor(gathered).square().sum().backward()
        torch.ops._dtensor.shard_dim_alltoall(torch.ones(4, 6), 0, 1, name)
    assert [(call.kind, call.bytes) for call in counter.calls] == [
        ("all_reduce", 24),
        ("reduce_scatter", 24),
        ("all_gather", 48),
        ("all_gather", 96),
        ("reduce_scatter", 96),
        ("all_to_all", 96),
    ]
    assert x.grad is not None


class ReduceGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        dist.broadcast(x.detach().clone(), 0)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        reduced = grad.clone()
        dist.all_reduce(reduced)
        return reduced


@on_ranks(2)
def test_forward_hooks_autograd_functions_and_gradient_hooks_are_seen() -> None:
    layer = nn.Linear(3, 3)
    layer.register_forward_pre_hook(lambda module, args: dist.all_reduce(torch.ones(1)))
    for parameter in layer.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    with CommCounter() as counter:
        ReduceGradient.apply(layer(torch.ones(2, 3))).sum().backward()
    sizes = [(call.kind, call.bytes) for call in counter.calls]
    assert sizes[:3] == [("all_reduce", 4), ("broadcast", 24), ("all_reduce", 24)]
    assert sorted(sizes[3:]) == [("all_reduce", 12), ("all_reduce", 36)]


class NestedBackward(torch.autograd.Function):
    """A backward inside a backward; deep enough, autograd continues in a thread of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, depth: int) -> torch.Tensor:
        ctx.depth = depth
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.depth:
            with torch.enable_grad():
                NestedBackward.apply(torch.ones(1, requires_grad=True), ctx.depth - 1).backward()
        else:
            assert threading.current_thread() is not threading.main_thread()
            dist.all_reduce(torch.ones(5))
        return grad, None


@on_ranks(2)
def test_a_backward_that_runs_in_another_thread_is_seen() -> None:
    with CommCounter() as counter:
        NestedBackward.apply(torch.ones(1, requires_grad=True), 100).backward()
    assert [(call.kind, call.bytes) for call in counter.calls] == [("all_reduce", 20)]


@on_ranks(2)
def test_what_a_tensor_subclass_issues_is_seen() -> None:
    mesh = dist.init_device_mesh("cpu", (2,))
    tensor = distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)])
    with CommCounter() as counter:
        product = tensor.t() @ tensor.cos()  # a partial sum over the ranks
        assert isinstance(product, DTensor)
        product.relu()  # needs the whole sum
    assert [(call.kind, call.bytes) for call in counter.calls] == [("all_reduce", 6 * 6 * FLOAT)]


@on_ranks(2)
def test_data_parallel_gradients_reduced_from_cpp_are_seen() -> None:
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 5))
    with CommCounter() as counter:
        model(torch.ones(2, 3)).sum().backward()
    assert counter.count("all_reduce") == 1
    assert counter.bytes("all_reduce") == (3 * 5 + 5) * FLOAT


def two_blocks() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6)), nn.Sequential(nn.Linear(6, 10)))


def sharded(model: nn.Module, by: Any = peer) -> nn.Module:
    for block in model:
        by.fully_shard(block, reshard_after_forward=True)
    return by.fully_shard(model)


BLOCKS = [(6 * 8 + 8 + 8 * 6 + 6) * FLOAT, (6 * 10 + 10) * FLOAT]  # every dim 0 is even: no padding


@on_ranks(2)
def test_a_sharded_step_gathers_each_block_twice_and_scatters_it_once() -> None:
    model = sharded(two_blocks())
    with CommCounter() as counter:
        model(torch.ones(3, 6)).sum().backward()
    gathered = [call.bytes for call in counter.calls if call.kind == "all_gather"]
    scattered = [call.bytes for call in counter.calls if call.kind == "reduce_scatter"]
    assert gathered == [BLOCKS[0], BLOCKS[1], BLOCKS[1], BLOCKS[0]]
    assert scattered == [BLOCKS[1], BLOCKS[0]]
    assert counter.count("all_reduce") == 0
    assert counter.bytes() == 3 * sum(BLOCKS)
    assert counter.wire_bytes() == 3 * sum(BLOCKS) // 2
    assert {(call.dtype, call.group_size) for call in counter.calls} == {(torch.float32, 2)}


def trained(model: nn.Module, *, counted: bool) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with CommCounter() if counted else torch.enable_grad():
        for step in range(3):
            torch.manual_seed(step)
            model(torch.randn(3, 6)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return [p.full_tensor() for p in model.parameters()]


@on_ranks(2)
@pytest.mark.parametrize("by", ["torch", "shardwise"])
def test_training_under_a_counter_changes_no_bit(by: str) -> None:
    library = peer if by == "torch" else shardwise
    plain, counted = (trained(sharded(two_blocks(), library), counted=c) for c in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(plain, counted, strict=True))
    assert not torch.equal(plain[0], two_blocks()[0][0].weight)


@on_ranks(2)
def test_a_compiled_graph_stays_compiled_and_is_counted() -> None:
    frames = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        frames.append(graph)
        return graph.forward

    @torch.compile(backend=backend, fullgraph=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x * 2, "sum", dist.group.WORLD) + 1

    with CommCounter() as counter:
        outputs = [step(torch.ones(3)), step(torch.ones(3))]
    assert len(frames) == 1
    assert counter.calls == [Collective("all_reduce", 12, torch.float32, 2)] * 2
    assert torch.equal(outputs[1], torch.full((3,), 5.0))


@on_ranks(2)
def test_nested_counters_each_count_what_happens_within() -> None:
    with CommCounter() as outer:
        dist.barrier()
        with CommCounter() as inner:
            dist.all_reduce(torch.ones(1))
        dist.barrier()
    dist.barrier()
    assert [call.kind for call in inner.calls] == ["all_reduce"]
    assert [call.kind for call in outer.calls] == ["barrier", "all_reduce", "barrier"]


def test_a_fake_group_of_any_size_is_counted() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=64)
    try:
        model = sharded(two_blocks())
        with CommCounter() as counter:
            model(torch.ones(3, 6)).sum().backward()
    finally:
        dist.destroy_process_group()
    # On 64 ranks every parameter is padded to one row a rank.
    padded = 64 * (6 + 1 + 8 + 1) * FLOAT
    assert next(call.bytes for call in counter.calls if call.kind == "all_gather") == padded
    assert (counter.count("all_gather"), counter.count("reduce_scatter")) == (4, 2)
    assert {call.group_size for call in counter.calls} == {64}


@pytest.mark.parametrize(
    ("kind", "group_size", "expected"),
    [
        ("all_gather", 4, 750),
        ("reduce_scatter", 4, 750),
        ("all_reduce", 4, 1500),
        ("all_to_all", 4, 750),
        ("broadcast", 4, 1000),
        ("send", 4, 1000),
        ("recv", 4, 0),
        ("all_gather", 1, 0),
        ("all_reduce", 1, 0),
        ("broadcast", 1, 0),
        ("all_gather", 3, 667),
    ],
)
def test_wire_bytes_are_those_of_the_ideal_ring(kind: str, group_size: int, expected: int) -> None:
    assert Collective(kind, 1000, torch.uint8, group_size).wire_bytes == expected
