"""The accelerator path on one real device: the same numbers as FSDP2 and as the unsharded model.

Two NCCL ranks cannot share a device, so the world is one rank: gathers and reductions become copies,
but streams, events, prefetching, casts and offloading run as they do in a larger job.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as peer
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from fsdp.models import Net
from ranks import on_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

OPTIONS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "plain": lambda api: {},
    "kept after forward": lambda api: {"reshard_after_forward": False},
    "bf16": lambda api: {
        "mp_policy": api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    },
    "offloaded": lambda api: {"offload_policy": api.CPUOffloadPolicy()},
}


def train(api: Any, options: dict[str, Any], *, clip: bool = True) -> list[torch.Tensor]:
    mesh = init_device_mesh("cuda", (1,))
    net: nn.Module = Net(blocks=4, width=64)
    for block in net.blocks:
        api.fully_shard(block, mesh=mesh, **options)
    api.fully_shard(net, mesh=mesh, **options)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(10):
        loss = net(torch.randn(8, 64, generator=generator)).square().mean()
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    return [*losses, *(p.full_tensor().cpu() for p in net.parameters())]


@on_ranks(1)
@pytest.mark.parametrize("options", OPTIONS)
def test_training_on_a_device_equals_torchs(options: str) -> None:
    ours = train(shardwise, OPTIONS[options](shardwise))
    theirs = train(peer, OPTIONS[options](peer))
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)


@on_ranks(1)
@pytest.mark.parametrize("strategy", ["fsdp", "zero2", "zero1", "ddp"])
@pytest.mark.parametrize("options", OPTIONS)
def test_training_by_rows_on_a_device_equals_torchs(options: str, strategy: str) -> None:
    """Without clipping, whose norm adds the parameters' squares in another order."""
    by_rows = {"layout": "contiguous", "strategy": strategy}
    ours = train(shardwise, OPTIONS[options](shardwise) | by_rows, clip=False)
    theirs = train(peer, OPTIONS[options](peer), clip=False)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)


@on_ranks(1)
def test_clipped_training_by_rows_on_a_device_stays_within_rounding_of_torchs() -> None:
    ours = train(shardwise, {"layout": "contiguous"})
    theirs = train(peer, {})
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)  # 10 AdamW steps from a rounded norm


@on_ranks(1)
@pytest.mark.parametrize("layout", ["interleaved", "contiguous"])
def test_device_memory_returns_to_what_is_sharded(layout: str) -> None:
    mesh = init_device_mesh("cuda", (1,))
    net = Net(blocks=4, width=256)
    for block in net.blocks:
        shardwise.fully_shard(block, mesh=mesh, layout=layout)
    shardwise.fully_shard(net, mesh=mesh, layout=layout)
    resting = []
    for _ in range(5):
        net(torch.randn(8, 256)).sum().backward()
        net.zero_grad()
        torch.cuda.synchronize()
        resting.append(torch.cuda.memory_allocated())
    assert resting[1:] == [resting[1]] * 4
