"""Parameters that compute, or keep their gradients, in dtypes of their own.

Before 2.15 torch's FSDP2 knows neither; there only ours are compared with one process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp.parity.harness import BF16, REPLICAS, Case, accumulate, by_block, compare, each_of, reduce_last
from fsdp.parity.models import LANGUAGE

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
        by_block(lambda api: {"mp_policy": policy})(api, model, mesh)
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
        by_block(lambda api: {"mp_policy": api.MixedPrecisionPolicy(*policy)})(api, model, mesh)

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


CASES: dict[str, Case] = {
    "norms in fp32, summed in bf16": case(norms_in_fp32(reduce_dtype=bf16), compute_dtype=bf16),
    "norms in fp32, accumulated": case(norms_in_fp32(), compute_dtype=bf16, step=accumulate(3, reduce_last)),
    "gradients in bf16": case(kept_in(bf16), after_backward=dtypes_are(bf16), ranks=3),
    "gradients in bf16, accumulated": case(kept_in(bf16), step=accumulate(3, reduce_last)),
    "gradients in bf16 of replicas": case(kept_in(bf16), **REPLICAS),
    "some gradients in bf16": case(kept_in(bf16, "norm"), after_backward=dtypes_are(bf16, "norm")),
    "gradients as they come": case(
        kept_in(None, policy=(bf16,)), compute_dtype=bf16, after_backward=dtypes_are(bf16)
    ),
    "gradients in bf16, summed in fp32": case(
        kept_in(bf16, policy=(bf16, fp32)), compute_dtype=bf16, after_backward=dtypes_are(bf16)
    ),
}
CASES = {name: replace(case, steps=2) for name, case in CASES.items()}  # dtypes are the same in every step


@each_of(CASES)
def test_dtypes_by_parameter_are_torchs_and_near_one_process(name: str) -> None:
    compare(CASES[name])
