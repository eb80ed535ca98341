"""How many of a matrix's rows each rank holds."""

from __future__ import annotations

import torch


def ragged(count: int, ranks: int, seed: int) -> list[int]:
    """Any number of rows on each rank, often none."""
    generator = torch.Generator().manual_seed(seed)
    ends = torch.randint(0, count + 1, (ranks - 1,), generator=generator).sort().values.tolist()
    return [b - a for a, b in zip([0, *ends], [*ends, count], strict=True)]


def owned(count: int, ranks: int, seed: int) -> list[int]:
    return [count if rank == seed % ranks else 0 for rank in range(ranks)]
