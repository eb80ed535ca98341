"""DTensors and rows to sharded tensors and back, whatever the mesh and its placements.

What a rank of a DTensor holds are indices of each dim, found by splitting the dim's range over the mesh axes
that cut it, one after the other. After a strided split they may be several runs:

    dim of 8 over a mesh of 2 x 2                   (0, 0)   (0, 1)   (1, 0)   (1, 1)
    [Shard(0), Shard(0)]                            0 1      2 3      4 5      6 7
    [Replicate(), Shard(0)]                         0-3      4-7      0-3      4-7
    [strided Shard(0) of 2, Replicate()]            0 1 4 5  0 1 4 5  2 3 6 7  2 3 6 7

Each combination of runs, one of every dim, is a box. Of replicas, the one at coordinate 0 of the axes that
replicate is what the sharded tensor holds; the others hold no shard. A rank whose chunk is empty holds one
empty shard.

Ranks must ascend along every axis that cuts. Where they do not, torch itself is of two minds: its collectives
take the parts by rank in the axis' group, which ascends, the rest of it by coordinate.

Rows (`ShardedRows`, parameters of the contiguous layout) know their own box, and the boxes of the one group
over which they are cut. What lies elsewhere, over several groups, on tensor-parallel axes or in replicas,
ranks tell each other; of ranks that hold one box the first holds the shard.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.distributed.tensor import Shard as Cut

from shardwise import _compat
from shardwise._compat.dtensors import LocalShardsWrapper, OwnShard
from shardwise.comm.agree import agree, together
from shardwise.errors import ShardingError, here
from shardwise.layout import Box
from shardwise.sharded_tensor.autograd import fill
from shardwise.sharded_tensor.construct import init_from_local_shards
from shardwise.sharded_tensor.group import group_or_default
from shardwise.sharded_tensor.metadata import Shard, ShardedTensorMetadata, ShardMetadata, TensorProperties
from shardwise.sharded_tensor.move import boxes_of, describe_with_failures
from shardwise.sharded_tensor.rows import ShardedRows
from shardwise.sharded_tensor.tensor import ShardedTensor

_Runs = list[tuple[int, int]]  # first index and length in one dim of the whole tensor, ascending, none empty


def from_dtensor(dtensor: DTensor, *, process_group: dist.ProcessGroup | None = None) -> ShardedTensor:
    """Return a DTensor as a sharded tensor, detached: no gradient passes. Local: nothing is sent.

    Where the local tensor is torchrec's (`LocalShardsWrapper`), shards are those that it lists, whatever the
    placements say. Then it is collective: ranks tell each other where theirs lie.

    Shards share the memory of the DTensor's local tensor where they lie in it contiguously: always, unless
    a strided placement cuts a dim other than the first or the local tensor has other strides. Those
    are copies.

    Args:
        dtensor: of any mesh, and any placements but `Partial`. On the ranks of the group outside its mesh,
            the DTensor without elements that torch makes there.
        process_group: the ranks of the sharded tensor, among them those of the mesh. By default the group
            of a mesh of one axis, or the default group where its ranks are those of the mesh.

    Raises:
        ShardingError: a placement that is neither replicated nor sharded, no group for the mesh, ranks
            that do not ascend along an axis that cuts, or, in grad mode, a result with a gradient to pass.
    """
    check_detached(dtensor)
    spec: Any = _compat.spec_of(dtensor)
    mesh, local = dtensor.device_mesh, _compat.local_tensor(dtensor)
    arriving = getattr(local, "wait", None)  # of a redistribution that is still under way
    group = _group_of(mesh, process_group)
    if isinstance(local, LocalShardsWrapper):
        return _of_listed_shards(local, mesh, dtensor.shape, group)
    local = (local if arriving is None else arriving()).detach()
    placements = _normalized(dtensor.placements, mesh, ndim=dtensor.ndim)
    holdings = _holdings(mesh, placements, tuple(dtensor.shape), order=getattr(spec, "shard_order", None))
    placed = [
        (box, rank) for rank, holding in holdings.items() if holding.first_replica for box, _ in holding.boxes
    ]
    placed.sort(key=lambda entry: entry[0].offsets)
    mine = holdings.get(dist.get_rank())
    held = [] if mine is None or not mine.first_replica else mine.boxes
    tensors = [local[slices].contiguous() for _, slices in held]
    return of_boxes(placed, tensors, shape=dtensor.shape, like=local, group=group)


def _of_listed_shards(
    local: LocalShardsWrapper, mesh: DeviceMesh, shape: torch.Size, group: dist.ProcessGroup
) -> ShardedTensor:
    """Make a sharded tensor of the shards that ranks list; the first of equal ones counts. Collective."""
    listed = [] if mesh.get_coordinate() is None else list(local.local_shards())
    offsets = [list(chunk) for chunk in local.local_offsets()[: len(listed)]]
    places = [[at, list(shard.shape)] for at, shard in zip(offsets, listed, strict=True)]
    by_rank = together("from_dtensor()", lambda: places, group=group, kind=ShardingError)
    before = [place for each in by_rank[: group.rank()] for place in each]
    rank = dist.get_rank()
    shards = [
        Shard.from_tensor_and_offsets(shard.detach(), at, rank)
        for at, shard in zip(offsets, listed, strict=True)
        if [at, list(shard.shape)] not in before
    ]
    return init_from_local_shards(shards, shape, process_group=group)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, with its gradient; a plain tensor as it is. No communication."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def held_by_this_rank(dtensor: DTensor) -> list[tuple[Box, Tensor]]:
    """Return this rank's boxes of a DTensor, also where they are replicas, and views of its memory. Local."""
    local = _compat.local_tensor(dtensor).detach()
    mesh = dtensor.device_mesh
    placements = _normalized(dtensor.placements, mesh, ndim=dtensor.ndim)
    order = getattr(_compat.spec_of(dtensor), "shard_order", None)
    mine = _holdings(mesh, placements, tuple(dtensor.shape), order=order).get(dist.get_rank())
    return [] if mine is None else [(box, local[slices]) for box, slices in mine.boxes]


def store_whole(dtensor: DTensor, whole: Tensor) -> None:
    """Copy this rank's part of `whole` into a DTensor of its shape. Local."""
    for box, local in held_by_this_rank(dtensor):
        local.copy_(whole[tuple(map(slice, box.offsets, box.ends))])


def of_boxes(
    placed: Iterable[tuple[Box, int]],
    tensors: Sequence[Tensor],
    *,
    shape: torch.Size,
    like: Tensor,
    group: dist.ProcessGroup,
) -> ShardedTensor:
    """Return the tensor of these boxes on these global ranks, of which this rank's are `tensors`. Local."""
    metadata = ShardedTensorMetadata(
        [ShardMetadata(box.offsets, box.sizes, f"rank:{rank}/{like.device.type}") for box, rank in placed],
        shape,
        TensorProperties(dtype=like.dtype),
    )
    places = metadata.held_by(dist.get_rank())
    shards = [Shard(tensor, place) for tensor, place in zip(tensors, places, strict=True)]
    return ShardedTensor.wrap(shards, metadata, process_group=group)


def to_dtensor(sharded: ShardedTensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Return the values as a DTensor on `mesh`, in memory of its own and detached: no gradient passes.

    Each rank gets the elements it lacks once, straight from a rank that has them. Collective over the
    tensor's group; ranks outside the mesh get a DTensor without elements, as torch makes them there.

    Args:
        sharded: any sharded tensor.
        mesh: of ranks of the tensor's group, on any number of axes.
        placements: `Shard` or `Replicate` for each axis of the mesh.

    Raises:
        ShardingError: ranks outside the group, placements that do not fit the mesh or the tensor, ranks
            that do not ascend along an axis that cuts, or, in grad mode, a result with a gradient to pass.
        RankMismatchError: on every rank, where ranks ask for different meshes or placements.
    """
    check_detached(sharded)
    metadata, group = sharded.metadata(), sharded.process_group
    shape = tuple(metadata.size)
    ranks = dist.get_process_group_ranks(group)
    _check_members(mesh, ranks)
    placements = _normalized(placements, mesh, ndim=len(shape))
    if own := [placement for placement in placements if isinstance(placement, OwnShard)]:
        raise ShardingError(f"{here()}: {own[0]} places rows; use to_rows() into a tensor that is cut so")
    asked = f"mesh {mesh.mesh.tolist()} on {mesh.device_type}, placements {placements}"
    agree(f"{describe_with_failures(sharded)}\nto\n{asked}", group=group, what="the DTensor to make")
    holdings = _holdings(mesh, placements, shape)
    wanted = [[box for box, _ in holdings[rank].boxes] if rank in holdings else [] for rank in ranks]
    mine = holdings.get(dist.get_rank())
    local = sharded.anchor.detach().new_empty(0 if mine is None else mine.sizes)
    fill(
        metadata.boxes_by(ranks),
        wanted,
        source=[shard.tensor for shard in sharded.local_shards()],
        target=[] if mine is None else [local[slices] for _, slices in mine.boxes],
        group=group,
        wire=local,
    )
    spec = _compat.dtensor_spec(mesh, placements, shape=metadata.size, dtype=local.dtype)
    if local.device.type != mesh.device_type:
        local = local.to(mesh.device_type)
    return _compat.dtensor(local, spec)


def to_sharded(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return rows or a DTensor as a sharded tensor over `group`, detached; other tensors as they are.

    Collective over `group` for rows, as `from_rows`.
    """
    if isinstance(tensor, ShardedRows):
        return from_rows(cast(ShardedRows, tensor.detach()), process_group=group)
    if isinstance(tensor, DTensor):
        return from_dtensor(cast(DTensor, tensor.detach()), process_group=group)
    return tensor


# What each rank of a mesh holds


@dataclass(frozen=True)
class _Holding:
    """One rank's part of a DTensor of `shape`."""

    runs: tuple[_Runs, ...]  # of every dim, one after the other in its local tensor
    shape: tuple[int, ...]
    first_replica: bool

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the local tensor."""
        return tuple(map(_length, self.runs))

    @property
    def boxes(self) -> list[tuple[Box, tuple[slice, ...]]]:
        """Every box, and where it lies in the local tensor; at least one, maybe empty."""
        if not all(self.runs):
            return [(self._empty(), (slice(None),) * len(self.shape))]
        ends = [list(itertools.accumulate(length for _, length in runs)) for runs in self.runs]
        return [
            (
                Box(tuple(start for (start, _), _ in chosen), tuple(length for (_, length), _ in chosen)),
                tuple(slice(end - length, end) for (_, length), end in chosen),
            )
            for chosen in itertools.product(*map(zip, self.runs, ends))
        ]

    def _empty(self) -> Box:
        """Return a box of the local tensor's sizes within the whole tensor."""
        starts = [runs[0][0] if runs else size for runs, size in zip(self.runs, self.shape, strict=True)]
        return Box(tuple(starts), self.sizes)


def _holdings(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: tuple[int, ...], *, order: Any = None
) -> dict[int, _Holding]:
    """Return what each rank holds, by global rank in the mesh's order.

    `order` names the axes that cut each dim, in the order in which they cut."""
    axes: list[list[int]] = [[] for _ in shape]
    for axis, placement in enumerate(placements):
        if _cuts(placement):
            axes[_dim(placement)].append(axis)
    for entry in order or ():
        axes[entry.tensor_dim] = list(entry.mesh_dims)
    counts = tuple(mesh.shape)
    tables = [_table(size, [(placements[a], counts[a]) for a in axes[d]]) for d, size in enumerate(shape)]
    for axis in itertools.chain(*axes):
        _check_order(mesh, axis)
    replicating = [axis for axis, placement in enumerate(placements) if not _cuts(placement)]
    found = {}
    for rank, at in zip(mesh.mesh.flatten().tolist(), itertools.product(*map(range, counts)), strict=True):
        runs = tuple(table[tuple(at[a] for a in axes[d])] for d, table in enumerate(tables))
        found[rank] = _Holding(runs, shape, first_replica=not any(at[a] for a in replicating))
    return found


def _table(size: int, cuts: Sequence[tuple[Placement, int]]) -> dict[tuple[int, ...], _Runs]:
    """Return what of a dim lies at each coordinate of the axes that cut it."""
    table: dict[tuple[int, ...], _Runs] = {(): [(0, size)] if size else []}
    for placement, count in cuts:
        table = {
            (*at, index): part
            for at, runs in table.items()
            for index, part in enumerate(_split(runs, placement, count))
        }
    return table


def _check_order(mesh: DeviceMesh, axis: int) -> None:
    if not (mesh.mesh.diff(dim=axis) > 0).all():
        raise ShardingError(
            f"{here()}: the ranks of mesh {mesh.mesh.tolist()} do not ascend along axis {axis}, which cuts"
            " the tensor. Torch's collectives and its placements then disagree about who holds what; use a"
            " mesh on which they ascend"
        )


def _length(runs: _Runs) -> int:
    return sum(length for _, length in runs)


def _split(runs: _Runs, placement: Placement, count: int) -> list[_Runs]:
    """Split `runs` over the `count` coordinates of an axis."""
    if isinstance(placement, OwnShard):
        held = [placement.local_rows(_length(runs), count, index) for index in range(count)]
        return [_between(runs, first, first + rows) for rows, first in held]
    if not isinstance(placement, _compat.StridedShard):
        return _chunks(runs, count)
    strides = [_chunks(stride, count) for stride in _chunks(runs, int(placement.split_factor))]
    return [_joined(run for stride in strides for run in stride[index]) for index in range(count)]


def _chunks(runs: _Runs, count: int) -> list[_Runs]:
    """Return the equal chunks of the indices in `runs`; the last ones short or empty."""
    total = _length(runs)
    chunk = -(-total // count)
    return [_between(runs, i * chunk, (i + 1) * chunk) for i in range(count)]


def _between(runs: _Runs, begin: int, end: int) -> _Runs:
    """Return the indices of `runs`, counted one after the other, from `begin` to before `end`."""
    found, before = [], 0
    for start, length in runs:
        low, high = max(begin - before, 0), min(end - before, length)
        if low < high:
            found.append((start + low, high - low))
        before += length
    return found


def _joined(runs: Iterable[tuple[int, int]]) -> _Runs:
    """Join runs that continue one another."""
    found: _Runs = []
    for start, length in runs:
        if found and sum(found[-1]) == start:
            found[-1] = (found[-1][0], found[-1][1] + length)
        else:
            found.append((start, length))
    return found


# What may be converted: placements, meshes and groups


def check_detached(tensor: Tensor) -> None:
    """Refuse, in grad mode, a result whose gradient a conversion would lose."""
    if torch.is_grad_enabled() and not tensor.is_leaf:
        raise ShardingError(
            f"{here()}: no gradient passes from a {type(tensor).__name__} to the tensor made of it, and"
            f" this one of shape {tuple(tensor.shape)} is a result of operations that need it; pass its"
            " detach(), or call under torch.no_grad()"
        )


def _cuts(placement: Placement) -> bool:
    return isinstance(placement, (Cut, _compat.StridedShard))


def _dim(placement: Any) -> int:
    dim: int = placement.dim
    return dim


def _normalized(placements: Sequence[Placement], mesh: DeviceMesh, *, ndim: int) -> tuple[Placement, ...]:
    """Return the placements with dims counted from the first."""
    if len(placements) != mesh.ndim:
        raise ShardingError(
            f"{here()}: a mesh of {mesh.ndim} axes needs one placement for each, found {len(placements)}:"
            f" {tuple(placements)}"
        )
    made: list[Placement] = []
    for axis, placement in enumerate(placements):
        if isinstance(placement, (Replicate, OwnShard)):
            made.append(placement)
            continue
        if not _cuts(placement):
            terms = "its ranks hold terms of a sum; " if isinstance(placement, Partial) else ""
            raise ShardingError(
                f"{here()}: mesh axis {axis} has placement {placement!r}, expected Shard or Replicate;"
                f" {terms}call redistribute() first"
            )
        dim = _dim(placement)
        if not -ndim <= dim < ndim:
            raise ShardingError(
                f"{here()}: {placement!r} cuts dim {dim} of a tensor of {ndim} dims; choose one that it has"
            )
        if isinstance(placement, _compat.StridedShard):
            made.append(_compat.StridedShard(dim % ndim, split_factor=placement.split_factor))
        else:
            made.append(Cut(dim % ndim))
    return tuple(made)


def _check_members(mesh: DeviceMesh, ranks: Sequence[int]) -> None:
    members = set(ranks)
    outside = [rank for rank in mesh.mesh.flatten().tolist() if rank not in members]
    if outside:
        raise ShardingError(
            f"{here()}: ranks {outside} of the mesh {mesh.mesh.tolist()} are not among the ranks"
            f" {list(ranks)} of the process group; use a mesh of its ranks, or a group that has them all"
        )


def _group_of(mesh: DeviceMesh, process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    ranks: list[int] = mesh.mesh.flatten().tolist()
    if process_group is not None:
        _check_members(mesh, dist.get_process_group_ranks(process_group))
        return process_group
    if mesh.ndim == 1 and dist.get_rank() in ranks:
        return mesh.get_group()
    world = dist.group.WORLD
    if world is not None and sorted(ranks) == sorted(dist.get_process_group_ranks(world)):
        return world
    raise ShardingError(
        f"{here()}: no process group is known for the mesh {mesh.mesh.tolist()}; pass process_group=, a"
        " group with these ranks"
    )


def from_rows(rows: ShardedRows, *, process_group: dist.ProcessGroup | None = None) -> ShardedTensor:
    """Return rows as a sharded tensor, which shares their memory, detached: no gradient passes.

    A rank without rows holds an empty shard. Local where rows are cut over one group, without tensor
    parallelism, and no other group is asked for; otherwise collective: ranks tell their boxes.

    Args:
        rows: a `ShardedParameter`, its gradient or an optimizer's state.
        process_group: by default the one group over which rows are cut, or the default group.

    Raises:
        ShardingError: ranks that together do not hold all of the tensor, or parts of it twice; in grad mode,
            a result with a gradient to pass.
    """
    check_detached(rows)
    piece = rows.piece
    if process_group is None and piece.group is not None and not piece.even_cuts:
        group, boxes = piece.group, list(piece.boxes)
    else:
        group = group_or_default(process_group)
        boxes = _all_boxes(rows, group=group)
    ranks = dist.get_process_group_ranks(group)
    held_by = list(zip(boxes, ranks, strict=True))
    first = dict(reversed(held_by))
    placed = [(box, rank) for box, rank in held_by if box.is_empty or first[box] == rank]
    held = [rows.local.detach() for _, rank in placed if rank == dist.get_rank()]
    made = of_boxes(placed, held, shape=piece.shape, like=rows.local, group=group)
    made.metadata().check(ranks)
    return made


@torch.no_grad()
def to_rows(sharded: ShardedTensor, rows: ShardedRows) -> None:
    """Copy the values of a sharded tensor into `rows`, wherever they lie; each rank gets what it lacks once.

    Collective over the group of `sharded`, of which every rank passes its rows of a tensor of the same shape.
    Values are converted to their dtype and device. As with any copy in place nothing is returned; no gradient
    passes.

    Raises:
        ShardingError: on every rank, where a rank passes rows of a tensor of another shape.
        RankMismatchError: on every rank, where ranks pass differently cut tensors.
    """
    metadata, group = sharded.metadata(), sharded.process_group
    wanted = _all_boxes(rows, group=group, shape=metadata.size)
    agree(describe_with_failures(sharded), group=group, what="the sharded tensor to copy into rows")
    fill(
        boxes_of(metadata, group),
        [[box] for box in wanted],
        source=sharded.tensors,
        target=[rows.local],
        group=group,
        wire=sharded.anchor,
    )


def _all_boxes(
    rows: ShardedRows, *, group: dist.ProcessGroup, shape: Sequence[int] | None = None
) -> list[Box]:
    """Return every rank's box. Raises on every rank where rows are not of one tensor."""
    tensor = f"{tuple(rows.shape)} of {rows.dtype}" if shape is None else f"{tuple(rows.shape)}"
    by_rank = together(
        "comparing rows", lambda: (tensor, rows.box.offsets, rows.box.sizes), group=group, kind=ShardingError
    )
    expected = by_rank[0][0] if shape is None else f"{tuple(shape)}"
    for rank, (found, _, _) in zip(dist.get_process_group_ranks(group), by_rank, strict=True):
        if found != expected:
            raise ShardingError(
                f"{here()}: expected rows of a tensor of shape {expected} on every rank, found {found} on"
                f" rank {rank}; pass the rows of the same tensor"
            )
    return [Box(tuple(offsets), tuple(sizes)) for _, offsets, sizes in by_rank]
