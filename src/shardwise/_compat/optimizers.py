"""Private torch names about optimizers. See the package's docstring."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim import optimizer as _optimizer

from shardwise._compat.gradients import plain_attributes

StepLists = tuple[list[Any], ...]


def change_step_lists(
    optimizer: Optimizer, change: Callable[[Optimizer, dict[str, Any], StepLists], None]
) -> None:
    """Call `change`, in each step and for each parameter group, with the lists that the step will work on.

    The lists have equal lengths: parameters, gradients, then state. Optimizers of torch.optim fill them in
    `_init_group`, which has no public hook. A compiled step does not call `change`.
    """
    fill: Callable[..., Any] = type(optimizer)._init_group  # type: ignore[attr-defined]
    owner_ref = weakref.ref(optimizer)  # a cycle would keep its state until garbage collection

    def filled(group: dict[str, Any], *lists: list[Any]) -> Any:
        owner = owner_ref()
        assert owner is not None
        if torch.compiler.is_compiling() or in_compiled_call():
            return fill(owner, group, *lists)
        with _fast_attributes(group["params"]):
            result = fill(owner, group, *lists)
            change(owner, group, lists)
        return result

    optimizer._init_group = filled  # type: ignore[attr-defined]


def _fast_attributes(params: list[Tensor]) -> AbstractContextManager[Any]:
    """Return `plain_attributes`, unless a parameter handles its own attributes, like a `ShardedTensor`."""
    kinds = set(map(type, params))
    are_plain = all(kind in (Tensor, Parameter) or issubclass(kind, DTensor) for kind in kinds)
    return plain_attributes() if are_plain else nullcontext()


def in_compiled_call() -> bool:
    """Return whether a compiled function is the caller, even through code that it does not compile."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != dynamo.__file__:
        frame = frame.f_back
    return frame is not None


def drop_gradients_unread(optimizer: Optimizer) -> None:
    """Make an optimizer's `zero_grad` set gradients to None without reading them first."""
    # Each read or write of an attribute of a tensor subclass also looks up `__torch_function__` by name.
    owner_ref, zero_grad = weakref.ref(optimizer), type(optimizer).zero_grad

    def zeroed(set_to_none: bool = True) -> None:
        owner = owner_ref()
        assert owner is not None
        if not set_to_none or torch.compiler.is_compiling():
            zero_grad(owner, set_to_none)
            return
        name = f"Optimizer.zero_grad#{type(owner).__name__}.zero_grad"
        with torch.autograd.profiler.record_function(name):
            for group in owner.param_groups:
                with _fast_attributes(group["params"]):
                    for param in group["params"]:
                        param.grad = None

    optimizer.zero_grad = zeroed  # type: ignore[method-assign]


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Return whether hooks other than this library's run around steps; torch has no public way to tell."""
    hooks = chain(
        optimizer._optimizer_step_pre_hooks.values(),
        optimizer._optimizer_step_post_hooks.values(),
        _optimizer._global_optimizer_pre_hooks.values(),
        _optimizer._global_optimizer_post_hooks.values(),
    )
    return any(not str(getattr(hook, "__module__", "")).startswith("shardwise") for hook in hooks)


def count_step(counts: list[Tensor]) -> None:
    """Add one to each count, in one call; public functions need a call for each."""
    with torch.no_grad():  # on CPU, a number would become a tensor for each count
        increment: Any = [torch.ones((), device="cpu")] * len(counts) if counts[0].is_cpu else 1
        torch._foreach_add_(counts, increment)


def restore_step_methods(optimizer: Optimizer) -> None:
    """Undo `change_step_lists` and `drop_gradients_unread`."""
    for name in ("_init_group", "zero_grad"):
        vars(optimizer).pop(name, None)
