"""The index of a checkpoint, torch's `.metadata`, read and checked: which bytes hold which box.

A checkpoint is whole if its boxes cover every tensor once. Checked content is passed on as numbers and texts
only; nothing else in an index goes any further.
"""

from __future__ import annotations

import copyreg
import dataclasses
import enum
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint.filesystem as dcp_filesystem
import torch.distributed.checkpoint.metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from shardwise.checkpoint.plan import Chunk, metadata_of
from shardwise.checkpoint.records import read_records
from shardwise.errors import CheckpointError, ShardingError
from shardwise.files.manifest import inside, refused_as, regular
from shardwise.files.stores import Location
from shardwise.layout import Box, cover

INDEX = ".metadata"


class Place(NamedTuple):
    """A range of bytes in a file."""

    file: Location
    begin: int
    length: int


@dataclasses.dataclass(frozen=True)
class Index:
    """The position of every chunk of a checkpoint's tensors."""

    metadata: Metadata  # has what torch's planner reads: sizes and chunks
    places: Mapping[tuple[str, tuple[int, ...]], Place]  # by name and the chunk's offsets


def read_index(folder: Location, tensors: Mapping[str, Any], files: Mapping[str, Any]) -> Index:
    """Return the index of a checkpoint; raises unless it is whole and fits `tensors` and `files`."""
    file = inside(folder, INDEX)
    try:
        with refused_as("not a valid index"):  # attributes that are missing or of other types
            metadata = read_records(regular(file).read_bytes(), find=_find, records=_RECORDS)
            return _check(folder, metadata, tensors, files)
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}. Load another step") from error


def _check(folder: Location, index: Any, tensors: Mapping[str, Any], files: Mapping[str, Any]) -> Index:
    if not isinstance(index, Metadata):
        raise CheckpointError(f"expected an index, found {type(index).__name__}")
    entries = index.state_dict_metadata  # its plain values are for torch's reader: the manifest has them
    entries = {name: entry for name, entry in entries.items() if not isinstance(entry, BytesStorageMetadata)}
    if differing := sorted(set(entries) ^ set(tensors), key=str):
        raise CheckpointError(f"{differing[0]} is in only one of index and manifest")
    chunks: list[Chunk] = []
    places: dict[tuple[str, tuple[int, ...]], Place] = {}
    items = index.storage_data.items()
    stored = {(key.fqn, _numbers(key.offset)): place for key, place in items if key.fqn in entries}
    for name, expected in tensors.items():
        entry: Any = entries[name]
        shape = _numbers(entry.size)
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        if (list(shape), dtype) != (expected["shape"], expected["dtype"]):
            raise CheckpointError(f"{name}: the index has {dtype} {shape}, the manifest {expected}")
        boxes = [Box(_numbers(chunk.offsets), _numbers(chunk.sizes)) for chunk in entry.chunks]
        try:
            cover(boxes, shape)
        except ShardingError as error:
            raise CheckpointError(f"{name}: {error}") from error
        for box in boxes:
            chunks.append([name, box.offsets, box.sizes, shape, dtype])
            places[name, box.offsets] = _place(folder, stored[name, box.offsets], files)
    return Index(metadata_of(chunks), places)


def _place(folder: Location, stored: Any, files: Mapping[str, Any]) -> Place:
    name, begin, length = stored.relative_path, stored.offset, stored.length
    if getattr(stored, "transform_descriptors", None):
        raise CheckpointError(f"{name!r:.100} is stored in a form that is not read: {stored!r:.200}")
    if name not in files:
        raise CheckpointError(f"{name!r:.100} is named by {INDEX} but not in the manifest; not read")
    begin, length = _numbers((begin, length))
    if begin + length > files[name]["bytes"]:
        raise CheckpointError(f"{name} has {files[name]['bytes']} bytes; expected {length} from {begin} on")
    return Place(inside(folder, name), begin, length)


def _numbers(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple) or any(type(n) is not int or not 0 <= n < 2**63 for n in value):
        raise CheckpointError(f"expected sizes or offsets, found {value!r:.100}")
    return tuple(value)


def _find(module: str, name: str) -> Any:
    """Return the object that a name in an index refers to: torch's index record, a size, dtype or path."""
    if module == "torch":
        value = getattr(torch, name, None)
        return value if name == "Size" or isinstance(value, torch.dtype) else None
    if module.split(".")[0] == "pathlib" and name.endswith("Path"):
        return PurePath
    return _KNOWN.get((module, name))


_KNOWN: dict[tuple[str, str], Any] = {
    (module.__name__, name): kind
    for module in (dcp_metadata, dcp_filesystem)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and kind.__module__ == module.__name__
    if dataclasses.is_dataclass(kind) or issubclass(kind, enum.Enum)
}
_RECORDS: tuple[Any, ...] = tuple(filter(dataclasses.is_dataclass, _KNOWN.values()))
_layout_by_name: Any = copyreg.dispatch_table[torch.layout](torch.strided)[0]  # what pickles of a layout call
_KNOWN[_layout_by_name.__module__, _layout_by_name.__name__] = {str(torch.strided): torch.strided}.__getitem__
