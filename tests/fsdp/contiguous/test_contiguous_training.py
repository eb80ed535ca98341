"""The parity suite's cases, trained with the contiguous layout."""

from __future__ import annotations

import pytest

from fsdp.contiguous.harness import compare_whole
from fsdp.parity import (
    test_parity_accumulation,
    test_parity_communication,
    test_parity_composition,
    test_parity_lifecycle,
    test_parity_precision,
    test_parity_sharding,
)
from fsdp.parity.harness import Case
from ranks import RankPool

AREAS = {
    "sharding": test_parity_sharding.CASES,
    "precision": test_parity_precision.CASES,
    "accumulation": test_parity_accumulation.CASES,
    "communication": test_parity_communication.CASES,
    "composition": test_parity_composition.CASES,
    "lifecycle": test_parity_lifecycle.CASES,
}


def train(area: str, name: str) -> None:
    case: Case = AREAS[area][name][1]
    compare_whole(case)


@pytest.mark.filterwarnings("ignore:.*returns a view")  # an attention ends in a linear layer over 3-d input
@pytest.mark.parametrize(
    ("area", "name", "world_size"),
    [
        (area, name, world)
        for area, cases in AREAS.items()
        for name, (worlds, _) in cases.items()
        for world in worlds
    ],
)
def test_sharded_training_equals_torchs_and_one_process(
    ranks: RankPool, area: str, name: str, world_size: int
) -> None:
    ranks(train, area, name, world_size=world_size)
