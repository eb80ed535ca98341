"""A small transformer on made-up tokens, cut into the five pieces of a verification case.

Its embedding is tied to its head, its key bias has a gradient that cancels to rounding noise, and
`norm.unused` never has one: what a comparison of gradients has to get right.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from shardwise import fully_shard

VOCAB, WIDTH, HEADS, LENGTH = 61, 24, 3, 10


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.attention(self.norm(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Transformer(nn.Module):
    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.unused = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build() -> Transformer:
    torch.manual_seed(1)
    return Transformer()


def shard(module: nn.Module, mesh, layout: str = "interleaved") -> None:
    for block in module.blocks:
        fully_shard(block, mesh=mesh, layout=layout)
    fully_shard(module, mesh=mesh, layout=layout)


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-3, foreach=True)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def batch(step: int) -> tuple[torch.Tensor, ...]:
    tokens = torch.randint(VOCAB, (12, LENGTH + 1), generator=torch.Generator().manual_seed(100 + step))
    return tokens[:, :-1], tokens[:, 1:]


def loss(module: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    tokens, targets = batch
    return F.cross_entropy(module(tokens).flatten(0, 1), targets.flatten())
