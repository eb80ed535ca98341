"""Where each parameter of a group lies in the group's buffers.

A group's parameters travel together. Each rank keeps its pieces end to end in one *shard buffer*
per stored dtype (a segment); gathering gives the shard buffers of all ranks, one after another;
and the *unsharded buffer* holds the whole parameters. Two parameters A and B over two ranks::

    shard buffer, rank 0      A0 B0
    shard buffer, rank 1      A1 B1
    gathered                  A0 B0 | A1 B1           one all-gather
    unsharded                 A0 A1 | B0 B1           one copy-out per parameter

That is the interleaved layout: every parameter is an even chunk of dim 0 (or another dim) and can
be a DTensor. `shardwise.layout.contiguous` makes `gathered` equal `unsharded` and needs no copy-out.

This file knows shapes, dtypes and offsets only: no processes, no tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwise.errors import ShardingError
from shardwise.layout.placement import EvenShard, Placement


@dataclass(frozen=True)
class ParamSpec:
    """What the layout must know of a parameter."""

    name: str
    shape: tuple[int, ...]  # of the unsharded parameter
    dtype: torch.dtype  # stored and optimised
    gather_dtype: torch.dtype  # computed with
    placement: Placement
    trainable: bool = True


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies in its segment, in elements."""

    index: int  # of the parameter in the group
    shard_shape: tuple[int, ...]  # this rank's piece
    padded_shard_shape: tuple[int, ...]  # what every rank stores and sends
    shard_offset: int  # in a rank's shard buffer
    unsharded_offset: int  # in the unsharded buffer

    @property
    def padded_shard_numel(self) -> int:
        return math.prod(self.padded_shard_shape)


@dataclass(frozen=True)
class Segment:
    """The parameters of one stored and one gathered dtype, end to end."""

    dtype: torch.dtype
    gather_dtype: torch.dtype
    slots: tuple[Slot, ...]
    padding: int  # elements at the end of each rank's shard buffer
    ranks: int

    @property
    def shard_numel(self) -> int:
        return sum(slot.padded_shard_numel for slot in self.slots) + self.padding

    @property
    def unsharded_numel(self) -> int:
        return self.ranks * (self.shard_numel - self.padding)


class InterleavedLayout:
    """Every parameter cut evenly over all ranks, as DTensor's `Shard(dim)` cuts it.

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
        keys = dict.fromkeys((spec.dtype, spec.gather_dtype) for spec in self.specs)
        self.segments = tuple(self._segment(*key, align_bytes=align_bytes) for key in keys)

    def _segment(self, dtype: torch.dtype, gather_dtype: torch.dtype, *, align_bytes: int) -> Segment:
        slots: list[Slot] = []
        shard_numel = 0
        for index, spec in enumerate(self.specs):
            if (spec.dtype, spec.gather_dtype) != (dtype, gather_dtype):
                continue
            placement = _even(spec)
            slot = Slot(
                index=index,
                shard_shape=placement.box(spec.shape, rank=self.rank, ranks=self.ranks).sizes,
                padded_shard_shape=placement.padded_shape(spec.shape, ranks=self.ranks),
                shard_offset=shard_numel,
                unsharded_offset=self.ranks * shard_numel,
            )
            slots.append(slot)
            shard_numel += slot.padded_shard_numel
        smallest = min(dtype.itemsize, gather_dtype.itemsize)
        align = max(1, align_bytes // smallest)
        return Segment(dtype, gather_dtype, tuple(slots), -shard_numel % align, self.ranks)

    def describe(self) -> str:
        """One line per parameter; equal on ranks that will communicate alike."""
        return "\n".join(
            f"{s.name}: shape {list(s.shape)}, {s.dtype} gathered as {s.gather_dtype},"
            f" cut on dim {_even(s).dim} over {self.ranks}"
            for s in self.specs
        )


def _even(spec: ParamSpec) -> EvenShard:
    if not isinstance(spec.placement, EvenShard):
        raise ShardingError(
            f"the interleaved layout cuts every parameter evenly, but '{spec.name}' has placement"
            f' {spec.placement}: use layout="contiguous", or EvenShard'
        )
    return spec.placement
