"""Faults that other libraries had on streams, as small programs: found, and not where they are put right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.torch_version import TorchVersion

import shardwise
from shardwise.planner.noop_group import noop_world
from shardwise.verify.streams import DEVICE, Order, simulated
from verify.streams.test_values import current, differences_by_order, numbers, pinned, run, side


def offloading_of_replicated_shards(right: bool) -> Any:
    """FSDP2, HSDP with CPU offloading.

    A reduced shard is allocated on one stream and copied to the host on another, and freed when nothing in
    Python refers to it any more. The next reduction may be given its memory while it is copied.
    """
    scatter, reduce = side(), side()
    kept, host = [], []
    for _ in range(3):
        gradient = numbers(16) * 3
        scatter.wait_stream(current())
        with scatter:
            shard = torch.empty(8, device=DEVICE)
            dist.reduce_scatter_tensor(shard, gradient)
        current().wait_stream(scatter)  # as the gradient goes back to it
        reduce.wait_stream(scatter)
        with reduce:
            dist.all_reduce(shard)
            host.append(pinned(8))
            host[-1].copy_(shard, non_blocking=True)
        if right:
            kept.append(shard)
        del shard
    torch.accelerator.synchronize()
    return [copy + 0 for copy in host]


def storages_emptied_under_kernels(right: bool) -> Any:
    """Megatron-FSDP: gathered parameters are resized to nothing as soon as the host is done with a module."""
    gather, computed = side(), []
    for _ in range(3):
        with gather:
            whole = torch.empty(16, device=DEVICE)
            dist.all_gather_into_tensor(whole, numbers(8))
        current().wait_stream(gather)
        computed.append(whole * 2)
        if right:
            gather.wait_stream(current())
        whole.untyped_storage().resize_(0)
    return computed


FAULTS: list[Callable[[bool], Any]] = [offloading_of_replicated_shards, storages_emptied_under_kernels]


@pytest.mark.parametrize("program", FAULTS, ids=lambda program: program.__name__)
def test_the_fault_is_found_and_changes_numbers(program: Callable[[bool], Any]) -> None:
    findings = run(lambda: program(False)).findings
    assert [one.again for one in findings] == [True] * len(findings) != []
    orders = [Order.without(one.earlier) for one in findings]
    assert differences_by_order(lambda: program(False), orders)


@pytest.mark.parametrize("program", FAULTS, ids=lambda program: program.__name__)
def test_put_right_it_is_not_found(program: Callable[[bool], Any]) -> None:
    found = run(lambda: program(True))
    assert not found.findings
    lines = range(1, len(found.simulation.timeline.lines))
    assert not differences_by_order(lambda: program(True), [Order.as_needed(), *map(Order.last, lines)])


@pytest.mark.parametrize("hook", [None, "plain", "own stream"])
@pytest.mark.parametrize("gradients", ["are the output", "accumulate", "are cast", "are offloaded"])
def test_fsdp2_frees_what_a_hook_got_if_it_is_no_gradient_and_has_no_finding_elsewhere(
    gradients: str, hook: str | None
) -> None:
    """As of torch 2.15 it no longer does."""
    how: dict[str, Any] = {}
    if gradients == "are cast":
        how["mp_policy"] = torch_fsdp.MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    elif gradients == "are offloaded":
        how["offload_policy"] = torch_fsdp.CPUOffloadPolicy()
    with noop_world(2), simulated() as found:
        model = nn.Sequential(*(nn.Linear(4, 4, device=DEVICE) for _ in range(3)))
        for module in (*model, model):
            torch_fsdp.fully_shard(module, mesh=init_device_mesh(DEVICE, (2,)), **how)
            if hook:
                stream = torch.Stream(device=DEVICE) if hook == "own stream" else None
                module.set_all_reduce_hook(lambda grad: grad.mul_(0.5), stream=stream)
        for _ in range(2):
            model(torch.randn(2, 4, device=DEVICE)).sum().backward()
            if gradients != "accumulate":
                model.zero_grad()
    frees = hook and gradients != "are the output" and TorchVersion(torch.__version__) < "2.15"
    assert bool(found.findings) == bool(frees)
    last_use = "add_" if gradients == "accumulate" else "_to_copy"
    assert all(f"memory was freed while {last_use}" in str(one) for one in found.findings)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("api", [torch_fsdp, shardwise], ids=["fsdp2", "ours"])
def test_fsdp2_gathers_at_once_beside_an_optimizer_whose_event_it_was_given(api: Any, at_once: bool) -> None:
    with noop_world(2), simulated() as found:
        model: Any = nn.Sequential(*(nn.Linear(4, 4, device=DEVICE) for _ in range(3)))
        for module in (*model, model):
            api.fully_shard(module, mesh=init_device_mesh(DEVICE, (2,)))
            module._set_unshard_async_op(at_once)
        optimizer, stream = torch.optim.SGD(model.parameters()), torch.Stream(device=DEVICE)
        for _ in range(2):
            model(torch.randn(2, 4, device=DEVICE)).sum().backward()
            stream.wait_stream(current())
            with stream:
                optimizer.step()
            model.set_post_optim_event(stream.record_event())
    assert bool(found.findings) == (at_once and api is torch_fsdp)
