"""Private torch names about gradients: dtypes, hooks on them, `torch.func`. See the package's docstring."""

from __future__ import annotations

import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_unwrapped, is_batchedtensor

# fsdp: gathered memory is not a transform's own; there is no public way to leave one, or to list active ones.
from torch._functorch.pyfunctorch import (
    retrieve_all_functorch_interpreters,
    temporarily_clear_interpreter_stack,
)
from torch.utils import _pytree as pytree
from torch.utils import checkpoint as _checkpoint

# Within it, torch does not look up `__torch_function__` by name at every attribute of a tensor subclass.
plain_attributes: Any = torch._C.DisableTorchFunctionSubclass

# By default FSDP2 sums gradients in their parameters' stored dtype since 2.15, before in their own dtype.
SUMS_AS_KEPT = torch.torch_version.TorchVersion(torch.__version__) >= "2.15"


def chosen_grad_dtype(tensor: Tensor) -> tuple[torch.dtype | None, ...]:
    """Return the `grad_dtype` that the user set on a leaf, in a tuple; empty if none."""
    # Before 2.15 torch does not say whether it was set: then the tensor's own dtype counts as not set.
    with plain_attributes():
        dtype = tensor.grad_dtype
        chosen = getattr(tensor, "_has_grad_dtype_override", dtype != tensor.dtype)
    return (dtype,) if chosen else ()


# Hooks of `register_post_accumulate_grad_hook` and `register_hook`: a dict by handle, or None. Autograd does
# not run them for gradients that we set.
post_accumulate_grad_hooks: Callable[[Tensor], Any] = attrgetter("_post_accumulate_grad_hooks")
grad_hooks: Callable[[Tensor], Any] = attrgetter("_backward_hooks")


def hook_gradient(tensor: Tensor, hook: Callable[[Tensor], Tensor]) -> None:
    """Call `hook` with the gradient of `tensor`, an op's result; like `register_hook` without a handle."""
    # The handle costs more than the hook, and these hooks are never removed.
    node: Any = tensor.grad_fn
    if node is None or tensor._backward_hooks is not None:
        tensor.register_hook(hook)
        return
    tensor._backward_hooks = hooks = OrderedDict()
    hooks[-1] = hook  # handles count up from 0
    node._register_hook_dict(tensor)


# Off while the forward of a `torch.autograd.Function` runs, and in inference mode.
is_forward_grad_enabled: Callable[[], bool] = torch._C._is_fwd_grad_enabled


def function_arguments() -> list[Any]:
    """Return arguments of the innermost `torch.autograd.Function` whose forward runs."""
    # There is no hook: since 2.15 `apply` is C++, and users keep it under other names. So they are found on
    # the stack, for callers that know from `is_forward_grad_enabled` that there may be any.
    frame = None if torch.is_inference_mode_enabled() else sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "forward":
            names, variadic, _, values = inspect.getargvalues(frame)
            own = [values.get(name) for name in (*names, variadic) if name]
            if own and not hasattr(type(own[0]), "forward"):  # not a method, such as a module's
                return pytree.tree_leaves(own)
        frame = frame.f_back
    return []


# Raised inside a recomputation to end it once it has all that backward needs; it passes through operations.
StopRecomputation: type[Exception] = _checkpoint._StopRecomputationError


# Whether a transform runs. Tensors made meanwhile are wrapped, and have no storage.
transforms_run: Callable[[], bool] = torch._C._are_functorch_transforms_active

# Tensors made in this context are as if there were no transform.
outside_transforms: Any = temporarily_clear_interpreter_stack


def below_vmap(tensor: Tensor) -> Tensor:
    """Return the tensor that autograd knows: those of `vmap` say that they require no grad."""
    while is_batchedtensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


_DERIVATIVES = (TransformType.Grad, TransformType.Jvp)


def differentiates_twice_backward() -> bool:
    """Return whether a transform that runs backward is inside another that takes derivatives."""
    running = [interpreter.key() for interpreter in retrieve_all_functorch_interpreters()]
    return TransformType.Grad in [key for key in running if key in _DERIVATIVES][:-1]
