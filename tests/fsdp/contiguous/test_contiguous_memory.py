"""Memory of the contiguous layout: what is freed when, in bytes of storage and by weak references."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
import torch
from torch import Tensor

from fsdp.contiguous.one_process import net
from fsdp.models import STRATEGIES, Net, forget_what_lives, gathered_bytes, groups, step
from ranks import on_ranks
from shardwise import MixedPrecisionPolicy, fully_shard
from shardwise.sharded_tensor.rows import ShardedRows


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
def test_live_bytes_at_rest_never_grow_over_30_steps(strategy: str) -> None:
    forget_what_lives()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = net(blocks=2, strategy=strategy, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    resting = (0, 0)
    for index in range(30):
        step(model)
        optimizer.step()
        optimizer.zero_grad()
        if index == 2:
            time.sleep(0.2)  # for gloo's threads, as in `settled`
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
