"""Which part of a whole tensor one rank holds, and who holds the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
import torch.distributed as dist

from shardwise import _compat
from shardwise.layout import Box


@dataclass(frozen=True)
class Piece:
    """Whole rows of a tensor on this rank.

    Attributes:
        shape: of the whole tensor.
        box: this rank's part of it.
        groups: the process groups over which rows are cut, the fastest-varying first. Empty where every
            rank holds the whole tensor.
        box_of: for an index counted over `groups` (the first group's rank varies fastest), the rows it
            holds, in the coordinates of the tensor that the groups cut: the whole one, or with tensor
            parallelism this rank's part of it.
        rows: `box` in those coordinates.
        tensor_parallel: how the tensor that `groups` cut is itself a part of the whole one.
    """

    shape: torch.Size
    box: Box
    groups: tuple[dist.ProcessGroup, ...]
    box_of: Callable[[int], Box] = field(compare=False, repr=False)
    rows: Box
    tensor_parallel: _compat.DTensorSpec | None = field(default=None, compare=False, repr=False)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The one group over which rows are cut; None where none or several do."""
        return self.groups[0] if len(self.groups) == 1 else None

    @property
    def is_whole(self) -> bool:
        return self.box.sizes == tuple(self.shape)

    @cached_property
    def ranks(self) -> int:
        """How many pieces the rows are cut into."""
        return math.prod(group.size() for group in self.groups)

    @cached_property
    def rank(self) -> int:
        """This process's index over `groups`."""
        index, step = 0, 1
        for group in self.groups:
            index += group.rank() * step
            step *= group.size()
        return index

    @cached_property
    def boxes(self) -> tuple[Box, ...]:
        """What each index over `groups` holds, as `box_of` says it."""
        return tuple(self.box_of(rank) for rank in range(self.ranks))

    @cached_property
    def axes(self) -> tuple[dist.ProcessGroup, ...]:
        """Every process group whose ranks hold different elements of the whole tensor."""
        spec = self.tensor_parallel
        if spec is None:
            return self.groups
        cut = [axis for axis, placement in enumerate(spec.placements) if not placement.is_replicate()]
        return (*self.groups, *(spec.mesh.get_group(axis) for axis in cut))

    def with_trailing(self, trailing: Sequence[int]) -> Piece:
        """The piece of a tensor with the same rows of another width: `(rows, *trailing)`."""
        if self.tensor_parallel is not None:
            raise ValueError("a tensor-parallel piece has no other width")
        trailing = tuple(trailing)

        def widen(box: Box) -> Box:
            return Box((box.offsets[0], *[0] * len(trailing)), (box.sizes[0], *trailing))

        box_of = self.box_of
        return replace(
            self,
            shape=torch.Size((self.shape[0], *trailing)),
            box=widen(self.box),
            box_of=lambda rank: widen(box_of(rank)),
            rows=widen(self.rows),
        )


def local_part(piece: Piece, whole: torch.Tensor) -> torch.Tensor:
    """This rank's part of a whole tensor, or of one that broadcasts to it: a view.

    Dims align at the last; a dim of size 1 stays.
    """
    first = len(piece.shape) - whole.ndim
    for dim, size in enumerate(whole.shape):
        wanted, offset = piece.box.sizes[first + dim], piece.box.offsets[first + dim]
        if size != 1 and size != wanted:
            whole = whole.narrow(dim, offset, wanted)
        elif size == 1 and piece.shape[first + dim] == 1 and wanted == 0:
            whole = whole.narrow(dim, 0, 0)
    return whole
