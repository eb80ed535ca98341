"""Moves a program to a device type, which this machine need not have.

Devices named in the graph always change. Tensors with memory move too if this machine has the device;
otherwise they stay where they are until `load` on a machine that has it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx.node import map_aggregate

from shardwise import _compat


def move_program(program: ExportedProgram, device_type: str) -> None:
    """Move all of `program` to `device_type`, in place."""
    target = torch.device(device_type)

    def move(x: Any) -> Any:
        if not isinstance(x, Tensor) or not _compat.is_fake(x) or _is_on(x.device, target):
            return x
        # `to` would need the device's library
        moved = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        moved.requires_grad_(x.requires_grad)
        return _compat.FakeTensor(x.fake_mode, moved, target)  # type: ignore[attr-defined]

    def rename(argument: Any) -> Any:
        return target if isinstance(argument, torch.device) else argument

    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            if node.op == "call_function":
                node.args, node.kwargs = map_aggregate((node.args, node.kwargs), rename)
            if "val" in node.meta:
                node.meta["val"] = map_aggregate(node.meta["val"], move)
    program.graph_module.recompile()
    move_state(program, device_type)


def move_state(program: ExportedProgram, device_type: str) -> None:
    """Move parameters, buffers and constants to `device_type`, if this machine has it.

    Tensors without memory stay that way. Names that share a tensor keep sharing it.
    """
    target = torch.device(device_type)
    if not is_available(target):
        return
    copies: dict[int, Tensor] = {}

    def move(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.is_meta or _is_on(value.device, target):
            return value
        if id(value) not in copies:
            copies[id(value)] = wrap_like(value, value.detach().to(target))
        return copies[id(value)]

    for store in (program.state_dict, program.constants):
        store.update({name: move(value) for name, value in store.items()})


def wrap_like(original: Tensor, tensor: Tensor) -> Tensor:
    """Return `tensor`, as a parameter with the same `requires_grad` if `original` is one."""
    is_parameter = isinstance(original, nn.Parameter)
    return nn.Parameter(tensor, requires_grad=original.requires_grad) if is_parameter else tensor


def storage_device(device_type: str) -> torch.device:
    """Return where this machine keeps a program's tensors: `device_type` if it has it, else the CPU."""
    target = torch.device(device_type)
    return target if target.type != "meta" and is_available(target) else torch.device("cpu")


def is_available(device: torch.device) -> bool:
    if device.type in ("cpu", "meta"):
        return True
    try:
        return bool(torch.get_device_module(device.type).is_available())
    except (RuntimeError, AttributeError):
        return False


def _is_on(device: torch.device, target: torch.device) -> bool:
    return device.type == target.type and target.index in (None, device.index)
