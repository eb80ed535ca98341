"""Llama at the sizes of its third generation: the model that the memory and start-up figures are about.

It is the whole architecture: grouped-query attention with rotary positions, SwiGLU, RMSNorm.
The last norm and the output projection are one module, so that they make one group.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Shape:
    vocabulary: int
    width: int
    blocks: int
    heads: int
    kv_heads: int
    ffn: int

    @property
    def head_width(self) -> int:
        return self.width // self.heads


LLAMA_8B = Shape(vocabulary=128256, width=4096, blocks=32, heads=32, kv_heads=8, ffn=14336)
LLAMA_70B = Shape(vocabulary=128256, width=8192, blocks=80, heads=64, kv_heads=8, ffn=28672)
SMALL = Shape(vocabulary=512, width=64, blocks=3, heads=4, kv_heads=2, ffn=192)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        kv_width = shape.kv_heads * shape.head_width
        self.norm_1 = nn.RMSNorm(shape.width)
        self.q = nn.Linear(shape.width, shape.width, bias=False)
        self.k = nn.Linear(shape.width, kv_width, bias=False)
        self.v = nn.Linear(shape.width, kv_width, bias=False)
        self.o = nn.Linear(shape.width, shape.width, bias=False)
        self.norm_2 = nn.RMSNorm(shape.width)
        self.gate = nn.Linear(shape.width, shape.ffn, bias=False)
        self.up = nn.Linear(shape.width, shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # x: (batch, length, width), in and out
        y = self.norm_1(x)
        q, k, v = (self._heads(project(y)) for project in (self.q, self.k, self.v))
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        repeat = self.shape.heads // self.shape.kv_heads
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def _heads(self, y: Tensor) -> Tensor:  # -> (batch, heads, length, head_width)
        return y.unflatten(-1, (-1, self.shape.head_width)).transpose(1, 2)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Head(nn.Module):
    """Logits in the parameters' dtype."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(shape.width)
        self.out = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (batch, length, width) -> (batch, length, vocabulary)
        return self.out(self.norm(x))


class Llama(nn.Module):
    """Every block is recomputed in backward; the embedding and the head are not."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.blocks))
        self.head = Head(shape)

    def units(self) -> Iterator[nn.Module]:
        """The modules that are gathered and reduced as a group each, in the order of forward."""
        yield from (self.embedding, *self.blocks, self.head)

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, length) -> scalar
        x = self.embedding(tokens)
        half = torch.arange(self.shape.head_width // 2, device=tokens.device)
        speeds = 500_000.0 ** (-2 * half / self.shape.head_width)
        angles = torch.outer(torch.arange(tokens.size(1), device=tokens.device), speeds)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = checkpoint(block, x, cos, sin, use_reentrant=False)
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
