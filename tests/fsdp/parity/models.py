"""The small models of the parity tests, each with its data and its loss.

A `Task` is what a training step needs besides sharding: `build()` seeds itself, so it gives the same
weights wherever it is called; `batch(step)` is the global batch of that step; `loss(model, batch)` is
a mean over the batch, so that the mean of equal slices' losses is the loss of the whole. Every
model keeps the modules worth a group of their own in `.blocks`. Global batches have 24 rows: 1 to 4
ranks and 1 to 3 micro-batches cut them evenly.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = 24
Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Task:
    """A model with the data and the loss that train it."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]

    def but(self, change: Callable[[nn.Module], None]) -> Task:
        """The same task on a model that `change` has edited in place."""

        def build() -> nn.Module:
            model = self.build()
            change(model)
            return model

        return replace(self, build=build)


def generator(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + step)


class UnevenMLP(nn.Module):
    """Layers of 33, 3, 7 and 1 rows, none of which 2 or 4 ranks cut evenly."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [7, 33, 3, 7, 1]
        self.blocks = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class WideGradient(torch.autograd.Function):
    """Scales, and hands the scales a gradient of more digits than they have, as some kernels do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        return grads[0] * scale, (grads[0].float() * x.float()).sum(0)


class WidelyScaled(FeedForward):
    """Ends in scales that get a wide gradient."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = WideGradient.apply(super().forward(x), self.scale)
        return scaled


class Residual(nn.Module):
    """Feed-forward blocks between two projections; every dimension divides by 4."""

    def __init__(self, width: int = 8, depth: int = 2, block: type[nn.Module] = FeedForward) -> None:
        super().__init__()
        self.inward = nn.Linear(8, width)
        self.blocks = nn.ModuleList(block(width) for _ in range(depth))
        self.outward = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.outward(self.features(x))

    def features(self, x: Tensor) -> Tensor:
        """A second way in: everything but the last projection."""
        x = self.inward(x)
        for block in self.blocks:
            x = block(x)
        return x


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-2, -1)) / q.shape[-1] ** 0.5  # [rows, heads, length, length]
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(rows, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.down(F.gelu(self.up(self.norm(x))))


class GPT(nn.Module):
    """A language model whose embedding is also its output projection."""

    def __init__(self, vocabulary: int = 37, width: int = 16, depth: int = 2, length: int = 6) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads=2) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Scaled(nn.Module):
    """A linear layer with a buffer it reads and a buffer it counts its calls in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.ones(width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + torch.tanh(self.linear(x)) * self.scale * self.scratch


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaled(8) for _ in range(2))
        self.outward = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.outward(x)


class Branches(nn.Module):
    """Two branches side by side; `forward` runs the one that the batch's route names."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([FeedForward(8), FeedForward(8)])
        self.outward = nn.Linear(8, 4)
        self.never = nn.Linear(8, 4)

    def forward(self, x: Tensor, route: int = 0) -> Tensor:
        return self.outward(self.blocks[route](x))


class Handing(FeedForward):
    """Reads what the blocks before it wrote to an object that they share, and writes to it."""

    def forward(self, x: Tensor, shared: UserDict[str, Tensor]) -> Tensor:
        x = super().forward((x + shared["hidden"]) / 2 if shared else x)
        shared["hidden"] = x
        return x


class Sharing(Residual):
    """A model whose blocks share an object, as layers that share keys and values do."""

    def __init__(self) -> None:
        super().__init__(depth=3, block=Handing)

    def forward(self, x: Tensor) -> Tensor:
        shared: UserDict[str, Tensor] = UserDict()
        x = self.inward(x)
        for block in self.blocks:
            x = block(x, shared)
        return self.outward((x + shared["hidden"]) / 2)


def seeded(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def seeded_build() -> nn.Module:
        torch.manual_seed(7)
        return build()

    return seeded_build


def pairs(inputs: int, outputs: int) -> Callable[[int], Batch]:
    def batch(step: int) -> Batch:
        source = generator(step)
        return torch.randn(ROWS, inputs, generator=source), torch.randn(ROWS, outputs, generator=source)

    return batch


def text(step: int) -> Batch:
    return (torch.randint(0, 37, (ROWS, 7), generator=generator(step)),)


def squared_error(model: nn.Module, batch: Batch) -> Tensor:
    inputs, targets = batch
    return F.mse_loss(model(inputs).float(), targets)


def next_token(model: nn.Module, batch: Batch) -> Tensor:
    (tokens,) = batch
    scores = model(tokens[:, :-1])
    return F.cross_entropy(scores.float().flatten(0, 1), tokens[:, 1:].flatten())


def freeze(*names: str) -> Callable[[nn.Module], None]:
    """A change that freezes the parameters whose name contains one of `names`."""

    def change(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if any(part in name for part in names):
                parameter.requires_grad_(False)

    return change


UNEVEN = Task(seeded(UnevenMLP), pairs(7, 1), squared_error)
RESIDUAL = Task(seeded(Residual), pairs(8, 4), squared_error)
WIDE = Task(seeded(lambda: Residual(block=WidelyScaled)), pairs(8, 4), squared_error)
DEEP = Task(seeded(lambda: Residual(depth=4)), pairs(8, 4), squared_error)
LANGUAGE = Task(seeded(GPT), text, next_token)
BUFFERED = Task(seeded(Buffered), pairs(8, 4), squared_error)
BRANCHES = Task(seeded(Branches), pairs(8, 4), squared_error)
SHARING = Task(seeded(Sharing), pairs(8, 4), squared_error)
