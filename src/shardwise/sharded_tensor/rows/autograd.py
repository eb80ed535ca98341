"""Rows that change form under autograd: to local and whole tensors, to other placements, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from shardwise.errors import ShardingError, here
from shardwise.sharded_tensor.autograd import linked
from shardwise.sharded_tensor.rows import convert
from shardwise.sharded_tensor.rows.piece import Piece

Wrap = Callable[[Tensor, Piece], Any]  # local rows as a tensor cut as a piece


def to_local(rows: Any, grad_placements: Sequence[Placement] | None) -> Tensor:
    """Return this rank's plain tensor."""
    piece, wrap = rows.piece, rows.wrap
    sums = _partial_axes(piece, grad_placements, piece.placements if grad_placements else ())

    def back(grad: Tensor) -> tuple[Tensor]:
        return (wrap(convert.summed(grad, piece, sums).contiguous(), piece),)

    return cast(Tensor, linked(lambda own: own.local.view_as(own.local), back, rows))


def full_tensor(rows: Any, grad_placements: Sequence[Placement] | None) -> Tensor:
    """Return the whole tensor, equal on all ranks."""
    piece, wrap = rows.piece, rows.wrap
    sums = _partial_axes(piece, grad_placements, [Replicate()] * len(grad_placements or ()))

    def back(grad: Tensor) -> tuple[Tensor]:
        return (wrap(convert.rows_of(convert.summed(grad, piece, sums), piece), piece),)

    return cast(Tensor, linked(lambda own: convert.full_tensor(own.local, piece), back, rows))


def _partial_axes(
    piece: Piece, asked: Sequence[Placement] | None, own: Sequence[Placement]
) -> tuple[int, ...]:
    """Return the mesh axes over which a gradient placed as `asked` is summed to be placed as `own`."""
    found = []
    for axis, (mine, other) in enumerate(zip(own, asked or (), strict=True)):
        if mine.is_replicate() and isinstance(other, Partial) and other.reduce_op == "sum":
            found.append(axis)
        elif other != mine and not (other.is_shard(0) and mine.is_shard(0)):
            raise ShardingError(
                f"{here()}: grad_placements {tuple(asked or ())} of a tensor sharded by rows, for a result"
                f" placed as {tuple(own)} on {piece.mesh}: on axis {axis} expected {mine}"
                + (" or Partial()" if mine.is_replicate() else "")
            )
    return tuple(found)


def redistributed(rows: Any, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Return a DTensor that is placed otherwise."""
    piece, wrap = rows.piece, rows.wrap
    return cast(
        DTensor,
        linked(
            lambda own: convert.placed(own.local, piece, mesh, placements),
            lambda grad: (wrap(convert.rows_of(grad, piece), piece),),
            rows,
        ),
    )


def into_rows(dtensor: DTensor, piece: Piece, wrap: Wrap) -> Any:
    """Return a DTensor, or rows that are cut otherwise, as rows cut as `piece`."""
    mesh = dtensor.device_mesh
    placements = tuple(Replicate() if p.is_partial() else p for p in dtensor.placements)
    return linked(
        lambda source: wrap(convert.rows_of(source, piece), piece),
        lambda grad: (convert.placed(convert.rows_of(grad, piece), piece, mesh, placements),),
        dtensor,
    )


def from_local(local: Tensor, piece: Piece, wrap: Wrap) -> Any:
    """Return this rank's plain tensor as rows cut as `piece`."""
    return linked(
        lambda own: wrap(own.view_as(own), piece), lambda grad: (convert.rows_of(grad, piece),), local
    )
