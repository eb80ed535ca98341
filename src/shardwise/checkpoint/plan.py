"""The plan of a save: which rank writes which chunk; equal on every rank, since all know what each holds.

A chunk that several ranks hold (replicas) is written by the rank with the fewest bytes so far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from shardwise.checkpoint.state import check_dense
from shardwise.errors import CheckpointError, ShardingError
from shardwise.layout import Box, cover

Chunk = list[Any]  # as JSON: name, offsets, sizes, the tensor's sizes, dtype
Held = dict[tuple[str, tuple[int, ...]], tuple[Chunk, Tensor]]  # by name and offsets


@dataclass(frozen=True)
class Plan:
    """The chunks of one save, and the rank that writes each."""

    chunks: list[Chunk]  # of all ranks, each once
    writers: list[int]  # by chunk, the rank that writes it

    def of(self, rank: int) -> list[Chunk]:
        """Return the chunks that `rank` writes."""
        return [chunk for chunk, writer in zip(self.chunks, self.writers, strict=True) if writer == rank]


def held_chunks(tensors: Mapping[str, Any]) -> Held:
    """Return the chunks that this rank holds of `tensors`, with their tensors, which are no copies."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors))
    held: Held = {}
    for item in planner.create_local_plan().items:
        name, data = item.index.fqn, item.tensor_data
        assert data is not None
        box, dtype = data.chunk, str(data.properties.dtype).removeprefix("torch.")
        chunk = [name, list(box.offsets), list(box.sizes), list(data.size), dtype]
        held[name, tuple(box.offsets)] = chunk, planner.lookup_object(item.index)
        check_dense(name, held[name, tuple(box.offsets)][1])
    return held


def plan(held: Sequence[Sequence[Chunk]]) -> Plan:
    """Assign each chunk to one of the ranks that hold it; raises unless a tensor's chunks cover it once."""
    holders: dict[tuple[str, tuple[int, ...]], tuple[Chunk, list[int]]] = {}
    for owner, chunks in enumerate(held):
        for chunk in chunks:
            key = chunk[0], tuple(chunk[1])
            holders.setdefault(key, (chunk, []))[1].append(owner)
    written_bytes, writers = [0] * len(held), []
    for chunk, owners in holders.values():
        writer = min(owners, key=lambda owner: (written_bytes[owner], owner))
        written_bytes[writer] += bytes_of(chunk)
        writers.append(writer)
    result = Plan([chunk for chunk, _ in holders.values()], writers)
    _check_covered(result.chunks)
    return result


def bytes_of(chunk: Chunk) -> int:
    itemsize: int = getattr(torch, chunk[4]).itemsize
    return torch.Size(chunk[2]).numel() * itemsize


def metadata_of(chunks: Sequence[Chunk]) -> Metadata:
    """Return the entries of torch's index for the tensors."""
    entries: dict[str, TensorStorageMetadata] = {}
    for name, offsets, sizes, size, dtype in chunks:
        properties = TensorProperties(dtype=getattr(torch, dtype))
        entry = entries.setdefault(name, TensorStorageMetadata(properties, torch.Size(size), []))
        entry.chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
    return Metadata(dict(entries), planner_data={name: (name,) for name in entries})


def _check_covered(chunks: Sequence[Chunk]) -> None:
    boxes: dict[str, tuple[list[int], list[Box]]] = {}
    for name, offsets, sizes, size, _ in chunks:
        boxes.setdefault(name, (size, []))[1].append(Box(tuple(offsets), tuple(sizes)))
    for name, (size, pieces) in boxes.items():
        try:
            cover(pieces, size)
        except ShardingError as error:
            raise CheckpointError(f"{name}: the ranks' shards do not make up the tensor: {error}") from error
