"""Private torch names about transforms of `torch.func`. See the package's docstring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C._functorch import TransformType

# fsdp: gathered memory is not a transform's own; there is no public way to leave one, or to ask which run.
from torch._functorch.pyfunctorch import (
    retrieve_all_functorch_interpreters,
    temporarily_clear_interpreter_stack,
)

# Does a transform run? Tensors that are made meanwhile are wrapped, and have no storage.
transforms_run: Callable[[], bool] = torch._C._are_functorch_transforms_active

# What is made within it is as if there were no transform.
outside_transforms: Any = temporarily_clear_interpreter_stack

_DERIVATIVES = (TransformType.Grad, TransformType.Jvp)


def differentiates_twice_backward() -> bool:
    """Return whether a transform that runs backward is inside another that takes derivatives."""
    running = [one.key() for one in retrieve_all_functorch_interpreters()]
    return TransformType.Grad in [key for key in running if key in _DERIVATIVES][:-1]
