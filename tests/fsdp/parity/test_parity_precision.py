"""What dtype parameters travel in, compute in, and are summed in.

The one-process reference computes in the same dtype over fp32 parameters, on the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp.parity.harness import BF16, FP16, Case, by_block, train, two_axes
from fsdp.parity.models import LANGUAGE, RESIDUAL, UNEVEN, WIDE, Batch, freeze, squared_error
from ranks import RankPool

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32


def policy(*dtypes: torch.dtype | None, **options: Any) -> Callable[[ModuleType], dict[str, Any]]:
    return lambda api: {"mp_policy": api.MixedPrecisionPolicy(*dtypes, **options)}


def only_blocks_in_bf16(api: ModuleType, model: nn.Module, mesh: DeviceMesh) -> None:
    """bf16 inside the blocks; each hands fp32 back to the model around it."""
    for block in model.blocks:
        options = api.MixedPrecisionPolicy(bf16, fp32, output_dtype=fp32)
        api.fully_shard(block, mesh=mesh, mp_policy=options)
    api.fully_shard(model, mesh=mesh)


def root_returns_fp32(api: ModuleType, model: nn.Module, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        api.fully_shard(block, mesh=mesh, mp_policy=api.MixedPrecisionPolicy(bf16, fp32))
    api.fully_shard(model, mesh=mesh, mp_policy=api.MixedPrecisionPolicy(bf16, fp32, output_dtype=fp32))


def output_is(dtype: torch.dtype) -> Callable[[nn.Module, Batch], Tensor]:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch
        output = model(inputs)
        if isinstance(model, nn.Module):  # sharded; the reference computes in bf16 throughout
            assert output.dtype == dtype
        return F.mse_loss(output.float(), targets)

    return loss


def already_bf16(model: nn.Module, batch: Batch) -> Tensor:
    inputs, targets = batch
    return squared_error(model, (inputs.to(bf16), targets))


def accumulate(model: nn.Module, task: Any, batch: Batch) -> Tensor:
    """Two micro-batches; only the second is reduced, and the first waits for it in the reduce dtype."""
    halves = [tuple(t.chunk(2)[i] for t in batch) for i in range(2)]
    total = torch.zeros(())
    for i, half in enumerate(halves):
        model.set_requires_gradient_sync(i == 1)
        loss = task.loss(model, half) / 2
        loss.backward()
        total += loss.detach()
    return total


def bf16_case(shard: Any, task: Any = LANGUAGE, **changes: Any) -> Case:
    return replace(Case(task, shard, compute_dtype=bf16, rounding=BF16), **changes)


CASES: dict[str, tuple[tuple[int, ...], Case]] = {
    "bf16 summed in its own dtype": ((2,), bf16_case(by_block(policy(bf16)))),
    "bf16 uneven": ((3,), bf16_case(by_block(policy(bf16, fp32)), UNEVEN)),
    "bf16 replicas": ((4,), bf16_case(by_block(policy(bf16, fp32)), mesh=two_axes(2, 2))),
    "bf16 resharded to 2 of 4": (
        (4,),
        bf16_case(by_block(lambda api: policy(bf16, fp32)(api) | {"reshard_after_forward": 2}), UNEVEN),
    ),
    "bf16 accumulated in fp32": ((2,), bf16_case(by_block(policy(bf16, fp32)), step=accumulate)),
    "bf16 with gradients of more digits": ((2,), bf16_case(by_block(policy(bf16, fp32)), WIDE)),
    "bf16 with frozen parameters": (
        (2,),
        bf16_case(by_block(policy(bf16, fp32)), LANGUAGE.but(freeze("blocks.0", "bias"))),
    ),
    "only blocks in bf16": ((2,), Case(RESIDUAL, only_blocks_in_bf16, rounding=BF16)),
    "fp32 computed, summed in fp16": ((2,), Case(LANGUAGE, by_block(policy(None, fp16)), rounding=FP16)),
    "replicas summed in fp16": (
        (4,),
        Case(RESIDUAL, by_block(policy(None, fp16)), mesh=two_axes(2, 2), rounding=FP16),
    ),
    "output in fp32": (
        (2,),
        bf16_case(root_returns_fp32, replace(RESIDUAL, loss=output_is(fp32))),
    ),
    "inputs not cast": (
        (2,),
        bf16_case(
            by_block(policy(bf16, fp32, cast_forward_inputs=False)),
            replace(RESIDUAL, loss=already_bf16),
            cast_inputs=False,
        ),
    ),
    "offloaded bf16": (
        (2,),
        bf16_case(
            by_block(
                lambda api: (
                    policy(bf16, fp32)(api) | {"offload_policy": api.CPUOffloadPolicy(pin_memory=False)}
                )
            )
        ),
    ),
}


def run(name: str) -> None:
    train(CASES, name)


@pytest.mark.parametrize(
    ("name", "world_size"), [(name, world) for name, (worlds, _) in CASES.items() for world in worlds]
)
def test_mixed_precision_equals_torchs_and_one_process(ranks: RankPool, name: str, world_size: int) -> None:
    ranks(run, name, world_size=world_size)
