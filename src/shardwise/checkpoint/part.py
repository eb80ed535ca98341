"""One rank's part of a checkpoint: a file of chunks, hashed while it is written.

The hash covers the intended bytes, not those read back from disk, so damage during writing is found too. It
is XXH3, ten times as fast as a cryptographic hash: it guards against damage, not malice, and costs less than
a tenth of writing.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from shardwise import _compat
from shardwise.checkpoint.index import INDEX
from shardwise.checkpoint.plan import Chunk, metadata_of
from shardwise.checkpoint.state import from_json
from shardwise.errors import CheckpointError
from shardwise.files.manifest import HASHES
from shardwise.files.stores import Location, new_file, write_whole

HASH = "xxh3_128"
_VALUES = "__values.distcp"
_BUFFER_BYTES = 1 << 20
_SMALL_BYTES = 1 << 16
_lock, _crc32_options = threading.Lock(), list[bool]()
Part = dict[str, Any]  # "files": their digests; "places" of chunks: name, offsets, file, begin, length


def write_part(staging: Location, rank: int, chunks: Iterable[tuple[Chunk, Tensor | bytes]]) -> Part:
    """Write chunks to a file in `staging`; return once it is on disk, or in the store; raises if refused."""
    file, places = staging / f"__{rank}_0.distcp", []
    try:
        with new_file(file) as raw:
            hashed = _Hashed(raw)
            stream = io.BufferedWriter(hashed, _BUFFER_BYTES)
            for (name, offsets, *_), content in chunks:
                begin = stream.tell()
                if isinstance(content, bytes):
                    stream.write(content)
                else:
                    _save(content, stream)
                places.append([name, offsets, file.name, begin, stream.tell() - begin])
            stream.flush()
    except CheckpointError:
        raise
    except Exception as error:  # torch's own message hides the system's error
        raise CheckpointError(f"{_first_cause(error)}; check the space and rights there") from error
    return {"files": {file.name: hashed.digest()}, "places": places}


def write_values(staging: Location, values: Mapping[str, Any]) -> Part:
    """Write plain values, which the manifest also has, for torch's reader: each under torch's name."""
    places, content = [], io.BytesIO()
    leaves = (leaf for name, value in values.items() for leaf in _walk(name, from_json(value)))
    for name, value in leaves:
        begin = content.tell()
        torch.save(value, content)
        places.append([name, None, _VALUES, begin, content.tell() - begin])
    write_whole(staging / _VALUES, content.getvalue())
    return {"files": {_VALUES: _digest(content.getvalue())}, "places": places}


def _walk(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a plain value by torch's names: it walks dicts, and lists with dicts in them."""
    if isinstance(value, dict):
        items: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list) and _has_dicts(value):
        items = enumerate(value)
    else:
        yield name, value
        return
    for key, item in items:
        yield from _walk(f"{name}.{key}", item)


def _has_dicts(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(map(_has_dicts, value)))


def write_index(staging: Location, chunks: list[Chunk], parts: Iterable[Part]) -> dict[str, Any]:
    """Write the index of all ranks' parts, as torch's distributed checkpoint has it; return its digest."""
    metadata = metadata_of(chunks)
    metadata.storage_data = {}
    for name, offset, path, begin, length in (place for part in parts for place in part["places"]):
        if offset is None:
            metadata.state_dict_metadata[name] = BytesStorageMetadata()
            metadata.planner_data[name] = (name,)
        place = _compat.StorageInfo(relative_path=path, offset=begin, length=length)
        metadata.storage_data[MetadataIndex(name, offset)] = place
    content = pickle.dumps(metadata)
    write_whole(staging / INDEX, content)
    return {INDEX: _digest(content)}


def _digest(content: bytes) -> dict[str, Any]:
    return {"bytes": len(content), HASH: HASHES[HASH](content).hexdigest()}


def stage(tensor: Tensor) -> Tensor | bytes:
    """Return a copy of a tensor in CPU memory.

    Small tensors are returned as their bytes in the file: serializing them costs mostly Python time, which in
    a thread would delay the run.
    """
    if tensor.nbytes < _SMALL_BYTES:
        stream = io.BytesIO()
        _save(tensor, stream)
        return stream.getvalue()
    return tensor.cpu() if not tensor.is_cpu else tensor.clone(memory_format=torch.contiguous_format)


def _first_cause(error: BaseException) -> str:
    """Return the first system error in a chain of errors, else the original error."""
    current = error
    while not isinstance(current, OSError) and (cause := current.__cause__ or current.__context__):
        current = cause
    return f"{type(current).__name__}: {current}"


def _save(tensor: Tensor, stream: Any) -> None:
    tensor = tensor.cpu()
    if tensor.untyped_storage().nbytes() != tensor.nbytes:  # a storage is saved whole
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    with _without_checksums():
        torch.save(tensor, stream)


@contextmanager
def _without_checksums() -> Iterator[None]:
    """Make torch omit its CRC-32, which takes twice the CPU time of the rest of a save; nothing checks it.

    The setting is per process, and two threads may save: the last restores what the first found.
    """
    with _lock:
        _crc32_options.append(torch.serialization.get_crc32_options())
        torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        with _lock:
            options = _crc32_options.pop()
            if not _crc32_options:
                torch.serialization.set_crc32_options(options)


class _Hashed(io.RawIOBase):
    """A file that is hashed while it is written."""

    def __init__(self, raw: Any) -> None:
        self._raw, self._hash, self._at = raw, HASHES[HASH](), 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        count: int = self._raw.write(data)
        self._hash.update(memoryview(data)[:count])
        self._at += count
        return count

    def tell(self) -> int:
        return self._at

    def digest(self) -> dict[str, Any]:
        return {"bytes": self._at, HASH: self._hash.hexdigest()}
