"""What dtype parameters travel in, compute in, and are summed in.

The one-process reference computes in the same dtype over fp32 parameters, on the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp.parity.harness import (
    BF16,
    FP16,
    ONE_AXIS,
    REPLICAS,
    TWO_AXES,
    ZERO2,
    Case,
    accumulate,
    by_block,
    compare,
    each_of,
    reduce_last,
)
from fsdp.parity.models import LANGUAGE, RESIDUAL, UNEVEN, WIDE, Batch, freeze, squared_error

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32


def policy(*dtypes: torch.dtype | None, **options: Any) -> Callable[[ModuleType], dict[str, Any]]:
    return lambda api: {"mp_policy": api.MixedPrecisionPolicy(*dtypes, **options)}


def blocks_and_root(blocks: tuple[Any, ...], root: tuple[Any, ...]) -> Callable[..., None]:
    """Other dtypes inside the blocks than around them: of parameters, of reductions and of outputs."""

    def shard(api: ModuleType, model: nn.Module, mesh: DeviceMesh) -> None:
        for block in model.blocks:
            api.fully_shard(block, mesh=mesh, mp_policy=api.MixedPrecisionPolicy(*blocks))
        api.fully_shard(model, mesh=mesh, mp_policy=api.MixedPrecisionPolicy(*root))

    return shard


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


def bf16_case(shard: Any, task: Any = LANGUAGE, **changes: Any) -> Case:
    return replace(Case(task, shard, compute_dtype=bf16, rounding=BF16), **changes)


CASES: dict[str, Case] = {
    "bf16 summed in its own dtype": bf16_case(by_block(policy(bf16))),
    "bf16 uneven": bf16_case(by_block(policy(bf16, fp32)), UNEVEN, ranks=3, strategies=ONE_AXIS),
    "bf16 replicas": bf16_case(by_block(policy(bf16, fp32)), strategies=TWO_AXES, **REPLICAS),
    "bf16 resharded to 2 of 4": bf16_case(
        by_block(lambda api: policy(bf16, fp32)(api) | {"reshard_after_forward": 2}), UNEVEN, ranks=4
    ),
    "bf16 accumulated in fp32": bf16_case(by_block(policy(bf16, fp32)), step=accumulate(2, reduce_last)),
    "bf16 with gradients of more digits": bf16_case(by_block(policy(bf16, fp32)), WIDE),
    "bf16 with frozen parameters": bf16_case(
        by_block(policy(bf16, fp32)), LANGUAGE.but(freeze("blocks.0", "bias"))
    ),
    "only blocks in bf16": Case(RESIDUAL, blocks_and_root((bf16, fp32, fp32), ()), rounding=BF16),
    "fp32 computed, summed in fp16": Case(
        LANGUAGE, by_block(policy(None, fp16)), rounding=FP16, strategies=ZERO2
    ),
    "replicas summed in fp16": Case(
        RESIDUAL, by_block(policy(None, fp16)), rounding=FP16, strategies=TWO_AXES, **REPLICAS
    ),
    "output in fp32": bf16_case(
        blocks_and_root((bf16, fp32), (bf16, fp32, fp32)), replace(RESIDUAL, loss=output_is(fp32))
    ),
    "inputs not cast": bf16_case(
        by_block(policy(bf16, fp32, cast_forward_inputs=False)),
        replace(RESIDUAL, loss=already_bf16),
        cast_inputs=False,
    ),
    "offloaded bf16": bf16_case(
        by_block(
            lambda api: policy(bf16, fp32)(api) | {"offload_policy": api.CPUOffloadPolicy(pin_memory=False)}
        ),
        strategies=ONE_AXIS,
    ),
}
CASES = {name: replace(case, steps=2) for name, case in CASES.items()}  # dtypes are the same in every step


@each_of(CASES)
def test_mixed_precision_equals_torchs_and_one_process(name: str) -> None:
    compare(CASES[name])
