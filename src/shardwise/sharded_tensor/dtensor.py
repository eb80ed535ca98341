"""Conversion of DTensors and rows to sharded tensors and back, for any mesh and placements.

Among a DTensor's replicas, those at coordinate 0 of the replicating mesh axes hold the sharded tensor's
shards; the others hold none. A rank whose chunk is empty holds one empty shard.

Rows (`ShardedRows`, parameters of the contiguous layout) know their own box, and the boxes in the single
group over which they are cut. With several groups, tensor-parallel axes or replicas, ranks exchange their
boxes; if several ranks hold the same box, the first holds the shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from shardwise import _compat
from shardwise._compat.dtensors import LocalShardsWrapper, OwnShard
from shardwise.comm.agree import agree
from shardwise.errors import ShardingError, here
from shardwise.layout import Box
from shardwise.sharded_tensor import failure
from shardwise.sharded_tensor.autograd import fill
from shardwise.sharded_tensor.check import tell_all
from shardwise.sharded_tensor.construct import init_from_local_shards
from shardwise.sharded_tensor.group import group_or_default
from shardwise.sharded_tensor.holding import Placed
from shardwise.sharded_tensor.metadata import Shard, ShardedTensorMetadata, ShardMetadata, TensorProperties
from shardwise.sharded_tensor.move import boxes_of, describe
from shardwise.sharded_tensor.rows import ShardedRows
from shardwise.sharded_tensor.tensor import ShardedTensor


def from_dtensor(dtensor: DTensor, *, process_group: dist.ProcessGroup | None = None) -> ShardedTensor:
    """Convert a DTensor to a sharded tensor, detached: no gradient passes. Local: nothing is sent.

    If the local tensor is torchrec's (`LocalShardsWrapper`), the shards are those that it lists, whatever the
    placements say. The call is then collective: ranks exchange the positions of their shards.

    Shards share the memory of the DTensor's local tensor if they are contiguous in it. That is always so,
    unless a strided placement cuts a dim other than the first or the local tensor has other strides; then
    shards are copies.

    Args:
        dtensor: on any mesh, with any placements but `Partial`. On ranks of the group outside its mesh,
            pass the DTensor without elements that torch makes there.
        process_group: the ranks of the sharded tensor, which include those of the mesh. Defaults to the group
            of a mesh of one axis, or to the default group if its ranks are those of the mesh.

    Raises:
        ShardingError: a placement that is neither replicated nor sharded, no group for the mesh, ranks
            that do not ascend along an axis that cuts, or, in grad mode, a result with a gradient to pass.
    """
    check_detached(dtensor)
    mesh, local = dtensor.device_mesh, _compat.local_tensor(dtensor)
    wait = getattr(local, "wait", None)  # set if a redistribution is still in progress
    group = _group_of(mesh, process_group)
    if isinstance(local, LocalShardsWrapper):
        return _from_listed_shards(local, mesh, dtensor.shape, group)
    local = (local if wait is None else wait()).detach()
    parts = Placed.of_dtensor(dtensor).parts
    pairs = [(box, rank) for rank, part in parts.items() if part.first_replica for box, _ in part.boxes]
    pairs.sort(key=lambda pair: pair[0].offsets)
    part = parts.get(dist.get_rank())
    boxes = [] if part is None or not part.first_replica else part.boxes
    tensors = [local[slices].contiguous() for _, slices in boxes]
    return of_boxes(pairs, tensors, shape=dtensor.shape, like=local, group=group)


def _from_listed_shards(
    local: LocalShardsWrapper, mesh: DeviceMesh, shape: torch.Size, group: dist.ProcessGroup
) -> ShardedTensor:
    """Make a sharded tensor of the shards that ranks list; of equal ones the first is used. Collective."""
    local_shards = [] if mesh.get_coordinate() is None else list(local.local_shards())
    offsets = [list(chunk) for chunk in local.local_offsets()[: len(local_shards)]]
    places = [[offset, list(shard.shape)] for offset, shard in zip(offsets, local_shards, strict=True)]
    by_rank = tell_all("from_dtensor()", lambda: places, group=group)
    earlier, rank = [place for entries in by_rank[: group.rank()] for place in entries], dist.get_rank()
    shards = [
        Shard.from_tensor_and_offsets(shard.detach(), offset, rank)
        for offset, shard in zip(offsets, local_shards, strict=True)
        if [offset, list(shard.shape)] not in earlier
    ]
    return init_from_local_shards(shards, shape, process_group=group)


def of_boxes(
    pairs: Iterable[tuple[Box, int]],
    tensors: Sequence[Tensor],
    *,
    shape: torch.Size,
    like: Tensor,
    group: dist.ProcessGroup,
) -> ShardedTensor:
    """Return the tensor of these boxes on these global ranks; `tensors` are this rank's. Local."""
    parts = [ShardMetadata(box.offsets, box.sizes, f"rank:{rank}/{like.device.type}") for box, rank in pairs]
    metadata = ShardedTensorMetadata(parts, shape, TensorProperties(dtype=like.dtype))
    places = metadata.held_by(dist.get_rank())
    shards = [Shard(tensor, place) for tensor, place in zip(tensors, places, strict=True)]
    return ShardedTensor.wrap(shards, metadata, process_group=group)


def to_dtensor(sharded: ShardedTensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Copy the values to a DTensor on `mesh`, detached: no gradient passes.

    Each rank gets the elements that it lacks once, directly from a rank that has them. Collective over the
    tensor's group; ranks outside the mesh get a DTensor without elements, as torch makes them there.

    Args:
        sharded: any sharded tensor.
        mesh: a mesh of ranks of the tensor's group, with any number of axes.
        placements: `Shard` or `Replicate` for each axis of the mesh.

    Raises:
        ShardingError: ranks outside the group, placements that do not fit the mesh or the tensor, ranks
            that do not ascend along an axis that cuts, or, in grad mode, a result with a gradient to pass.
        RankMismatchError: on every rank, if ranks ask for different meshes or placements.
    """
    check_detached(sharded)
    metadata, group = sharded.metadata(), sharded.process_group
    ranks = dist.get_process_group_ranks(group)
    _check_members(mesh, ranks)
    holding = Placed.of(mesh, placements, metadata.size)
    placements = holding.placements
    if rows := [placement for placement in placements if isinstance(placement, OwnShard)]:
        raise ShardingError(f"{here()}: {rows[0]} places rows; use to_rows() into a tensor that is cut so")
    request = f"mesh {mesh.mesh.tolist()} on {mesh.device_type}, placements {placements}"
    text = failure.with_failures(f"{describe(metadata)}\nto\n{request}", sharded)
    agree(text, group=group, subject="the DTensor to make")
    parts = holding.parts
    target_boxes = [[box for box, _ in parts[rank].boxes] if rank in parts else [] for rank in ranks]
    part = parts.get(dist.get_rank())
    local = sharded.anchor.detach().new_empty(0 if part is None else part.sizes)
    source_boxes, source = metadata.boxes_by_rank(ranks), [shard.tensor for shard in sharded.local_shards()]
    target = [] if part is None else [local[slices] for _, slices in part.boxes]
    fill(source_boxes, target_boxes, source=source, target=target, group=group, wire=local)
    spec = _compat.dtensor_spec(mesh, placements, shape=metadata.size, dtype=local.dtype)
    if local.device.type != mesh.device_type:
        local = local.to(mesh.device_type)
    return _compat.dtensor(local, spec)


def check_detached(tensor: Tensor) -> None:
    """Raise, in grad mode, for a result whose gradient a conversion would lose."""
    if torch.is_grad_enabled() and not tensor.is_leaf:
        raise ShardingError(
            f"{here()}: no gradient passes from a {type(tensor).__name__} to the tensor made of it, and"
            f" this one of shape {tuple(tensor.shape)} is a result of operations that need it; pass its"
            " detach(), or call under torch.no_grad()"
        )


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
    """Convert rows to a sharded tensor that shares their memory, detached: no gradient passes.

    A rank without rows holds an empty shard. Local if rows are cut over one group, without tensor
    parallelism, and no other group is asked for; otherwise collective: ranks exchange their boxes.

    Args:
        rows: a `ShardedParameter`, its gradient or an optimizer's state.
        process_group: by default the only group over which rows are cut, or the default group.

    Raises:
        ShardingError: ranks together do not hold all of the tensor, or hold parts of it twice; in grad mode,
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
    holders = list(zip(boxes, ranks, strict=True))
    first_holder = dict(reversed(holders))
    pairs = [(box, rank) for box, rank in holders if box.is_empty or first_holder[box] == rank]
    tensors = [rows.local.detach() for _, rank in pairs if rank == dist.get_rank()]
    sharded = of_boxes(pairs, tensors, shape=piece.shape, like=rows.local, group=group)
    sharded.metadata().check(ranks)
    return sharded


@torch.no_grad()
def to_rows(sharded: ShardedTensor, rows: ShardedRows) -> None:
    """Copy the values of a sharded tensor into `rows`, in place; each rank gets what it lacks once.

    Collective over the group of `sharded`: every rank passes its rows of a tensor of the same shape. Values
    are converted to the dtype and device of `rows`. Returns nothing; no gradient passes.

    Raises:
        ShardingError: on every rank, if a rank passes rows of a tensor of another shape.
        RankMismatchError: on every rank, if ranks pass differently cut tensors.
    """
    metadata, group = sharded.metadata(), sharded.process_group
    target_boxes = [[box] for box in _all_boxes(rows, group=group, shape=metadata.size)]
    text = failure.with_failures(describe(metadata), sharded)
    agree(text, group=group, subject="the sharded tensor to copy into rows")
    source_boxes, source = boxes_of(metadata, group), sharded.tensors
    fill(source_boxes, target_boxes, source=source, target=[rows.local], group=group, wire=sharded.anchor)


def _all_boxes(rows: ShardedRows, group: dist.ProcessGroup, shape: Sequence[int] | None = None) -> list[Box]:
    """Return every rank's box. Raises on every rank if rows are not of one tensor."""
    tensor = f"{tuple(rows.shape)} of {rows.dtype}" if shape is None else f"{tuple(rows.shape)}"
    by_rank = tell_all("comparing rows", lambda: (tensor, rows.box.offsets, rows.box.sizes), group=group)
    expected = by_rank[0][0] if shape is None else f"{tuple(shape)}"
    for rank, (found, _, _) in zip(dist.get_process_group_ranks(group), by_rank, strict=True):
        if found != expected:
            raise ShardingError(
                f"{here()}: expected rows of a tensor of shape {expected} on every rank, found {found} on"
                f" rank {rank}; pass the rows of the same tensor"
            )
    return [Box(tuple(offsets), tuple(sizes)) for _, offsets, sizes in by_rank]
