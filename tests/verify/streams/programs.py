"""What programs for the simulated device are made of, and what it finds in them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shardwise.planner.noop_group import noop_world
from shardwise.verify.streams import DEVICE, simulated

Program = Callable[[], object]


def races(program: Program) -> list[str]:
    with simulated() as found, noop_world(2):
        program()
    return [str(one) for one in found.findings]


def side(*, waits: bool = True) -> torch.Stream:
    stream = torch.Stream(device=DEVICE)
    if waits:
        stream.wait_stream(current())
    return stream


def current() -> torch.Stream:
    return torch.accelerator.current_stream()


def square() -> Tensor:
    return torch.randn(4, 4, device=DEVICE)


def pair() -> list[Tensor]:
    return [torch.randn(8, device=DEVICE) for _ in range(2)]
