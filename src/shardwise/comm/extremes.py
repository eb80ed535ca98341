"""Maxima and minima over ranks, NaN where one rank has NaN.

A backend's maximum may drop NaN (gloo keeps whichever operand a comparison leaves), so whether there was one
travels beside the numbers, in the same reduction.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def extreme(values: Tensor, reduce: Callable[[Tensor], Tensor], *, largest: bool) -> Tensor:
    """Reduce every rank's `values` elementwise by `reduce`, an all-reduce by MAX, or MIN if not `largest`.

    `reduce` gets memory of its own, in the dtype of `values`, and may write to it. Collective as it is.
    """
    if not values.is_floating_point():
        return reduce(values.clone(memory_format=torch.contiguous_format))
    no_number = values.isnan()
    sign = 1 if largest else -1
    both = torch.stack([values.masked_fill(no_number, 0), no_number.to(values.dtype) * sign])
    value, no_number = reduce(both).unbind()
    return value.masked_fill(no_number != 0, torch.nan)
