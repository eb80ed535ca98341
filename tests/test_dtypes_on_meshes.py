"""The example on meshes in mixed precision: FSDP2's bits, and one process's numbers within bf16's rounding.

Experts have a divisor of their own, which FSDP2 asks of gloo by an operation that gloo lacks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from examples import train_dimensions as example

from fuzz.meshes_part.beside import by_torchs_fully_shard, worst
from fuzz.meshes_part.train import OnMesh, Record, in_one_process, relative, settings
from ranks import on_ranks
from shardwise import MixedPrecisionPolicy

POLICY = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
)


@contextmanager
def in_bf16() -> Iterator[None]:
    with mock.patch.object(example, "fully_shard", partial(example.fully_shard, mp_policy=POLICY)):
        yield


def trained(meshes: dict[Any, Any], **chosen: Any) -> Record:
    record = Record()
    OnMesh(settings(dtype="float32", depth=2, **chosen), meshes).train(2, record)
    return record


@pytest.mark.parametrize("mesh", ["pp2,dp2", "sp2,ep2", "replicate2,tp2"])
@on_ranks(4)
def test_bf16_with_sums_in_fp32_is_fsdp2s_bit_for_bit(mesh: str) -> None:
    meshes: dict[Any, Any] = {}
    with in_bf16():
        ours = trained(meshes, mesh=mesh, experts=0)
    with by_torchs_fully_shard(), in_bf16():
        theirs = trained(meshes, mesh=mesh, experts=0)
    assert worst(ours, theirs) == 0


@pytest.mark.parametrize(("mesh", "layout"), [("pp2,dp2", "interleaved"), ("ep2,tp2", "contiguous")])
@on_ranks(4)
def test_bf16_is_within_its_rounding_of_one_process(mesh: str, layout: str) -> None:
    expected = in_one_process(settings(dtype="float64", depth=2), 2)
    with in_bf16():
        found = trained({}, mesh=mesh, layout=layout)
    assert 1e-6 < relative(torch.tensor(found.losses), torch.tensor(expected.losses)) < 2e-3
    assert relative(torch.tensor(found.norms), torch.tensor(expected.norms)) < 2e-2
    for name, gradient in found.gradients.items():
        assert relative(gradient, expected.gradients[name]) < 0.15, name  # terms cancel
