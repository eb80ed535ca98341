"""Which part of a whole tensor one rank holds, and who holds the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.tensor import Placement, Replicate, Shard

from shardwise import _compat
from shardwise.errors import ShardingError, here
from shardwise.layout import Box


@dataclass(frozen=True, eq=False)
class Piece:
    """Whole rows of a tensor on this rank.

    Pieces are equal where they cut tensors of one shape alike, on every rank: ranks never disagree
    about it, so that it may decide whether they communicate.

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
        name: of the parameter, for errors.
    """

    shape: torch.Size
    box: Box
    groups: tuple[dist.ProcessGroup, ...]
    box_of: Callable[[int], Box] = field(repr=False)
    rows: Box
    tensor_parallel: _compat.DTensorSpec | None = field(default=None, repr=False)
    name: str = ""

    def __deepcopy__(self, memo: object) -> Piece:
        return self  # nothing in it changes, and process groups cannot be copied

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Piece) or self.shape != other.shape:
            return NotImplemented if not isinstance(other, Piece) else False
        return self._cut == other._cut and self.boxes == other.boxes

    def __hash__(self) -> int:
        return hash((self.shape, self.groups))

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
        return place_over(self.groups)[1]

    @cached_property
    def rank(self) -> int:
        """This process's index over `groups`."""
        return place_over(self.groups)[0]

    @cached_property
    def boxes(self) -> tuple[Box, ...]:
        """What each index over `groups` holds, as `box_of` says it."""
        return tuple(self.box_of(rank) for rank in range(self.ranks))

    @cached_property
    def row_ranges(self) -> tuple[tuple[int, int], ...]:
        """First row and number of rows of each of `boxes`."""
        return tuple((box.offsets[0], box.sizes[0]) for box in self.boxes)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Of tensor parallelism, by mesh axis; none without it."""
        return () if self.tensor_parallel is None else tuple(self.tensor_parallel.placements)

    @property
    def _cut(self) -> tuple[object, ...]:
        spec = self.tensor_parallel
        return (self.groups, None if spec is None else spec.mesh, self.placements)

    @cached_property
    def axes(self) -> tuple[dist.ProcessGroup, ...]:
        """Every process group whose ranks hold different elements of the whole tensor."""
        return self.axes_along(range(len(self.shape)))

    def axes_along(self, dims: Sequence[int]) -> tuple[dist.ProcessGroup, ...]:
        """The process groups whose ranks hold different elements along `dims`."""
        rows = self.groups if 0 in dims else ()
        return (*rows, *(group for group, dim in self._tensor_parallel_axes if dim in dims))

    @cached_property
    def _tensor_parallel_axes(self) -> list[tuple[dist.ProcessGroup, int]]:
        """The mesh axes of tensor parallelism that cut, with the dim that each cuts."""
        spec = self.tensor_parallel
        if spec is None:
            return []
        cut = []
        for axis, placement in enumerate(spec.placements):
            if isinstance(placement, Shard):
                cut.append((spec.mesh.get_group(axis), placement.dim))
            elif not isinstance(placement, Replicate):
                raise ShardingError(
                    f"{here()}: a parameter of shape {tuple(self.shape)} has tensor-parallel placement"
                    f" {placement}; rows can be cut from Shard and Replicate only"
                )
        return cut

    def with_trailing(self, trailing: Sequence[int], *, of: Sequence[int | None] | None = None) -> Piece:
        """The piece of a tensor with the same rows of another width: `(rows, *trailing)`.

        Args:
            trailing: sizes of its dims from 1 on.
            of: for each of them, the dim of this piece with which it is cut; None (the default for all)
                for a dim that every rank holds whole.
        """
        trailing = tuple(trailing)
        of = tuple(of) if of is not None else (None,) * len(trailing)
        held = [size if d is None else self.box.sizes[d] for size, d in zip(trailing, of, strict=True)]
        starts = [0 if d is None else self.box.offsets[d] for d in of]

        def widen(box: Box) -> Box:
            return Box((box.offsets[0], *[0] * len(held)), (box.sizes[0], *held))

        box_of, shape = self.box_of, torch.Size((self.shape[0], *trailing))
        return replace(
            self,
            shape=shape,
            box=Box((self.box.offsets[0], *starts), (self.box.sizes[0], *held)),
            box_of=lambda rank: widen(box_of(rank)),
            rows=widen(self.rows),
            tensor_parallel=self.spec_of(shape, (0, *of)),
        )

    def spec_of(self, shape: Sequence[int], of: Sequence[int | None]) -> _compat.DTensorSpec | None:
        """The tensor-parallel form of a tensor of `shape` whose dims are cut as this one's dims `of`."""
        spec = self.tensor_parallel
        if spec is None:
            return None
        assert spec.tensor_meta is not None
        cut = dict(self._tensor_parallel_axes)
        placements: list[Placement] = []
        for axis in range(len(spec.placements)):
            dim = cut.get(spec.mesh.get_group(axis))
            placements.append(Replicate() if dim is None or dim not in of else Shard(of.index(dim)))
        return _compat.dtensor_spec(
            spec.mesh, placements, shape=torch.Size(shape), dtype=spec.tensor_meta.dtype
        )


def place_over(groups: Sequence[dist.ProcessGroup]) -> tuple[int, int]:
    """This process's index over `groups`, the first group's rank varying fastest, and how many there are."""
    rank, ranks = 0, 1
    for group in groups:
        rank += group.rank() * ranks
        ranks *= group.size()
    return rank, ranks


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
