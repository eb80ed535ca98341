"""Hooks that autograd calls in a module's backward, on the gradients of its outputs and inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise import _compat

State = Any  # an `FSDPState`, which imports this file


class _EndOfBackward(torch.autograd.Function):
    """The identity on a module's inputs; its backward ends the module's backward."""

    @staticmethod
    def forward(ctx: Any, state: State, *inputs: Tensor) -> tuple[Tensor, ...]:
        # A strong reference: backward may go on after the model was deleted, and still reduces.
        ctx.state = state
        # Returned unchanged: autograd makes views of them, with this node as their history.
        return inputs

    @staticmethod
    @_compat.runs_eagerly
    def backward(ctx: Any, *grads: Any) -> Any:
        # Autograd runs this node after the module's own nodes, which were made later, so parameters have
        # their gradients. The previous module's backward comes next, and gathers once this module is freed.
        ctx.state.post_backward()
        return (None, *grads)


class _EndOfTransformedBackward(_EndOfBackward):
    """The form that transforms of `torch.func` require; it costs more calls."""

    generate_vmap_rule = True

    @staticmethod
    def forward(state: State, *inputs: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return inputs

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.state = inputs[0]

    @staticmethod
    def jvp(ctx: Any, state: None, *tangents: Any) -> Any:
        return tangents


attach_post_backward: Callable[..., tuple[Tensor, ...]] = _compat.apply_of(_EndOfBackward)
attach_within_transforms: Callable[..., tuple[Tensor, ...]] = _EndOfTransformedBackward.apply
