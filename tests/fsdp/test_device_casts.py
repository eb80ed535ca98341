"""Casts on a device run where the gather does, in both layouts: on the streams that copy in and gather."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardwise
from fsdp.models import Net
from fsdp.parity.extension import Held, Narrowed, Quantized, fill, wrap_weights
from shardwise.fsdp.module_state import state_of
from shardwise.planner.noop_group import noop_world
from shardwise.verify.streams import DEVICE, Findings, simulated

WIDTH, RANKS, STEPS = 16, 4, 2
BF16 = shardwise.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Scaled(Held):
    """Travels in 8 bits, and its one scale in the metadata, as torchao's float8 weights do."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        scale = self.held.abs().amax().clamp_min(1e-6) / 127
        return ((self.held / scale).round().to(torch.int8),), (scale,)

    def fsdp_post_all_gather(
        self, gathered: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        (numbers,), (scale,) = gathered, metadata
        whole = numbers.to(dtype) * scale
        return (whole, (whole,)) if out is None else fill(out, whole)


class Casts(TorchDispatchMode):
    """The streams that flat memory is cast on, from fp32 to another dtype."""

    def __init__(self, made: torch.dtype) -> None:
        super().__init__()
        self.made, self.streams = made, list[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten._foreach_copy_):
            into, of = (tree_leaves(arg) for arg in args[:2])
            if into[0].ndim == 1 and into[0].dtype == self.made and of[0].dtype == torch.float32:
                self.streams.append(torch.accelerator.current_stream().stream_id)
        return func(*args, **(kwargs or {}))


@contextmanager
def simulation() -> Iterator[Findings]:
    with simulated() as found, noop_world(RANKS):
        yield found
    assert list(map(str, found.findings)) == []


def sharded(change: Callable[[Net], None] = lambda net: None, **options: Any) -> Net:
    net = Net(blocks=3, width=WIDTH).to(DEVICE)
    change(net)
    mesh = init_device_mesh(DEVICE, (RANKS,))
    for block in net.blocks:
        shardwise.fully_shard(block, mesh=mesh, **options)
    for block, following in zip(net.blocks, net.blocks[1:], strict=False):
        block.set_modules_to_forward_prefetch([following])
    return shardwise.fully_shard(net, mesh=mesh, **options)


def train(net: Net) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        loss = net(torch.randn(4, WIDTH, device=DEVICE)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("layout", "stream"), [("interleaved", "copy_in"), ("contiguous", "all_gather")])
def test_parameters_are_cast_on_the_stream_that_sends_them(layout: str, stream: str) -> None:
    with simulation():
        net = sharded(layout=layout, mp_policy=BF16)
        with Casts(torch.bfloat16) as casts:
            train(net)
        assert set(casts.streams) == {getattr(state_of(net).schedule.streams, stream).stream_id}
        assert len(casts.streams) == STEPS * 2 * len(net.blocks)  # backward keeps the last block


@pytest.mark.parametrize("kind", [Narrowed, Quantized, Scaled])
def test_hooks_before_the_gather_run_where_their_results_are_copied_in(kind: type[Held]) -> None:
    seen: list[int] = []

    @wraps(kind.fsdp_pre_all_gather)  # how many arguments it takes is asked
    def note(self: Any, *args: Any) -> Any:
        seen.append(torch.accelerator.current_stream().stream_id)
        return kind.fsdp_pre_all_gather(self, *args)

    noting: Any = type(kind.__name__, (kind,), {"fsdp_pre_all_gather": note})
    with simulation():
        net = sharded(wrap_weights(noting))
        train(net)
        streams = state_of(net).schedule.streams
        assert set(seen) == {streams.copy_in.stream_id}
        assert len(seen) >= STEPS * 2 * len(net.blocks)


@pytest.mark.parametrize("kind", [Narrowed, Quantized])
def test_what_hooks_made_of_a_gather_is_freed_with_it(kind: type[Held]) -> None:
    with noop_world(2):
        net = Net()
        wrap_weights(kind)(net)
        for block in net.blocks:
            shardwise.fully_shard(block, mp_policy=BF16)
        shardwise.fully_shard(net, mp_policy=BF16)
        with torch.no_grad():
            net(torch.ones(1, 8))
        (group,) = state_of(net.blocks[0]).groups
        made = [tensor for each in group.extended.values() for tensor in (*each.outputs, *each.inner)]
        assert made
        assert not any(tensor.untyped_storage().nbytes() for tensor in made)
