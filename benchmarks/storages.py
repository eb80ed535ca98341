"""Bytes alive in a process with real memory, without those that it did not allocate."""

from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from shardwise.planner.storages import Storages


class Allocated(Storages):
    """Without storages of memory that is not the process's own, or that another one has.

    That is mapped safetensors files, the meta device, and what lies within another storage: parameters of
    the interleaved layout lie in their group's buffer.
    """

    def see(self, value: Any) -> None:
        if not isinstance(value, FakeTensor):  # by which DTensors find shapes
            super().see(value)

    def _see(self, storage: torch.UntypedStorage) -> None:
        if id(storage) in self._alive:
            super()._see(storage)
            return
        begin = storage.data_ptr()
        others = self._living()
        within = any(one.data_ptr() < begin < one.data_ptr() + one.nbytes() for one in others)
        same = any(one.data_ptr() == begin and one is not storage and one.nbytes() for one in others)
        if storage.device.type != "meta" and not within and not same and not _is_mapped(begin):
            super()._see(storage)


def _is_mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(".safetensors"):
            begin, end = (int(number, 16) for number in line.split()[0].split("-"))
            if begin <= address < end:
                return True
    return False
