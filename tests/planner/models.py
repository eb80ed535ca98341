"""Models that several files plan."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Even(nn.Module):
    """Tokens to logits; every dim is a multiple of 64."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(512, 256), nn.Linear(256, 512, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(layers))

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class TwoLists(Even):  # with more vision blocks than the 8 and 9 blocks that are run of the longest list
    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.ModuleList(nn.Linear(256, 256) for _ in range(10))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(256, 256, bias=False)) for _ in range(12))

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.embedding(tokens)
        for block in [*self.vision, *self.blocks]:
            x = block(x)
        return self.head(x)
