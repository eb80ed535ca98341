"""Row ranges to whole tensors, other row ranges and DTensors, and back.

Two ways of cutting rows over one process group differ by who sends which rows to whom: the intersections
of intervals. One all-to-all moves each row at most once.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shardwise import _compat
from shardwise.comm.watch import announced
from shardwise.errors import ShardingError, here
from shardwise.layout import Box, EvenShard
from shardwise.sharded_tensor.rows.piece import Piece, local_part


@torch.no_grad()
def full_tensor(local: Tensor, piece: Piece) -> Tensor:
    """The whole tensor of which every rank gives its rows. Collective over `piece.axes`."""
    if _compat.is_functional(local):
        return _full_tensor(local, piece)
    with ExitStack() as stack:
        for group in piece.groups:
            stack.enter_context(announced(group, f"gather a whole tensor\nof shape {list(piece.shape)}"))
        return _full_tensor(local, piece)


def _full_tensor(local: Tensor, piece: Piece) -> Tensor:
    if not piece.groups:
        whole = local.clone()
    else:
        boxes = piece.boxes
        largest = max(box.numel for box in boxes)
        shape = (sum(piece.counts), *boxes[0].sizes[1:])
        whole = local.new_empty(shape)
        if largest * piece.ranks <= 2 * whole.numel() or _compat.is_functional(local):
            _gather_padded(whole, local, piece, largest)
        else:
            _broadcast_each(whole, local, piece)
    if piece.tensor_parallel is None:
        return whole.view(piece.shape)
    return gather_tensor_parallel(whole, piece.tensor_parallel)


def gather_tensor_parallel(part: Tensor, spec: _compat.DTensorSpec) -> Tensor:
    """The whole of a DTensor described by `spec`, of any dtype. Collective over the axes that cut it."""
    moved = part.view(_MOVED_AS.get(part.element_size(), part.dtype))
    form = _compat.dtensor_spec(spec.mesh, spec.placements, shape=torch.Size(spec.shape), dtype=moved.dtype)
    return _compat.dtensor(moved, form).full_tensor().view(part.dtype)


# gloo knows these dtypes, not all.
_MOVED_AS = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}


def _gather_padded(whole: Tensor, local: Tensor, piece: Piece, largest: int) -> None:
    """Rows that all ranks hold about equally many of: one all-gather a group, padded to the most."""
    gathered = local.reshape(-1)
    if gathered.numel() < largest:
        gathered = local.new_zeros(largest)
        gathered[: local.numel()].copy_(local.reshape(-1))
    for group in piece.groups:
        if _compat.is_functional(gathered):
            gathered = _compat.traced_all_gather(gathered, group.size(), group.group_name)
            continue
        wider = local.new_empty(group.size() * gathered.numel())
        _compat.all_gather_single(_as_bytes(wider), _as_bytes(gathered), group, async_op=False)
        gathered = wider
    for part, box in zip(gathered.view(piece.ranks, largest), piece.boxes, strict=True):
        if box.numel:
            whole.narrow(0, box.offsets[0], box.sizes[0]).copy_(part[: box.numel].view(box.sizes))


def _broadcast_each(whole: Tensor, local: Tensor, piece: Piece) -> None:
    """Rows that few ranks hold: one broadcast for each, in place, and no byte of padding."""
    mine = piece.boxes[piece.rank]
    if mine.numel:
        whole.narrow(0, mine.offsets[0], mine.sizes[0]).copy_(local)
    step = 1
    for group in piece.groups:
        first = piece.rank // (step * group.size()) * (step * group.size())
        for index in range(first, first + step * group.size()):
            box = piece.boxes[index]
            if box.numel:
                rows = whole.narrow(0, box.offsets[0], box.sizes[0])
                dist.broadcast(_as_bytes(rows), group=group, group_src=(index - first) // step)
        step *= group.size()


def _as_bytes(tensor: Tensor) -> Tensor:
    """The same memory, flat, in a dtype that every backend moves."""
    return tensor.view(-1).view(torch.uint8)


def overlaps(mine: Box, others: Sequence[Box]) -> list[tuple[int, int]]:
    """The rows that `mine` shares with each of `others`: the first, counted within `mine`, and how many."""
    shared = [mine.intersect(other) for other in others]
    return [(0, 0) if box is None else (box.offsets[0] - mine.offsets[0], box.sizes[0]) for box in shared]


def move_rows(
    local: Tensor,
    source: Sequence[Box],
    target: Sequence[Box],
    rank: int,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """This rank's rows by `target` (a box for each rank of `group`) from the ranks' rows by `source`.

    Collective over `group`; None stands for this rank alone.
    """
    wanted = target[rank]
    if group is None:
        return local.clone()
    if _compat.is_functional(local):
        raise ShardingError(
            f"{here()}: rows {source[rank]} would move to {wanted}, which no graph can hold; copy between"
            " tensors that are sharded otherwise outside of compiled functions"
        )
    width = wanted.sizes[1:]
    sends, receives = overlaps(source[rank], target), overlaps(wanted, source)
    row_numel = torch.Size(width).numel()
    row_bytes = row_numel * local.element_size()
    outgoing = torch.cat([local.narrow(0, *rows).reshape(-1) for rows in sends])
    incoming = local.new_empty(sum(count for _, count in receives) * row_numel)
    dist.all_to_all_single(
        _as_bytes(incoming),
        _as_bytes(outgoing),
        [count * row_bytes for _, count in receives],
        [count * row_bytes for _, count in sends],
        group=group,
    )
    parts = incoming.split([count * row_numel for _, count in receives])
    moved = local.new_empty(wanted.sizes)
    for rows, part in zip(receives, parts, strict=True):
        moved.narrow(0, *rows).copy_(part.view(rows[1], *width))
    return moved


@torch.no_grad()
def moved(local: Tensor, piece: Piece, to: Piece) -> Tensor:
    """The rows of `to`. Collective over both pieces' groups."""
    plain = piece.tensor_parallel is None and to.tensor_parallel is None
    if plain and piece.groups == to.groups and piece.group is not None:
        return move_rows(local, piece.boxes, to.boxes, to.rank, to.group)
    return local_part(to, full_tensor(local, piece)).clone()


def _even_boxes(piece: Piece) -> list[Box]:
    shape = tuple(piece.shape)
    return [EvenShard(0).box(shape, rank=rank, ranks=piece.ranks) for rank in range(piece.ranks)]


def _is_even(mesh: DeviceMesh, placements: Sequence[Placement], piece: Piece) -> bool:
    """Do `placements` cut dim 0 evenly over just the ranks, in their order, over which `piece` is cut?"""
    if piece.group is None or piece.tensor_parallel is not None:
        return False
    cut = [axis for axis, placement in enumerate(placements) if not placement.is_replicate()]
    if len(cut) != 1 or type(placements[cut[0]]) is not Shard or placements[cut[0]] != Shard(0):
        return False
    group = mesh.get_group(cut[0])
    return group == piece.group or dist.get_process_group_ranks(group) == piece.group_ranks


@torch.no_grad()
def to_dtensor(local: Tensor, piece: Piece, mesh: DeviceMesh | None) -> DTensor:
    """Rows wherever they lie to even chunks of dim 0. Collective over the piece's one group."""
    if piece.group is None or piece.tensor_parallel is not None:
        raise ShardingError(
            f"{here()}: only rows cut over one mesh axis convert to a DTensor, got {piece}; use full_tensor()"
        )
    if mesh is None:
        mesh = DeviceMesh.from_group(piece.group, local.device.type)
    elif mesh.ndim != 1 or not _is_even(mesh, (Shard(0),), piece):
        raise ShardingError(
            f"{here()}: expected a 1-D mesh of ranks {piece.group_ranks}, which hold the rows, got {mesh};"
            " pass that mesh, or None to make one"
        )
    return placed(local, piece, mesh, (Shard(0),))


@torch.no_grad()
def placed(local: Tensor, piece: Piece, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Rows as a DTensor on `mesh`. Collective over the piece's axes, and over `mesh`."""
    if _is_even(mesh, placements, piece):
        part = move_rows(local, piece.boxes, _even_boxes(piece), piece.rank, piece.group)
        return _compat.dtensor(
            part, _compat.dtensor_spec(mesh, placements, shape=piece.shape, dtype=local.dtype)
        )
    replicated = [Replicate()] * mesh.ndim
    spec = _compat.dtensor_spec(mesh, replicated, shape=piece.shape, dtype=local.dtype)
    whole = _compat.dtensor(full_tensor(local, piece), spec)
    return whole if list(placements) == replicated else whole.redistribute(mesh, placements)


def rows_of(value: Tensor, piece: Piece) -> Tensor:
    """The rows of `piece` of any tensor; a plain one is whole. Collective where `from_dtensor` is."""
    if isinstance(value, DTensor):
        return from_dtensor(value, piece)
    return local_part(piece, value).clone(memory_format=torch.contiguous_format)


@torch.no_grad()
def from_dtensor(dtensor: DTensor, piece: Piece) -> Tensor:
    """The rows of `piece`. Collective over the DTensor's mesh; local where each rank has its rows."""
    if dtensor.shape != piece.shape:
        raise ShardingError(
            f"{here()}: expected a DTensor of shape {tuple(piece.shape)}, got {tuple(dtensor.shape)}"
        )
    local = _compat.local_tensor(dtensor)
    if (known := getattr(dtensor, "piece", None)) is not None:
        return local.clone() if known == piece else moved(local, known, piece)
    if all(isinstance(placement, Replicate) for placement in dtensor.placements):
        return local_part(piece, local).clone()
    if _is_even(dtensor.device_mesh, dtensor.placements, piece):
        return move_rows(local, _even_boxes(piece), piece.boxes, piece.rank, piece.group)
    return local_part(piece, dtensor.full_tensor()).clone()


def scattered(whole: Tensor, piece: Piece, source: int) -> Tensor:
    """The rows of `piece` from the rank that is `source` on every mesh axis. Collective over the mesh."""
    whole = whole.contiguous()
    for axis in range(piece.mesh.ndim):
        group = piece.mesh.get_group(axis)
        if group.size() > 1:
            whole = whole if group.rank() == source else torch.empty_like(whole)
            with announced(group, f"distribute a whole tensor\nof shape {list(piece.shape)}"):
                dist.broadcast(_as_bytes(whole), group=group, group_src=source)
    return local_part(piece, whole).clone(memory_format=torch.contiguous_format)


def summed(value: Tensor, piece: Piece, axes: Sequence[int]) -> Tensor:
    """The ranks' values added up over some of the mesh axes. Collective over these."""
    for axis in axes:
        group = piece.mesh.get_group(axis)
        value = value.clone(memory_format=torch.contiguous_format)
        with announced(group, f"add up a gradient\nof shape {list(piece.shape)}"):
            dist.all_reduce(value, group=group)
    return value
