"""Models in the contiguous layout beside the same ones in one process, and tests under every strategy."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp.models import STRATEGIES, Net, shard_each, sharded_net, step
from ranks import on_ranks
from shardwise.sharded_tensor.rows import ShardedRows


def net(*, blocks: int = 3, **options: Any) -> Any:
    return sharded_net(blocks=blocks, layout="contiguous", **options)


def full(model: nn.Module) -> dict[str, Tensor]:
    """Collective."""
    return {n: whole(p).detach() for n, p in model.named_parameters()}


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, ShardedRows) else tensor.clone()


def lone(*, blocks: int = 3) -> Net:
    return Net(blocks=blocks)


def whole_step(model: nn.Module, *, backward: bool = True) -> Tensor:
    """What `step` does on all ranks together, in one process."""
    losses = [
        model(torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))).square().mean()
        for rank in range(dist.get_world_size())
    ]
    loss = torch.stack(losses).mean()
    if backward:
        loss.backward()
    return loss.detach()


def assert_trains_like_one_process(model: nn.Module, reference: nn.Module, *, steps: int = 3) -> None:
    """Losses' gradients and parameters within fp32 rounding through some steps of SGD with momentum."""
    ours = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
    for _ in range(steps):
        step(model)
        whole_step(reference)
        for (name, mine), other in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert (mine.grad is None) == (other.grad is None), name
            if other.grad is not None:
                torch.testing.assert_close(whole(mine.grad), other.grad, rtol=1e-4, atol=1e-6, msg=name)
        ours.step()
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
    for name, value in full(model).items():
        torch.testing.assert_close(value, reference.get_parameter(name).detach(), rtol=1e-4, atol=1e-6)


def each_case(*worlds: int, **choices: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the test on `worlds` ranks with every combination of `choices`, all in one call of the ranks."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def every() -> None:
            for values in itertools.product(*choices.values()):
                case = dict(zip(choices, values, strict=True))
                try:
                    body(**case)
                except Exception as error:
                    error.add_note(f"case: {case}")
                    raise

        del every.__wrapped__  # whose parameters pytest would look for
        return on_ranks(*worlds)(every)

    return decorate


def all_strategies(*worlds: int, **choices: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return each_case(*worlds, strategy=STRATEGIES, **choices)


def shard(model: Net, **options: Any) -> Net:
    return shard_each(*model.blocks, model, layout="contiguous", **options)
