"""The contiguous layout: the output of an all-gather *is* the whole parameters, end to end.

Two parameters A and B over two ranks::

    shard buffer, rank 0      A0 A1 A2
    shard buffer, rank 1      A3 B0 B1 -
    gathered = unsharded      A0 A1 A2 | A3 B0 B1 -       one all-gather, no copy

Rank `r` holds the elements from `r * S` to `(r + 1) * S`: rows of some parameters, and with many ranks none
of most others. `shardwise.layout.packing` orders the parameters so that these boundaries fall between blocks
of rows. Parameters that differ in dtype, or in whether they are trained, lie in separate buffers (segments),
so that a frozen parameter costs no gradient. The arithmetic is done once for all modules of equal shapes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from shardwise._compat import contiguous_stride
from shardwise.errors import ShardingError, here
from shardwise.layout.box import Box
from shardwise.layout.group_layout import ParamSpec
from shardwise.layout.packing import pack
from shardwise.layout.placement import EvenShard, Owned, RaggedShard

_Cut = RaggedShard | Owned
_Key = tuple[torch.dtype, torch.dtype, bool]  # stored, gathered, trained
_Shaped = tuple[tuple[int, ...], _Key, _Cut]


@dataclass(frozen=True)
class Place:
    """The position of one parameter in its segment, in elements."""

    index: int  # of the parameter in the group
    start: int  # of the whole parameter, in the gathered buffer
    numel: int  # of the whole parameter
    box: Box  # this rank's rows, in the parameter's own coordinates; possibly zero rows
    shard_offset: int  # where this rank's rows begin in its shard buffer; 0 for an empty box

    @cached_property
    def rows_stride(self) -> tuple[int, ...]:
        return contiguous_stride(self.box.sizes)


@dataclass(frozen=True)
class ContiguousSegment:
    """The parameters of one stored and one gathered dtype that are all trained or all frozen."""

    dtype: torch.dtype
    gather_dtype: torch.dtype
    trainable: bool
    ranks: int
    shard_numel: int  # elements of each rank's shard buffer
    places: tuple[Place, ...]  # in the order of their starts

    @property
    def unsharded_numel(self) -> int:
        """The number of elements of the gathered buffer."""
        return self.ranks * self.shard_numel

    @cached_property
    def padding(self) -> int:
        """The number of elements of the gathered buffer that no parameter uses."""
        return sum(size for _, size in self.gaps)

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """The padding: (begin, size) in elements of the gathered buffer."""
        return gaps_between([(p.start, p.numel) for p in self.places], 0, self.unsharded_numel)


class ContiguousLayout:
    """A layout in which every parameter is a contiguous view of the gathered buffer.

    Parameters are cut between blocks of rows or not at all.

    Args:
        specs: the group's parameters in registration order, of at least one dim each. `EvenShard(0)` is
            taken as `RaggedShard(1)`.
        ranks: size of the shard axis.
        rank: this process's index on it.
        align_bytes: every parameter and every shard begins at a multiple of it, in all its dtypes.

    Raises:
        ShardingError: a placement shards a dim other than 0, or names an owner that is not in the shard axis.
    """

    def __init__(self, specs: Sequence[ParamSpec], *, ranks: int, rank: int, align_bytes: int = 16) -> None:
        self.specs = tuple(specs)
        self.ranks = ranks
        self.rank = rank
        shaped = tuple((s.shape, (s.dtype, s.gather_dtype, s.trainable), _cut(s, ranks)) for s in self.specs)
        self.segments = _segments(shaped, ranks, rank, align_bytes)

    def box(self, index: int, rank: int) -> Box:
        """Return the rows of parameter `index` that `rank` holds; possibly zero rows."""
        start, size = self._spans[index]
        return rows_between(self.specs[index].shape, start, rank * size, (rank + 1) * size)

    def describe(self) -> str:
        """Return one line per segment and per parameter; equal on ranks that communicate the same way."""
        lines = []
        for segment in self.segments:
            lines.append(
                f"{segment.dtype} gathered as {segment.gather_dtype},"
                f" {'trained' if segment.trainable else 'frozen'}:"
                f" {segment.shard_numel} elements on each of {self.ranks} ranks"
            )
            for place in segment.places:
                spec = self.specs[place.index]
                cut = _cut(spec, self.ranks)
                text = "whole on one rank" if isinstance(cut, Owned) else f"row block {cut.block}"
                lines.append(
                    f"{spec.name}: shape {list(spec.shape)}, {spec.dtype} gathered as {spec.gather_dtype},"
                    f" {text}, from element {place.start}"
                )
        return "\n".join(lines)

    @cached_property
    def _spans(self) -> dict[int, tuple[int, int]]:
        """The start of each parameter and the shard size of its segment, by the parameter's index."""
        return {p.index: (p.start, segment.shard_numel) for segment in self.segments for p in segment.places}


def _cut(spec: ParamSpec, ranks: int) -> _Cut:
    """Return the placement of `spec` in a layout that can cut only rows of dim 0."""
    placement = spec.placement
    if isinstance(placement, EvenShard):
        if placement.dim != 0:
            raise ShardingError(
                f"{here()}: cannot shard '{spec.name}' on dim {placement.dim}: the contiguous layout"
                ' shards parameters on dim 0 only; shard it on dim 0, or use layout="interleaved"'
            )
        return RaggedShard()
    if isinstance(placement, Owned) and placement.rank is not None and placement.rank >= ranks:
        raise ShardingError(
            f"{here()}: rank {placement.rank} cannot own '{spec.name}': the shard axis has {ranks} ranks; use"
            f" Owned(rank) with a rank below {ranks}, or Owned() for any rank"
        )
    return placement


@lru_cache(maxsize=1024)
def _segments(
    shaped: tuple[_Shaped, ...], ranks: int, rank: int, align_bytes: int
) -> tuple[ContiguousSegment, ...]:
    segments = []
    for key in dict.fromkeys(key for _, key, _ in shaped):
        dtype, gather_dtype, trainable = key
        members = [(index, shape, cut) for index, (shape, of, cut) in enumerate(shaped) if of == key]
        numels = tuple(math.prod(shape) for _, shape, _ in members)
        blocks = (
            math.prod(shape) if isinstance(cut, Owned) else cut.block * math.prod(shape[1:])
            for _, shape, cut in members
        )
        packing = pack(
            numels,
            tuple(max(1, block) for block in blocks),
            ranks=ranks,
            align=max(1, align_bytes // min(dtype.itemsize, gather_dtype.itemsize)),
            owners=tuple(cut.rank if isinstance(cut, Owned) else None for _, _, cut in members),
        )
        places, size = [], packing.shard_numel
        for (index, shape, _), start, numel in zip(members, packing.starts, numels, strict=True):
            box = rows_between(shape, start, rank * size, (rank + 1) * size)
            places.append(Place(index, start, numel, box, 0 if box.is_empty else max(start - rank * size, 0)))
        places.sort(key=lambda place: (place.start, place.numel, place.index))
        segments.append(ContiguousSegment(dtype, gather_dtype, trainable, ranks, size, tuple(places)))
    return tuple(segments)


def gaps_between(used: Iterable[tuple[int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    """Return the gaps that the ranges `used`, in order, leave in [begin, end); both are (begin, size)."""
    edges = [begin, *(edge for start, size in used for edge in (start, start + size)), end]
    return [(a, b - a) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]


def rows_between(shape: tuple[int, ...], start: int, begin: int, end: int) -> Box:
    """Return the rows of a parameter at `start` that lie in elements [begin, end) of the gathered buffer."""
    row, numel = max(1, math.prod(shape[1:])), math.prod(shape)
    first, last = (min(max(bound - start, 0), numel) // row for bound in (begin, end))
    return Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
