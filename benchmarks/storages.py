"""Bytes alive in a process with real memory, without those that it did not allocate."""

from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from shardwise.comm.count import tensors_in
from shardwise.planner.storages import Storages


class Allocated(Storages):
    """Without storages of the meta device, and what lies within another storage.

    Parameters of the interleaved layout lie in their group's buffer.
    """

    def see(self, value: Any) -> None:
        # By fakes, DTensors find shapes.
        super().see([tensor for tensor in tensors_in(value) if not isinstance(tensor, FakeTensor)])

    def _see(self, storage: torch.UntypedStorage) -> None:
        if id(storage) in self._alive or self._is_own(storage):
            super()._see(storage)

    def _is_own(self, storage: torch.UntypedStorage) -> bool:
        begin = storage.data_ptr()
        others = self._living()
        within = any(one.data_ptr() < begin < one.data_ptr() + one.nbytes() for one in others)
        same = any(one.data_ptr() == begin and one is not storage and one.nbytes() for one in others)
        return storage.device.type != "meta" and not within and not same


class AllocatedBesideFiles(Allocated):
    """Without memory of mapped safetensors files either, which the process did not allocate."""

    def _is_own(self, storage: torch.UntypedStorage) -> bool:
        return super()._is_own(storage) and not _is_mapped(storage.data_ptr())


def _is_mapped(address: int) -> bool:
    with Path("/proc/self/maps").open("rb") as maps:
        ranges = [line.split()[0].split(b"-") for line in maps if line.endswith(b".safetensors\n")]
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)
