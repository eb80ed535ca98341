"""Ops that stay within rows: elementwise arithmetic, copies, random numbers, new tensors, views, products.

All run on the local rows. Random numbers are drawn for the whole tensor, in a temporary of its size,
and cut: ranks with equal seeds agree, and get what one process gets.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.errors import ShardingError, here
from shardwise.sharded_tensor.registry import Handler
from shardwise.sharded_tensor.rows import convert
from shardwise.sharded_tensor.rows.operands import is_foreign, local_operand, refuse, result_piece, rows
from shardwise.sharded_tensor.rows.operands import whole as whole_of
from shardwise.sharded_tensor.rows.piece import Piece, local_part
from shardwise.sharded_tensor.rows.tensor import ShardedRows

_KEEPS_ROWS = (None, torch.preserve_format, torch.contiguous_format)


def elementwise(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an elementwise op on tensors of the same cut; return a new tensor (or several), or `out`."""
    if kwargs.get("memory_format") not in _KEEPS_ROWS or kwargs.get("layout") not in (None, torch.strided):
        refuse(op, args, kwargs, "in another memory format on tensors sharded by rows")
    out = kwargs.get("out")
    piece = result_piece(op, (*args, *(value for name, value in kwargs.items() if name != "out")))
    if out is not None and (not isinstance(out, ShardedRows) or out.piece != piece):
        refuse(op, args, kwargs, "with an out= that is cut otherwise, on tensors sharded by rows")
    local = op(
        *[local_operand(op, value, piece) for value in args],
        **{name: local_operand(op, value, piece) for name, value in kwargs.items()},
    )
    if out is not None:
        return out
    return rows(local, piece) if isinstance(local, Tensor) else tuple(rows(each, piece) for each in local)


def elementwise_(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an elementwise op that writes into its first argument."""
    target = args[0]
    if not isinstance(target, ShardedRows):
        raise ShardingError(
            f"{here()}: {op} would write a tensor sharded by rows into a {type(target).__name__} of shape"
            f" {tuple(target.shape)}; use full_tensor() first"
        )
    piece = target.piece
    op(
        *[local_operand(op, value, piece) for value in args],
        **{name: local_operand(op, value, piece) for name, value in kwargs.items()},
    )
    return target


def copy_(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy from a whole plain tensor or equally cut rows; collective from other rows or a DTensor."""
    target, source, *rest = args
    if isinstance(source, ShardedRows) and source.shape == target.shape:
        if isinstance(target, ShardedRows):
            if source.piece != target.piece:
                source = rows(convert.rows_of(source, target.piece), target.piece)
        elif isinstance(target, DTensor):
            mesh, placements = target.device_mesh, target.placements
            return target.copy_(convert.placed(source.local, source.piece, mesh, placements))
    return elementwise_(op, (target, source, *rest), kwargs)


def random(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `rand_like` and its kin, and with rows as probabilities `bernoulli` (collective)."""
    return rows(_drawn(op, args, kwargs), args[0].piece)


def random_(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not isinstance(args[0], ShardedRows):
        refuse(op, args, kwargs, "into a plain tensor from one sharded by rows")
    args[0]._local_tensor.copy_(_drawn(op, args, kwargs))
    return args[0]


def _drawn(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    first = args[0]
    if first.is_meta:
        drawn: Tensor = op(first._local_tensor, *args[1:], **kwargs)
        return drawn
    if op._schema.name == "aten::bernoulli":
        whole = whole_of(first)
    else:
        whole = torch.empty(first.shape, dtype=first.dtype, device=first.device)
    others = [whole_of(value) if isinstance(value, ShardedRows) else value for value in args[1:]]
    return local_part(first.piece, op(whole, *others, **kwargs)).clone()


def eye(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out = kwargs["out"]
    if tuple(out.shape) != (args[0], args[-1]):
        refuse(op, args, kwargs)
    return out.copy_(torch.eye(*out.shape, dtype=out.dtype, device=out.device))


def new(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `new_zeros` and its kin: cut the same way where dim 0 is the rows, else plain and whole."""
    like, size = args[0], tuple(args[1])
    piece: Piece = like.piece
    if not size or size[:1] != tuple(like.shape[:1]):
        return op(like._local_tensor, *args[1:], **kwargs)
    of = [d if d < len(piece.shape) and piece.shape[d] == size[d] else None for d in range(1, len(size))]
    piece = piece if size == tuple(like.shape) else piece.with_trailing(size[1:], of=of)
    return rows(op(like._local_tensor, piece.rows.sizes, *args[2:], **kwargs), piece)


def view(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run views (and `expand` to no more) that leave dim 0 and dims cut by tensor parallelism alone."""
    tensor, size = args[0], args[1]
    if isinstance(size, torch.dtype) or len(args) > 2 or any(kwargs.values()):
        refuse(op, args, kwargs)
    piece, sizes = tensor.piece, op(torch.empty(tensor.shape, device="meta"), size).shape
    if sizes.numel() != tensor.numel() or sizes[:1] != tensor.shape[:1]:
        refuse(op, args, kwargs)
    if sizes == tensor.shape:
        return ShardedRows.wrap(tensor._local_tensor, piece)
    if piece.axes_along(range(1, len(piece.shape))):
        refuse(op, args, kwargs)
    piece = piece.with_trailing(sizes[1:])
    return rows(tensor._local_tensor.view(piece.rows.sizes), piece)


def product(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `mm`, rows times a whole matrix, or `bmm`, the matrices of the same rows, one by one."""
    a, b = args
    if not isinstance(a, ShardedRows) or a.piece.axes_along(range(1, a.ndim)) or is_foreign(b):
        refuse(op, args, kwargs)
    if op._schema.name == "aten::bmm":
        if isinstance(b, ShardedRows):
            if b.piece.counts != a.piece.counts or b.piece.axes != a.piece.axes:
                refuse(op, args, kwargs)
            local = b._local_tensor
        else:
            local = local_part(a.piece.with_trailing(b.shape[1:]), b)
        return rows(op(a._local_tensor, local), a.piece.with_trailing((a.shape[1], b.shape[2])))
    if isinstance(b, ShardedRows):
        if b.shape[0] != 1:  # a whole matrix would have to be gathered
            refuse(op, args, kwargs)
        b = whole_of(b)
    return rows(op(a._local_tensor, b), a.piece.with_trailing((b.shape[1],)))


def index_put_(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `rows[mask] = scalar`, with a mask of the same cut."""
    target, indices, value = args[:3]
    mask = indices[0] if len(indices) == 1 else None
    if (
        not isinstance(target, ShardedRows)
        or not isinstance(mask, ShardedRows)
        or (mask.dtype, mask.piece) != (torch.bool, target.piece)
        or value.ndim
        or any(args[3:])
    ):
        refuse(op, args, kwargs)
    target._local_tensor.masked_fill_(mask._local_tensor, value)
    return target


def scalar(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `item()` of a tensor of one element, wherever it lies (collective)."""
    if args[0].numel() != 1:
        refuse(op, args, kwargs)
    return whole_of(args[0]).item()


# Elementwise, though torch does not tag them so.
UNTAGGED = {
    "alias", "clone", "detach", "empty_like", "fill", "fill_", "floor_divide", "floor_divide_", "full_like",
    "lift_fresh", "ones_like", "_pin_memory", "_to_copy", "zero_", "zeros_like",
}  # fmt: skip
OTHERS: dict[str, Handler] = {
    **dict.fromkeys(("bernoulli", "rand_like", "randn_like", "randint_like"), random),
    **dict.fromkeys(
        ("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_",
         "uniform_"), random_,
    ),
    "copy_": copy_,
    "eye": eye,
    **dict.fromkeys(("new_empty", "new_zeros", "new_ones", "new_full"), new),
    **dict.fromkeys(("view", "_unsafe_view", "expand"), view),
    "index_put_": index_put_,
    **dict.fromkeys(("mm", "bmm"), product),
    "_local_scalar_dense": scalar,
}  # fmt: skip
