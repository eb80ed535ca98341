"""The parity suite's cases, trained with the contiguous layout.

Those it refuses (another dim than 0, tensor subclasses that choose what is gathered) are in
`test_contiguous_errors.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch.distributed.device_mesh import DeviceMesh

from fsdp.contiguous.harness import adds_in_pairs, compare_whole
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
REFUSED = {"columns", "columns of replicas", "last dim", "weights sent in bf16", "weights sent in int8"}
ELSEWHERE = {"made on meta"}  # distributes values as DTensors; test_contiguous_lifecycle.py has our way
WITHIN_ROUNDING = {
    "two meshes in a block": "half of the parameters are summed over 4 ranks",
    "two axes flattened": "2 x 2 ranks are one shard axis of 4",
    "clipped": "the norm adds the squares of other pieces first",
    "clipped replicas": "as above",
    "clipped beside tensor parallel": "as above",
}


def exact(name: str) -> Callable[[DeviceMesh], bool]:
    return lambda mesh: adds_in_pairs(mesh) and name not in WITHIN_ROUNDING


def train(area: str, name: str) -> None:
    case: Case = AREAS[area][name][1]
    compare_whole(case, exact=exact(name))


@pytest.mark.filterwarnings("ignore:.*returns a view")  # an attention ends in a linear layer over 3-d input
@pytest.mark.parametrize(
    ("area", "name", "world_size"),
    [
        (area, name, world)
        for area, cases in AREAS.items()
        for name, (worlds, _) in cases.items()
        if name not in REFUSED | ELSEWHERE
        for world in worlds
        if world != 4 or 3 not in worlds  # both cut unevenly; the parity tests run both
    ],
)
def test_sharded_training_equals_torchs_and_one_process(
    ranks: RankPool, area: str, name: str, world_size: int
) -> None:
    ranks(train, area, name, world_size=world_size)
