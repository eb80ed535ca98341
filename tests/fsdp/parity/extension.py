"""A parameter that travels in 8 bits: what a user of the all-gather extension hooks would write.

`Quantized` keeps its values in `held` (fp32) and defines `fsdp_pre_all_gather`, which sends int8 with
one fp32 scale per row, and `fsdp_post_all_gather`, which rebuilds the whole parameter in the compute
dtype. `Narrowed` sends bf16 only, one tensor and no metadata.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


def fill(out: Tensor, whole: Tensor) -> None:
    """Writes a gathered parameter where autograd has saved it, unseen: the values are those it saved."""
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
        out.copy_(whole)


class Held(Tensor):
    """A wrapper around `held` that stays itself through views and copies and is its values otherwise."""

    KEEP = (
        "aten.detach.default",
        "aten.split.Tensor",
        "aten.slice.Tensor",
        "aten.view.default",
        "aten.as_strided.default",
        "aten.new_zeros.default",
        "aten.new_empty.default",
        "aten.empty_like.default",
        "aten.clone.default",
        "aten._to_copy.default",
        "aten._pin_memory.default",
    )

    @staticmethod
    def __new__(cls, held: Tensor) -> Held:
        return Tensor._make_wrapper_subclass(
            cls, held.shape, held.stride(), held.storage_offset(), dtype=held.dtype, device=held.device
        )

    def __init__(self, held: Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain_args, plain_kwargs = tree_map_only(cls, lambda t: t.held, (args, kwargs or {}))
        out = func(*plain_args, **plain_kwargs)
        if func.overloadpacket.__name__.endswith("_") and isinstance(args[0], Tensor):  # in place
            return args[0]
        return tree_map_only(Tensor, cls, out) if str(func) in cls.KEEP else out

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], _: Any, size: Any, stride: Any) -> Held:
        return cls(inner["held"])


class Narrowed(Held):
    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        return (self.held.to(torch.bfloat16),), None

    def fsdp_post_all_gather(
        self,
        gathered: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> Any:
        (whole,) = gathered
        if out is not None:
            return fill(out, whole)
        widened = whole.to(param_dtype)
        return widened, (widened,)


class Quantized(Held):
    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        scale = self.held.abs().amax(dim=-1, keepdim=True).clamp_min(1e-6) / 127  # [rows, 1]
        return ((self.held / scale).round().to(torch.int8), scale), outer_size

    def fsdp_post_all_gather(
        self,
        gathered: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> Any:
        numbers, scale = gathered
        assert numbers.shape == metadata
        whole = (numbers.float() * scale).to(param_dtype)
        if out is not None:
            return fill(out, whole)
        return whole, (whole,)


def wrap_weights(kind: type[Held]) -> Any:
    """A change that makes every matrix of `.blocks` a `kind`."""

    def change(model: nn.Module) -> None:
        for module in model.blocks.modules():
            if isinstance(module, nn.Linear):
                module.weight = nn.Parameter(kind(module.weight.detach()))

    return change
