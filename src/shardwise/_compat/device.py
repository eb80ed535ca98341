"""A device written in Python: what `verify.streams` needs of torch to simulate one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

# What a functional collective returns outside of compilers: it waits when it is first read.
from torch.distributed._functional_collectives import AsyncCollectiveTensor as AsyncCollectiveTensor

# Tensors of a class with these are no hosts of user's overrides: operators come one level lower.
NO_TORCH_FUNCTION: Any = torch._C._disabled_torch_function_impl


def register_device(name: str, module: ModuleType, is_available: Any) -> None:
    """Let torch know a device of this name, for the rest of the process; there is no public way from Python."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend as set_up

    class Hook(torch._C._acc.PrivateUse1Hooks):  # type: ignore[misc]
        def is_available(self) -> bool:
            return bool(is_available())

        def has_primary_context(self, device_index: int) -> bool:
            return True

        def is_built(self) -> bool:
            return True

    set_up(rename=name, backend_module=module, hook=Hook())


def as_device_tensor(kind: type[Tensor], memory: Tensor, device: torch.device) -> Any:
    """A tensor of class `kind` over CPU memory that says it is on `device`; only subclasses may."""
    return torch.Tensor._make_subclass(
        kind, memory, False, dispatch_device=True, device_for_backend_keys=device
    )


def take_over(tensor: Tensor, other: Tensor) -> None:
    """Let `tensor` be over `other`'s memory, with its shape; versions and autograd stay."""
    with torch._C._DisableTorchDispatch():
        tensor.data = other


def autograd_node() -> Any:
    """The node that autograd runs now, None outside of backward; profilers have it, users have not."""
    return torch._C._current_autograd_node()


def node_number(node: Any) -> int:
    """The place of a node among all that forward made; a huge number for those that accumulate gradients."""
    return int(node._sequence_nr())


def next_node_number() -> int:
    """What the next node that forward makes will have."""
    return int(torch._C._autograd._get_sequence_nr())


@contextmanager
def tensors_begin_on_cpu() -> Iterator[None]:
    """Let `torch.tensor(..., device=...)` copy to the device by an operator that modes see; else it cannot."""
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(False)
