"""Specs, shards and tensors of torch's deprecated `torch.distributed._shard`, taken where ours are.

They are recognised by their methods, and converted at the edge; nothing of that package is imported.

    spec      `build_metadata(sizes, properties)`         -> `ShardingSpec`
    shard     `tensor`, `metadata`                        -> `Shard`, of the same memory
    metadata  `shards_metadata`, `size`, ...              -> `ShardedTensorMetadata`
    tensor    `local_shards()`, `metadata()`              -> `ShardedTensor`, of the same memory
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch

from shardwise.errors import ShardingError, here
from shardwise.sharded_tensor.metadata import Shard, ShardedTensorMetadata, ShardMetadata, TensorProperties
from shardwise.sharded_tensor.spec import ChunkShardingSpec, EnumerableShardingSpec, ShardingSpec


class ForeignSpec(ShardingSpec):
    """A rule of another library's, which makes metadata like ours. `spec` is the rule."""

    def __init__(self, spec: Any) -> None:
        self.spec = spec

    def build_metadata(
        self, tensor_sizes: torch.Size, tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        return metadata_of(self.spec.build_metadata(tensor_sizes, tensor_properties))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ForeignSpec) and bool(self.spec == other.spec)

    __hash__ = None  # type: ignore[assignment] # as specs of ours, which have lists in them

    def __repr__(self) -> str:
        return repr(self.spec)


def spec_of(spec: Any) -> ShardingSpec:
    """Return `spec`, or ours in place of another library's. Raises ShardingError where it is none."""
    if isinstance(spec, ShardingSpec):
        return spec
    if not callable(getattr(spec, "build_metadata", None)):
        raise ShardingError(f"{here()}: expected a ShardingSpec, found {spec!r}")
    kind = type(spec).__name__ if type(spec).__module__.startswith("torch.") else ""
    if kind == "ChunkShardingSpec" and isinstance(spec.dim, int):
        return ChunkShardingSpec(spec.dim, spec.placements)
    if kind == "EnumerableShardingSpec":
        return EnumerableShardingSpec([ShardMetadata.of(shard) for shard in spec.shards])
    return ForeignSpec(spec)


def metadata_of(metadata: Any) -> ShardedTensorMetadata:
    """Return `metadata`, or ours in place of another library's."""
    if isinstance(metadata, ShardedTensorMetadata):
        return metadata
    properties = (getattr(metadata.tensor_properties, field.name) for field in fields(TensorProperties))
    return ShardedTensorMetadata(
        [ShardMetadata.of(shard) for shard in metadata.shards_metadata],
        torch.Size(metadata.size),
        TensorProperties(*properties),
    )


def shards_of(shards: Sequence[Any]) -> list[Shard]:
    """Return `shards`, or ours in place of another library's, of the same memory."""
    return [
        shard if isinstance(shard, Shard) else Shard(shard.tensor, ShardMetadata.of(shard.metadata))
        for shard in shards
    ]
