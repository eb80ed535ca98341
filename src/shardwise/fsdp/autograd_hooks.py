"""What autograd calls on a module's way through backward: with the gradients of its outputs and inputs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise import _compat


class _State(Protocol):
    """A sharded module's, which goes through backward."""

    def pre_backward(self, grad: Tensor) -> Tensor: ...

    def post_backward(self) -> None: ...


class OutputHook:
    """On a module's output: begins its backward, after ending that of the modules it was the input of."""

    __slots__ = ("ending", "state", "tensor")

    def __init__(self, tensor: Tensor, state: _State) -> None:
        self.tensor = weakref.ref(tensor)
        self.state = state
        self.ending: list[_State] = []

    @_compat.runs_eagerly
    def __call__(self, grad: Tensor) -> Tensor:
        for state in self.ending:
            state.post_backward()
        return self.state.pre_backward(grad)


class _EndOfBackward(torch.autograd.Function):
    """The identity on a module's inputs, whose backward ends the module's."""

    @staticmethod
    def forward(ctx: Any, state: _State, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.state = state
        return inputs

    @staticmethod
    @_compat.runs_eagerly
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.state.post_backward()
        return (None, *grads)


attach_post_backward: Callable[..., tuple[Tensor, ...]] = _compat.apply_of(_EndOfBackward)
