"""A setup applied to a module: checkpointing, `fully_shard`, the optimizer."""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardwise import optim
from shardwise._compat import fakes_convert
from shardwise.fsdp import MixedPrecisionPolicy, fully_shard
from shardwise.planner.models import Model
from shardwise.planner.setup import Optimizer, Setup

# Over `model`; for Muon, over the blocks' `matrices` and the `others`. The same code is printed and run.
OPTIMIZERS: dict[Optimizer, str] = {
    "AdamW": "torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)",
    "AdamW fused": "torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)",
    "AdamW flat": "optim.flat(torch.optim.AdamW, model, lr=1e-3, fused=True)",
    "AdamW 8 bits": "optim.AdamW8bit(model.parameters(), lr=1e-3)",
    "Muon": "optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(others, lr=1e-3, fused=True)",
    "SGD": "torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)",
}
aten = torch.ops.aten
CASTS = {"float32": "float", "bfloat16": "bfloat16", "float16": "half"}  # methods of modules
_SAVED = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
)
_MATMULS = (aten.mm.default, aten.addmm.default)


def build_module(model: Model, layers: int, dtype: str) -> tuple[nn.Module, tuple[str, ...]]:
    """Return `model` on fake tensors, parameters converted to `dtype`, and their other original dtypes."""
    with fakes_convert():
        module = model.build(layers)
        _off_meta(module)
        converted = tuple(other_dtypes(module, dtype))
        if converted:
            getattr(module, CASTS[dtype])()
    return module, converted


def _off_meta(module: nn.Module) -> None:
    """Move meta tensors to the device of the rest; shared tensors stay shared."""
    fakes: dict[int, torch.Tensor] = {}
    for child in module.modules():
        for name, p in child._parameters.items():
            if p is not None and p.is_meta:
                fake = fakes.setdefault(
                    id(p), nn.Parameter(torch.empty_like(p, device="cpu"), p.requires_grad)
                )
                child._parameters[name] = cast(nn.Parameter, fake)
        for name, buffer in child._buffers.items():
            if buffer is not None and buffer.is_meta:
                child._buffers[name] = fakes.setdefault(id(buffer), torch.empty_like(buffer, device="cpu"))


def other_dtypes(module: nn.Module, dtype: str) -> list[str]:
    """List the floating dtypes of parameters other than `dtype`."""
    dtypes = {str(p.dtype).removeprefix("torch.") for p in module.parameters() if p.is_floating_point()}
    return sorted(dtypes - {dtype})


def split(mesh: DeviceMesh) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Return the data-parallel axes of a setup's mesh, and the tensor-parallel one."""
    *data, last = mesh.mesh_dim_names or ("shard",)
    if last != "tensor":
        return mesh, None
    return mesh[tuple(data)], mesh[last]


def shard(module: nn.Module, model: Model, setup: Setup, mesh: DeviceMesh) -> None:
    """Cut `module` over `mesh`: a group for each block, for each end if `ends_apart`, and for the rest."""
    blocks = model.blocks(module)
    if setup.checkpointing != "none":
        for block in blocks[1::2] if setup.checkpointing == "alternate" else blocks:
            recompute(block, selective=setup.checkpointing == "selective")
    options = options_of(setup, mesh)
    for unit in [*blocks, *(model.ends(module) if setup.ends_apart else [])]:
        fully_shard(unit, **options)
    fully_shard(module, **options | {"reshard_after_forward": None})


def shard_experts(module: nn.Module, setup: Setup, mesh: DeviceMesh) -> None:
    """Cut experts over the ranks that hold the same ones: their gradients are sums over all ranks' tokens."""
    fully_shard(module, **options_of(setup, mesh)).set_gradient_divide_factor(setup.ranks)


def options_of(setup: Setup, mesh: DeviceMesh) -> dict[str, Any]:
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, setup.param_dtype), reduce_dtype=getattr(torch, setup.reduce_dtype)
    )
    return {
        "mesh": mesh,
        "mp_policy": policy,
        "layout": setup.layout,
        "strategy": setup.strategy,
        "reshard_after_forward": setup.reshard,
    }


def recompute(block: nn.Module, *, selective: bool) -> None:
    """Make backward recompute `block`; if `selective`, all but attention and every second matmul."""
    contexts: dict[str, Any] = {"context_fn": _keep_every_second_matmul} if selective else {}
    forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **contexts)
    block.forward = forward


def _keep_every_second_matmul() -> Any:
    """Keep attention and the first, third, ... matmuls of a block; recompute the rest."""
    matmuls = {False: 0, True: 0}  # of forward, of recomputation

    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if func in _MATMULS:
            matmuls[context.is_recompute] += 1
            saves = matmuls[context.is_recompute] % 2 == 1
        else:
            saves = func in _SAVED
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def optimizers_of(module: nn.Module, model: Model, setup: Setup) -> list[torch.optim.Optimizer]:
    """Make the optimizers by running the code in `OPTIMIZERS`."""
    matrices = [p for block in model.blocks(module) for p in block.parameters() if p.ndim == 2]
    others = [p for p in module.parameters() if all(p is not matrix for matrix in matrices)]
    names = {"torch": torch, "optim": optim, "model": module, "matrices": matrices, "others": others}
    optimizers = eval(OPTIMIZERS[setup.optimizer], names)
    return [*optimizers] if isinstance(optimizers, tuple) else [optimizers]
