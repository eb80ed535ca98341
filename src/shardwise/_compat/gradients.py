"""Private torch names about gradients: their dtypes, and hooks on them. See the package's docstring."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch._functorch import utils as _functorch
from torch.utils import checkpoint as _checkpoint

# Within it, torch does not look for `__torch_function__` by name at every attribute of a tensor subclass.
plain_attributes: Any = torch._C.DisableTorchFunctionSubclass


# Unless told otherwise, FSDP2 sums gradients as their parameters keep them since 2.15, before as they come.
SUMS_AS_KEPT = torch.torch_version.TorchVersion(torch.__version__) >= "2.15"


def chosen_grad_dtype(tensor: Tensor) -> tuple[torch.dtype | None, ...]:
    """What the user set as a leaf's `grad_dtype`, in a tuple; empty if nothing.

    Before 2.15 torch does not say whether it was set: then the tensor's own dtype is nobody's choice.
    """
    with plain_attributes():
        found = tensor.grad_dtype
        chosen = getattr(tensor, "_has_grad_dtype_override", found != tensor.dtype)
    return (found,) if chosen else ()


# Hooks by `register_post_accumulate_grad_hook`, which autograd does not run for gradients we set: a
# dict by handle, or None.
post_accumulate_grad_hooks: Callable[[Tensor], dict[int, Callable[[Tensor], None]] | None] = attrgetter(
    "_post_accumulate_grad_hooks"
)


# Hooks by `register_hook`, which autograd does not run for gradients we set either.
grad_hooks: Callable[[Tensor], dict[int, Callable[[Tensor], Tensor | None]] | None] = attrgetter(
    "_backward_hooks"
)


def hook_gradient(tensor: Tensor, hook: Callable[[Tensor], Tensor]) -> None:
    """Call `hook` with the gradient of `tensor`, the result of an op; `register_hook` without a handle.

    The handle costs more than the hook, and nobody removes these.
    """
    node: Any = tensor.grad_fn
    if node is None or tensor._backward_hooks is not None:
        tensor.register_hook(hook)
        return
    tensor._backward_hooks = hooks = OrderedDict()
    hooks[-1] = hook  # handles count up from 0
    node._register_hook_dict(tensor)


def watch_functions(see: Callable[[tuple[Any, ...]], None]) -> None:
    """Let `see` have the arguments of every `torch.autograd.Function` before its forward.

    No public hook follows them. What `apply` calls is replaced: users keep `apply` itself under other names.
    """
    unwrap = _functorch.unwrap_dead_wrappers

    def seen(args: tuple[Any, ...]) -> tuple[Any, ...]:
        see(args)
        return unwrap(args)

    _functorch.unwrap_dead_wrappers = seen


# What ends a recomputation from within, where it has all that backward needs; it passes through operations.
StopRecomputation: type[Exception] = _checkpoint._StopRecomputationError
