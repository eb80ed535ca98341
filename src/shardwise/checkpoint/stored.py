"""Tensors written by `torch.save`, located in a file without reading them.

A checkpoint's tensor file is a sequence of such archives:

    archive/data.pkl     a pickle of dtype, shape, strides, and the storage's name
    archive/data/0       the storage's bytes, unchanged

`locate` reads everything but the storage, checks it against the actual number of bytes, and returns their
position; `read` seeks and reads only the rows that are wanted.
"""

from __future__ import annotations

import functools
import io
import struct
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.records import read_records
from shardwise.errors import CheckpointError
from shardwise.files.manifest import refused_as
from shardwise.files.stores import Ranges

_LOCAL_HEADER = struct.Struct("<26xHH")  # lengths of the name and of the extra field that follow it
_STORAGES = {  # dtypes by the names of the storage classes that pickles refer to
    torch.empty(0, dtype=dtype).type().removeprefix("torch.").replace("Tensor", "Storage"): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


@dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    begin: int  # of its first element, in bytes from the start of the file
    key: str  # the storage's name in its archive

    def read(self, file: io.BufferedReader, offsets: Sequence[int], target: Tensor) -> None:
        """Fill `target` with the box of its size at `offsets` within the tensor, from `file`."""
        sizes = target.shape
        if 0 in sizes:
            return
        itemsize = self.dtype.itemsize
        first = sum(o * stride for o, stride in zip(offsets, self.strides, strict=True))
        span = _span(sizes, self.strides)
        is_as_stored = target.stride() == self.strides and not (target.is_conj() or target.is_neg())
        # Pinned memory is filled by a copy, which a simulated device sees.
        direct = target.is_cpu and target.is_contiguous() and is_as_stored and not target.is_pinned()
        buffer = target.as_strided((span,), (1,)) if direct else torch.empty(span, dtype=self.dtype)
        file.seek(self.begin + first * itemsize)
        numbers: Any = buffer.view(torch.uint8).numpy()
        if file.readinto(memoryview(numbers)) != span * itemsize:
            raise CheckpointError(f"{file.name}: ended before the tensor did; it changed while it was read")
        if direct and not target.is_inference():
            torch.autograd.graph.increment_version(target)
        elif not direct:
            target.copy_(buffer.as_strided(tuple(sizes), self.strides))


@refused_as("damaged")
def locate(file: io.BufferedReader, begin: int, length: int) -> Stored:
    """Return the tensor whose archive is `length` bytes from `begin` on; raises unless plain and whole."""

    def fetch(first: int, last: int) -> bytes:  # an archive cannot read beyond its part of the file
        file.seek(begin + first)
        return file.read(last - first)

    with zipfile.ZipFile(Ranges(length, fetch)) as archive:
        entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        for info in entries.values():
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                raise CheckpointError("compressed, which torch.save never does; not read")
            if info.CRC == 0:  # torch omitted it; zipfile skips a missing one
                del info.CRC
        order = archive.read(entries["byteorder"]).decode() if "byteorder" in entries else "little"
        if order != sys.byteorder:
            raise CheckpointError(f"written in {order} byte order; this machine has {sys.byteorder}")
        tensor = _describe(archive.read(entries["data.pkl"]))
        info = entries[f"data/{tensor.key}"]
    file.seek(begin + info.header_offset)
    at = info.header_offset + _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size)))
    end = tensor.begin + _span(tensor.shape, tensor.strides) * tensor.dtype.itemsize
    if end > info.file_size or at + info.file_size > length:
        raise CheckpointError(
            f"a {tensor.dtype} tensor of shape {tensor.shape} needs {end} bytes; there are"
            f" {min(info.file_size, max(0, length - at))}"
        )
    return replace(tensor, begin=begin + at + tensor.begin)


def _span(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements from the first to the last of a tensor in memory."""
    if 0 in sizes:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


@functools.lru_cache(1024)
def _describe(content: bytes) -> Stored:
    """Return a tensor by its pickle, from its storage's begin; cached: equal tensors have equal pickles."""
    tensor = read_records(content, find=_find, persistent=_storage)
    if not isinstance(tensor, Stored):
        raise CheckpointError(f"expected one plain tensor, found {type(tensor).__name__}")
    return tensor


class _Bytes:
    """A storage without a dtype, which the tensor has instead."""


def _storage(reference: Any) -> tuple[str, Any]:
    word, kind, key, _, _ = reference
    if word != "storage" or not isinstance(key, str) or not (kind is _Bytes or isinstance(kind, torch.dtype)):
        raise CheckpointError("expected a tensor's storage, found something else")
    return key, kind


def _tensor_v2(storage: Any, offset: Any, sizes: Any, strides: Any, *rest: Any) -> Stored:
    """Describe a tensor whose dtype has its own storage class; replaces `_rebuild_tensor_v2`."""
    key, dtype = storage
    if len(rest) > 2 and rest[2]:
        raise CheckpointError(f"a tensor with {rest[2]!r:.100}, expected a plain one")
    if not isinstance(dtype, torch.dtype) or not _are_sizes((offset,), sizes, strides):
        raise CheckpointError(f"no tensor: {dtype}, offset {offset!r}, {sizes!r:.100}, {strides!r:.100}")
    if len(sizes) != len(strides):
        raise CheckpointError(f"a tensor of {len(sizes)} sizes and {len(strides)} strides")
    return Stored(dtype, sizes, strides, offset * dtype.itemsize, key)


def _tensor_v3(storage: Any, *rest: Any) -> Stored:
    """Describe a tensor of a later dtype, the sixth of `rest`; replaces `_rebuild_tensor_v3`."""
    return _tensor_v2((storage[0], rest[5]), *rest[:5], *rest[6:])


def _are_sizes(*values: Any) -> bool:
    return all(isinstance(value, tuple) and all(type(n) is int and n >= 0 for n in value) for value in values)


def _find(module: str, name: str) -> Any:
    if module == "torch":
        dtype = _STORAGES.get(name, getattr(torch, name, None))
        return dtype if isinstance(dtype, torch.dtype) else None
    objects = {
        ("torch.storage", "UntypedStorage"): _Bytes,
        ("torch._utils", "_rebuild_tensor_v2"): _tensor_v2,
        ("torch._utils", "_rebuild_tensor_v3"): _tensor_v3,
        ("collections", "OrderedDict"): tuple,
    }
    return objects.get((module, name))
