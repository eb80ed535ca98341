"""Queries on tensors of any kind: plain tensors, rows, DTensors and `ShardedTensor`s."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

from shardwise import _compat
from shardwise.layout import Box
from shardwise.sharded_tensor.dtensor import from_dtensor, from_rows
from shardwise.sharded_tensor.holding import Groups, Holding, Listed, Placed
from shardwise.sharded_tensor.rows import ShardedRows
from shardwise.sharded_tensor.tensor import ShardedTensor


def holding_of(tensor: Tensor) -> Holding:
    """Return which rank holds what. Local. Raises ShardingError for a DTensor that holds partial sums."""
    if isinstance(tensor, ShardedRows):
        return tensor.piece
    if isinstance(tensor, DTensor):
        return Placed.of_dtensor(tensor)
    if isinstance(tensor, ShardedTensor):
        return Listed(tensor.metadata().size, tensor.metadata(), tensor.process_group)
    return Holding(tensor.shape)


def sharding_of(tensor: Tensor) -> object:
    """Return the object that describes how rows or a DTensor are cut, until the cut changes; else None."""
    if isinstance(tensor, ShardedRows):
        return tensor.piece
    return _compat.spec_of(tensor) if isinstance(tensor, DTensor) else None


def shards_of(tensor: Tensor) -> list[Tensor]:
    """Return this rank's shards of a `ShardedTensor`, or its anchor if it has none; another tensor itself."""
    if isinstance(tensor, ShardedTensor):
        return tensor.tensors or [tensor.anchor]
    return [tensor]


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, differentiably; a plain tensor as it is. No communication."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def held_by_this_rank(tensor: Tensor) -> list[tuple[Box, Tensor]]:
    """Return this rank's boxes, replicas too, of a plain tensor, rows or a DTensor, and views of memory."""
    if not isinstance(tensor, DTensor):
        return [(Box.whole(tensor.shape), tensor.detach())]
    if isinstance(tensor, ShardedRows):
        return [(tensor.box, tensor.local)]
    local = _compat.local_tensor(tensor).detach()
    part = Placed.of_dtensor(tensor).parts.get(dist.get_rank())
    return [] if part is None else [(box, local[slices]) for box, slices in part.boxes]


def store_whole(tensor: Tensor, whole: Tensor) -> None:
    for box, local in held_by_this_rank(tensor):
        local.copy_(whole[tuple(map(slice, box.offsets, box.ends))])


def whole_of(tensor: Tensor) -> Tensor:
    """Return the whole tensor; a plain one as it is. Collective over the ranks that hold parts."""
    return tensor.full_tensor() if isinstance(tensor, (DTensor, ShardedTensor)) else tensor


def to_sharded(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return rows (collective) or a DTensor as a sharded tensor over `group`, detached; others as is."""
    if isinstance(tensor, ShardedRows):
        return from_rows(cast(ShardedRows, tensor.detach()), process_group=group)
    if isinstance(tensor, DTensor):
        return from_dtensor(cast(DTensor, tensor.detach()), process_group=group)
    return tensor


def by_axes(
    tensors: Iterable[Tensor],
    groups: dict[tuple[int, ...], dist.ProcessGroup],
    merge: Callable[[list[Tensor]], list[Tensor]],
) -> tuple[dict[Groups, list[Tensor]], Counter[Groups]]:
    """Return this rank's memory of all tensors by the process groups that cut them, and how many each cut.

    `groups`, filled here, has the first group seen of each ranks: equal meshes have separate ones. `merge`
    returns fewer tensors with the same elements as the local rows of one cut.
    """
    shards: dict[Groups, list[Tensor]] = {}
    rows: dict[Groups, list[Tensor]] = {}
    counts: Counter[Groups] = Counter()
    axes_of: dict[tuple[int, tuple[Placement, ...]], Groups] = {}  # by mesh identity: hashing one is slow
    previous: Any = None  # the cut of the previous tensor: comparing costs less than hashing
    mesh, bucket = None, []
    axes: Groups = ()
    for tensor in tensors:
        if isinstance(tensor, ShardedRows):
            if (cut := tensor.piece.axes) != previous:
                previous, bucket = cut, rows.setdefault(cut, [])
            bucket.append(tensor._local_tensor)
        elif isinstance(tensor, DTensor):
            spec = _compat.spec_of(tensor)
            if spec.placements != previous or spec.mesh is not mesh:
                previous, mesh = spec.placements, spec.mesh
                key = (id(mesh), previous)
                if key not in axes_of:
                    axes_of[key] = tuple(
                        groups.setdefault(tuple(dist.get_process_group_ranks(group)), group)
                        for group in holding_of(tensor).axes
                    )
                axes = axes_of[key]
                bucket = shards.setdefault(axes, [])
            bucket.append(_compat.local_tensor(tensor))
            counts[axes] += 1
        else:
            tensor_axes = holding_of(tensor).axes
            counts[tensor_axes] += 1
            shards.setdefault(tensor_axes, []).extend(shards_of(tensor))
    for axes, locals_ in rows.items():
        counts[axes] += len(locals_)
        shards.setdefault(axes, []).extend(merge(locals_))
    return shards, counts
