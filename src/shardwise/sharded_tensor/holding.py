"""`Holding`: which rank holds what of a tensor, with one interface for every kind of tensor.

    a plain tensor     Holding     whole on every rank
    rows               Piece       whole rows for each rank (`rows.piece`)
    a DTensor          Placed      indices of each dim, split over mesh axes
    a ShardedTensor    Listed      boxes anywhere, listed in its metadata

`kinds.holding_of` returns a tensor's holding. Nothing here communicates, and boxes are computed on first use.
A rank of a DTensor holds certain indices of each dim, found by splitting the dim's range over the mesh axes
that cut it, one after the other. After a strided split they may form several runs, and each combination of
runs, one per dim, is a box:

    dim of 8 over a mesh of 2 x 2                   (0, 0)   (0, 1)   (1, 0)   (1, 1)
    [Shard(0), Shard(0)]                            0 1      2 3      4 5      6 7
    [Replicate(), Shard(0)]                         0-3      4-7      0-3      4-7
    [strided Shard(0) of 2, Replicate()]            0 1 4 5  0 1 4 5  2 3 6 7  2 3 6 7

Ranks must ascend along every axis that cuts. Where they do not, torch itself is inconsistent: its collectives
order parts by rank in the axis' group, which ascends, and all other code orders them by coordinate.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from shardwise import _compat
from shardwise._compat.dtensors import OwnShard
from shardwise.errors import ShardingError, here
from shardwise.layout import Box
from shardwise.sharded_tensor.metadata import ShardedTensorMetadata

Groups = tuple[dist.ProcessGroup, ...]


@dataclass(frozen=True, eq=False)
class Holding:
    """The ranks that hold a tensor of `shape`, and its boxes; this class: whole on each rank."""

    shape: torch.Size

    def axes_along(self, dims: Sequence[int]) -> Groups:
        """Return the process groups whose ranks hold different elements along `dims`."""
        return ()

    @cached_property
    def axes(self) -> Groups:
        """Every process group whose ranks hold different elements of the whole tensor."""
        return self.axes_along(range(len(self.shape)))

    def over_one_group(self) -> tuple[dist.ProcessGroup | None, Sequence[Box]] | None:
        """Return the only group that cuts the tensor, and the box of each of its ranks.

        Returns no group and the whole box if nothing cuts the tensor; returns None if several groups cut it,
        or if a rank may hold several boxes.
        """
        groups = [group for group in self.axes if group.size() > 1]
        if not groups:
            return None, (Box.whole(self.shape),)
        boxes = self._boxes_over(groups[0]) if len(groups) == 1 else None
        return None if boxes is None else (groups[0], boxes)

    def _boxes_over(self, group: dist.ProcessGroup) -> Sequence[Box] | None:
        """Return the box of each rank of `group`, the only one that cuts; None if a rank may have several."""
        return None


_Runs = list[range]  # indices in one dim of the whole tensor: ascending, none empty


@dataclass(frozen=True)
class Part:
    """The indices of a DTensor of `shape` that one rank holds."""

    runs: tuple[_Runs, ...]  # by dim; one after the other in the local tensor
    shape: tuple[int, ...]
    first_replica: bool

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(map(_length, self.runs))

    @property
    def boxes(self) -> list[tuple[Box, tuple[slice, ...]]]:
        """Every box, and its slices of the local tensor; at least one box, maybe empty."""
        if not all(self.runs):
            starts = [runs[0].start if runs else n for runs, n in zip(self.runs, self.shape, strict=True)]
            return [(Box(tuple(starts), self.sizes), (slice(None),) * len(self.shape))]
        ends = [list(itertools.accumulate(map(len, runs))) for runs in self.runs]
        return [
            (
                Box(tuple(run.start for run, _ in combination), tuple(len(run) for run, _ in combination)),
                tuple(slice(end - len(run), end) for run, end in combination),
            )
            for combination in itertools.product(*map(zip, self.runs, ends))
        ]


@dataclass(frozen=True, eq=False)
class Placed(Holding):
    """Holding of a DTensor: the part that its placements give to each rank."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]  # of any kind but `Partial`, with dims counted from the first
    order: Any = None  # the axes that cut each dim, in the order in which they cut; None: that of the mesh

    @staticmethod
    def of(mesh: DeviceMesh, placements: Sequence[Any], shape: Sequence[int], order: Any = None) -> Placed:
        """Return which rank holds what. Raises ShardingError for placements that do not fit mesh or shape."""
        ndim = len(shape)
        if len(placements) != mesh.ndim:
            raise ShardingError(
                f"{here()}: a mesh of {mesh.ndim} axes needs one placement for each, found {len(placements)}:"
                f" {tuple(placements)}"
            )
        normalized: list[Placement] = []
        for axis, placement in enumerate(placements):
            if isinstance(placement, (Replicate, OwnShard)):
                normalized.append(placement)
                continue
            if not cuts_a_dim(placement):
                terms = "it holds partial sums; " if isinstance(placement, Partial) else ""
                raise ShardingError(
                    f"{here()}: a tensor of shape {tuple(shape)} has placement {placement!r} on mesh axis"
                    f" {axis}, expected Shard or Replicate; {terms}call redistribute() first"
                )
            dim = placement.dim
            if not -ndim <= dim < ndim:
                raise ShardingError(
                    f"{here()}: {placement!r} cuts dim {dim} of a tensor of shape {tuple(shape)}; choose one"
                    " that it has"
                )
            if isinstance(placement, _compat.StridedShard):
                normalized.append(_compat.StridedShard(dim % ndim, split_factor=placement.split_factor))
            else:
                normalized.append(Shard(dim % ndim))
        return Placed(torch.Size(shape), mesh, tuple(normalized), order)

    @staticmethod
    def of_dtensor(dtensor: DTensor) -> Placed:
        """Return which rank holds what of a DTensor, cut in the order that its spec gives."""
        order = getattr(_compat.spec_of(dtensor), "shard_order", None)
        return Placed.of(dtensor.device_mesh, dtensor.placements, dtensor.shape, order)

    def axes_along(self, dims: Sequence[int]) -> Groups:
        axes = [axis for axis, p in enumerate(self.placements) if cuts_a_dim(p) and p.dim in dims]
        return tuple(map(self.mesh.get_group, axes))

    def _boxes_over(self, group: dist.ProcessGroup) -> Sequence[Box] | None:
        # Not from `parts`: a mesh's ranks are a tensor, which is fake in a plan.
        placement: Any = self.placements[self.mesh.get_all_groups().index(group)]
        dim, whole = placement.dim, [[range(size)] if size else [] for size in self.shape]
        by_rank = [
            Part((*whole[:dim], runs, *whole[dim + 1 :]), self.shape, first_replica=True).boxes
            for runs in _split(whole[dim], placement, group.size())
        ]
        return [box for ((box, _),) in by_rank] if all(len(boxes) == 1 for boxes in by_rank) else None

    @cached_property
    def parts(self) -> dict[int, Part]:
        """Parts of all ranks, by global rank in the mesh's order."""
        axes: list[list[int]] = [[] for _ in self.shape]
        for axis, placement in enumerate(self.placements):
            if cuts_a_dim(placement):
                axes[placement.dim].append(axis)
        for entry in self.order or ():
            axes[entry.tensor_dim] = list(entry.mesh_dims)
        counts = tuple(self.mesh.shape)
        tables = [
            _table(size, [(self.placements[a], counts[a]) for a in axes[d]])
            for d, size in enumerate(self.shape)
        ]
        for axis in itertools.chain(*axes):
            if not (self.mesh.mesh.diff(dim=axis) > 0).all():
                raise ShardingError(
                    f"{here()}: the ranks of mesh {self.mesh.mesh.tolist()} do not ascend along axis {axis},"
                    " which cuts the tensor. Torch's collectives and its placements then disagree about who"
                    " holds what; use a mesh on which they ascend"
                )
        replicate_axes = [axis for axis, placement in enumerate(self.placements) if not cuts_a_dim(placement)]
        parts, ranks = {}, self.mesh.mesh.flatten().tolist()
        for rank, coordinate in zip(ranks, itertools.product(*map(range, counts)), strict=True):
            runs = tuple(table[tuple(coordinate[a] for a in axes[d])] for d, table in enumerate(tables))
            parts[rank] = Part(runs, self.shape, first_replica=not any(coordinate[a] for a in replicate_axes))
        return parts


@dataclass(frozen=True, eq=False)
class Listed(Holding):
    """Holding of a `ShardedTensor`: the boxes that its metadata lists."""

    metadata: ShardedTensorMetadata
    process_group: dist.ProcessGroup

    def axes_along(self, dims: Sequence[int]) -> Groups:
        return (self.process_group,) if self.metadata.is_cut(dims) else ()

    @cached_property
    def axes(self) -> Groups:
        return (self.process_group,)


def _table(size: int, cuts: Sequence[tuple[Placement, int]]) -> dict[tuple[int, ...], _Runs]:
    """Return the runs of a dim at each coordinate of the axes that cut it."""
    table: dict[tuple[int, ...], _Runs] = {(): [range(size)] if size else []}
    for placement, count in cuts:
        table = {
            (*coordinate, index): part
            for coordinate, runs in table.items()
            for index, part in enumerate(_split(runs, placement, count))
        }
    return table


def _length(runs: _Runs) -> int:
    return sum(map(len, runs))


def _split(runs: _Runs, placement: Placement, count: int) -> list[_Runs]:
    if isinstance(placement, OwnShard):
        spans = [placement.local_rows(_length(runs), count, index) for index in range(count)]
        return [_slice_runs(runs, first, first + rows) for rows, first in spans]
    if not isinstance(placement, _compat.StridedShard):
        return _chunks(runs, count)
    strides = [_chunks(stride, count) for stride in _chunks(runs, int(placement.split_factor))]
    return [_join_runs(run for stride in strides for run in stride[index]) for index in range(count)]


def _chunks(runs: _Runs, count: int) -> list[_Runs]:
    """Return the equal chunks of the indices in `runs`; the last ones short or empty."""
    total = _length(runs)
    chunk = -(-total // count)
    return [_slice_runs(runs, i * chunk, (i + 1) * chunk) for i in range(count)]


def _slice_runs(runs: _Runs, begin: int, end: int) -> _Runs:
    """Return the runs of the indices from number `begin` to before `end`, counted through `runs`."""
    parts, position = [], 0
    for run in runs:
        if part := run[max(begin - position, 0) : max(end - position, 0)]:
            parts.append(part)
        position += len(run)
    return parts


def _join_runs(runs: Iterable[range]) -> _Runs:
    joined: _Runs = []
    for run in runs:
        if joined and joined[-1].stop == run.start:
            run = range(joined.pop().start, run.stop)
        joined.append(run)
    return joined


def cuts_a_dim(placement: Placement) -> TypeGuard[Shard]:
    return isinstance(placement, (Shard, _compat.StridedShard))
