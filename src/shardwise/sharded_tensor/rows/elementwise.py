"""Ops that stay within rows: elementwise arithmetic, copies, random numbers, new tensors, views, products.

All run on the local rows. A plain operand is taken as the whole tensor, equal on all ranks, never as local
rows. A DTensor with other placements is redistributed to the rows (collective), as among DTensors. Random
numbers are drawn for the whole tensor, in a temporary of its size, and cut: ranks with equal seeds agree, and
get the same numbers as one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.errors import ShardingError, here
from shardwise.sharded_tensor.registry import Args, Handler, Kwargs
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


def refuse(op: Any, args: Any, kwargs: Any, context: str = "") -> NoReturn:
    """Raise for an op whose result from only this rank's rows would be wrong."""
    listed = [value if isinstance(value, (list, tuple)) else [value] for value in (*args, *kwargs.values())]
    sharded = next((value for values in listed for value in values if isinstance(value, ShardedRows)), None)
    operation = op._schema.name.removeprefix("aten::")
    name = f"'{sharded.piece.name}' " if sharded is not None and sharded.piece.name else ""
    subject = "" if sharded is None else f" (here {name}of shape {tuple(sharded.shape)})"
    raise ShardingError(
        f"{here()}: {op} is not defined {context or 'on tensors sharded by rows'}{subject}: from this rank's"
        " rows alone its answer would be wrong. Use .full_tensor() for the whole tensor (collective), or"
        f" .local for this rank's rows.{_HINTS.get(operation, '')}"
        + (_FORWARD if isinstance(sharded, ShardedParameter) else "")
    )


def is_foreign(value: Any) -> bool:
    """Return whether `value` is a DTensor, and not rows."""
    return isinstance(value, DTensor) and not isinstance(value, ShardedRows)


def whole(tensor: ShardedRows) -> Tensor:
    """Return the whole tensor, below autograd. Collective."""
    return convert.make_whole(tensor.local, tensor.piece)


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
        dims = [d if shape[d] == widest.shape[d] else None for d in range(1, len(shape))]
        if not widest.axes_along([d for d in range(1, len(shape)) if d not in dims]):
            return widest.with_trailing(shape[1:], dims=dims)
    misfit = next(value for value in tensors if value.ndim and value.shape != widest.shape)
    raise _misfit(op, misfit, widest)


def local_operand(op: Any, value: Any, piece: Piece) -> Any:
    """Return an operand of an elementwise op as this rank's rows, for a result cut like `piece`."""
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


def _broadcasts(piece: Piece, target: Piece) -> bool:
    """Return whether `piece` broadcasts to `target`: the same rows, and the same cut of equal dims."""
    if len(piece.shape) != len(target.shape) or piece.shape[0] != target.shape[0]:
        return False
    dims = [d if piece.shape[d] == target.shape[d] else None for d in range(1, len(target.shape))]
    if any(d is None and size != 1 for d, size in zip(dims, piece.shape[1:], strict=True)):
        return False
    return target.with_trailing(piece.shape[1:], dims=dims) == piece


_KEEPS_ROWS = (None, torch.preserve_format, torch.contiguous_format)


def elementwise(op: Any, args: Args, kwargs: Kwargs) -> Any:
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
    return rows(local, piece) if isinstance(local, Tensor) else tuple(rows(part, piece) for part in local)


def elementwise_(op: Any, args: Args, kwargs: Kwargs) -> Any:
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


def copy_(op: Any, args: Args, kwargs: Kwargs) -> Any:
    """Copy from a whole plain tensor or equally cut rows; collective from other rows or a DTensor."""
    target, source, *rest = args
    if isinstance(source, ShardedRows) and source.shape == target.shape:
        if isinstance(target, ShardedRows):
            if source.piece != target.piece:
                source = rows(convert.rows_of(source, target.piece), target.piece)
        elif isinstance(target, DTensor):
            mesh, placements = target.device_mesh, target.placements
            return target.copy_(convert.make_dtensor(source.local, source.piece, mesh, placements))
    return elementwise_(op, (target, source, *rest), kwargs)


def random(op: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run `rand_like` and the like, and `bernoulli` with rows as probabilities (collective)."""
    return rows(_draw(op, args, kwargs), args[0].piece)


def random_(op: Any, args: Args, kwargs: Kwargs) -> Any:
    if not isinstance(args[0], ShardedRows):
        refuse(op, args, kwargs, "into a plain tensor from one sharded by rows")
    args[0]._local_tensor.copy_(_draw(op, args, kwargs))
    return args[0]


def _draw(op: Any, args: Args, kwargs: Kwargs) -> Tensor:
    first = args[0]
    draws = first.is_meta or op._schema.name != "aten::bernoulli"
    source = torch.empty(first.shape, dtype=first.dtype, device=first.device) if draws else whole(first)
    operands = [whole(value) if isinstance(value, ShardedRows) else value for value in args[1:]]
    return local_part(first.piece, op(source, *operands, **kwargs)).clone()


def eye(op: Any, args: Args, kwargs: Kwargs) -> Any:
    out = kwargs["out"]
    if tuple(out.shape) != (args[0], args[-1]):
        refuse(op, args, kwargs)
    return out.copy_(torch.eye(*out.shape, dtype=out.dtype, device=out.device))


def new(op: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run `new_zeros` and the like: cut the same way if dim 0 is the rows, else plain and whole."""
    like, size = args[0], tuple(args[1])
    piece: Piece = like.piece
    if not size or size[:1] != tuple(like.shape[:1]):
        return op(like._local_tensor, *args[1:], **kwargs)
    dims = [d if d < len(piece.shape) and piece.shape[d] == size[d] else None for d in range(1, len(size))]
    piece = piece if size == tuple(like.shape) else piece.with_trailing(size[1:], dims=dims)
    return rows(op(like._local_tensor, piece.rows.sizes, *args[2:], **kwargs), piece)


def view(op: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run views and `expand`, where they leave dim 0 and dims cut by tensor parallelism alone."""
    tensor, size = args[0], args[1]
    if isinstance(size, torch.dtype) or len(args) > 2 or any(kwargs.values()):
        refuse(op, args, kwargs)
    piece, sizes = tensor.piece, op(torch.empty(tensor.shape, device="meta"), size).shape
    expands = op._schema.name == "aten::expand"
    fits = len(sizes) == tensor.ndim if expands else sizes.numel() == tensor.numel()
    if not fits or sizes[:1] != tensor.shape[:1]:
        refuse(op, args, kwargs)
    if sizes == tensor.shape:
        return ShardedRows.wrap(tensor._local_tensor, piece)
    if piece.axes_along(range(1, len(piece.shape))):
        refuse(op, args, kwargs)
    piece = piece.with_trailing(sizes[1:])
    local = tensor._local_tensor
    return rows(local.expand(piece.rows.sizes) if expands else local.view(piece.rows.sizes), piece)


def product(op: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run `mm`, rows times a whole matrix, or `bmm`, the matrices of the same rows, one by one."""
    a, b = args
    if not isinstance(a, ShardedRows) or a.piece.axes_along(range(1, a.ndim)) or is_foreign(b):
        refuse(op, args, kwargs)
    if op._schema.name == "aten::bmm":
        local = local_operand(op, b, a.piece.with_trailing(b.shape[1:]))
        return rows(op(a._local_tensor, local), a.piece.with_trailing((a.shape[1], b.shape[2])))
    if isinstance(b, ShardedRows):
        if b.shape[0] != 1:  # a whole matrix would have to be gathered
            refuse(op, args, kwargs)
        b = whole(b)
    return rows(op(a._local_tensor, b), a.piece.with_trailing((b.shape[1],)))


def index_put_(op: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run `rows[mask] = scalar`, with a mask of the same shape."""
    target, [mask, *more_indices], value = args[:3]
    is_mask = isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape == target.shape
    if not is_mask or more_indices or value.ndim or any(args[3:]):
        refuse(op, args, kwargs)
    return elementwise_(torch.ops.aten.masked_fill_.Tensor, (target, mask, value), {})


def scalar(op: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run `item()` of a tensor of one element, on whichever rank it is (collective)."""
    if args[0].numel() != 1:
        refuse(op, args, kwargs)
    return whole(args[0]).item()


# Elementwise, though torch does not tag them so.
UNTAGGED = {
    "alias", "clone", "detach", "empty_like", "fill", "fill_", "floor_divide", "floor_divide_", "full_like",
    "lift_fresh", "ones_like", "_pin_memory", "_to_copy", "zero_", "zeros_like",
}  # fmt: skip
SPECIAL: dict[str, Handler] = {
    **dict.fromkeys(("bernoulli", "rand_like", "randn_like", "randint_like"), random),
    **dict.fromkeys(
        ("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_",
         "uniform_"), random_,
    ),
    "copy_": copy_,
    "eye": eye,
    **dict.fromkeys(("new_empty", "new_zeros", "new_ones", "new_full"), new),
    **dict.fromkeys(("view", "_unsafe_view", "unsqueeze", "expand"), view),
    "index_put_": index_put_,
    **dict.fromkeys(("mm", "bmm"), product),
    "_local_scalar_dense": scalar,
}  # fmt: skip
