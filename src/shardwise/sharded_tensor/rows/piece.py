"""Which part of a whole tensor one rank holds, and who holds the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from shardwise import _compat
from shardwise._compat.dtensors import OwnSpec
from shardwise.errors import ShardingError, here
from shardwise.layout import Box, EvenShard
from shardwise.sharded_tensor.rows.row_shard import RowShard


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
        on_mesh: the mesh that a DTensor shows, with `groups` and those of `tensor_parallel` among its axes;
            None: one of `groups` alone.
    """

    shape: torch.Size
    box: Box
    groups: tuple[dist.ProcessGroup, ...]
    box_of: Callable[[int], Box] = field(repr=False)
    rows: Box
    tensor_parallel: _compat.DTensorSpec | None = field(default=None, repr=False)
    name: str = ""
    on_mesh: DeviceMesh | None = field(default=None, repr=False)

    def __deepcopy__(self, memo: object) -> Piece:
        return self  # nothing in it changes, and process groups cannot be copied

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Piece) or self.shape != other.shape:
            return NotImplemented if not isinstance(other, Piece) else False
        return self._cut == other._cut and self.counts == other.counts

    def __hash__(self) -> int:
        return hash((self.shape, self.groups))

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The one group over which rows are cut; None where none or several do."""
        return self.groups[0] if len(self.groups) == 1 else None

    @cached_property
    def group_ranks(self) -> list[int]:
        """The global ranks of `group`, in its order."""
        return [] if self.group is None else dist.get_process_group_ranks(self.group)

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
    def counts(self) -> tuple[int, ...]:
        """Rows of each of `boxes`, which lie one after the other."""
        return tuple(box.sizes[0] for box in self.boxes)

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The mesh of a DTensor that is cut so."""
        if self.on_mesh is not None:
            return self.on_mesh
        if self.group is None or self.tensor_parallel is not None:
            raise ShardingError(
                f"{here()}: {self} belongs to no mesh; only rows over one process group, or made by"
                " fully_shard, are a DTensor to others"
            )
        return DeviceMesh.from_group(self.group, _compat.device_type_of(self.group))

    @cached_property
    def placements(self) -> tuple[Placement, ...]:
        """How a DTensor that is cut so is placed on `mesh`."""
        found: dict[dist.ProcessGroup, Placement] = {}
        if (spec := self.tensor_parallel) is not None:
            found = {spec.mesh.get_group(axis): placement for axis, placement in enumerate(spec.placements)}
        step = 1
        for group in self.groups:
            found[group] = RowShard(self.counts, step)
            step *= group.size()
        groups = [self.mesh.get_group(axis) for axis in range(self.mesh.ndim)]
        return tuple(found.get(group, _REPLICATE) for group in groups)

    def spec(self, dtype: torch.dtype) -> _compat.DTensorSpec:
        """What DTensor knows of a tensor of this dtype that is cut so."""
        spec = self._specs.get(dtype)
        if spec is None:
            meta = _compat.TensorMeta(self.shape, _compat.contiguous_stride(self.shape), dtype)
            spec = self._specs[dtype] = OwnSpec(self.mesh, self.placements, tensor_meta=meta)
        return spec

    @cached_property
    def _specs(self) -> dict[torch.dtype, _compat.DTensorSpec]:
        return {}

    @property
    def _cut(self) -> tuple[object, ...]:
        return (self.groups, self._tensor_parallel_axes)

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


_REPLICATE = Replicate()
_known: WeakValueDictionary[object, Piece] = WeakValueDictionary()


def piece_of(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], dtype: torch.dtype
) -> Piece:
    """This rank's part of a tensor of `shape` that is placed so, as `RowShard` says. No communication."""
    key = (id(mesh), tuple(placements), tuple(shape), dtype)
    piece = _known.get(key)
    if piece is None:  # a living piece keeps its mesh alive, and so the mesh's id its own
        piece = _known[key] = _piece_of(mesh, tuple(placements), torch.Size(shape), dtype)
    return piece


def _piece_of(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size, dtype: torch.dtype
) -> Piece:
    rows: dict[int, RowShard] = {}
    for axis, placement in enumerate(placements):
        if isinstance(placement, RowShard):
            rows[axis] = placement
    inner = [a for a in range(mesh.ndim) if a not in rows and not placements[a].is_replicate()]
    spec = None
    if inner:
        names = mesh.mesh_dim_names
        if names is None:
            raise ShardingError(
                f"{here()}: rows beside tensor parallelism need a mesh with names, got {mesh}"
            )
        kept = [placements[axis] for axis in inner]
        spec = _compat.dtensor_spec(mesh[tuple(names[a] for a in inner)], kept, shape=shape, dtype=dtype)
    part = Box.whole(shape) if spec is None else part_of(spec)
    first = sorted(rows, key=lambda axis: rows[axis].step)
    groups = tuple(mesh.get_group(axis) for axis in first)
    counts = rows[first[0]].counts if first else (shape[0],)
    if sum(counts) != part.sizes[0]:
        raise ShardingError(
            f"{here()}: {placements} cut {sum(counts)} rows, but this rank's part of a tensor of shape"
            f" {tuple(shape)} has {part.sizes[0]}; use placements of a tensor of the same shape"
        )
    rest = part.sizes[1:]
    starts = list(accumulate(counts, initial=0))
    boxes = [Box((a, *[0] * len(rest)), (n, *rest)) for a, n in zip(starts, counts, strict=False)]
    mine = boxes[place_over(groups)[0]]
    box = Box(tuple(a + b for a, b in zip(part.offsets, mine.offsets, strict=True)), mine.sizes)
    return Piece(shape, box, groups, boxes.__getitem__, mine, spec, on_mesh=mesh)


def part_of(spec: _compat.DTensorSpec) -> Box:
    """This rank's part of a tensor that tensor parallelism cuts."""
    meta = spec.tensor_meta
    assert meta is not None
    box = Box.whole(meta.shape)
    for axis, placement in enumerate(spec.placements):
        if placement.is_replicate():
            continue
        if not isinstance(placement, Shard):
            raise ShardingError(
                f"{here()}: a tensor-parallel parameter placed as {placement} cannot be sharded"
            )
        inner = EvenShard(placement.dim).box(
            box.sizes, rank=spec.mesh.get_local_rank(axis), ranks=spec.mesh.size(axis)
        )
        box = Box(tuple(a + b for a, b in zip(box.offsets, inner.offsets, strict=True)), inner.sizes)
    return box


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
