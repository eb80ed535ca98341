"""Arithmetic that reductions add to the backend's: division of summed gradients, and NaN in extremes.

Gradients become their mean over all data-parallel ranks (or their sum over `factor`):

    dtype          backend averages          backend only sums
    fp32, bf16     op AVG, no division       op SUM, divide the shard after
    fp16, others   op SUM, divide by about sqrt(ranks) before and by the rest after, since the sum
                   over many ranks overflows fp16 and the quotient before summing underflows

Dividing after the reduction touches 1/ranks of the elements, so it is preferred.

A backend's maximum may drop NaN (gloo keeps whichever operand a comparison leaves), so a flag that marks NaN
is reduced together with the numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from shardwise import _compat
from shardwise.errors import ShardingError

SUMMING_BACKENDS = ("mpi",)  # all others can average


@dataclass(frozen=True)
class DivideFactors:
    """Divide by `before` (the full buffer), reduce by the ops, divide by `after` (the shard)."""

    before: float | None
    after: float | None
    reduce_scatter_op: Any  # ReduceOp
    all_reduce_op: Any


def divide_factors(
    *,
    shard_size: int,
    replicate_size: int,
    reduce_dtype: torch.dtype,
    backend: str,
    factor: float | None = None,
    force_sum: bool = False,
) -> DivideFactors:
    """Return the divisions that turn a sum over `shard_size * replicate_size` ranks into the wanted mean.

    Args:
        shard_size: ranks of the reduce-scatter (1: there is none).
        replicate_size: ranks of the all-reduce (1: there is none).
        reduce_dtype: dtype of the reduction.
        backend: name of the reducing backend, which decides whether it can average or premultiply.
        factor: the divisor of the sum; None means the number of ranks.
        force_sum: allow only SUM, as zero-copy NCCL transfers require.

    Raises:
        ShardingError: a factor that is not positive.
    """
    if factor is not None and not factor > 0:
        raise ShardingError(f"the gradient divide factor must be positive, got {factor}")
    ranks = shard_size * replicate_size
    wide = reduce_dtype in (torch.float32, torch.bfloat16, torch.float64)
    if wide and not force_sum:
        if factor is None:
            if ranks == 1:
                return DivideFactors(None, None, ReduceOp.SUM, ReduceOp.SUM)
            if backend not in SUMMING_BACKENDS:
                # Each mean covers equally many ranks, so their mean over replicas is the mean of all ranks.
                return DivideFactors(None, None, ReduceOp.AVG, ReduceOp.AVG)
        elif backend == "nccl" and shard_size > 1:
            # NCCL multiplies within the reduce-scatter, which saves a pass over the shard.
            op = ReduceOp.AVG if factor == shard_size else _compat.premultiplied_sum(1 / factor)
            return DivideFactors(None, None, op, ReduceOp.SUM)
    total = float(ranks) if factor is None else factor
    if wide:
        return DivideFactors(None, total, ReduceOp.SUM, ReduceOp.SUM)
    before = 1.0  # a power of two near the square root, which divides without rounding, short of underflow
    while total % before == 0 and before * before < total:
        before *= 2
    return DivideFactors(before, total / before, ReduceOp.SUM, ReduceOp.SUM)


def extreme(values: Tensor, reduce: Callable[[Tensor], Tensor], *, largest: bool) -> Tensor:
    """Reduce every rank's `values` elementwise by `reduce`, an all-reduce by MAX, or MIN if not `largest`.

    `reduce` gets a tensor of its own, in the dtype of `values`, and may write to it. Collective if it is.
    """
    if not values.is_floating_point():
        # A copy, since an all-reduce writes in place; contiguous, since collectives take no strides.
        return reduce(values.clone(memory_format=torch.contiguous_format))
    no_number = values.isnan()
    sign = 1 if largest else -1
    # One reduction covers both: with its sign, any rank's flag prevails over the others' zeros.
    stacked = torch.stack([values.masked_fill(no_number, 0), no_number.to(values.dtype) * sign])
    value, no_number = reduce(stacked).unbind()
    return value.masked_fill(no_number != 0, torch.nan)
