"""The first thing to run on a new kind of device: is training on it what FSDP2 makes of it?

    pytest tests/fsdp/test_gpu.py -m gpu      # on the accelerator that is here
    make gpu                                  # these, then all of it on every device, with figures

One rank on one device, as two NCCL ranks cannot share one: gathers and reductions become copies, but
streams, events, prefetching, casts and offloading run as they do in a larger job. Every test runs on the
simulated device too, where each operation must wait for what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as peer
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwise
from fsdp.models import Net, in_each_layout
from ranks import on_ranks
from shardwise.verify.streams import DEVICE, simulated

THERE = torch.accelerator.is_available()
on_a_device = pytest.mark.parametrize(
    "device",
    [
        pytest.param(
            "accelerator",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not THERE, reason="needs an accelerator")],
        ),
        "sim",
    ],
)

OPTIONS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "plain": lambda api: {},
    "kept after forward": lambda api: {"reshard_after_forward": False},
    "bf16": lambda api: {
        "mp_policy": api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    },
    "offloaded": lambda api: {"offload_policy": api.CPUOffloadPolicy()},
}
BY_ROWS = {"layout": "contiguous"}
STEPS = {"accelerator": 10, "sim": 3}


@contextmanager
def mesh_on(device: str, *, checked: bool = True) -> Iterator[DeviceMesh]:
    """A mesh of the one device. At the end of a simulation nothing must have run before what it needs.

    Unless not `checked`: torch's own waits are torch's.
    """
    if device == "sim":
        with simulated() as found:
            yield init_device_mesh(DEVICE, (1,))
        assert not checked or list(map(str, found.findings)) == []
        return
    there = torch.accelerator.current_accelerator()
    assert there is not None
    group = dist.new_group(backend=f"cpu:gloo,{there.type}:{dist.get_default_backend_for_device(there)}")
    yield DeviceMesh.from_group(group, there.type)


def sharded(api: Any, mesh: DeviceMesh, *, width: int, **options: Any) -> Net:
    """A model on the mesh's device, with a group for each block and one for the rest."""
    net = Net(blocks=4, width=width).to(mesh.device_type)
    for block in net.blocks:
        api.fully_shard(block, mesh=mesh, **options)
    api.fully_shard(net, mesh=mesh, **options)
    return net


def train(net: nn.Module, device: str, *, clip: bool) -> list[torch.Tensor]:
    """Losses and whole parameters of AdamW's first steps."""
    there = DEVICE if device == "sim" else torch.accelerator.current_accelerator()
    foreach = True if device == "sim" else None  # where each operation costs
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=foreach)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS[device]):
        loss = net(torch.randn(8, 64, generator=generator).to(there)).square().mean()
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    whole = [getattr(p, "full_tensor", lambda p=p: p)() for p in net.parameters()]
    return [*losses, *(p.detach().cpu() for p in whole)]


def trained(api: Any, device: str, options: dict[str, Any], *, clip: bool = True) -> list[torch.Tensor]:
    with mesh_on(device, checked=api is not peer) as mesh:
        return train(sharded(api, mesh, width=64, **options), device, clip=clip)


def assert_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert all(map(torch.equal, ours, theirs))
    assert len(ours) == len(theirs)


@on_ranks(1)
@on_a_device
@pytest.mark.parametrize("options", OPTIONS)
def test_training_on_a_device_equals_torchs(device: str, options: str) -> None:
    ours = trained(shardwise, device, OPTIONS[options](shardwise))
    assert_equal(ours, trained(peer, device, OPTIONS[options](peer)))


@on_ranks(1)
@on_a_device
@pytest.mark.parametrize("options", OPTIONS)
def test_training_by_rows_on_a_device_equals_torchs(device: str, options: str) -> None:
    """Without clipping, whose norm adds the parameters' squares in another order."""
    theirs = trained(peer, device, OPTIONS[options](peer), clip=False)
    for strategy in ("fsdp", "zero2", "zero1", "ddp"):
        by_rows = BY_ROWS | {"strategy": strategy}
        assert_equal(trained(shardwise, device, OPTIONS[options](shardwise) | by_rows, clip=False), theirs)


@in_each_layout(1)
@on_a_device
def test_training_on_a_device_equals_the_unsharded_models(device: str, layout: str) -> None:
    ours = trained(shardwise, device, {"layout": layout}, clip=False)
    with mesh_on(device) as mesh:
        theirs = train(Net(blocks=4, width=64).to(mesh.device_type), device, clip=False)
    assert_equal(ours, theirs)


@on_ranks(1)
@on_a_device
def test_clipped_training_by_rows_on_a_device_stays_within_rounding_of_torchs(device: str) -> None:
    ours, theirs = trained(shardwise, device, BY_ROWS), trained(peer, device, {})
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)  # AdamW steps from a rounded norm


@in_each_layout(1)
@on_a_device
def test_device_memory_returns_to_what_is_sharded(device: str, layout: str) -> None:
    with mesh_on(device) as mesh:
        net = sharded(shardwise, mesh, width=256, layout=layout)
        resting = []
        for _ in range(5):
            net(torch.randn(8, 256).to(mesh.device_type)).sum().backward()
            net.zero_grad()
            torch.accelerator.synchronize()
            resting.append(torch.get_device_module(mesh.device_type).memory_allocated())
    assert resting[1:] == [resting[1]] * 4


@in_each_layout(1)
@on_a_device
def test_the_next_forward_waits_for_an_event_of_the_devices_own_kind(device: str, layout: str) -> None:
    """Such as `torch.cuda.Event`, which `torch.Stream.wait_event` takes for one that was never recorded."""
    with mesh_on(device) as mesh:
        own: Any = torch.get_device_module(mesh.device_type)
        net = sharded(shardwise, mesh, width=64, layout=layout)
        x, side = torch.randn(8, 64).to(mesh.device_type), own.Stream()
        seen = [net(x).detach()]
        for number in range(3):
            net.reshard()  # forward leaves the root's whole parameters
            side.wait_stream(own.current_stream())
            with own.stream(side), torch.no_grad():
                if hasattr(own, "_sleep"):
                    own._sleep(50_000_000)  # cycles, some 25 ms
                for parameter in net.parameters():
                    parameter.mul_(1.5)
            net.set_post_optim_event(side.record_event())
            seen.append(net(x).detach())
            torch.accelerator.synchronize()
            again = net(x).detach()
            assert torch.equal(seen[-1].cpu(), again.cpu()), number
            assert not torch.equal(seen[-1].cpu(), seen[-2].cpu())


@in_each_layout(1)
@on_a_device
def test_gradients_wait_for_a_hook_on_a_stream_of_the_devices_own_kind(device: str, layout: str) -> None:
    with mesh_on(device) as mesh:
        own: Any = torch.get_device_module(mesh.device_type)
        net, stream = sharded(shardwise, mesh, width=64, layout=layout), own.Stream()

        def hook(shard: torch.Tensor) -> None:
            if hasattr(own, "_sleep"):
                own._sleep(20_000_000)
            shard.mul_(0)

        for module in (*net.blocks, net):
            module.set_all_reduce_hook(hook, stream=stream)
        net(torch.randn(8, 64).to(mesh.device_type)).square().mean().backward()
        for parameter in net.parameters():
            assert parameter.grad.to_local().cpu().count_nonzero() == 0
