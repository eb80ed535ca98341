"""Run a test in one process as one of several ranks, whose others do not exist."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ranks import on_ranks
from savings import forget_meshes

# Before torch 2.13 the fake group leaves what is reduced as it was.
FAKE_REDUCES = torch.torch_version.TorchVersion(torch.__version__) >= "2.13"


def as_one_of(ranks: int, *, rank: int = -1) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the test in this process as one of `ranks`, by default the last; the others hold what it holds.

    What it gathers is its own shard once per rank, and of what it reduces its own gradients are left. So
    eager and compiled runs have equal numbers, and graphs the collectives of real ranks, for less.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**params: Any) -> None:
            dist.init_process_group("fake", store=FakeStore(), rank=rank % ranks, world_size=ranks)
            torch.manual_seed(0)
            try:
                body(**params)
            finally:
                torch.compiler.reset()
                forget_meshes()
                dist.destroy_process_group()

        return test

    return decorate if FAKE_REDUCES else on_ranks(ranks)
