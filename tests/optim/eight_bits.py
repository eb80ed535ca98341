"""Parameters with moments in 8 bits and in fp32, and steps with AdamW8bit on one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.optim.adamw8bit import AdamW8bit

# In 8 bits: blocks that fill rows, short last blocks, rows shorter than a block, more dims than two. In fp32:
# one dim, one column, few elements.
IN_8_BITS = [(16, 512), (13, 331), (50, 100), (6, 30, 40)]
IN_FP32 = [(5000,), (5000, 1), (63, 65), (3, 4)]
SHAPES = [*IN_8_BITS, *IN_FP32]


def tensors(shapes: list[tuple[int, ...]] = SHAPES, *, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def train(optimizer: Any, params: list[Tensor], place: Callable[[int, Tensor], Tensor], steps: range) -> None:
    """Steps with gradients that depend on nothing but the step, put on the ranks by `place`."""
    for step in steps:
        for i, grad in enumerate(tensors([tuple(p.shape) for p in params], seed=100 + step)):
            params[i].grad = place(i, grad.to(params[i].dtype))
        optimizer.step()


def plain(i: int, whole: Tensor) -> Tensor:
    return whole


def on_one_process(kind: Any = AdamW8bit, *, steps: int = 3, **options: Any) -> list[Tensor]:
    params = [nn.Parameter(value) for value in tensors()]
    train(kind(params, lr=0.01, **options), params, plain, range(steps))
    return [p.detach() for p in params]
