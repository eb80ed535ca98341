"""What an operator does to tensors that are row ranges of whole ones.

`find_handler(op)` decides once per operator; `HANDLERS` remembers. A handler gets the operator and its
arguments and answers for the whole tensors::

    elementwise    the op on local rows; plain operands are whole tensors and are cut to the rows
    foreach        the same for lists, one call for all
    reductions     the op on local rows, then an all-reduce; along trailing dims no communication
    random         drawn whole from this rank's generator, then cut: ranks that seed alike agree
    the rest       an error that names the op and what to use

A plain tensor beside a sharded one is taken for the whole tensor, equal on all ranks, never for local
rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.errors import ShardingError, here
from shardwise.layout import Box
from shardwise.sharded_parameter.piece import Piece, local_part

if TYPE_CHECKING:
    from shardwise.sharded_parameter.tensor import ShardedRows

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
HANDLERS: dict[Any, Handler] = {}
aten = torch.ops.aten

# Elementwise, though torch does not tag them so.
_ELEMENTWISE = {
    "alias", "clone", "copy_", "detach", "empty_like", "fill_", "full_like", "lift_fresh", "ones_like",
    "_to_copy", "zero_", "zeros_like", "masked_fill_", "lerp_", "clamp_",
}  # fmt: skip
_RANDOM = {
    "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_",
    "rand_like", "randn_like", "randint_like",
}  # fmt: skip


def rows_of(value: Any) -> ShardedRows | None:
    return value if hasattr(value, "piece") else None


def find_handler(op: Any) -> Handler:
    """How to run `op`; remembered for the next time."""
    name = op._schema.name.removeprefix("aten::")
    if name in _REDUCTIONS:
        handler: Handler = _REDUCTIONS[name]
    elif name in ("_foreach_norm", "_foreach_max"):
        handler = _foreach_norm
    elif name == "_amp_foreach_non_finite_check_and_unscale_":
        handler = _unscale
    elif name.startswith(("_foreach_", "_fused_")):
        handler = _foreach
    elif name in _RANDOM:
        handler = _random
    elif name == "copy_":
        handler = _copy
    elif name in _ELEMENTWISE or torch.Tag.pointwise in op.tags:
        handler = _elementwise
    elif name in _OTHERS:
        handler = _OTHERS[name]
    else:
        handler = _refuse
    HANDLERS[op] = handler
    return handler


def _refuse(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shapes = [tuple(value.shape) for value in _flat((args, kwargs)) if rows_of(value) is not None]
    raise ShardingError(
        f"{here()}: {op} is not defined on tensors sharded by rows (here of global shape"
        f" {shapes[0] if shapes else '?'}), and its answer from this rank's rows alone would be wrong. Use"
        " full_tensor() for the whole tensor (collective), or local for this rank's rows. If a forward got"
        " here, it ran outside the call of its fully_shard module"
    )


def _flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _flat(item)]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _flat(item)]
    return [value]


def _wrap(local: Tensor, piece: Piece) -> ShardedRows:
    from shardwise.sharded_parameter.tensor import ShardedRows

    return ShardedRows.wrap(local, piece)


# Elementwise


def _local(value: Any, piece: Piece, op: Any) -> Any:
    """An operand as this rank's rows of it."""
    if not isinstance(value, Tensor):
        return value
    rows = rows_of(value)
    if rows is not None:
        if rows.piece is not piece and rows.piece != piece and not _broadcasts(rows.piece, piece):
            raise ShardingError(
                f"{here()}: {op} got tensors that are cut differently: {rows.piece.box} of"
                f" {tuple(rows.piece.shape)} and {piece.box} of {tuple(piece.shape)}. Bring them to one"
                " placement first, for example with full_tensor()"
            )
        return rows.local
    if isinstance(value, DTensor):
        raise ShardingError(
            f"{here()}: {op} got a DTensor beside a tensor sharded by rows; convert one of them:"
            " to_dtensor() or full_tensor()"
        )
    if value.ndim == 0:
        return value
    first = len(piece.shape) - value.ndim
    if first < 0 or any(s not in (1, piece.shape[first + d]) for d, s in enumerate(value.shape)):
        raise ShardingError(
            f"{here()}: {op} got a plain tensor of shape {tuple(value.shape)} beside a sharded one of global"
            f" shape {tuple(piece.shape)} (this rank: {piece.box}). Plain operands are whole tensors; for"
            " local rows operate on .local"
        )
    return local_part(piece, value)


def _broadcasts(piece: Piece, to: Piece) -> bool:
    """The same rows, of width 1 or fewer dims' worth of the same width?"""
    return (
        piece.groups == to.groups
        and len(piece.shape) == len(to.shape)
        and piece.rows.offsets[0] == to.rows.offsets[0]
        and piece.rows.sizes[0] == to.rows.sizes[0]
        and all(a in (1, b) for a, b in zip(piece.shape[1:], to.shape[1:], strict=True))
    )


def _result_piece(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Piece:
    """The widest of the operands' pieces, which is the result's."""
    pieces = [value.piece for value in (*args, *kwargs.values()) if rows_of(value) is not None]
    return max(pieces, key=lambda piece: piece.shape.numel()) if len(pieces) > 1 else pieces[0]


def _elementwise(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    inplace = op._schema.name[-1] == "_"
    if inplace and rows_of(args[0]) is None:
        raise ShardingError(
            f"{here()}: {op} would write a tensor sharded by rows into a plain tensor of shape"
            f" {tuple(args[0].shape)}; use full_tensor() first"
        )
    piece = args[0].piece if inplace else _result_piece(args, kwargs)
    out = kwargs.get("out")
    local = op(
        *[_local(value, piece, op) for value in args],
        **{name: _local(value, piece, op) for name, value in kwargs.items()},
    )
    if inplace:
        return args[0]
    return out if out is not None else _wrap(local, piece)


def _copy(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, source = args[0], args[1]
    if isinstance(source, DTensor):
        source = source.full_tensor()
    elif (rows := rows_of(source)) is not None and rows_of(target) is not None and rows.piece != target.piece:
        source = rows.full_tensor()
    return _elementwise(op, (target, source, *args[2:]), kwargs)


def _random(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows = args[0]
    piece: Piece = rows.piece
    shape = piece.shape
    like = torch.empty(shape, dtype=rows.dtype, device=rows.device)
    if not rows.device.type == "meta":
        drawn = op(like, *args[1:], **kwargs)
    else:
        drawn = like
    part = local_part(piece, drawn)
    if op._schema.name[-1] == "_":
        rows.local.copy_(part)
        return rows
    return _wrap(part.clone(), piece)


# Lists of tensors


def _foreach(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    first = args[0]
    try:
        pieces = [tensor.piece for tensor in first]
        locals_ = [_locals(value, pieces, op) for value in args]
        named = {name: _locals(value, pieces, op) for name, value in kwargs.items()}
    except AttributeError:
        return _one_by_one(op, args, kwargs)
    result = op(*locals_, **named)
    if not op._schema.returns:
        return None
    return [_wrap(local, piece) for local, piece in zip(result, pieces, strict=True)]


def _locals(value: Any, pieces: list[Piece], op: Any) -> Any:
    """A list of sharded tensors as their rows; AttributeError for one with other tensors in it."""
    if type(value) is not list or not value or not hasattr(value[0], "piece"):
        if isinstance(value, Tensor) and rows_of(value) is not None:
            raise ShardingError(f"{here()}: {op} got a sharded tensor where it expects a plain scalar tensor")
        if type(value) is list and value and isinstance(value[0], Tensor) and value[0].ndim:
            raise AttributeError
        return value
    if [tensor.piece for tensor in value] != pieces:
        raise ShardingError(f"{here()}: {op} got lists of tensors that are cut differently")
    return [tensor._local for tensor in value]


def _one_by_one(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A list op whose lists hold plain tensors too: each as whole tensors."""
    if op._schema.name.startswith("aten::_fused_"):
        raise ShardingError(f"{here()}: {op} got plain parameters and sharded ones in one list; give them")
    count = len(args[0])

    def at(value: Any, index: int) -> Any:
        return value[index] if isinstance(value, (list, tuple)) and len(value) == count else value

    results = []
    for index in range(count):
        mine = [at(value, index) for value in args]
        piece = next((v.piece for v in mine if rows_of(v) is not None), None)
        if piece is None:
            locals_ = mine
        else:
            if rows_of(mine[0]) is None and not op._schema.returns:
                raise ShardingError(f"{here()}: {op} would write a sharded tensor into a plain one")
            locals_ = [_local(v, piece, op) for v in mine]
        args_one = [
            [one] if isinstance(v, (list, tuple)) and len(v) == count else one
            for one, v in zip(locals_, args, strict=True)
        ]
        result = op(*args_one, **kwargs)
        if op._schema.returns:
            results.append(result[0] if piece is None else _wrap(result[0], piece))
    return results if op._schema.returns else None


def _unscale(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Gradient scaling: a gradient that is not finite on one rank counts on all."""
    tensors, found, scale = args
    op([tensor.local for tensor in tensors], found, scale, **kwargs)
    for group in dict.fromkeys(group for tensor in tensors for group in tensor.piece.axes):
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)


# Reductions


def _all_reduce(value: Tensor, axes: Sequence[dist.ProcessGroup], op: Any) -> Tensor:
    for group in axes:
        dist.all_reduce(value, op=op, group=group)
    return value


def _foreach_norm(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The norm of each whole tensor, in one all-reduce for all that are cut over the same axes."""
    tensors = args[0]
    p = float(args[1]) if len(args) > 1 else float(kwargs.get("ord", 2))
    if "_foreach_max" in op._schema.name:
        return [torch.max(tensor) for tensor in tensors]
    dtype = kwargs.get("dtype")
    if not p > 0:
        raise ShardingError(f"{here()}: the {p}-norm of tensors sharded by rows is not supported")
    locals_ = [t.local if rows_of(t) is not None else t for t in tensors]
    norms = list(_norms(locals_, p, dtype))
    by_axes: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
    for i, tensor in enumerate(tensors):
        rows = rows_of(tensor)
        if rows is not None and rows.piece.axes:
            by_axes.setdefault(rows.piece.axes, []).append(i)
    for axes, members in by_axes.items():
        total = _combine_norms(torch.stack([norms[i] for i in members]), axes, p)
        for i, norm in zip(members, total.unbind(), strict=True):
            norms[i] = norm
    return norms


def _norms(locals_: list[Tensor], p: float, dtype: torch.dtype | None) -> list[Tensor]:
    return [torch.linalg.vector_norm(t, p, dtype=dtype) if t.numel() else _zero(t, dtype) for t in locals_]


def _zero(like: Tensor, dtype: torch.dtype | None) -> Tensor:
    return torch.zeros((), dtype=dtype or like.dtype, device=like.device)


def _combine_norms(norms: Tensor, axes: Sequence[dist.ProcessGroup], p: float) -> Tensor:
    if math.isinf(p):
        both = torch.stack([norms.nan_to_num(nan=0.0, posinf=math.inf), norms.isnan().to(norms.dtype)])
        both = _all_reduce(both, axes, dist.ReduceOp.MAX)
        return both[0].masked_fill(both[1] > 0, math.nan)
    return _all_reduce(norms.pow(p), axes, dist.ReduceOp.SUM).pow(1 / p)


def _dims(dim: Any, ndim: int) -> tuple[int, ...]:
    """The dims that a reduction names; all of them if it names none."""
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return tuple(range(ndim))
    return tuple(sorted(d % ndim for d in ([dim] if isinstance(dim, int) else dim)))


def _reduced_piece(piece: Piece, dims: tuple[int, ...], *, keepdim: bool) -> Piece:
    """The piece of a reduction along `dims`, none of which is 0."""
    trailing = [
        1 if dim in dims else size
        for dim, size in enumerate(piece.shape)
        if dim and (keepdim or dim not in dims)
    ]
    return piece.with_trailing(trailing)


def _argument(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str, default: Any) -> Any:
    for place, argument in enumerate(op._schema.arguments):
        if argument.name == name:
            return args[place] if place < len(args) else kwargs.get(name, default)
    return default


def _reduction(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, reduce: Any, empty: float | None
) -> Any:
    """sum, mean, norm, amax, ...: trailing dims are local, anything with dim 0 is all-reduced."""
    rows = args[0]
    piece: Piece = rows.piece
    dims = _dims(_argument(op, args, kwargs, "dim", None), len(piece.shape))
    keepdim = bool(_argument(op, args, kwargs, "keepdim", False))
    if piece.tensor_parallel is not None and dims != tuple(range(len(piece.shape))):
        return _refuse(op, args, kwargs)
    if 0 not in dims:
        return _wrap(op(rows.local, *args[1:], **kwargs), _reduced_piece(piece, dims, keepdim=keepdim))
    local = rows.local
    if not local.numel() and empty is not None:
        local = local.new_full((1, *local.shape[1:]), empty)
    return _all_reduce(op(local, *args[1:], **kwargs), piece.axes, reduce)


def _mean(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    piece: Piece = args[0].piece
    dims = _dims(_argument(op, args, kwargs, "dim", None), len(piece.shape))
    if 0 not in dims:
        return _reduction(op, args, kwargs, reduce=None, empty=None)
    keepdim = bool(_argument(op, args, kwargs, "keepdim", False))
    dtype = kwargs.get("dtype") or args[0].dtype
    total = torch.sum(args[0], dim=dims, keepdim=keepdim, dtype=dtype)
    return total / math.prod(piece.shape[d] for d in dims)


def _norm(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows = args[0]
    piece: Piece = rows.piece
    name = "ord" if op._schema.name.endswith("vector_norm") else "p"
    order = _argument(op, args, kwargs, name, 2)
    p = 2.0 if order is None else float(order)
    dims = _dims(_argument(op, args, kwargs, "dim", None), len(piece.shape))
    if 0 not in dims:
        return _reduction(op, args, kwargs, reduce=None, empty=None)
    if not p > 0 or (piece.tensor_parallel is not None and len(dims) != len(piece.shape)):
        return _refuse(op, args, kwargs)
    local = rows.local if rows.local.numel() else rows.local.new_zeros((1, *rows.local.shape[1:]))
    return _combine_norms(op(local, *args[1:], **kwargs), piece.axes, p)


def _extreme(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, largest: bool) -> Any:
    if len(op._schema.returns) != 1 or len(args) > 1 and isinstance(args[1], Tensor):
        return _refuse(op, args, kwargs)
    dtype = args[0].dtype
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    worst = (
        (-math.inf if dtype.is_floating_point else limits.min)
        if largest
        else (math.inf if dtype.is_floating_point else limits.max)
    )
    reduce = dist.ReduceOp.MAX if largest else dist.ReduceOp.MIN
    return _reduction(op, args, kwargs, reduce=reduce, empty=worst)


def _any_or_all(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, every: bool) -> Any:
    rows = args[0]
    if len(args) > 1 or kwargs:
        return _refuse(op, args, kwargs)
    answer = op(rows.local).to(torch.int32)
    reduce = dist.ReduceOp.MIN if every else dist.ReduceOp.MAX
    return _all_reduce(answer, rows.piece.axes, reduce).bool()


def _equal(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    a, b = args
    piece = a.piece if rows_of(a) is not None else b.piece
    shapes = tuple(a.shape) == tuple(b.shape)
    same = shapes and op(_local(a, piece, op), _local(b, piece, op))
    answer = torch.tensor(int(same), dtype=torch.int32, device=a.device)
    return bool(_all_reduce(answer, piece.axes, dist.ReduceOp.MIN))


def _matmul(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rows of a times a whole b: rows of the product."""
    a, b = args
    if rows_of(a) is None or rows_of(b) is not None or a.piece.tensor_parallel is not None:
        return _refuse(op, args, kwargs)
    return _wrap(op(a.local, b), a.piece.with_trailing((b.shape[1],)))


def _same_shape_view(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if tuple(args[1]) != tuple(args[0].shape):
        return _refuse(op, args, kwargs)
    return _wrap(args[0].local, args[0].piece)


def _new(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`new_zeros` and its like: of the tensor's own shape they are sharded, else plain."""
    rows, size = args[0], tuple(args[1])
    if size != tuple(rows.shape):
        return op(rows.local, *args[1:], **kwargs)
    return _wrap(op(rows.local, rows.local.shape, *args[2:], **kwargs), rows.piece)


_SUM = partial(_reduction, reduce=dist.ReduceOp.SUM, empty=0.0)
_REDUCTIONS: dict[str, Handler] = {
    "sum": _SUM,
    "count_nonzero": _SUM,
    "prod": partial(_reduction, reduce=dist.ReduceOp.PRODUCT, empty=1.0),
    "mean": _mean,
    "norm": _norm,
    "linalg_vector_norm": _norm,
    "amax": partial(_extreme, largest=True),
    "amin": partial(_extreme, largest=False),
    "max": partial(_extreme, largest=True),
    "min": partial(_extreme, largest=False),
    "any": partial(_any_or_all, every=False),
    "all": partial(_any_or_all, every=True),
}
_OTHERS: dict[str, Handler] = {
    "equal": _equal,
    "mm": _matmul,
    "view": _same_shape_view,
    "_unsafe_view": _same_shape_view,
    "new_empty": _new,
    "new_zeros": _new,
    "new_ones": _new,
    "new_full": _new,
}
