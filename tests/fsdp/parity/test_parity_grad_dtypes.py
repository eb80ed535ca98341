"""Parameters that compute, or keep their gradients, in dtypes of their own.

Before 2.15 torch's FSDP2 knows neither; there only ours are compared with one process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp.parity.harness import BF16, Case, train, two_axes
from fsdp.parity.models import LANGUAGE, Batch, Task
from fsdp.parity.test_parity_accumulation import accumulate, reduce_last
from ranks import RankPool

bf16, fp32 = torch.bfloat16, torch.float32
IN_TORCH = "param_dtype_override_fn" in torch_fsdp.MixedPrecisionPolicy.__dataclass_fields__


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Not foreach, which takes gradients of their parameters' dtype only."""
    return torch.optim.SGD(model.parameters(), lr=1e-2, foreach=False)


def norms_in_fp32(**dtypes: torch.dtype) -> Callable[..., None]:
    """Computation in bf16 but for layer norms, whose parameters are gathered in fp32."""

    def shard(api: ModuleType, model: nn.Module, mesh: DeviceMesh) -> None:
        norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
        kept = {parameter for norm in norms for parameter in norm.parameters()}
        policy = api.MixedPrecisionPolicy(
            bf16, param_dtype_override_fn=lambda p: p.dtype if p in kept else None, **dtypes
        )
        for block in model.blocks:
            api.fully_shard(block, mesh=mesh, mp_policy=policy)
        api.fully_shard(model, mesh=mesh, mp_policy=policy)
        for inside, dtype in ((model.blocks[0].norm, fp32), (model.blocks[0].up, bf16)):
            inside.register_forward_pre_hook(partial(computes_in, dtype))

    return shard


def computes_in(dtype: torch.dtype, module: nn.Module, args: Any) -> None:
    assert module.weight.dtype == dtype


def kept_in(dtype: torch.dtype | None, which: str = "", policy: tuple[Any, ...] = ()) -> Callable[..., None]:
    """Gradients of parameters whose names contain `which` are kept in `dtype`; None: as they come."""

    def shard(api: ModuleType, model: nn.Module, mesh: DeviceMesh) -> None:
        chosen = {name for name, _ in model.named_parameters() if which in name}
        for name, parameter in model.named_parameters():
            if name in chosen:
                parameter.grad_dtype = dtype
        options = api.MixedPrecisionPolicy(*policy)
        for block in model.blocks:
            api.fully_shard(block, mesh=mesh, mp_policy=options)
        api.fully_shard(model, mesh=mesh, mp_policy=options)

    return shard


def dtypes_are(dtype: torch.dtype, which: str = "") -> Callable[[nn.Module], None]:
    def check(model: nn.Module) -> None:
        if any(type(p) is not nn.Parameter for p in model.parameters()):  # not the reference
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                assert parameter.grad.dtype == (dtype if which in name else parameter.dtype)

    return check


def case(shard: Callable[..., None], **changes: Any) -> Case:
    made = Case(LANGUAGE, shard, rounding=BF16, optimizer=sgd, torchs=IN_TORCH)
    return replace(made, **changes)


def thirds(model: nn.Module, task: Task, batch: Batch) -> Tensor:
    """Three micro-batches; the first two wait for the last, unsharded."""
    return accumulate(3, reduce_last)(model, task, batch)


CASES: dict[str, tuple[tuple[int, ...], Case]] = {
    "norms in fp32, summed in bf16": ((2,), case(norms_in_fp32(reduce_dtype=bf16), compute_dtype=bf16)),
    "norms in fp32, accumulated": ((2,), case(norms_in_fp32(), compute_dtype=bf16, step=thirds)),
    "gradients in bf16": ((3,), case(kept_in(bf16), after_backward=dtypes_are(bf16))),
    "gradients in bf16, accumulated": ((2,), case(kept_in(bf16), step=thirds)),
    "gradients in bf16 of replicas": ((4,), case(kept_in(bf16), mesh=two_axes(2, 2))),
    "some gradients in bf16": (
        (2,),
        case(kept_in(bf16, "norm"), after_backward=dtypes_are(bf16, "norm")),
    ),
    "gradients as they come": (
        (2,),
        case(kept_in(None, policy=(bf16,)), compute_dtype=bf16, after_backward=dtypes_are(bf16)),
    ),
    "gradients in bf16, summed in fp32": (
        (2,),
        case(kept_in(bf16, policy=(bf16, fp32)), compute_dtype=bf16, after_backward=dtypes_are(bf16)),
    ),
}


def run(name: str) -> None:
    train(CASES, name)


@pytest.mark.parametrize(
    ("name", "world_size"), [(name, world) for name, (worlds, _) in CASES.items() for world in worlds]
)
def test_dtypes_by_parameter_are_torchs_and_near_one_process(
    ranks: RankPool, name: str, world_size: int
) -> None:
    ranks(run, name, world_size=world_size)
