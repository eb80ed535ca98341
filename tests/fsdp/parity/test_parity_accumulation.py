"""Several backwards before one optimizer step: what is reduced when, and what is kept meanwhile.

The one-process reference takes all micro-batches as one batch.
"""

from __future__ import annotations

from torch import nn

from fsdp.parity.harness import (
    ONE_AXIS,
    REPLICAS,
    TWO_AXES,
    Case,
    accumulate,
    by_block,
    compare,
    each_of,
    reduce_last,
)
from fsdp.parity.models import LANGUAGE, RESIDUAL, UNEVEN, freeze


def reduce_each(model: nn.Module, i: int, last: bool) -> None:
    model.set_requires_gradient_sync(True)


def reduce_middle(model: nn.Module, i: int, last: bool) -> None:
    """Kept, reduced, kept and reduced: both ways of accumulating meet."""
    model.set_requires_gradient_sync(i % 2 == 1)


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


never_reshard = by_block(lambda api: {"reshard_after_forward": False})
offloaded = by_block(lambda api: {"offload_policy": api.CPUOffloadPolicy(pin_memory=False)})
CASES: dict[str, Case] = {
    "reduced at the last": Case(LANGUAGE, by_block(), step=accumulate(3, reduce_last), ranks=(1, 2)),
    "uneven dims reduced at the last": Case(UNEVEN, by_block(), step=accumulate(2, reduce_last), ranks=3),
    "kept, reduced, kept, reduced": Case(
        RESIDUAL, by_block(), step=accumulate(4, reduce_middle), ranks=3, strategies=ONE_AXIS
    ),
    "replicas reduced at the last": Case(
        RESIDUAL, by_block(), step=accumulate(2, reduce_last), strategies=TWO_AXES, **REPLICAS
    ),
    "kept, scattered, summed over replicas": Case(
        UNEVEN,
        by_block(),
        step=accumulate(3, keep_then_scatter_then_sum_replicas),
        strategies=TWO_AXES,
        **REPLICAS,
    ),
    "waiting at the last": Case(RESIDUAL, by_block(), step=accumulate(3, wait_at_last)),
    "unsharded until the last": Case(
        RESIDUAL, by_block(), step=accumulate(3, stay_unsharded), strategies=ONE_AXIS
    ),
    "never resharded, unsharded until the last": Case(
        RESIDUAL, never_reshard, step=accumulate(3, stay_unsharded)
    ),
    "one block waits": Case(RESIDUAL, by_block(), step=accumulate(2, only_one_block_waits)),
    "frozen block reduced at the last": Case(
        RESIDUAL.but(freeze("blocks.0")), by_block(), step=accumulate(2, reduce_last)
    ),
    "offloaded, reduced every time": Case(UNEVEN, offloaded, step=accumulate(2, reduce_each)),
    "offloaded, reduced at the last": Case(UNEVEN, offloaded, step=accumulate(2, reduce_last)),
}


@each_of(CASES)
def test_accumulated_gradients_equal_torchs_and_one_batch(name: str) -> None:
    compare(CASES[name])
