"""Rows that change form under autograd: to local and whole tensors, to other placements, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from shardwise.errors import ShardingError, here
from shardwise.sharded_tensor.rows import convert
from shardwise.sharded_tensor.rows.piece import Piece, local_part


class ToLocal(torch.autograd.Function):
    """Rows -> this rank's plain tensor."""

    @staticmethod
    def forward(ctx: Any, rows: Any, grad_placements: Sequence[Placement] | None) -> Tensor:
        piece: Piece = rows.piece
        ctx.wrap, ctx.piece = rows.wrap, piece
        ctx.sums = _partial_axes(piece, grad_placements, piece.placements if grad_placements else ())
        local: Tensor = rows.local
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.wrap(convert.summed(grad, ctx.piece, ctx.sums).contiguous(), ctx.piece), None


class FullTensor(torch.autograd.Function):
    """Rows -> the whole tensor, equal on all ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Any, grad_placements: Sequence[Placement] | None) -> Tensor:
        ctx.wrap, ctx.piece = rows.wrap, rows.piece
        whole = [Replicate()] * len(grad_placements or ())
        ctx.sums = _partial_axes(rows.piece, grad_placements, whole)
        return convert.full_tensor(rows.local, rows.piece)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        summed = convert.summed(grad, ctx.piece, ctx.sums)
        mine = local_part(ctx.piece, summed).clone(memory_format=torch.contiguous_format)
        return ctx.wrap(mine, ctx.piece), None


def _partial_axes(
    piece: Piece, asked: Sequence[Placement] | None, own: Sequence[Placement]
) -> tuple[int, ...]:
    """The mesh axes over which a gradient placed as `asked` is to be added up, to be placed as `own`."""
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


class Redistribute(torch.autograd.Function):
    """Rows -> a DTensor that is placed otherwise."""

    @staticmethod
    def forward(ctx: Any, rows: Any, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
        ctx.wrap, ctx.piece = rows.wrap, rows.piece
        return convert.placed(rows.local, rows.piece, mesh, placements)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> Any:
        return ctx.wrap(convert.rows_of(grad, ctx.piece), ctx.piece), None, None


class IntoRows(torch.autograd.Function):
    """A DTensor, or rows that are cut otherwise -> rows cut as `piece`, made by `wrap`."""

    @staticmethod
    def forward(ctx: Any, dtensor: DTensor, piece: Piece, wrap: Any) -> Any:
        ctx.source = dtensor.device_mesh, tuple(dtensor.placements)
        ctx.piece, ctx.wrap = piece, wrap
        return wrap(convert.from_dtensor(dtensor, piece), piece)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        mesh, placements = ctx.source
        placements = tuple(Replicate() if p.is_partial() else p for p in placements)
        rows = convert.rows_of(grad, ctx.piece)
        return convert.placed(rows, ctx.piece, mesh, placements), None, None


class FromLocal(torch.autograd.Function):
    """This rank's plain tensor -> rows cut as `piece`, made by `wrap`."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, piece: Piece, wrap: Any) -> Any:
        ctx.piece = piece
        return wrap(local.view_as(local), piece)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return convert.rows_of(grad, ctx.piece), None, None
