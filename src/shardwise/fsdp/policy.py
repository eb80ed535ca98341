"""What the user decides about a sharded module's dtypes and where its state lives."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MaybeDtype = torch.dtype | None


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of a module's computation, apart from the dtype its optimizer updates.

    Attributes:
        param_dtype: dtype of gathered parameters, and so of computation; None keeps the stored one.
        reduce_dtype: dtype of gradient reduction, and of accumulation without synchronisation;
            None reduces in the dtype of the gradients.
        output_dtype: floating-point outputs of forward are cast to it; None leaves them.
        cast_forward_inputs: cast floating-point inputs of forward to `param_dtype`.
    """

    param_dtype: MaybeDtype = None
    reduce_dtype: MaybeDtype = None
    output_dtype: MaybeDtype = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True)
class OffloadPolicy:
    """No offloading: sharded parameters, gradients and optimizer state stay on the device."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Sharded parameters and gradients, and so the optimizer step, live on CPU.

    Attributes:
        pin_memory: pin them, so that copies to and from the device overlap with computation.
            Pinned memory is not available to other processes.
    """

    pin_memory: bool = True
