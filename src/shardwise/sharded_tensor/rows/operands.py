"""Tensors of any kind as this rank's rows of them, and back.

A plain tensor beside a sharded one is taken for the whole tensor, equal on all ranks, never for local
rows. A DTensor that is placed otherwise is brought to the rows (collective), as DTensors do among themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.errors import ShardingError, here
from shardwise.sharded_tensor.rows import convert
from shardwise.sharded_tensor.rows.piece import Piece, local_part
from shardwise.sharded_tensor.rows.tensor import ShardedParameter, ShardedRows

_HINTS = {
    **dict.fromkeys(
        ("t", "transpose", "permute", "mm", "addmm", "bmm", "matmul", "_foreach_mm"),
        " An optimizer that multiplies whole matrices, such as torch.optim.Muon, cannot work on rows: use"
        " shardwise.optim.Muon.",
    ),
    **dict.fromkeys(
        ("view", "reshape", "_unsafe_view", "cat"),
        " An optimizer that flattens parameters, such as torch.optim.LBFGS, cannot work on rows.",
    ),
}


_FORWARD = (
    " If a module got here, it was called outside the forward of its fully_shard module: call that one; or"
    " make the method that calls this a forward with register_fsdp_forward_method; or call unshard() first."
)


def refuse(op: Any, args: Any, kwargs: Any, why: str = "") -> NoReturn:
    """Raise for an op whose answer from this rank's rows alone would be wrong."""
    listed = [value if isinstance(value, (list, tuple)) else [value] for value in (*args, *kwargs.values())]
    sharded = next((value for each in listed for value in each if isinstance(value, ShardedRows)), None)
    name = op._schema.name.removeprefix("aten::")
    which = "" if sharded is None else f" (here {_called(sharded.piece.name)}of shape {tuple(sharded.shape)})"
    raise ShardingError(
        f"{here()}: {op} is not defined {why or 'on tensors sharded by rows'}{which}: from this rank's rows"
        " alone its answer would be wrong. Use .full_tensor() for the whole tensor (collective), or .local"
        f" for this rank's rows.{_HINTS.get(name, '')}"
        + (_FORWARD if isinstance(sharded, ShardedParameter) else "")
    )


def _called(name: str) -> str:
    return f"'{name}' " if name else ""


def is_foreign(value: Any) -> bool:
    """Return whether `value` is a DTensor, and not rows."""
    return isinstance(value, DTensor) and not isinstance(value, ShardedRows)


def whole(tensor: ShardedRows) -> Tensor:
    """Return the whole tensor, below autograd. Collective."""
    return convert.full_tensor(tensor.local, tensor.piece)


def rows(local: Tensor, piece: Piece) -> ShardedRows:
    """Return a result on this rank, as its rows of the whole result."""
    assert local.shape == piece.rows.sizes, (local.shape, piece)
    return ShardedRows.wrap(local.contiguous(), piece)


def result_piece(op: Any, operands: Sequence[Any]) -> Piece:
    """Return how the result of an elementwise op is cut."""
    tensors = [value for value in operands if isinstance(value, Tensor)]
    pieces = [value.piece for value in tensors if isinstance(value, ShardedRows)]
    widest = max(pieces, key=lambda piece: piece.shape.numel()) if len(pieces) > 1 else pieces[0]
    if all(value.ndim == 0 or value.shape == widest.shape for value in tensors):
        return widest
    try:
        shape = torch.broadcast_shapes(*(value.shape for value in tensors))
    except RuntimeError:
        shape = torch.Size()
    if shape == widest.shape:
        return widest
    if len(shape) == len(widest.shape) and shape[0] == widest.shape[0]:
        of = [d if shape[d] == widest.shape[d] else None for d in range(1, len(shape))]
        if not widest.axes_along([d for d in range(1, len(shape)) if d not in of]):
            return widest.with_trailing(shape[1:], of=of)
    other = next(value for value in tensors if value.ndim and value.shape != widest.shape)
    raise _misfit(op, other, widest)


def local_operand(op: Any, value: Any, piece: Piece) -> Any:
    """Return an operand of an elementwise op as this rank's rows, where the result is cut as `piece`."""
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, ShardedRows):
        if value.piece is not piece and value.piece != piece and not _broadcasts(value.piece, piece):
            raise ShardingError(
                f"{here()}: {op} got tensors that are cut differently: {value.piece.box} of"
                f" {tuple(value.shape)} and {piece.box} of {tuple(piece.shape)}. Bring them to one cut"
                " first, with copy_() or full_tensor()"
            )
        return value._local_tensor
    if isinstance(value, DTensor):
        if value.shape == piece.shape:
            return convert.rows_of(value, piece)
        with torch.no_grad():
            value = value.full_tensor()
    if value.ndim == 0:
        return value
    first = len(piece.shape) - value.ndim
    if first < 0 or any(s not in (1, piece.shape[first + d]) for d, s in enumerate(value.shape)):
        raise _misfit(op, value, piece)
    return local_part(piece, value)


def _misfit(op: Any, value: Tensor, piece: Piece) -> ShardingError:
    return ShardingError(
        f"{here()}: {op} got a tensor of shape {tuple(value.shape)} beside a sharded one of global shape"
        f" {tuple(piece.shape)} (this rank: {piece.box}), to which it does not broadcast. Plain operands are"
        " whole tensors; for local rows operate on .local"
    )


def _broadcasts(piece: Piece, to: Piece) -> bool:
    """Return whether `piece` broadcasts to `to`: the same rows, and the same cut of dims that are equal."""
    if len(piece.shape) != len(to.shape) or piece.shape[0] != to.shape[0]:
        return False
    of = [d if piece.shape[d] == to.shape[d] else None for d in range(1, len(to.shape))]
    if any(d is None and size != 1 for d, size in zip(of, piece.shape[1:], strict=True)):
        return False
    return to.with_trailing(piece.shape[1:], of=of) == piece
