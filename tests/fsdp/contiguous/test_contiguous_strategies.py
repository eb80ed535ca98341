"""The parity suite's cases under the other strategies, against one process.

torch's FSDP2 has no such strategies, so there is nothing to be bit-equal with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch.distributed as dist

from fsdp.models import STRATEGIES
from fsdp.parity import (
    test_parity_accumulation,
    test_parity_communication,
    test_parity_composition,
    test_parity_lifecycle,
    test_parity_precision,
    test_parity_sharding,
)
from fsdp.parity.harness import (
    Case,
    assert_close_to_single_process,
    by_block,
    each_of,
    nothing,
    run_contiguous,
    worlds_of,
)
from fsdp.parity.models import RESIDUAL
from ranks import on_ranks

CASES: dict[str, Case] = {
    name: replace(case, ranks=max(worlds_of(case)))
    for area in (
        test_parity_sharding,
        test_parity_precision,
        test_parity_accumulation,
        test_parity_communication,
        test_parity_composition,
        test_parity_lifecycle,
    )
    for name, case in area.CASES.items()
    if case.strategies
}


def check(case: Case, strategies: Sequence[str]) -> None:
    mesh = case.mesh(dist.get_world_size())
    runs = {strategy: run_contiguous(case, mesh, strategy=strategy) for strategy in strategies}
    assert_close_to_single_process(runs, case)


@pytest.mark.filterwarnings("ignore:.*returns a view")  # an attention ends in a linear layer over 3-d input
@each_of(CASES)
def test_other_strategies_train_like_one_process(name: str) -> None:
    case = CASES[name]
    if name.startswith("own collectives"):  # which of them run depends on the strategy
        case = replace(case, after_step=nothing)
    check(case, case.strategies)


@on_ranks(3)
def test_gradients_may_be_divided_by_any_number() -> None:
    shard = test_parity_communication.divide_by(6.0, force_sum=False)
    case = Case(RESIDUAL, shard, alone=test_parity_communication.divided(2.0))
    check(case, STRATEGIES)


@on_ranks(3)
def test_a_failed_backwards_gradients_are_discarded() -> None:
    case = Case(RESIDUAL, by_block(), step=test_parity_lifecycle.raising("backward"), steps=4)
    check(case, STRATEGIES)
