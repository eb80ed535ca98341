"""Buffers of symmetric memory: as many as there are gathers in flight, and used again after that."""

from __future__ import annotations

from unittest import mock

import torch
from torch import Tensor

from shardwise import _compat
from shardwise.comm.api import SymmetricAllGather


class Symmetric(SymmetricAllGather):
    """Without a device to be on."""

    def __init__(self) -> None:
        self.buffers = {}
        self.group = None  # type: ignore[assignment]


def test_a_buffer_is_used_again_when_nothing_refers_to_it_and_not_before() -> None:
    made: list[Tensor] = []

    def registered(numel: int, dtype: torch.dtype, *_: object) -> Tensor:
        made.append(torch.empty(numel, dtype=dtype))
        return made[-1]

    gather, cpu = Symmetric(), torch.device("cpu")
    with mock.patch.object(_compat, "symmetric_empty", registered):
        in_flight = [gather.allocate((2, 3), dtype=torch.float32, device=cpu) for _ in range(3)]
        assert len({buffer.data_ptr() for buffer in in_flight}) == 3
        freed = in_flight.pop(1).data_ptr()
        again = gather.allocate((6,), dtype=torch.float32, device=cpu)
        assert again.data_ptr() == freed
        gather.allocate((6,), dtype=torch.bfloat16, device=cpu)
    assert [buffer.dtype for buffer in made] == [torch.float32] * 3 + [torch.bfloat16]
