"""Ops over lists of tensors: what optimizers and gradient clipping are made of.

Elementwise ones, foreach and fused, are one call on the lists of local rows. Norms are those of the
whole tensors, in one all-reduce for all tensors that are cut over the same process group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise import _compat
from shardwise.errors import ShardingError, here
from shardwise.sharded_tensor.rows.operands import is_foreign, local_operand, refuse, result_piece, rows
from shardwise.sharded_tensor.rows.piece import Piece
from shardwise.sharded_tensor.rows.reductions import MAX, all_reduced, combine_powers
from shardwise.sharded_tensor.rows.registry import Handler
from shardwise.sharded_tensor.rows.tensor import ShardedRows

_pieces: Callable[[Any], Piece] = attrgetter("piece")
_locals: Callable[[Any], Tensor] = attrgetter("_local_tensor")


def foreach(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An elementwise op on lists, fused ones too. A steady step costs two `map`s for each list."""
    first = args[0] if type(args[0]) is list else args[1]
    try:
        pieces = list(map(_pieces, first))
        locals_ = [_same(value, pieces) for value in args]
        named = {name: _same(value, pieces) for name, value in kwargs.items()} if kwargs else kwargs
    except (AttributeError, _Differs):
        return _mixed(op, args, kwargs)
    result = op(*locals_, **named)
    return [rows(*each) for each in zip(result, pieces, strict=True)] if op._schema.returns else None


class _Differs(Exception):  # noqa: N818 - not an error: the list takes the slower way
    pass


def _same(value: Any, pieces: list[Piece]) -> Any:
    """A list cut as `pieces`, as its rows. Anything but a list of tensors with dims stays."""
    if type(value) is not list or not value or not isinstance(value[0], Tensor):
        if isinstance(value, ShardedRows):
            raise _Differs
        return value
    if value[0].ndim == 0 and not isinstance(value[0], ShardedRows):
        return value
    if list(map(_pieces, value)) != pieces:
        raise _Differs
    return list(map(_locals, value))


def _mixed(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Lists in which some tensors are plain, or broadcast: place by place."""
    values = [*args, *kwargs.values()]
    count = len(args[0] if type(args[0]) is list else args[1])
    fused = op._schema.name.startswith("aten::_fused_")
    per_place = [value if _is_list(value, count) else [value] * count for value in values]
    pieces: list[Piece | None] = []
    for place in zip(*per_place, strict=True):
        if not any(isinstance(value, ShardedRows) for value in place):
            pieces.append(None)
            continue
        plain = [isinstance(v, Tensor) and v.ndim > 0 and not isinstance(v, ShardedRows) for v in place]
        writes = not op._schema.returns
        if (writes and plain[0]) or (fused and any(plain)):
            at = next(v for v, is_plain in zip(place, plain, strict=True) if is_plain)
            raise ShardingError(
                f"{here()}: {op} would write tensors sharded by rows into a plain one of shape"
                f" {tuple(at.shape)}; parameter, gradient and optimizer state must be cut alike"
            )
        pieces.append(place[0].piece if writes else result_piece(op, place))
    cut = [
        [v if piece is None else local_operand(op, v, piece) for v, piece in zip(value, pieces, strict=True)]
        if _is_list(original, count)
        else original
        for value, original in zip(per_place, values, strict=True)
    ]
    if any(isinstance(value, ShardedRows) for value in cut):
        raise ShardingError(f"{here()}: {op} got a sharded tensor where it expects a plain scalar tensor")

    def run(at: list[int]) -> Any:
        part = [[value[i] for i in at] if _is_list(value, count) else value for value in cut]
        return op(*part[: len(args)], **dict(zip(kwargs, part[len(args) :], strict=True)))

    results = _apart([any(map(is_foreign, place)) for place in zip(*per_place, strict=True)], pieces, run)
    if not op._schema.returns:
        return None
    return [
        local if piece is None else rows(local, piece) for local, piece in zip(results, pieces, strict=True)
    ]


def _apart(
    foreign: Sequence[bool], pieces: Sequence[Piece | None], run: Callable[[list[int]], Any]
) -> list[Any]:
    """The results of `run` by place, where DTensors that are not ours get a call of their own."""
    results: list[Any] = [None] * len(foreign)
    for theirs in (False, True):
        at = [i for i, piece in enumerate(pieces) if (foreign[i] and piece is None) == theirs]
        if at and (found := run(at)) is not None:
            for i, result in zip(at, found, strict=True):
                results[i] = result
    return results


def _is_list(value: Any, count: int) -> bool:
    return isinstance(value, list) and len(value) == count


def norms(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """`_foreach_norm`, and `_foreach_powsum`: sums of powers, without the root."""
    tensors: Sequence[Tensor] = args[0]
    p = float(args[1] if len(args) > 1 else kwargs.get("ord", 2))
    wanted = args[2] if len(args) > 2 else kwargs.get("dtype")
    root = op._schema.name == "aten::_foreach_norm"
    if "out" in kwargs or (p < 0 and not root):
        refuse(op, args, kwargs)
    if any(map(is_foreign, tensors)):
        return _norms_apart(op, tensors, args[1:], kwargs)
    locals_ = [local_of(tensor) for tensor in tensors]
    # A norm in half precision is rounded once, at the end.
    wide = wanted
    if wanted is None or wanted in (torch.bfloat16, torch.float16):
        low = any(t.dtype in (torch.bfloat16, torch.float16) for t in tensors)
        wide = reduce(torch.promote_types, (t.dtype for t in tensors), torch.float32) if low else wanted
    filled = [local for local in locals_ if local.numel()]
    found = iter(_compat.foreach_norm(filled, p, wide) if filled else ())  # type: ignore[arg-type]
    each = [
        next(found) if local.numel() else torch.zeros((), dtype=torch.float32, device=local.device)
        for local in locals_
    ]
    axes = [t.piece.axes if isinstance(t, ShardedRows) else () for t in tensors]
    totals = combine_powers(each, axes, p, root=root)
    return [total.to(wanted or tensor.dtype.to_real()) for total, tensor in zip(totals, tensors, strict=True)]


def _norms_apart(op: Any, tensors: Sequence[Tensor], rest: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """As `norms`; those of DTensors that are not ours are whole too."""
    pieces = [t.piece if isinstance(t, ShardedRows) else None for t in tensors]

    def run(at: list[int]) -> list[Tensor]:
        found = op([tensors[i] for i in at], *rest, **kwargs)
        return [norm.full_tensor() if is_foreign(norm) else norm for norm in found]

    return _apart([is_foreign(tensor) for tensor in tensors], pieces, run)


def maxima(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    if kwargs:
        refuse(op, args, kwargs)
    return [torch.max(tensor) for tensor in args[0]]


def unscale(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Gradient scaling: a gradient that is not finite on one rank counts on all."""
    tensors, found, scale = args
    if foreign := [tensor for tensor in tensors if is_foreign(tensor)]:
        op(foreign, found, scale, **kwargs)
    op([local_of(tensor) for tensor in tensors if not is_foreign(tensor)], found, scale, **kwargs)
    for group in groups_of(t.piece.axes for t in tensors if isinstance(t, ShardedRows)):
        found.copy_(all_reduced(found, MAX, group))


def local_of(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, ShardedRows) else tensor


def groups_of(axes: Iterable[Sequence[dist.ProcessGroup]]) -> list[dist.ProcessGroup]:
    """Each process group once, in the order of the list, which is that of every rank."""
    return list(dict.fromkeys(group for each in axes for group in each))


FUSED = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
LISTS: dict[str, Handler] = {
    "_foreach_norm": norms,
    "_foreach_powsum": norms,
    "_foreach_max": maxima,
    "_amp_foreach_non_finite_check_and_unscale_": unscale,
    **dict.fromkeys(FUSED, foreach),
}
