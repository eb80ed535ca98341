"""The piece of a whole tensor that one rank holds, the ranks that hold the rest, and its placement.

Five rows over four ranks, `RowShard((2, 0, 3, 0))`::

    rank 0: rows 0-1    rank 1: none    rank 2: rows 2-4    rank 3: none

It is a `Shard(0)` to other code, but records how many rows each rank holds, where DTensor's own cuts evenly.
So a tensor that is made with it (`distribute_tensor(whole, p.device_mesh, p.placements)`) is cut like the
tensor that it was read from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from shardwise import _compat
from shardwise._compat.dtensors import OwnShard, OwnSpec
from shardwise.errors import ShardingError, here
from shardwise.layout import Box, EvenShard
from shardwise.sharded_tensor.holding import Groups, Holding
from shardwise.sharded_tensor.ops.operands import within


class RowShard(OwnShard):
    """A cut into whole rows of dim 0: `counts` gives the number of rows of each rank, in order of ranks.

    Attributes:
        counts: rows of each rank. With tensor parallelism, of this rank's part of the tensor.
        step: the distance in `counts` of neighbours on this mesh axis; 1 unless several axes cut rows.
    """

    counts: tuple[int, ...]
    step: int

    def __new__(cls, counts: Sequence[int], step: int = 1) -> RowShard:
        return super().__new__(cls, 0)  # type: ignore[call-arg]

    def __init__(self, counts: Sequence[int], step: int = 1) -> None:
        super().__init__(0)
        self.counts = tuple(counts)
        self.step = step

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowShard) and (self.counts, self.step) == (other.counts, other.step)

    def __hash__(self) -> int:
        return hash((RowShard, self.counts, self.step))

    def __repr__(self) -> str:
        return f"RowShard({self.counts}" + (")" if self.step == 1 else f", step={self.step})")

    __str__ = __repr__

    def __reduce__(self) -> Any:
        return RowShard, (self.counts, self.step)

    def local_rows(self, rows: int, ranks: int, rank: int) -> tuple[int, int]:
        """Return how many of `rows` rows `rank` of `ranks` on this axis holds, and the first."""
        if rows != sum(self.counts) or ranks != len(self.counts):
            raise ShardingError(
                f"{here()}: {self} cuts {sum(self.counts)} rows over {len(self.counts)} ranks; here are"
                f" {rows} rows over {ranks} ranks. Where tensor parallelism or a second mesh axis cuts rows"
                " too, ask the tensor itself (.box, to_local(), full_tensor())"
            )
        return self.counts[rank], [*accumulate(self.counts, initial=0)][rank]

    def refuse(self, operation: str) -> NoReturn:
        raise ShardingError(
            f"{here()}: torch was asked {operation} where {self} says which rows each rank holds, and would"
            " cut evenly; make the tensor with distribute_tensor, DTensor.from_local or redistribute"
        )


EvenCuts = tuple[tuple[dist.ProcessGroup, int], ...]


def groups_of(mesh: DeviceMesh) -> Groups:
    """Return a mesh's groups by axis: while a compiler traces, a stand-in may have no `get_all_groups`."""
    return tuple(mesh.get_group(axis) for axis in range(mesh.ndim))


@dataclass(frozen=True, eq=False)
class Piece(Holding):
    """The whole rows of a tensor on this rank.

    Pieces are equal if they cut tensors of one shape equally, on every rank. Ranks never disagree about
    this, so equality may decide whether they communicate.

    `box_of` returns the rows of an index counted over `groups` (the first group's rank varies fastest); they
    follow each other in order of indices. They are in coordinates of the tensor that the groups cut: the
    whole one, or with tensor parallelism this rank's part of it.
    """

    groups: Groups  # over which rows are cut, fastest-varying first; none if all ranks hold the whole tensor
    box_of: Callable[[int], Box] = field(repr=False)
    even_cuts: EvenCuts = ()  # tensor parallelism, outermost first: cuts of dims before `groups` cut the rest
    name: str = ""  # of the parameter, for errors
    on_mesh: DeviceMesh | None = field(default=None, repr=False)  # its axes include the groups of all cuts
    # Groups of `on_mesh` by axis. A mesh looks them up by name, which fails once they are gone or in tracing.
    mesh_groups: Groups = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if self.on_mesh is not None and not self.mesh_groups:
            object.__setattr__(self, "mesh_groups", groups_of(self.on_mesh))

    def __deepcopy__(self, memo: object) -> Piece:
        return self  # immutable, and process groups cannot be copied

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Piece):
            return NotImplemented
        left, right = (self.shape, self.groups, self.even_cuts), (other.shape, other.groups, other.even_cuts)
        return left == right and self.counts == other.counts

    def __hash__(self) -> int:
        return hash((self.shape, self.groups))

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The only group over which rows are cut; None if no group or several do."""
        return self.groups[0] if len(self.groups) == 1 else None

    @cached_property
    def rows(self) -> Box:
        """This rank's rows, in the coordinates of `box_of`."""
        return self.box_of(self.rank)

    @cached_property
    def box(self) -> Box:
        """This rank's part of the whole tensor."""
        return self.rows.shifted(self.even_part.offsets)

    @cached_property
    def even_part(self) -> Box:
        """The part of the whole tensor that `even_cuts` leave to this rank, before rows are cut."""
        return _even_part(self.shape, self.even_cuts)

    @cached_property
    def rank(self) -> int:
        """This process's index over `groups`."""
        return place_over(self.groups)[0]

    @cached_property
    def boxes(self) -> tuple[Box, ...]:
        """The box of each index over `groups`."""
        return tuple(map(self.box_of, range(place_over(self.groups)[1])))

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The number of rows of each of `boxes`."""
        return tuple(box.sizes[0] for box in self.boxes)

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of a DTensor with this cut."""
        if self.on_mesh is None:
            raise ShardingError(f"{here()}: {self} belongs to no mesh; rows made by fully_shard do")
        return self.on_mesh

    @cached_property
    def placements(self) -> tuple[Placement, ...]:
        """The placements on `mesh` of a DTensor with this cut."""
        by_group: dict[dist.ProcessGroup, Placement] = {group: Shard(dim) for group, dim in self.even_cuts}
        step = 1
        for group in self.groups:
            by_group[group] = RowShard(self.counts, step)
            step *= group.size()
        return tuple(by_group.get(group, _REPLICATE) for group in self.mesh_groups or groups_of(self.mesh))

    def spec(self, dtype: torch.dtype) -> _compat.DTensorSpec:
        """Return DTensor's spec of a tensor of this dtype with this cut."""
        spec = self._specs.get(dtype)
        if spec is None:
            meta = _compat.TensorMeta(self.shape, _compat.contiguous_stride(self.shape), dtype)
            spec = self._specs[dtype] = OwnSpec(self.mesh, self.placements, tensor_meta=meta)
        return spec

    @cached_property
    def _specs(self) -> dict[torch.dtype, _compat.DTensorSpec]:
        return {}

    def axes_along(self, dims: Sequence[int]) -> Groups:
        rows = self.groups if 0 in dims else ()
        return (*rows, *(group for group, dim in self.even_cuts if dim in dims))

    def _boxes_over(self, group: dist.ProcessGroup) -> Sequence[Box]:
        cuts = dict(self.even_cuts)
        return even_boxes(tuple(self.shape), group, cuts[group]) if group in cuts else self.boxes

    def with_trailing(self, trailing: Sequence[int], *, dims: Sequence[int | None] | None = None) -> Piece:
        """Return the piece of a tensor with the same rows but other trailing dims: `(rows, *trailing)`.

        Each is cut as the dim of this piece that `dims` gives; None (by default all) is whole on every rank.
        """
        trailing = tuple(trailing)
        dims = tuple(dims) if dims is not None else (None,) * len(trailing)
        rest = [size if d is None else self.rows.sizes[d] for size, d in zip(trailing, dims, strict=True)]
        old_box_of, shape = self.box_of, torch.Size((self.shape[0], *trailing))

        def box_of(rank: int) -> Box:
            rows = old_box_of(rank)
            return Box((rows.offsets[0], *[0] * len(rest)), (rows.sizes[0], *rest))

        return replace(self, shape=shape, box_of=box_of, even_cuts=self.even_cuts_of((0, *dims)))

    def even_cuts_of(self, dims: Sequence[int | None]) -> EvenCuts:
        """Return the even cuts of a tensor whose dims are cut like `dims` of this one."""
        return tuple((group, dims.index(dim)) for group, dim in self.even_cuts if dim in dims)


_REPLICATE = Replicate()
_pieces: WeakValueDictionary[object, Piece] = WeakValueDictionary()


def piece_of(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], dtype: torch.dtype
) -> Piece:
    """Return this rank's part of a tensor of `shape` with these placements. No communication."""
    size = torch.Size(shape)
    key = (id(mesh), tuple(placements), size, dtype)
    if known := _pieces.get(key):  # a living piece keeps its mesh alive, so no other mesh gets its id
        return known
    cuts = {axis: p for axis, p in enumerate(placements) if isinstance(p, RowShard)}
    even_cuts = even_cuts_of(mesh, [_REPLICATE if axis in cuts else p for axis, p in enumerate(placements)])
    part = _even_part(size, even_cuts)
    row_axes = sorted(cuts, key=lambda axis: cuts[axis].step)
    groups = tuple(mesh.get_group(axis) for axis in row_axes)
    counts = cuts[row_axes[0]].counts if row_axes else (size[0],)
    if part.numel and sum(counts) != part.sizes[0]:
        raise ShardingError(
            f"{here()}: {tuple(placements)} cut {sum(counts)} rows, but this rank's part of a tensor of shape"
            f" {tuple(size)} has {part.sizes[0]}; use placements of a tensor of the same shape"
        )
    trailing = part.sizes[1:]
    starts = accumulate(counts, initial=0)
    boxes = [Box((a, *[0] * len(trailing)), (n, *trailing)) for a, n in zip(starts, counts, strict=False)]
    piece = _pieces[key] = Piece(size, groups, boxes.__getitem__, even_cuts, on_mesh=mesh)
    return piece


def even_cuts_of(mesh: DeviceMesh, placements: Sequence[Placement]) -> EvenCuts:
    """Return how tensor parallelism cuts a DTensor. Raises ShardingError unless by Shard and Replicate."""
    for placement in placements:
        if type(placement) not in (Shard, Replicate):
            raise ShardingError(
                f"{here()}: a parameter has tensor-parallel placement {placement}; rows can be cut from Shard"
                " and Replicate only"
            )
    return tuple((mesh.get_group(axis), p.dim) for axis, p in enumerate(placements) if isinstance(p, Shard))


def even_boxes(sizes: tuple[int, ...], group: dist.ProcessGroup, dim: int) -> list[Box]:
    """List the box of each rank of `group` in a tensor that it cuts evenly."""
    ranks = group.size()
    return [EvenShard(dim).box(sizes, rank=rank, ranks=ranks) for rank in range(ranks)]


def _even_part(shape: torch.Size, even_cuts: EvenCuts) -> Box:
    box = Box.whole(shape)
    for group, dim in even_cuts:
        box = even_boxes(box.sizes, group, dim)[group.rank()].shifted(box.offsets)
    return box


def place_over(groups: Sequence[dist.ProcessGroup]) -> tuple[int, int]:
    """Return this process's index over `groups`, the first group's rank varying fastest, and the total."""
    rank, ranks = 0, 1
    for group in groups:
        rank += group.rank() * ranks
        ranks *= group.size()
    return rank, ranks


def local_part(piece: Piece, whole: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a whole tensor, or of one that broadcasts to it: a view."""
    return within(whole, piece.box, size=piece.shape)
