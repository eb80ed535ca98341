"""Kernels that an accelerator has and the CPU does not, as a plan sees them: torch's own, and scans."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardwise import _compat
from shardwise.planner.scans import FUNCTIONS
from shardwise.planner.setup import Setup

_attention, _dropout = F.scaled_dot_product_attention, F.dropout


@dataclass
class Stood:
    """Functions of transformers that ran: as their kernels do, or by reference code that has none."""

    as_kernels: set[str] = field(default_factory=set)
    by_reference: set[str] = field(default_factory=set)


@contextmanager
def kernels(setup: Setup) -> Iterator[Stood]:
    """Let models compute on fake tensors what they would on the setup's device."""
    stood = Stood()
    with ExitStack() as stack:
        stack.enter_context(_listening(stood.by_reference))
        if setup.device == "cuda":
            own: dict[str, Any] = {
                "scaled_dot_product_attention": _fused_attention,
                "dropout": _fused_dropout,
            }
            own |= {"rms_norm": _fused_norm} if setup.fused_norms else {}
            # What is called by these names within torch's functions, and what else has been imported by name.
            stack.enter_context(_InPlaceOf({getattr(F, name): kernel for name, kernel in own.items()}))
            stack.enter_context(mock.patch.multiple(F, **own))
            for module, name in _of_transformers():
                named = _named(*FUNCTIONS[name], stood.as_kernels)
                stack.enter_context(mock.patch.object(module, name, named))
        yield stood


class _InPlaceOf(TorchFunctionMode):
    """Calls functions in the place of others. Off within `Tensor.backward`, not in `autograd.backward`."""

    def __init__(self, functions: dict[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self.functions = functions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.functions.get(func, func)(*args, **(kwargs or {}))


def _of_transformers() -> list[tuple[Any, str]]:
    modules = [one for name, one in sys.modules.items() if name.startswith("transformers.models.")]
    return [(one, name) for one in modules for name in FUNCTIONS.keys() & vars(one).keys()]


def _named(name: str, kernel: Callable[..., Any], names: set[str]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        names.add(name)
        return kernel(*args, **kwargs)

    return call


@contextmanager
def _listening(found: set[str]) -> Iterator[None]:
    """Collect what transformers computes by reference code, where no kernels for it are installed."""
    warn: Any = getattr(logging.Logger, "warning_once", None)  # transformers' own: this is how it says so
    if warn is None:
        yield
        return

    def listen(logger: logging.Logger, message: Any, *args: Any, **kwargs: Any) -> None:
        if "reference PyTorch implementation" in str(message):
            found.add(str(message).split("`")[1])
        else:
            warn(logger, message, *args, **kwargs)

    with mock.patch.object(logging.Logger, "warning_once", listen):
        yield


def _fused_norm(
    x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """RMSNorm in one kernel, as on CUDA: LayerNorm's stands in, which keeps one number a token more."""
    return F.layer_norm(x, shape, weight, None, eps or 1e-6)


def _fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention as CUDA has it: in one kernel with dropout too, a learned mask, or values of another width.

    The CPU has no such kernels, and would have all scores in memory.
    """
    how: Any = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    alike = query.ndim == 4 and (enable_gqa or query.shape[:2] == key.shape[:2])
    if not alike or query.dtype == torch.float64 or not any(enabled() for enabled in _KERNELS_ENABLED):
        if not dropout_p:
            return _attention(query, key, value, attn_mask, **how)
        return _scores_in_memory(query, key, value, attn_mask, dropout_p, **how)
    learned = attn_mask is not None and attn_mask.requires_grad
    if (query.shape[-1] == value.shape[-1] and not learned) or query.shape[1] != key.shape[1]:
        return _attention(query, key, value, attn_mask, **how)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -math.inf)
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    learns = torch.is_grad_enabled() and any(one.requires_grad for one in (query, key, value))
    found: Tensor = _compat.efficient_attention(
        query, key, value, attn_mask, learns, 0.0, is_causal, scale=scale
    )[0]
    return found


_KERNELS_ENABLED: tuple[Callable[[], bool], ...] = (
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.cudnn_sdp_enabled,
)


def _scores_in_memory(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    *,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """Attention in kernels apart, in fp32 or wider, with the mask of dropout in bytes."""
    wide = torch.promote_types(query.dtype, torch.float32)
    q, k, v = (one.to(wide) for one in (query, key, value))
    if enable_gqa:
        k, v = (one.repeat_interleave(q.shape[-3] // one.shape[-3], -3) for one in (k, v))
    scores = (q * (scale or q.shape[-1] ** -0.5)) @ k.mT
    if is_causal:
        mask = scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return (_fused_dropout(scores.softmax(-1), dropout) @ v).to(query.dtype)


def _fused_dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Dropout in one kernel, as on CUDA, which keeps a byte of each element."""
    if not training or inplace or not 0 < p < 1:
        return _dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]
