"""The position of each parameter of a group in the group's buffers.

A group's parameters are gathered together. Each rank keeps its pieces end to end in one *shard buffer*
per stored dtype (a segment). A gather returns the shard buffers of all ranks, one after another. The
*unsharded buffer* holds the whole parameters. Two parameters A and B over two ranks::

    shard buffer, rank 0      A0 B0
    shard buffer, rank 1      A1 B1
    gathered                  A0 B0 | A1 B1           one all-gather
    unsharded                 A0 A1 | B0 B1           one copy-out per parameter, to a multiple of 16 bytes

That is the interleaved layout: every parameter is an even chunk of dim 0 (or another dim) and can
be a DTensor. `shardwise.layout.contiguous` makes `gathered` equal `unsharded` and needs no copy-out. The
arithmetic depends on shapes, not on names, and is done once for all equal groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch

from shardwise._compat import contiguous_stride
from shardwise.errors import ShardingError
from shardwise.layout.placement import EvenShard, Placement

_WHOLE_ALIGN_BYTES = 16  # matmuls of one row round differently for other alignments of the weight


class ParamSpec(NamedTuple):
    """A parameter as the layout sees it; its position depends on all fields except the name."""

    name: str
    shape: tuple[int, ...]  # of the unsharded parameter
    dtype: torch.dtype  # stored and optimised
    gather_dtype: torch.dtype  # used in computation
    placement: Placement
    trainable: bool = True


@dataclass(frozen=True)
class Slot:
    """The position of one parameter in its segment, in elements."""

    index: int  # of the parameter in the group
    shard_shape: tuple[int, ...]  # this rank's piece
    padded_shard_shape: tuple[int, ...]  # the piece that every rank stores and sends
    begin: int  # of this rank's piece in the parameter, on the dim that is cut
    shard_offset: int  # in a rank's shard buffer
    unsharded_offset: int  # in the unsharded buffer

    # Attributes, since every step reads them for every parameter, and a cached property costs ten times more.
    padded_shard_numel: int = field(init=False, repr=False)
    shard_stride: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "padded_shard_numel", math.prod(self.padded_shard_shape))
        object.__setattr__(self, "shard_stride", contiguous_stride(self.shard_shape))

    def of(self, shard: torch.Tensor) -> torch.Tensor:
        """Return this rank's piece in a shard buffer. Padding follows it: only dim 0 is cut unevenly."""
        return shard.as_strided(self.shard_shape, self.shard_stride, self.shard_offset)


@dataclass(frozen=True)
class Segment:
    """The parameters of one stored and one gathered dtype, end to end in shards."""

    dtype: torch.dtype
    gather_dtype: torch.dtype
    slots: tuple[Slot, ...]
    padding: int  # elements at the end of each rank's shard buffer
    ranks: int

    @cached_property
    def shard_numel(self) -> int:
        return sum(slot.padded_shard_numel for slot in self.slots) + self.padding

    @property
    def unsharded_numel(self) -> int:
        last = self.slots[-1]
        return last.unsharded_offset + self.ranks * last.padded_shard_numel


class InterleavedLayout:
    """A layout that cuts every parameter evenly over all ranks, as DTensor's `Shard(dim)` does.

    Args:
        specs: the group's parameters in registration order.
        ranks: size of the shard axis.
        rank: this process's index on it.
        align_bytes: each rank's shard buffer is padded to a multiple of it (16 on accelerators,
            whose collectives slow down on unaligned sizes; 1 on CPU, where it would gain nothing
            and change the order in which gloo adds).
    """

    def __init__(self, specs: Sequence[ParamSpec], *, ranks: int, rank: int, align_bytes: int = 1) -> None:
        self.specs = tuple(specs)
        self.ranks = ranks
        self.rank = rank
        shaped = tuple([(_even(s), s.shape, s.dtype, s.gather_dtype) for s in self.specs])
        self.segments = _segments(shaped, ranks, rank, align_bytes)

    def describe(self) -> str:
        """Return one line per parameter; equal on ranks that communicate the same way."""
        return "\n".join(
            f"{s.name}: shape {list(s.shape)}, {s.dtype} gathered as {s.gather_dtype},"
            f" cut on dim {_even(s).dim} over {self.ranks}"
            for s in self.specs
        )


_Shaped = tuple[EvenShard, tuple[int, ...], torch.dtype, torch.dtype]


@lru_cache(maxsize=1024)
def _segments(shaped: tuple[_Shaped, ...], ranks: int, rank: int, align_bytes: int) -> tuple[Segment, ...]:
    segments = []
    for dtype, gather_dtype in dict.fromkeys((stored, gathered) for _, _, stored, gathered in shaped):
        slots: list[Slot] = []
        shard_numel = unsharded_numel = 0
        whole_align = max(1, _WHOLE_ALIGN_BYTES // gather_dtype.itemsize)
        for index, (placement, shape, *dtypes) in enumerate(shaped):
            if dtypes != [dtype, gather_dtype]:
                continue
            box = placement.box(shape, rank=rank, ranks=ranks)
            slot = Slot(
                index=index,
                shard_shape=box.sizes,
                padded_shard_shape=placement.padded_shape(shape, ranks=ranks),
                begin=box.offsets[placement.dim],
                shard_offset=shard_numel,
                unsharded_offset=unsharded_numel + -unsharded_numel % whole_align,
            )
            slots.append(slot)
            shard_numel += slot.padded_shard_numel
            unsharded_numel = slot.unsharded_offset + ranks * slot.padded_shard_numel
        align = max(1, align_bytes // min(dtype.itemsize, gather_dtype.itemsize))
        segments.append(Segment(dtype, gather_dtype, tuple(slots), -shard_numel % align, ranks))
    return tuple(segments)


def _even(spec: ParamSpec) -> EvenShard:
    if not isinstance(spec.placement, EvenShard):
        raise ShardingError(
            f"the interleaved layout cuts every parameter evenly, but '{spec.name}' has placement"
            f' {spec.placement}; use layout="contiguous", or EvenShard'
        )
    return spec.placement
