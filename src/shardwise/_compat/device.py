"""A device written in Python: what `verify.streams` needs of torch to simulate one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from operator import methodcaller
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

# What a functional collective returns outside compilers: it waits when first read.
from torch.distributed._functional_collectives import AsyncCollectiveTensor as AsyncCollectiveTensor
from torch.utils._python_dispatch import _pop_mode, _push_mode

# Tensor classes with this do not run users' overrides: operators arrive one level lower.
NO_TORCH_FUNCTION: Any = torch._C._disabled_torch_function_impl


@cache
def register_device(make: Callable[[], ModuleType]) -> None:
    """Give torch's device type "lazy" a module, for the rest of the process."""
    # Of the types without a backend, only "lazy" has the guard that autograd needs, runs backward in the
    # calling thread, and is never taken for the machine's accelerator.
    from torch._lazy import ts_backend

    ts_backend.init()
    torch._register_device_module("lazy", make())


@cache
def is_plain(kind: type[Tensor]) -> bool:
    """Return whether tensors of this class, including simulated devices', are plain memory and a shape."""
    return kind is Tensor or issubclass(kind, FakeTensor) or getattr(kind, "is_plain_memory", False)


def as_device_tensor(kind: type[Tensor], memory: Tensor, device: torch.device) -> Any:
    """Return a tensor of class `kind`, a subclass, over CPU memory that reports `device` as its device."""
    return torch.Tensor._make_subclass(
        kind, memory, False, dispatch_device=True, device_for_backend_keys=device
    )


def as_saved(tensor: Tensor) -> tuple[Any, ...]:
    """Return what pickles a tensor by way of the CPU so that `torch.load(weights_only=True)` accepts it."""
    if isinstance(tensor, torch.nn.Parameter):
        return torch._utils._rebuild_parameter, (tensor.detach(), tensor.requires_grad, OrderedDict())
    args = tensor.detach().cpu(), tensor.dtype, str(tensor.device), tensor.requires_grad
    return torch._utils._rebuild_device_tensor_from_cpu_tensor, args


@contextmanager
def below_modes() -> Iterator[None]:
    """Run operators as torch's own: no mode sees them, and neither autograd nor autocast takes part."""
    with (
        torch._C._DisableTorchDispatch(),
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        yield


@contextmanager
def shared_with_thread(mode: Any) -> Iterator[None]:
    """Enter another thread's dispatch mode; `with` sets flags of the process, and threads may end last."""
    _push_mode(mode)
    try:
        yield
    finally:
        _pop_mode()


def take_over(tensor: Tensor, source: Tensor) -> None:
    """Give `tensor` the memory and shape of `source`; its version and autograd state stay."""
    with torch._C._DisableTorchDispatch():
        tensor.data = source


# Waits for a functional collective's result and returns it; the public form waits at other times too.
wait_for_collective: Callable[[Tensor], Tensor] = torch.ops._c10d_functional.wait_tensor.default

# The node that autograd runs now, or None outside backward.
autograd_node: Callable[[], Any] = torch._C._current_autograd_node

# A node's place among all that forward made; huge for nodes that accumulate gradients.
node_number: Callable[[Any], int] = methodcaller("_sequence_nr")

# The number that autograd will give the next node made in forward.
next_node_number: Callable[[], int] = torch._C._autograd._get_sequence_nr

# Methods of a process group that begin and end batches of messages and coalesced collectives, and that tell
# torch whether a device batches them. A simulated device replaces them.
START_COALESCING, END_COALESCING, BACKEND_OF = "_start_coalescing", "_end_coalescing", "_get_backend"


class _Receives(torch.autograd.Function):
    """Function whose node follows its argument's; unlike operators it records that below autograd, too."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return torch.empty(0)


def data_of_accumulation(leaf: Tensor) -> dict[Any, Any]:
    """Return the dict of the node that accumulates a leaf's gradient, which lives as long as a graph with it.

    The dict is empty and kept by nobody for a leaf that backward unpacked, which has no node.
    """
    with torch.enable_grad():
        output = _Receives.apply(leaf)  # type: ignore[no-untyped-call]
    node = output.grad_fn.next_functions[0][0]
    return {} if node is None else node.metadata


# All public functions of torch.autograd call the engine by it. A simulated device follows the nodes run.
ENGINE = "_engine_run_backward"


def nodes_of(outputs: Iterable[Any]) -> list[Any]:
    """Return the nodes where backward begins, or that receive the gradients of these tensors or edges."""
    edges = (
        output if isinstance(output, GradientEdge) else get_gradient_edge(output)
        for output in outputs
        if isinstance(output, GradientEdge) or output.requires_grad
    )
    return [edge.node for edge in edges]


@contextmanager
def device_is_known() -> Iterator[None]:
    """Make torch treat "lazy" as a full device within this context."""
    # torch's lists of devices with foreach and fused kernels get a custom device's name from the patched
    # function. And `torch.tensor(..., device=...)`, which fails otherwise, copies by an operator seen by
    # modes.
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with mock.patch.object(torch._C, "_get_privateuse1_backend_name", partial(str, "lazy")):
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(False)
