"""Buffers of symmetric memory: as many as there are gathers in flight, and used again after that."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor

from shardwise import _compat
from shardwise.comm.api import SymmetricAllGather
from shardwise.verify.streams import DEVICE, simulated


class Symmetric(SymmetricAllGather):
    """Without a device to be on."""

    def __init__(self) -> None:
        self.buffers = {}
        self.group = None  # type: ignore[assignment]


@pytest.fixture
def made() -> Iterator[list[Tensor]]:
    """What is registered, by `Symmetric`, on the simulated device."""
    made: list[Tensor] = []

    def registered(numel: int, dtype: torch.dtype, device: torch.device, _: object) -> Tensor:
        made.append(torch.empty(numel, dtype=dtype, device=device))
        return made[-1]

    with simulated() as found, mock.patch.object(_compat, "symmetric_empty", registered):
        yield made
    assert not found.findings


def test_a_buffer_is_used_again_when_nothing_refers_to_it_and_not_before(made: list[Tensor]) -> None:
    gather, device = Symmetric(), torch.device(DEVICE)
    in_flight = [gather.allocate((2, 3), dtype=torch.float32, device=device) for _ in range(3)]
    assert len({buffer.data_ptr() for buffer in in_flight}) == 3
    freed = in_flight.pop(1).data_ptr()
    again = gather.allocate((6,), dtype=torch.float32, device=device)
    assert again.data_ptr() == freed
    gather.allocate((6,), dtype=torch.bfloat16, device=device)
    assert [buffer.dtype for buffer in made] == [torch.float32] * 3 + [torch.bfloat16]


def test_a_buffer_that_only_a_cycle_keeps_is_used_again(made: list[Tensor]) -> None:
    """A buffer more is made by all ranks together, and cycles may be found on one rank before others."""
    gather, device = Symmetric(), torch.device(DEVICE)
    kept: list[object] = [gather.allocate((6,), dtype=torch.float32, device=device)]
    kept.append(kept)
    del kept
    gather.allocate((6,), dtype=torch.float32, device=device)
    assert len(made) == 1


def test_a_buffer_is_used_again_on_another_stream_after_the_one_that_had_it(made: list[Tensor]) -> None:
    gather, device = Symmetric(), torch.device(DEVICE)
    gather.allocate((6,), dtype=torch.float32, device=device).fill_(1)
    with torch.Stream(device=device):
        gather.allocate((6,), dtype=torch.float32, device=device).fill_(2)
    gather.allocate((6,), dtype=torch.float32, device=device).fill_(3)
    assert len(made) == 1
