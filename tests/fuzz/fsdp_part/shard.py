"""Applies `fully_shard`, ours or torch's, as a case says, and offers what a case may set or hook."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import shardwise
from fuzz.fsdp_part.model import Model, Spec

OURS: ModuleType = shardwise
TORCHS: ModuleType = torch_fsdp


def mesh_of(case: Spec, made: dict[Any, DeviceMesh]) -> DeviceMesh:
    """One mesh of each shape for all cases of a call, as each costs process groups."""
    world = dist.get_world_size()
    shape = (2, world // 2) if case.get("mesh") == "two" and world % 2 == 0 else (world,)
    if shape not in made:
        names = ("replicate", "shard")[-len(shape) :]
        made[shape] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return made[shape]


def dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def options_of(api: ModuleType, case: Spec, own: Spec, mesh: DeviceMesh, ignored: set[Any]) -> dict[str, Any]:
    policy = own.get("mp", case.get("mp", {}))
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": own.get("reshard"),
        "mp_policy": api.MixedPrecisionPolicy(
            param_dtype=dtype(policy.get("param")),
            reduce_dtype=dtype(policy.get("reduce")),
            output_dtype=dtype(policy.get("output")),
            cast_forward_inputs=policy.get("cast", True),
        ),
    }
    if case.get("offload"):
        options["offload_policy"] = api.CPUOffloadPolicy(pin_memory=False)
    if ignored:
        options["ignored_params"] = ignored
    if api is OURS and own.get("layout", case.get("layout")) == "contiguous":
        options["layout"] = "contiguous"
        if case.get("strategy"):
            options["strategy"] = case["strategy"]
    return options


def shard(api: ModuleType, case: Spec, model: Model, mesh: DeviceMesh) -> list[nn.Module]:
    """Shards the model in place, inner modules first; returns the roots: what runs forward by itself."""
    ignored = {p for block in model.blocks if block.spec.get("ignored") for p in block.parameters()}
    together = case.get("together")  # blocks that share a group
    if together and len(together) > 1:
        blocks = [model.blocks[i] for i in sorted({i % len(model.blocks) for i in together})]
        own = blocks[0].spec.get("shard", {})
        api.fully_shard(blocks, **options_of(api, case, own, mesh, ignored))
    else:
        blocks = []
    for block in reversed(model.blocks) if case.get("last_first") else model.blocks:
        if block not in blocks:
            shard_block(api, case, block, mesh, ignored)
    if case.get("root") is None:
        return list(model.blocks)
    api.fully_shard(model, **options_of(api, case, case["root"], mesh, ignored))
    return [model]


def shard_block(api: ModuleType, case: Spec, block: Any, mesh: DeviceMesh, ignored: set[Any]) -> None:
    if block.kind == "nest":
        for inner in block.inner:
            shard_block(api, case, inner, mesh, ignored)
    if block.kind == "experts" and block.spec.get("each"):
        for expert in block.experts:
            api.fully_shard(expert, **options_of(api, case, {}, mesh, ignored))
    if block.spec.get("shard") is not None:
        api.fully_shard(block, **options_of(api, case, block.spec["shard"], mesh, ignored))


def sharded(model: nn.Module) -> list[Any]:
    """The sharded modules, in order of registration."""
    return [one for one in model.modules() if isinstance(one, (OURS.FSDPModule, TORCHS.FSDPModule))]


def set_once(api: ModuleType, case: Spec, model: nn.Module) -> None:
    """Settings that hold for the whole run."""
    modules = sharded(model)
    if not modules:
        return
    for one in modules:
        if case.get("factor"):
            one.set_gradient_divide_factor(float(case["factor"]))
        if case.get("force_sum"):
            one.set_force_sum_reduction_for_comms(True)
        if case.get("unused"):
            one.set_reduce_scatter_unused_params(True)
        if case.get("keep_after_backward"):
            one.set_reshard_after_backward(False, recurse=False)
    for kind, setter in (("forward", "forward"), ("backward", "backward")):
        for source, targets in case.get(f"prefetch_{kind}", []):
            chosen = [modules[i % len(modules)] for i in targets]
            one = modules[source % len(modules)]
            getattr(one, f"set_modules_to_{setter}_prefetch")([c for c in chosen if c is not one])


def plain(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def piece(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return plain(tensor)


def full(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    return plain(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)
