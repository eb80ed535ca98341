"""Several backwards before one optimizer step: what is reduced when, and what is kept meanwhile.

The one-process reference takes all micro-batches as one batch.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp.parity.harness import Case, by_block, train, two_axes
from fsdp.parity.models import LANGUAGE, RESIDUAL, UNEVEN, Batch, Task, freeze
from ranks import RankPool

Prepare = Callable[[nn.Module, int, bool], None]  # given the micro-batch and whether it is the last


def micro_batches(batch: Batch, count: int) -> list[Batch]:
    assert len(batch[0]) % count == 0, "the mean of the micro-batches' means must be the batch's"
    return list(zip(*(tensor.chunk(count) for tensor in batch), strict=True))


def accumulate(count: int, prepare: Prepare) -> Any:
    """A step of `count` micro-batches; `prepare` runs before each."""

    def step(model: nn.Module, task: Task, batch: Batch) -> Tensor:
        total = torch.zeros(())
        for i, part in enumerate(micro_batches(batch, count)):
            prepare(model, i, i == count - 1)
            loss = task.loss(model, part) / count
            loss.backward()
            total += loss.detach()
        return total

    return step


def reduce_each(model: nn.Module, i: int, last: bool) -> None:
    model.set_requires_gradient_sync(True)


def reduce_last(model: nn.Module, i: int, last: bool) -> None:
    model.set_requires_gradient_sync(last)


def reduce_middle(model: nn.Module, i: int, last: bool) -> None:
    """Kept, reduced, kept and reduced: both ways of accumulating meet."""
    model.set_requires_gradient_sync(i % 2 == 1)


def scatter_each_and_sum_replicas_last(model: nn.Module, i: int, last: bool) -> None:
    model.set_requires_all_reduce(last)


def keep_then_scatter_then_sum_replicas(model: nn.Module, i: int, last: bool) -> None:
    model.set_requires_gradient_sync(i > 0)
    model.set_requires_all_reduce(last)


def wait_at_last(model: nn.Module, i: int, last: bool) -> None:
    model.set_is_last_backward(last)


def stay_unsharded(model: nn.Module, i: int, last: bool) -> None:
    """Nothing is gathered or reduced again until the last micro-batch."""
    model.set_is_last_backward(last)
    model.set_requires_gradient_sync(last)
    model.set_reshard_after_backward(last)


def only_one_block_waits(model: nn.Module, i: int, last: bool) -> None:
    model.blocks[0].set_requires_gradient_sync(last, recurse=False)
    model.blocks[0].set_reshard_after_backward(last, recurse=False)


def never_reshard(api: ModuleType, model: nn.Module, mesh: DeviceMesh) -> None:
    by_block(lambda api: {"reshard_after_forward": False})(api, model, mesh)


offloaded = by_block(lambda api: {"offload_policy": api.CPUOffloadPolicy(pin_memory=False)})
replicas = two_axes(2, 2)
CASES: dict[str, tuple[tuple[int, ...], Case]] = {
    "reduced at the last": ((1, 2), Case(LANGUAGE, by_block(), step=accumulate(3, reduce_last))),
    "uneven dims reduced at the last": ((3,), Case(UNEVEN, by_block(), step=accumulate(2, reduce_last))),
    "kept, reduced, kept, reduced": ((3,), Case(RESIDUAL, by_block(), step=accumulate(4, reduce_middle))),
    "replicas reduced at the last": (
        (4,),
        Case(RESIDUAL, by_block(), mesh=replicas, step=accumulate(2, reduce_last)),
    ),
    "kept, scattered, summed over replicas": (
        (4,),
        Case(UNEVEN, by_block(), mesh=replicas, step=accumulate(3, keep_then_scatter_then_sum_replicas)),
    ),
    "waiting at the last": ((2,), Case(RESIDUAL, by_block(), step=accumulate(3, wait_at_last))),
    "unsharded until the last": ((2,), Case(RESIDUAL, by_block(), step=accumulate(3, stay_unsharded))),
    "never resharded, unsharded until the last": (
        (2,),
        Case(RESIDUAL, never_reshard, step=accumulate(3, stay_unsharded)),
    ),
    "one block waits": ((2,), Case(RESIDUAL, by_block(), step=accumulate(2, only_one_block_waits))),
    "frozen block reduced at the last": (
        (2,),
        Case(RESIDUAL.but(freeze("blocks.0")), by_block(), step=accumulate(2, reduce_last)),
    ),
    "offloaded, reduced every time": ((2,), Case(UNEVEN, offloaded, step=accumulate(2, reduce_each))),
    "offloaded, reduced at the last": ((2,), Case(UNEVEN, offloaded, step=accumulate(2, reduce_last))),
}


def run(name: str) -> None:
    train(CASES, name)


@pytest.mark.parametrize(
    ("name", "world_size"), [(name, world) for name, (worlds, _) in CASES.items() for world in worlds]
)
def test_accumulated_gradients_equal_torchs_and_one_batch(
    ranks: RankPool, name: str, world_size: int
) -> None:
    ranks(run, name, world_size=world_size)
