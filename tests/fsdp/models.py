"""Small models for the tests of `fully_shard`, and how to shard them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ranks import on_ranks
from shardwise import ShardingError, fully_shard
from shardwise.comm.count import CommCounter
from shardwise.fsdp.module_state import state_of

LAYOUTS: Any = ("interleaved", "contiguous")
STRATEGIES = ["ddp", "zero1", "zero2", "fsdp"]
WAYS: list[dict[str, Any]] = [{}, *({"layout": "contiguous", "strategy": name} for name in STRATEGIES)]


def in_each_layout(*world_sizes: int) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Run the test on ranks, as `on_ranks` does, with either `layout`."""
    return lambda body: pytest.mark.parametrize("layout", LAYOUTS)(on_ranks(*world_sizes)(body))


class Block(nn.Module):
    """A residual MLP of 4 parameters: 2 * width * 2 * width + 3 * width elements."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """An embedding-like input layer, blocks, and a head; the root owns the first and the last."""

    def __init__(self, *, blocks: int = 3, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(width, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * 1.0

    def features(self, x: Tensor) -> Tensor:
        return torch.relu(self.inner(x))


def mesh_of_all() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def shard_each(*modules: nn.Module, **options: Any) -> Any:
    """Apply `fully_shard` to each, in this order; returns the last."""
    for module in modules:
        fully_shard(module, **options)
    return modules[-1]


def sharded_net(*, blocks: int = 3, width: int = 8, **options: Any) -> Net:
    """A `Net` with every block and the root sharded."""
    net = Net(blocks=blocks, width=width)
    return shard_each(*net.blocks, net, **options)


def step(model: nn.Module, *, width: int = 8, then: Callable[[], None] | None = None) -> Tensor:
    """One forward and backward on this rank's batch; returns the loss."""
    x = torch.randn(4, width, generator=torch.Generator().manual_seed(dist.get_rank()))
    loss = model(x).square().mean()
    if then is not None:
        then()
    loss.backward()
    return loss.detach()


def update(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def groups(model: nn.Module) -> list[Any]:
    """All groups of a model, the root's first."""
    states = dict.fromkeys(s for m in model.modules() if (s := state_of(m)) is not None)
    return [group for state in states for group in state.groups]


def gathered_bytes(model: nn.Module) -> int:
    """Bytes of gathered buffers that exist now."""
    return sum(b.full.untyped_storage().nbytes() for g in groups(model) for b in g.buffers)


def kinds(counter: CommCounter) -> dict[str, int]:
    """How many collectives of each kind there were."""
    return {kind: counter.count(kind) for kind in ("all_gather", "reduce_scatter", "all_reduce")}


EXACT = {"rtol": 0.0, "atol": 0.0}


def whole(tensor: Any) -> Tensor:
    """Collective where the tensor is sharded."""
    return getattr(tensor, "full_tensor", tensor.clone)().detach()


def assert_same_gradients(model: nn.Module, reference: nn.Module, **near: float) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            torch.testing.assert_close(
                whole(ours.grad), whole(theirs.grad), msg=lambda text, n=name: f"{n}: {text}", **near
            )


def assert_same_parameters(model: nn.Module, reference: nn.Module, **near: float) -> None:
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(ours), whole(theirs), **near)


def refused(act: Callable[[], Any], *words: str, by: type[Exception] = ShardingError) -> str:
    """Check that `act` raises `by`, with `words`, on this and all other ranks; returns this one's message."""
    message = None
    try:
        act()
    except by as error:
        message = str(error)
    raised = [None] * dist.get_world_size()
    dist.all_gather_object(raised, message)
    assert all(raised), f"raised on each rank: {[m is not None for m in raised]}"
    assert message is not None
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in: {message}"
    return message


def forget_what_lives() -> None:
    """Leave what is in this process by now out of what garbage collection visits: little to look at."""
    gc.collect()
    gc.freeze()
