"""Memory of the contiguous layout: what is freed when, in bytes of storage and by weak references."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp.models import Net, sharded_net, step
from ranks import on_ranks
from shardwise import MixedPrecisionPolicy, fully_shard
from shardwise.fsdp.contiguous import ContiguousGroup
from shardwise.fsdp.module_state import state_of
from shardwise.sharded_tensor.rows import ShardedRows

STRATEGIES = ["ddp", "zero1", "zero2", "fsdp"]


def net(*, blocks: int = 3, **options: Any) -> Any:
    return sharded_net(blocks=blocks, layout="contiguous", **options)


def groups(model: nn.Module) -> list[ContiguousGroup]:
    states = dict.fromkeys(s for m in model.modules() if (s := state_of(m)) is not None)
    return [group for state in states for group in state.groups]


def gathered_bytes(model: nn.Module) -> int:
    """Bytes of gathered buffers that exist now."""
    return sum(b.full.untyped_storage().nbytes() for g in groups(model) for b in g.buffers)


def whole_bytes(model: nn.Module) -> list[int]:
    """Of each group, the root first, when gathered."""
    return [
        sum(s.unsharded_numel * s.gather_dtype.itemsize for s in g.layout.segments) for g in groups(model)
    ]


def forget_what_lives() -> None:
    """Leave what is in this process by now out of `live`, which then has little to look at."""
    gc.collect()
    gc.freeze()


def live() -> tuple[int, int]:
    """Bytes of every storage held by a tensor made since `forget_what_lives`, and how many tensors."""
    gc.collect()
    storages: dict[int, int] = {}
    tensors = 0
    for found in gc.get_objects():
        if not isinstance(found, Tensor) or found.is_meta:
            continue
        tensors += 1
        local = found._local_tensor if isinstance(found, ShardedRows) else found
        try:
            storage = local.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
        except (RuntimeError, NotImplementedError):
            continue
    return sum(storages.values()), tensors


def settled(expected: tuple[int, int]) -> tuple[int, int]:
    """`live()`, waiting for gloo's threads, which let go of buffers a moment after the wait for them."""
    deadline = time.monotonic() + 5
    while (found := live()) != expected and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


@on_ranks(2, 3)
def test_gathered_memory_exists_only_inside_a_step() -> None:
    model = net()
    root, *blocks = whole_bytes(model)
    between: list[int] = []
    step(model, then=lambda: between.append(gathered_bytes(model)))
    assert between == [root + blocks[-1]]
    assert gathered_bytes(model) == 0


@on_ranks(2)
def test_forward_never_holds_more_than_one_block_and_the_root() -> None:
    model = net(blocks=5)
    root, block, *_ = whole_bytes(model)
    seen: list[int] = []
    for one in model.blocks:
        one.register_forward_pre_hook(lambda *unused: seen.append(gathered_bytes(model)))
        one.register_forward_hook(lambda *unused: seen.append(gathered_bytes(model)))
    step(model)
    assert seen == [root + block] * 10


@on_ranks(2)
def test_backward_never_holds_more_than_two_blocks_and_the_root() -> None:
    model = net(blocks=5)
    root, block, *_ = whole_bytes(model)
    seen: list[int] = []
    step(model)
    for one in model.blocks:
        for param in state_of(one).groups[0].params:
            param.unsharded.register_hook(lambda grad: seen.append(gathered_bytes(model)))
    step(model)
    assert len(seen) == 5 * 4
    assert max(seen) == root + 2 * block


@on_ranks(2, 4)
def test_each_rank_stores_its_share_of_parameters_gradients_and_optimizer_state() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model)
    optimizer.step()
    shard = sum(g.layout.segments[0].shard_numel for g in groups(model))
    held = sum(p.local.numel() for p in model.parameters())
    assert held == sum(p.grad.local.numel() for p in model.parameters())
    assert held == sum(s["exp_avg"].local.numel() for s in optimizer.state.values())
    assert held <= shard
    storages = {p.grad.local.untyped_storage()._cdata for p in model.parameters() if p.local.numel()}
    assert len(storages) == len(groups(model)), "a group's gradients share one buffer"


@on_ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_deleted_model_is_gone_at_once(strategy: str) -> None:
    gc.collect()
    gc.disable()
    try:
        model = net(blocks=2, strategy=strategy)
        optimizer = torch.optim.AdamW(model.parameters())
        step(model)
        optimizer.step()
        optimizer.zero_grad()
        watched: list[Any] = [weakref.ref(model), weakref.ref(model.blocks[0]), weakref.ref(state_of(model))]
        watched += [weakref.ref(g) for g in groups(model)]
        watched += [weakref.ref(b) for g in groups(model) for b in g.buffers]
        watched += [weakref.ref(shard) for g in groups(model) for shard in g.shards]
        watched += [weakref.ref(p) for p in model.parameters()]
        del model, optimizer
        assert [ref() for ref in watched] == [None] * len(watched)
    finally:
        gc.enable()


@on_ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_live_bytes_at_rest_never_grow_over_60_steps(strategy: str) -> None:
    forget_what_lives()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = net(blocks=2, strategy=strategy, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    resting = (0, 0)
    for index in range(60):
        step(model)
        optimizer.step()
        optimizer.zero_grad()
        if index == 2:
            time.sleep(0.5)
            resting = live()
        elif 2 < index < 10 or index % 10 == 9:  # looking takes longer than a step
            assert settled(resting) == resting, f"step {index}"


@on_ranks(2)
def test_at_rest_only_shards_and_optimizer_state_are_alive() -> None:
    forget_what_lives()
    model = net(blocks=3, width=32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(3):
        step(model, width=32)
        optimizer.step()
        optimizer.zero_grad()
    shards = sum(4 * g.layout.segments[0].shard_numel for g in groups(model))
    momenta = sum(4 * p.local.numel() for p in model.parameters())
    time.sleep(0.2)  # for gloo's threads, as in `settled`
    extra = live()[0] - shards - momenta
    assert 0 <= extra <= 64, "at most what stands for padding: one element a segment"


@on_ranks(2)
def test_the_whole_parameters_are_freed_when_sharded() -> None:
    linear = nn.Linear(64, 64)
    data = weakref.ref(linear.weight)
    fully_shard(linear, layout="contiguous")
    gc.collect()
    assert data() is None
    shards = sum(s.nbytes for g in groups(linear) for s in g.shards)
    assert shards == 4 * 33 * 64, "half of 64 rows, and the bias, which no boundary can divide as well"


@on_ranks(2)
def test_a_gather_that_nobody_used_leaves_no_memory() -> None:
    model = net()
    step(model)
    model.blocks[0].unshard(async_op=True)
    model.blocks[0].reshard()
    assert gathered_bytes(model) == 0
    model.blocks[0].set_modules_to_backward_prefetch([model.blocks[2]])  # which is done by then
    step(model)
    assert gathered_bytes(model) == 0
    model.blocks[0].unshard(async_op=True)
    model.reset_iter_state()
    assert gathered_bytes(model) == 0


@on_ranks(2)
def test_an_unsharded_module_that_is_deleted_frees_its_gathered_memory() -> None:
    model = fully_shard(Net(), layout="contiguous")
    model.unshard()
    full = weakref.ref(groups(model)[0].buffers[0].full)
    gc.disable()
    try:
        del model
        deadline = time.monotonic() + 5
        while full() is not None and time.monotonic() < deadline:
            time.sleep(0.01)  # as in `settled`
        assert full() is None
    finally:
        gc.enable()
