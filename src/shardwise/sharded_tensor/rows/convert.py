"""Conversion of row ranges to and from whole tensors, row ranges and DTensors, below autograd.

Between two cuts of rows over one process group, each row moves at most once. All other conversions go through
the whole tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from shardwise import _compat
from shardwise.comm.agree import Agreement
from shardwise.comm.exchange import exchange, gather
from shardwise.comm.exchange import part as part_at
from shardwise.comm.watch import announced
from shardwise.errors import ShardingError, here
from shardwise.layout import Box, transfer
from shardwise.sharded_tensor.rows.piece import EvenCuts, Piece, even_boxes, groups_of, local_part


@torch.no_grad()
def make_whole(local: Tensor, piece: Piece) -> Tensor:
    """Return the whole tensor of which every rank gives its rows. Collective over `piece.axes`."""
    if 0 in piece.shape:
        return local.new_empty(piece.shape)
    with ExitStack() as stack:
        for group in () if _compat.is_functional(local) else piece.axes:
            stack.enter_context(announced(group, f"gather a whole tensor\nof shape {list(piece.shape)}"))
        return gather_even(_gather_rows(local, piece), piece.shape, piece.even_cuts)


def _gather_rows(local: Tensor, piece: Piece) -> Tensor:
    """Gather the dims that the piece's groups cut, over one group after another."""
    part = piece.even_part
    if not part.numel:  # no rows are cut of it: tensor parallelism has left this rank no columns
        return local.new_empty(part.sizes)
    if not piece.groups:
        return local.clone()
    whole = local.new_empty((sum(piece.counts), *piece.rows.sizes[1:]))
    whole.narrow(0, piece.rows.offsets[0], piece.rows.sizes[0]).copy_(local)
    step = 1
    for group in piece.groups:
        width = step * group.size()
        first = piece.rank // width * width
        starts = range(first, first + width, step)
        gather([piece.boxes[i : i + step] for i in starts], whole, group=group)
        step = width
    return whole


def gather_even(part: Tensor, shape: Sequence[int], even_cuts: EvenCuts) -> Tensor:
    """Gather the tensor of `shape`, of which this rank has what `even_cuts` leave. Collective over these."""
    if not even_cuts:
        return part
    (group, dim), *inner = even_cuts
    boxes = even_boxes(tuple(shape), group, dim)
    box = boxes[group.rank()]
    whole = part.new_empty(torch.Size(shape))
    inner_part = gather_even(part, box.sizes, tuple(inner))
    part_at(Box.whole(shape), whole, box).copy_(inner_part)
    gather([[box] for box in boxes], whole, group=group)
    return whole


def _move_rows(local: Tensor, source: Sequence[Box], target: Sequence[Box], piece: Piece) -> Tensor:
    """Return this rank's box of `target` from ranks' boxes of `source`. Collective over the one group."""
    source_box, target_box = source[piece.rank], target[piece.rank]
    if _compat.is_functional(local):
        raise ShardingError(
            f"{here()}: rows {source_box} would move to {target_box}, which no graph can hold; copy between"
            " tensors that are sharded otherwise outside of compiled functions"
        )
    assert piece.group is not None
    text = f"{tuple(piece.shape)} {local.dtype}\n{source}\nto\n{target}"
    agreement = Agreement(text, group=piece.group, subject="the rows to move")
    result = local.new_empty(target_box.sizes)
    messages = transfer([[box] for box in source], [[box] for box in target], rank=piece.rank)
    sent, received = [(source_box, local)], [(target_box, result)]
    exchange(messages, source=sent, target=received, group=piece.group, agreement=agreement)
    return result


def _even_over(mesh: DeviceMesh, placements: Sequence[Placement], piece: Piece) -> Sequence[Box] | None:
    """Return the boxes of `placements`, where they cut dim 0 over the ranks over which `piece` is cut."""
    axes = [axis for axis, placement in enumerate(placements) if not placement.is_replicate()]
    if piece.group is None or piece.even_cuts or len(axes) != 1:
        return None
    placement, group = placements[axes[0]], mesh.get_group(axes[0])
    ranks, piece_ranks = map(dist.get_process_group_ranks, (group, piece.group))
    if type(placement) is not Shard or placement.dim != 0 or ranks != piece_ranks:
        return None
    return even_boxes(tuple(piece.shape), group, 0)


@torch.no_grad()
def make_dtensor(local: Tensor, piece: Piece, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Return rows as a DTensor on `mesh`. Collective over the piece's axes, and over `mesh`."""
    if boxes := _even_over(mesh, placements, piece):
        local_placements, part = placements, _move_rows(local, piece.boxes, boxes, piece)
    else:
        local_placements, part = [Replicate()] * mesh.ndim, make_whole(local, piece)
    spec = _compat.dtensor_spec(mesh, local_placements, shape=piece.shape, dtype=local.dtype)
    dtensor = _compat.dtensor(part, spec)
    return dtensor if list(placements) == list(local_placements) else dtensor.redistribute(mesh, placements)


@torch.no_grad()
def rows_of(value: Tensor, piece: Piece) -> Tensor:
    """Return a copy of the rows of `piece`; a plain `value` is whole. Collective where rows must move."""
    if value.shape != piece.shape:
        raise ShardingError(
            f"{here()}: expected a {type(value).__name__} of shape {tuple(piece.shape)}, got"
            f" {tuple(value.shape)}"
        )
    whole = value
    if isinstance(value, DTensor):
        local, source = _compat.local_tensor(value), getattr(value, "piece", None)
        if source == piece:
            return local.clone()
        if isinstance(source, Piece):
            is_one_group = piece.group is not None and source.groups == piece.groups
            if is_one_group and not source.even_cuts and not piece.even_cuts:
                return _move_rows(local, source.boxes, piece.boxes, piece)
            whole = make_whole(local, source)
        elif boxes := _even_over(value.device_mesh, value.placements, piece):
            return _move_rows(local, boxes, piece.boxes, piece)
        elif all(placement.is_replicate() for placement in value.placements):
            whole = local
        else:
            whole = value.full_tensor()
    return local_part(piece, whole).clone(memory_format=torch.contiguous_format)


def scatter_rows(whole: Tensor, piece: Piece, source: int) -> Tensor:
    """Scatter the rows of `piece` from the rank `source` of every mesh axis. Collective over the mesh."""
    box, whole = Box.whole(piece.shape), whole.contiguous()
    for group in groups_of(piece.mesh):
        if group.size() > 1:
            whole = whole if group.rank() == source else torch.empty_like(whole)
            with announced(group, f"distribute a whole tensor\nof shape {list(piece.shape)}"):
                boxes = [[box] if rank == source else [] for rank in range(group.size())]
                gather(boxes, whole, group=group)
    return local_part(piece, whole).clone(memory_format=torch.contiguous_format)


def sum_over(value: Tensor, piece: Piece, axes: Sequence[int]) -> Tensor:
    """Return the ranks' values added up over some of the mesh axes. Collective over these."""
    for axis in axes:
        group = piece.mesh.get_group(axis)
        value = value.clone(memory_format=torch.contiguous_format)
        with announced(group, f"add up a gradient\nof shape {list(piece.shape)}"):
            dist.all_reduce(value, group=group)
    return value


def partial_axes(
    piece: Piece, grad_placements: Sequence[Placement] | None, placements: Sequence[Placement]
) -> tuple[int, ...]:
    """Return the mesh axes over which a gradient is summed to change `grad_placements` to `placements`."""
    axes = []
    for axis, (placement, grad) in enumerate(zip(placements, grad_placements or (), strict=True)):
        if placement.is_replicate() and isinstance(grad, Partial) and grad.reduce_op == "sum":
            axes.append(axis)
        elif grad != placement and not (grad.is_shard(0) and placement.is_shard(0)):
            raise ShardingError(
                f"{here()}: grad_placements {tuple(grad_placements or ())} of a tensor sharded by rows,"
                f" for a result placed as {tuple(placements)} on {piece.mesh}: on axis {axis} expected"
                f" {placement}" + (" or Partial()" if placement.is_replicate() else "")
            )
    return tuple(axes)
