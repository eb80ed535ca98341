"""The user's choices: dtypes, where state lives, and what may change between steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise import _compat
from shardwise.comm import AllGather, AutoAllGather, AutoReduceScatter, ReduceScatter
from shardwise.errors import ShardingError, here

MaybeDtype = torch.dtype | None


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of a module's computation, independent of the dtype that its optimizer updates.

    Attributes:
        param_dtype: dtype of gathered parameters, and so of computation; None keeps the stored one.
        reduce_dtype: dtype of gradient reduction, and of accumulation without synchronisation;
            None takes a parameter's `grad_dtype` if that is set, else its stored dtype (before torch 2.15,
            as in FSDP2, its dtype of computation).
        output_dtype: floating-point outputs of forward are cast to it; None leaves them.
        cast_forward_inputs: cast floating-point inputs of forward to `param_dtype`.
        param_dtype_override_fn: called with each parameter that `fully_shard` manages; returns the stored
            dtype, to gather and compute in that, or None for `param_dtype`. Equal on all ranks.
    """

    param_dtype: MaybeDtype = None
    reduce_dtype: MaybeDtype = None
    output_dtype: MaybeDtype = None
    cast_forward_inputs: bool = True
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(
        default=None, kw_only=True
    )

    def for_param(self, param: nn.Parameter, *, name: str) -> MixedPrecisionPolicy:
        """Return the policy of one parameter, with `param_dtype_override_fn` applied and removed."""
        if self.param_dtype_override_fn is None:
            return self
        dtype = self.param_dtype_override_fn(param)
        if dtype not in (None, self.param_dtype, param.dtype):
            raise ShardingError(
                f"{here()}: param_dtype_override_fn must return None, param_dtype ({self.param_dtype}) or the"
                f" stored dtype ({param.dtype}) for '{name}', got {dtype!r}"
            )
        return replace(self, param_dtype=dtype or self.param_dtype, param_dtype_override_fn=None)

    def sum_dtype(self, *, stored: torch.dtype, computed: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients are summed if their parameter has no `grad_dtype`."""
        return self.reduce_dtype or (stored if _compat.SUMS_AS_KEPT else computed)


@dataclass(frozen=True)
class OffloadPolicy:
    """The policy of no offloading: sharded parameters, gradients and optimizer state stay on the device."""

    on_host: ClassVar[bool] = False  # where sharded parameters are


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Sharded parameters and gradients, and so the optimizer step, live on CPU.

    Attributes:
        pin_memory: pin them, so that copies to and from the device overlap with computation.
            Pinned memory is not available to other processes.
    """

    on_host: ClassVar[bool] = True
    pin_memory: bool = True


def pins(offload: OffloadPolicy, device: torch.device) -> bool:
    """Return whether shards lie in pinned memory, from which gathers copy without blocking the host."""
    return isinstance(offload, CPUOffloadPolicy) and offload.pin_memory and device.type != "cpu"


_ALL_GATHER, _REDUCE_SCATTER = AutoAllGather(), AutoReduceScatter()


@dataclass(slots=True)
class GroupSettings:
    """The settings that a user may change between steps; see the `FSDPModule` method of the same name."""

    all_gather: AllGather = _ALL_GATHER
    reduce_scatter: ReduceScatter = _REDUCE_SCATTER
    reduce_grads: bool = True
    all_reduce_grads: bool = True
    reshard_after_backward: bool = True
    keep_unsharded_storage: bool = False
    divide_factor: float | None = None
    force_sum: bool = False
    reduce_unused: bool = False
    unshard_in_backward: bool = True
    unshard_async_op: bool = False
    max_input_buffers: int = 1
    staging_bytes: int = 128 << 20  # contiguous: reduce larger groups in slices of this size
    separate_memory_min_bytes: int = 8 << 20  # interleaved: gather larger parameters to memory of their own
    all_reduce_hook: Callable[[Tensor], None] | None = None
    all_reduce_hook_stream: torch.Stream | None = None
    reduce_scatter_group: dist.ProcessGroup | None = None  # to overlap with gathers; None: the shard group


def chosen(policy: MixedPrecisionPolicy, offload: OffloadPolicy, settings: GroupSettings) -> list[str]:
    """List the settings that are not at their defaults, in words that ranks compare."""
    words = [] if type(offload) is OffloadPolicy else [type(offload).__name__]
    for current, default in ((policy, MixedPrecisionPolicy()), (settings, GroupSettings())):
        for option in fields(current):
            # In words that mean the same in every process: the class of an object, not its address.
            word, default_word = _word(getattr(current, option.name)), _word(getattr(default, option.name))
            if word != default_word:
                words.append(f"{option.name}={word}")
    return words


def _word(value: object) -> str:
    plain = value is None or isinstance(value, (bool, int, float, torch.dtype))
    return str(value) if plain else type(value).__name__
