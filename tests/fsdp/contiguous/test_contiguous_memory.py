"""Memory of the contiguous layout: what is freed when, in bytes of storage and by weak references."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp.contiguous.one_process import net
from fsdp.models import WAYS, Net, forget_what_lives, gathered_bytes, groups, sharded_net, step, update
from ranks import on_ranks
from shardwise import MixedPrecisionPolicy, fully_shard


def live() -> tuple[int, int]:
    """Bytes of every storage held by a tensor made since `forget_what_lives`, and how many tensors."""
    gc.collect()
    storages: dict[int, int] = {}
    tensors = 0
    for found in gc.get_objects():
        if not isinstance(found, Tensor) or found.is_meta:
            continue
        tensors += 1
        local = found._local_tensor if isinstance(found, DTensor) else found
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


@on_ranks(2)
@pytest.mark.parametrize("options", WAYS, ids=str)
def test_live_bytes_at_rest_never_grow_over_steps(options: dict[str, str]) -> None:
    forget_what_lives()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = sharded_net(blocks=2, mp_policy=policy, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    resting = (0, 0)
    for index in range(10):
        step(model)
        update(optimizer)
        if index == 2:
            time.sleep(0.2)  # for gloo's threads, as in `settled`
            resting = live()
        elif index > 2:
            assert settled(resting) == resting, f"step {index}"


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
