"""Sharding specs: from a shape to the shards of a tensor.

=========================  ====================================================================
spec                       shards
=========================  ====================================================================
`ChunkShardingSpec`        equal chunks of one dim, one for each placement, in any order
`GridShardingSpec`         equal chunks of several dims, their product, in row-major order
`RaggedShardingSpec`       given numbers of rows of one dim, maybe zero
`EnumerableShardingSpec`   any boxes
=========================  ====================================================================

A chunk has `ceil(size / chunks)` elements; the last ones may be short or empty. A rank may have several
shards or none. Any other rule is a subclass of `ShardingSpec` with a `build_metadata` method. Specs of
torch's deprecated package are recognised by that method (`spec_of`).
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardwise.errors import ShardingError, here
from shardwise.layout import cover, disjoint
from shardwise.sharded_tensor.metadata import (
    RemoteDevice,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
)
from shardwise.sharded_tensor.registry import declared


class ShardingSpec(ABC):
    """A rule by which tensors are cut and placed; users subclass it for their own rules."""

    @abstractmethod
    def build_metadata(
        self, tensor_sizes: torch.Size, tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        """Return the shards of a tensor of `tensor_sizes`: an exact cover. Local; the same on every rank.

        Raises:
            ShardingError: a shape that this spec cannot cut.
        """

    @declared
    def shard(
        self, tensor: torch.Tensor, src_rank: int | None = 0, process_group: dist.ProcessGroup | None = None
    ) -> Any:
        """Cut the `tensor` of group rank `src_rank`; see `shard_tensor`. Collective over the group."""
        raise NotImplementedError


@dataclass
class ChunkShardingSpec(ShardingSpec):
    """Equal chunks of dim `dim` (negative counts from the last), one for each of `placements` in order."""

    dim: int
    placements: list[RemoteDevice]

    def __init__(self, dim: int, placements: Sequence[Any]) -> None:
        self.dim, self.placements = _int_dim(self, dim), _placements(self, placements)

    def build_metadata(
        self, tensor_sizes: torch.Size, tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        dim = _dim_of(self, tensor_sizes)
        cuts = {dim: _chunks(tensor_sizes[dim], len(self.placements))}
        return _grid(self, tensor_sizes, cuts, tensor_properties)


@dataclass
class GridShardingSpec(ShardingSpec):
    """`grid[d]` equal chunks of every dim d; `placements` by chunk, the last dim varying fastest."""

    grid: list[int]
    placements: list[RemoteDevice]

    def __init__(self, grid: Sequence[int], placements: Sequence[Any]) -> None:
        self.grid = list(grid)
        self.placements = _placements(self, placements)
        if any(chunks < 1 for chunks in self.grid) or math.prod(self.grid) != len(self.placements):
            raise ShardingError(
                f"GridShardingSpec of {self.grid} chunks needs {math.prod(self.grid)} placements, one for"
                f" each, found {len(self.placements)}"
            )

    def build_metadata(
        self, tensor_sizes: torch.Size, tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        if len(tensor_sizes) != len(self.grid):
            raise ShardingError(
                f"GridShardingSpec of {self.grid} chunks cuts tensors of {len(self.grid)} dims, found shape"
                f" {tuple(tensor_sizes)}"
            )
        cuts = map(_chunks, tensor_sizes, self.grid)
        return _grid(self, tensor_sizes, dict(enumerate(cuts)), tensor_properties)


@dataclass
class RaggedShardingSpec(ShardingSpec):
    """`sizes[i]` elements of dim `dim` on `placements[i]`, one after another; zero is allowed."""

    dim: int
    sizes: list[int]
    placements: list[RemoteDevice]

    def __init__(self, dim: int, sizes: Sequence[int], placements: Sequence[Any]) -> None:
        self.dim, self.sizes = _int_dim(self, dim), list(sizes)
        self.placements = _placements(self, placements)
        if len(self.sizes) != len(self.placements) or any(size < 0 for size in self.sizes):
            raise ShardingError(
                f"RaggedShardingSpec needs one size of at least 0 for each placement, found {self.sizes}"
                f" for {len(self.placements)} placements"
            )

    def build_metadata(
        self, tensor_sizes: torch.Size, tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        dim = _dim_of(self, tensor_sizes)
        if sum(self.sizes) != tensor_sizes[dim]:
            raise ShardingError(
                f"RaggedShardingSpec has sizes {self.sizes}, together {sum(self.sizes)}, but dim {dim} of"
                f" shape {tuple(tensor_sizes)} has {tensor_sizes[dim]}"
            )
        return _grid(self, tensor_sizes, {dim: self.sizes}, tensor_properties)


@dataclass
class EnumerableShardingSpec(ShardingSpec):
    """An explicit list of shards. Raises ShardingError if two overlap."""

    shards: list[ShardMetadata]

    def __init__(self, shards: Sequence[ShardMetadata]) -> None:
        self.shards = [ShardMetadata.of(shard) for shard in shards]
        if not self.shards:
            raise ShardingError("EnumerableShardingSpec needs at least one shard, found none")
        boxes = [shard.box for shard in self.shards]
        if len({len(box.sizes) for box in boxes}) > 1:
            raise ShardingError(f"EnumerableShardingSpec has shards of different numbers of dims: {boxes}")
        disjoint(boxes)

    def build_metadata(
        self, tensor_sizes: torch.Size, tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        cover([shard.box for shard in self.shards], tensor_sizes)
        return ShardedTensorMetadata(list(self.shards), torch.Size(tensor_sizes), tensor_properties)


@dataclass(repr=False)
class ForeignSpec(ShardingSpec):
    """Wraps another library's rule, `spec`, which makes metadata like ours."""

    spec: Any

    def build_metadata(
        self, tensor_sizes: torch.Size, tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        return ShardedTensorMetadata.of(self.spec.build_metadata(tensor_sizes, tensor_properties))

    def __repr__(self) -> str:
        return repr(self.spec)


def spec_of(spec: Any) -> ShardingSpec:
    """Return `spec`, or our equivalent of another library's. Raises ShardingError if it is no spec."""
    if isinstance(spec, ShardingSpec):
        return spec
    if not callable(getattr(spec, "build_metadata", None)):
        raise ShardingError(f"{here()}: expected a ShardingSpec, found {spec!r}")
    kind = type(spec).__name__ if type(spec).__module__.startswith("torch.") else ""
    if kind == "ChunkShardingSpec" and isinstance(spec.dim, int):
        return ChunkShardingSpec(spec.dim, spec.placements)
    if kind == "EnumerableShardingSpec":
        return EnumerableShardingSpec(spec.shards)
    return ForeignSpec(spec)


class PlacementSpec(ABC):  # noqa: B024 - users subclass it for placements of their own
    """A placement of a whole object."""


@dataclass
class DevicePlacementSpec(PlacementSpec):
    """A placement on one device of one process, of a whole tensor or of a shard."""

    device: RemoteDevice

    def __init__(self, device: Any) -> None:
        self.device = RemoteDevice.of(device)


def infer_sharding_spec(metadata: ShardedTensorMetadata) -> ShardingSpec:
    """Return the simplest spec whose `build_metadata` gives exactly these shards in this order. Local."""
    for spec in _candidates(metadata.size, metadata.shards_metadata):
        candidate = spec.build_metadata(metadata.size, metadata.tensor_properties)
        if candidate.shards_metadata == metadata.shards_metadata:
            return spec
    return EnumerableShardingSpec(metadata.shards_metadata)


def _candidates(size: torch.Size, shards: Sequence[ShardMetadata]) -> Iterator[ShardingSpec]:
    placements = [shard.placement for shard in shards]
    yield from (ChunkShardingSpec(dim, placements) for dim in range(len(size)))
    grid = [len({shard.shard_offsets[d] for shard in shards}) for d in range(len(size))]
    if size and math.prod(grid) == len(placements):
        yield GridShardingSpec(grid, placements)
    for dim in range(len(size)):
        sizes = [shard.shard_sizes[dim] for shard in shards]
        if sum(sizes) == size[dim]:
            yield RaggedShardingSpec(dim, sizes, placements)


def _chunks(size: int, count: int) -> list[int]:
    """Return the lengths of `count` chunks of `ceil(size / count)` elements, the last short or empty."""
    chunk = -(-size // count)
    return [min(chunk, max(size - i * chunk, 0)) for i in range(count)]


def _grid(
    spec: Any, size: torch.Size, cuts: Mapping[int, Sequence[int]], properties: TensorProperties
) -> ShardedTensorMetadata:
    """Place the product of the lengths that `cuts` lists by dim, others whole, in row-major order."""
    lengths = [cuts.get(dim, [length]) for dim, length in enumerate(size)]
    ranges = [list(zip(itertools.accumulate(cut, initial=0), cut, strict=False)) for cut in lengths]
    shards = [
        ShardMetadata([start for start, _ in extents], [length for _, length in extents], placement)
        for extents, placement in zip(itertools.product(*ranges), spec.placements, strict=True)
    ]
    return ShardedTensorMetadata(shards, torch.Size(size), properties)


def _placements(spec: ShardingSpec, placements: Sequence[Any]) -> list[RemoteDevice]:
    if isinstance(placements, str) or not len(placements):
        name = type(spec).__name__
        raise ShardingError(f"{name} needs a list of at least one placement, found {placements!r}")
    return [RemoteDevice.of(placement) for placement in placements]


def _int_dim(spec: ShardingSpec, dim: Any) -> int:
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise ShardingError(f"{type(spec).__name__} needs a dim as an int, found {dim!r}")
    return dim


def _dim_of(spec: ChunkShardingSpec | RaggedShardingSpec, size: torch.Size) -> int:
    if not -len(size) <= spec.dim < len(size):
        name = type(spec).__name__
        raise ShardingError(f"{name} cuts dim {spec.dim}, which shape {tuple(size)} does not have")
    return spec.dim % len(size)
