"""The parity suite's cases under the other strategies, against one process.

torch's FSDP2 has no such strategies, so there is nothing to be bit-equal with.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.distributed as dist

from fsdp.parity import (
    test_parity_accumulation,
    test_parity_communication,
    test_parity_composition,
    test_parity_lifecycle,
    test_parity_precision,
    test_parity_sharding,
)
from fsdp.parity.harness import Case, assert_close_to_single_process, by_block, nothing, run_contiguous
from fsdp.parity.models import RESIDUAL
from ranks import RankPool, on_ranks

CASES: dict[str, Case] = {
    name: case
    for area in (
        test_parity_sharding,
        test_parity_precision,
        test_parity_accumulation,
        test_parity_communication,
        test_parity_composition,
        test_parity_lifecycle,
    )
    for name, (_, case) in area.CASES.items()
}
ONE_AXIS = {
    "uneven dims": 3,
    "uneven dims in one group": 4,
    "lists of modules": 3,
    "all frozen but two": 3,
    "bf16 uneven": 3,
    "fp32 computed, summed in fp16": 3,
    "offloaded bf16": 2,
    "kept, reduced, kept, reduced": 3,
    "unsharded until the last": 2,
    "own collectives, uneven dims": 3,
    "hook after reduce-scatter": 2,
    "divided by 6 of 3, summed": 3,
    "tensor parallel on the whole mesh": 4,
    "clipped": 3,
    "loss scaled, one step skipped": 2,
    "recompute wrapper outside": 2,
    "two forwards, one backward": 3,
    "blocks called twice": 3,
    "evaluation in inference mode": 2,
    "unsharded by hand": 2,
    "explicit prefetch": 3,
    "each rank its own branch": 2,
    "frozen in turns": 2,
    "recovery from a failed forward": 2,
}
TWO_AXES = {
    "2 replicas of 2 uneven shards": 4,
    "3 replicas of 1 shard": 3,
    "1 replica of 4 shards": 4,
    "bf16 replicas": 4,
    "replicas summed in fp16": 4,
    "replicas reduced at the last": 4,
    "kept, scattered, summed over replicas": 4,
    "own collectives over replicas": 4,
    "hook after all-reduce": 4,
    "divided by 8 of 2 x 2, summed": 4,
    "clipped replicas": 4,
}


STRATEGIES: dict[str, list[str]] = {name: ["hierarchical_fsdp"] for name in TWO_AXES}
STRATEGIES |= {name: ["zero2"] for name in ONE_AXIS}
for _name in [*ONE_AXIS][::4]:  # the others differ from zero2 in one collective
    STRATEGIES[_name] += ["ddp", "zero1"]


def check(case: Case, strategies: list[str]) -> None:
    mesh = case.mesh(dist.get_world_size())
    runs = {strategy: run_contiguous(case, mesh, strategy=strategy) for strategy in strategies}
    assert_close_to_single_process(runs, case)


def train(name: str) -> None:
    case = CASES[name]
    if name.startswith("own collectives"):  # which of them run depends on the strategy
        case = replace(case, after_step=nothing)
    check(case, STRATEGIES[name])


@pytest.mark.filterwarnings("ignore:.*returns a view")  # an attention ends in a linear layer over 3-d input
@pytest.mark.parametrize("name", STRATEGIES)
def test_other_strategies_train_like_one_process(ranks: RankPool, name: str) -> None:
    ranks(train, name, world_size=(ONE_AXIS | TWO_AXES)[name])


@on_ranks(3)
def test_gradients_may_be_divided_by_any_number() -> None:
    shard = test_parity_communication.divide_by(6.0, force_sum=False)
    case = Case(RESIDUAL, shard, alone=test_parity_communication.divided(2.0))
    check(case, ["ddp", "zero1", "zero2", "fsdp"])


@on_ranks(3)
def test_a_failed_backwards_gradients_are_discarded() -> None:
    case = Case(RESIDUAL, by_block(), step=test_parity_lifecycle.raising("backward"), steps=4)
    check(case, ["ddp", "zero1", "zero2", "fsdp"])
