"""Every strategy trains to the numbers of one process, and moves and keeps the bytes its row says.

Formulas: N elements in a group's gathered buffer, padding included; r replicate ranks, s shard ranks (s of
a 1-D mesh); e bytes a gathered element has, d a reduced one, 4 a stored one. docs/strategies.md has them.
"""

from __future__ import annotations

import copy
import functools
import gc
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp.models import Net, forget_what_lives, groups, refused, update
from ranks import on_ranks
from shardwise import MixedPrecisionPolicy, fully_shard
from shardwise.comm.count import CommCounter
from shardwise.mesh import DataParallelMeshDims
from shardwise.optim import flat
from shardwise.sharded_tensor.rows import ShardedRows

ONE_AXIS = ["ddp", "zero1", "zero2", "fsdp"]
TWO_AXES = ["hsdp", "hierarchical_fsdp"]
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
POLICIES = {"fp32": MixedPrecisionPolicy(), "bf16": BF16}
# Sums over three ranks have several orders, and Adam divides a gradient by its own size.
THREE_TERMS = {"rtol": 1e-5, "atol": 1e-5}
STEPS = 3


def meshes(strategy: str) -> DeviceMesh:
    if strategy in ONE_AXIS:
        return init_device_mesh("cpu", (dist.get_world_size(),))
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))


def sharded(strategy: str, policy: str) -> Net:
    net, mesh = Net(), meshes(strategy)
    for module in (*net.blocks, net):
        fully_shard(module, mesh=mesh, layout="contiguous", strategy=strategy, mp_policy=POLICIES[policy])
    return net


def batch(rank: int, step: int, micro: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))


def train(net: Net, optimizer: torch.optim.Optimizer, *, step: int, micro_batches: int) -> None:
    for micro in range(micro_batches):
        net.set_requires_gradient_sync(micro == micro_batches - 1)
        net(batch(dist.get_rank(), step, micro)).float().square().mean().backward()
    update(optimizer)


@functools.cache
def one_process(ranks: int, dtype: torch.dtype, *, micro_batches: int) -> list[Tensor]:
    """The parameters that one process trains on all ranks' batches."""
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=True)
    for step in range(STEPS):
        per_rank = []
        for rank in range(ranks):
            total = [torch.zeros_like(p) for p in net.parameters()]
            for micro in range(micro_batches):
                computing = copy.deepcopy(net).to(dtype)
                computing(batch(rank, step, micro).to(dtype)).float().square().mean().backward()
                for into, param in zip(total, computing.parameters(), strict=True):
                    into += param.grad.float()
            per_rank.append(total)
        while len(per_rank) > 1:  # pairs, as the axes of a 2 x 2 mesh add
            pairs = [per_rank[i : i + 2] for i in range(0, len(per_rank), 2)]
            per_rank = [[sum(grads[1:], grads[0]) for grads in zip(*pair, strict=True)] for pair in pairs]
        for param, grad in zip(net.parameters(), per_rank[0], strict=True):
            param.grad = grad / ranks
        optimizer.step()
    return [param.detach() for param in net.parameters()]


def check_training(strategy: str, policy: str, micro_batches: int) -> None:
    net = sharded(strategy, policy)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=True)
    for step in range(STEPS):
        train(net, optimizer, step=step, micro_batches=micro_batches)
    found = [param.full_tensor() for param in net.parameters()]
    ranks = dist.get_world_size()
    dtype = torch.float32 if policy == "fp32" else torch.bfloat16
    expected = one_process(ranks, dtype, micro_batches=micro_batches)
    if ranks == 3:
        torch.testing.assert_close(found, expected, **THREE_TERMS)
    else:
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@on_ranks(3)
@pytest.mark.parametrize("strategy", ONE_AXIS)
def test_training_on_one_axis_is_that_of_one_process(strategy: str) -> None:
    for policy in POLICIES:
        check_training(strategy, policy, micro_batches=1)


@on_ranks(2)
@pytest.mark.parametrize("strategy", ONE_AXIS)
def test_accumulating_without_sync_on_one_axis_adds_up_as_in_one_process(strategy: str) -> None:
    for policy in POLICIES:
        check_training(strategy, policy, micro_batches=2)


@on_ranks(4)
@pytest.mark.parametrize("strategy", TWO_AXES)
def test_training_and_accumulating_on_two_axes_are_those_of_one_process(strategy: str) -> None:
    for policy, micro_batches in (("fp32", 1), ("bf16", 2)):
        check_training(strategy, policy, micro_batches)


def sizes(net: nn.Module) -> tuple[int, int]:
    """N summed over all groups, and N of those that backward gathers again."""
    root, *blocks = [sum(s.unsharded_numel for s in g.layout.segments) for g in groups(net)]
    return root + sum(blocks), sum(blocks[:-1])  # the root and the last block stay gathered


def expected_bytes(strategy: str, net: nn.Module, *, e: int, d: int) -> dict[tuple[str, int], int]:
    """By kind of collective and size of its group."""
    cut, again = sizes(net)
    ranks = dist.get_world_size()
    r, s = (2, ranks // 2) if strategy in TWO_AXES else (1, ranks)
    n = cut
    if strategy == "ddp":  # what `sizes` calls gathered is every rank's shard
        return {("all_reduce", ranks): n * d}
    if strategy == "zero1":
        return {("all_reduce", ranks): n * d, ("all_gather", ranks): n * e}
    if strategy == "zero2":
        return {("reduce_scatter", ranks): n * d, ("all_gather", ranks): n * e}
    uses = {("all_gather", s): (n + again) * e, ("reduce_scatter", s): n * d}
    if strategy == "hsdp":
        uses["all_reduce", r] = n // s * d
    elif strategy == "hierarchical_fsdp":  # r = s = 2 here: the axes' calls count together
        uses["all_gather", r] += n // s * e
        uses["reduce_scatter", r] += n // s * d
    return uses


def check_bytes(strategy: str, policy: str) -> None:
    net = sharded(strategy, policy)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    train(net, optimizer, step=0, micro_batches=1)
    with CommCounter() as counter:
        train(net, optimizer, step=1, micro_batches=1)
    found: dict[tuple[str, int], int] = {}
    for call in counter.calls:
        key = (call.kind, call.group_size)
        found[key] = found.get(key, 0) + call.bytes
    assert found == expected_bytes(strategy, net, e=4 if policy == "fp32" else 2, d=4)


@on_ranks(3)
@pytest.mark.parametrize("strategy", ONE_AXIS)
def test_a_step_on_one_axis_moves_the_bytes_of_its_row(strategy: str) -> None:
    for policy in POLICIES:
        check_bytes(strategy, policy)


def live_bytes() -> int:
    """Of the storages of floating-point tensors made since `forget_what_lives`, single numbers left out."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if type(thing) in (Tensor, nn.Parameter) and thing.device.type == "cpu" and thing.is_floating_point():
            storage = thing.untyped_storage()
            if storage.data_ptr() and storage.nbytes() > 4:
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def assert_lives(expected: int) -> None:
    deadline = time.monotonic() + 5
    while (found := live_bytes()) != expected and time.monotonic() < deadline:
        time.sleep(0.01)  # gloo's threads let go of a collective's tensors just after it has ended
    assert found == expected


def check_memory(strategy: str, policy: str) -> None:
    forget_what_lives()
    net = sharded(strategy, policy)
    optimizer = flat(torch.optim.AdamW, net, lr=1e-2)
    train(net, optimizer, step=0, micro_batches=1)
    x = batch(0, 1, 0)
    ranks, (n, _) = dist.get_world_size(), sizes(net)
    cut, held = {
        "ddp": (1, n),
        "zero1": (ranks, n),
        "zero2": (ranks, n),
        "fsdp": (ranks, n // ranks),
        "hsdp": (ranks // 2, n // (ranks // 2)),
        "hierarchical_fsdp": (ranks, n // (ranks // 2)),
    }[strategy]
    shard = n // cut
    parameters = 4 * held if policy == "fp32" or strategy in ("fsdp", "hsdp") else 4 * shard + 2 * held
    assert_lives(parameters + 2 * 4 * shard + x.nbytes)
    net(x).float().square().mean().backward()
    assert_lives(parameters + (1 + 2) * 4 * shard + x.nbytes)
    update(optimizer)
    assert_lives(parameters + 2 * 4 * shard + x.nbytes)
    assert isinstance(next(net.parameters()), ShardedRows)


@on_ranks(3)
@pytest.mark.parametrize("strategy", ONE_AXIS)
def test_between_steps_one_axis_keeps_the_bytes_of_its_row(strategy: str) -> None:
    for policy in POLICIES:
        check_memory(strategy, policy)


@on_ranks(4)
@pytest.mark.parametrize("strategy", TWO_AXES)
def test_two_axes_move_and_keep_the_bytes_of_their_rows(strategy: str) -> None:
    for policy in POLICIES:
        check_bytes(strategy, policy)
        check_memory(strategy, policy)


@on_ranks(2)
def test_a_strategy_of_the_interleaved_layout_is_refused() -> None:
    rank = dist.get_rank()
    for options in ({}, {"layout": "interleaved"}):
        words = f"rank {rank}: strategy='zero1' needs layout=\"contiguous\""
        refused(lambda o=options: fully_shard(nn.Linear(4, 4), strategy="zero1", **o), words)


@on_ranks(4)
def test_a_strategy_for_another_mesh_is_refused() -> None:
    contiguous, interleaved, both = ["contiguous"], ["interleaved"], ["contiguous", "interleaved"]
    names = "strategy must be one of ddp, zero1, zero2, fsdp, hsdp, hierarchical_fsdp"
    cases: list[tuple[list[str], str, str, Any]] = [
        (both, "hsdp", "needs a 2-D", meshes("fsdp")),
        (contiguous, "hierarchical_fsdp", "needs a 2-D", meshes("fsdp")),
        (contiguous, "zero1", "needs a 1-D", meshes("hsdp")),
        (both, "fsdp", "needs a 1-D", meshes("hsdp")),
        (both, "zero3", names, None),
        (interleaved, "fsdp", "needs a mesh with a shard axis, got replicas only", replicas_only()),
    ]
    for layouts, strategy, expected, mesh in cases:
        for layout in layouts:
            options: Any = mesh if isinstance(mesh, dict) else {"mesh": mesh}
            options |= {"layout": layout, "strategy": strategy}
            refused(lambda o=options: fully_shard(nn.Linear(4, 4), **o), expected)


def replicas_only() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("copies",))
    return {"mesh": mesh, "dp_mesh_dims": DataParallelMeshDims(replicate="copies")}


@on_ranks(4)
def test_the_strategies_that_the_interleaved_layout_has_are_its_defaults() -> None:
    for strategy in ("fsdp", "hsdp"):
        trained = []
        for options in ({}, {"strategy": strategy}):
            torch.manual_seed(0)
            net, mesh = Net(), meshes(strategy)
            for module in (*net.blocks, net):
                fully_shard(module, mesh=mesh, **options)
            train(net, torch.optim.SGD(net.parameters(), foreach=True), step=0, micro_batches=1)
            trained.append([param.full_tensor() for param in net.parameters()])
        assert all(torch.equal(left, right) for left, right in zip(*trained, strict=True))
