"""Ops over lists of tensors, which optimizers and gradient clipping use.

Elementwise ones, foreach and fused, are one call on the lists of local rows. Norms are those of the
whole tensors, with one all-reduce for all tensors that are cut over the same process group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import compress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from shardwise import _compat
from shardwise.errors import ShardingError, here
from shardwise.sharded_tensor.registry import Args, Handler, Kwargs
from shardwise.sharded_tensor.rows.elementwise import is_foreign, local_operand, refuse, result_piece, rows
from shardwise.sharded_tensor.rows.piece import Piece
from shardwise.sharded_tensor.rows.reductions import HALF, MAX, all_reduced, combine_powers
from shardwise.sharded_tensor.rows.tensor import ShardedRows

_pieces: Callable[[Any], Piece] = attrgetter("piece")
_locals: Callable[[Any], Tensor] = attrgetter("_local_tensor")


def foreach(op: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run an elementwise op on lists, including fused ones. A steady step costs two `map`s per list."""
    first = args[0] if type(args[0]) is list else args[1]
    try:
        pieces = list(map(_pieces, first))
        locals_ = [_local_list(value, pieces) for value in args]
        named = {name: _local_list(value, pieces) for name, value in kwargs.items()} if kwargs else kwargs
    except (AttributeError, _CutsDiffer):
        return _foreach_mixed(op, args, kwargs)
    if op._schema.returns:
        return [rows(*pair) for pair in zip(op(*locals_, **named), pieces, strict=True)]
    numels = list(map(Tensor.numel, locals_[0])) if type(locals_[0]) is list and not named else ()
    if 0 in numels:  # each would cost as much as one with rows
        count = len(numels)
        locals_ = [list(compress(v, numels)) if type(v) is list and len(v) == count else v for v in locals_]
    if not numels or locals_[0]:
        op(*locals_, **named)
    return None


class _CutsDiffer(Exception):  # noqa: N818 - not an error: the list takes the slower way
    pass


def _local_list(value: Any, pieces: list[Piece]) -> Any:
    """Return a list cut as `pieces`, as its rows. Anything but a list of tensors with dims stays."""
    if type(value) is not list or not value or not isinstance(value[0], Tensor):
        if isinstance(value, ShardedRows):
            raise _CutsDiffer
        return value
    if value[0].ndim == 0 and not isinstance(value[0], ShardedRows):
        return value
    if list(map(_pieces, value)) != pieces:
        raise _CutsDiffer
    return list(map(_locals, value))


def _foreach_mixed(op: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run an op on lists in which some tensors are plain, or broadcast: cut place by place."""
    values = [*args, *kwargs.values()]
    count = len(args[0] if type(args[0]) is list else args[1])
    listed = [isinstance(value, list) and len(value) == count for value in values]
    if any(isinstance(value, ShardedRows) for value in values):
        raise ShardingError(f"{here()}: {op} got a sharded tensor where it expects a plain scalar tensor")
    columns = [value if is_list else [value] * count for value, is_list in zip(values, listed, strict=True)]
    places = list(zip(*columns, strict=True))
    pieces = [_piece_at(op, place) for place in places]

    def cut(value: Any, piece: Piece | None) -> Any:
        if piece is None:
            return value
        local = local_operand(op, value, piece)
        return local.contiguous() if isinstance(local, Tensor) else local  # fused kernels assume it

    def run(indices: list[int]) -> Any:
        arguments = [
            [cut(column[i], pieces[i]) for i in indices] if is_list else column[0]
            for column, is_list in zip(columns, listed, strict=True)
        ]
        return op(*arguments[: len(args)], **dict(zip(kwargs, arguments[len(args) :], strict=True)))

    results = _run_by_kind(places, run)
    if not op._schema.returns:
        return None
    return [v if piece is None else rows(v, piece) for v, piece in zip(results, pieces, strict=True)]


def _piece_at(op: Any, place: Sequence[Any]) -> Piece | None:
    """Return the piece of the result at one place of the lists; None if plain, or another DTensor."""
    if not any(isinstance(value, ShardedRows) for value in place):
        return None
    if op._schema.returns:
        return result_piece(op, place)
    targets = place[:1]
    if op._schema.name.startswith("aten::_fused_"):
        param, grad, *state = place
        targets = (param, *state) if grad.shape == param.shape else place
    plain = [v for v in targets if isinstance(v, Tensor) and v.ndim and not isinstance(v, ShardedRows)]
    if plain:
        raise ShardingError(
            f"{here()}: {op} would write tensors sharded by rows into a plain one of shape"
            f" {tuple(plain[0].shape)}; parameter, gradient and optimizer state must be cut alike"
        )
    piece: Piece = place[0].piece
    return piece


def _run_by_kind(places: Sequence[Sequence[Any]], run: Callable[[list[int]], Any]) -> list[Any]:
    """Return the results of `run` by place; plain DTensors get a separate call."""
    results: list[Any] = [None] * len(places)
    native = [any(isinstance(v, ShardedRows) for v in p) or not any(map(is_foreign, p)) for p in places]
    for kind in (True, False):
        indices = [i for i, is_native in enumerate(native) if is_native == kind]
        if indices and (outputs := run(indices)) is not None:
            for i, result in zip(indices, outputs, strict=True):
                results[i] = result
    return results


def norms(op: Any, args: Args, kwargs: Kwargs) -> list[Tensor]:
    """Run `_foreach_norm`, or `_foreach_powsum`: sums of powers, without the root."""
    tensors: Sequence[Tensor] = args[0]
    p = float(args[1] if len(args) > 1 else kwargs.get("ord", 2))
    out_dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    root = op._schema.name == "aten::_foreach_norm"
    if "out" in kwargs or (p < 0 and not root):
        refuse(op, args, kwargs)
    if not all(type(t) is ShardedRows for t in tensors) and any(map(is_foreign, tensors)):

        def run(indices: list[int]) -> list[Tensor]:
            results = op([tensors[i] for i in indices], *args[1:], **kwargs)
            return [norm.full_tensor() if is_foreign(norm) else norm for norm in results]

        return _run_by_kind([[tensor] for tensor in tensors], run)
    locals_ = [_local_of(tensor) for tensor in tensors]
    dtypes = list(dict.fromkeys(local.dtype for local in locals_))
    wide = out_dtype
    if out_dtype in (None, *HALF) and any(dtype in HALF for dtype in dtypes):  # rounded once, at the end
        wide = reduce(torch.promote_types, dtypes, torch.float32)
    axes = [t.piece.axes if isinstance(t, ShardedRows) else () for t in tensors]
    totals = combine_powers(_norms_of_rows(locals_, p, wide), axes, p, root=root)
    if len(dtypes) == 1 and len({local.device for local in locals_}) == 1:
        return list(totals.to(out_dtype or dtypes[0].to_real()).unbind())
    return [
        total.to(local.device, out_dtype or local.dtype.to_real())
        for total, local in zip(totals.unbind(), locals_, strict=True)
    ]


def _norms_of_rows(locals_: Sequence[Tensor], p: float, dtype: torch.dtype | None) -> Tensor:
    """Return [tensors] on the device of the first; a neutral value where there are no rows."""
    indices, device = [i for i, local in enumerate(locals_) if local.numel()], locals_[0].device
    nothing = torch.full((len(locals_),), math.inf if p < 0 else 0.0, device=device)
    if not indices:
        return nothing
    results = _compat.foreach_norm([locals_[i] for i in indices], p, dtype)  # type: ignore[arg-type]
    if len({(norm.dtype, norm.device) for norm in results}) > 1:
        results = [norm.to(device, torch.float64) for norm in results]
    norms = torch.stack(list(results))
    if len(indices) == len(locals_):
        return norms
    return nothing.to(norms.dtype).index_copy_(0, torch.tensor(indices, device=device), norms)


def maxima(op: Any, args: Args, kwargs: Kwargs) -> list[Tensor]:
    if kwargs:
        refuse(op, args, kwargs)
    return [torch.max(tensor) for tensor in args[0]]


def unscale(op: Any, args: Args, kwargs: Kwargs) -> None:
    """Unscale gradients; a value that is not finite on one rank counts on all."""
    tensors, found_inf, scale = args
    if foreign := [tensor for tensor in tensors if is_foreign(tensor)]:
        op(foreign, found_inf, scale, **kwargs)
    op([_local_of(tensor) for tensor in tensors if not is_foreign(tensor)], found_inf, scale, **kwargs)
    axes = [group for t in tensors if isinstance(t, ShardedRows) for group in t.piece.axes]
    for group in dict.fromkeys(axes):  # in the order of the list, which is that of every rank
        found_inf.copy_(all_reduced(found_inf, MAX, group))


def _local_of(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, ShardedRows) else tensor


LISTS: dict[str, Handler] = {
    "_foreach_norm": norms,
    "_foreach_powsum": norms,
    "_foreach_max": maxima,
    "_amp_foreach_non_finite_check_and_unscale_": unscale,
    **dict.fromkeys(("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"), foreach),
}
