"""Sums, means, norms, extremes and their kin, of whole tensors.

Along trailing dims each row has its own answer: no communication, and the result is sharded alike. Over
dim 0 the answers of the ranks' rows are combined by an all-reduce over every process group that cuts the
tensor along a reduced dim, and the result is a plain whole tensor, equal on all ranks.

What ranks combine is fp32 or wider, and is rounded to the result's dtype at the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise import _compat
from shardwise.comm import extremes
from shardwise.comm.watch import announced
from shardwise.sharded_tensor.rows.convert import gather_tensor_parallel
from shardwise.sharded_tensor.rows.operands import refuse, rows
from shardwise.sharded_tensor.rows.piece import Piece
from shardwise.sharded_tensor.rows.registry import Handler
from shardwise.sharded_tensor.rows.tensor import ShardedRows

Groups = Sequence[dist.ProcessGroup]
SUM, PRODUCT, MAX, MIN = dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MAX, dist.ReduceOp.MIN
_NAMES = {SUM: "sum", PRODUCT: "product", MAX: "max", MIN: "min"}
_HALF = (torch.bfloat16, torch.float16)


def combine(value: Tensor, groups: Groups, reduce: Any) -> Tensor:
    """The ranks' values combined, elementwise, in their dtype. Collective over `groups`."""
    if not groups:
        return value
    if value.is_floating_point():
        wide = torch.promote_types(value.dtype, torch.float32)
    else:
        wide = value.dtype if value.is_complex() else torch.int64

    def over_groups(sent: Tensor) -> Tensor:
        for group in groups:
            sent = all_reduced(sent, reduce, group)
        return sent

    if reduce in (MAX, MIN):
        return extremes.extreme(value.to(wide), over_groups, largest=reduce == MAX).to(value.dtype)
    return over_groups(value.to(wide, copy=True, memory_format=torch.contiguous_format)).to(value.dtype)


def all_reduced(value: Tensor, reduce: Any, group: dist.ProcessGroup) -> Tensor:
    """`value` itself, or in a graph, where a tracer's tensors stand for values, another."""
    if type(value) is Tensor:
        with announced(group, "reduce something of rows"):
            dist.all_reduce(value, op=reduce, group=group)
        return value
    return _compat.traced_all_reduce(value, _NAMES[reduce], group.group_name)


def combine_powers(
    norms: Sequence[Tensor], axes: Sequence[Groups], p: float, *, root: bool = True
) -> list[Tensor]:
    """The p-norms of whole tensors from those of local rows, in fp64.

    Collective: one all-reduce for each process group, of all norms that it cuts. `axes[i]` are the groups
    that cut tensor i. Without `root`, norms are sums of powers on the way out.
    """
    infinite = math.isinf(p)
    each = [norm.to(torch.float64) for norm in norms]
    if not infinite and p != 0:
        each = [norm.pow(p) for norm in each]
    reduce = SUM if not infinite else MAX if p > 0 else MIN
    for group in dict.fromkeys(group for groups in axes for group in groups):
        members = [i for i, groups in enumerate(axes) if group in groups]
        device = each[members[0]].device
        total = combine(torch.stack([each[i].to(device) for i in members]), (group,), reduce)
        for i, value in zip(members, total.unbind(), strict=True):
            each[i] = value.to(norms[i].device)
    if root and not infinite and p != 0:
        each = [value.pow(1 / p) for value in each]
    return each


# What every reduction is made of


def _argument(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str, default: Any = None) -> Any:
    for place, argument in enumerate(op._schema.arguments):
        if argument.name == name:
            known = argument.default_value if argument.has_default_value() else default
            return args[place] if place < len(args) else kwargs.get(name, known)
    return default


def _dims(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[int, ...], bool]:
    """The dims that a reduction names (all of them if it names none), and whether they stay."""
    dim, ndim = _argument(op, args, kwargs, "dim"), args[0].ndim
    if any(isinstance(value, Tensor) for value in (*args[1:], *kwargs.values())):
        refuse(op, args, kwargs, "with an out= on tensors sharded by rows")
    keepdim = bool(_argument(op, args, kwargs, "keepdim", False))
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return tuple(range(ndim)), keepdim
    named = [dim] if isinstance(dim, int) else list(dim)
    if any(not -max(ndim, 1) <= d < max(ndim, 1) for d in named):
        raise IndexError(f"dims {named} are out of range for a tensor of shape {tuple(args[0].shape)}")
    return tuple(sorted(d % ndim for d in named)) if ndim else (), keepdim


def _spread(tensor: ShardedRows, value: Tensor, dims: tuple[int, ...], *, keepdim: bool) -> Tensor:
    """`value`, reduced along `dims` on all ranks that cut them: sharded rows, or if dim 0 went whole."""
    piece = tensor.piece
    of = [None if d in dims else d for d in range(tensor.ndim) if keepdim or d not in dims]
    if 0 not in dims:
        shape = [tensor.shape[d] if d is not None else 1 for d in of]
        return rows(value, piece.with_trailing(shape[1:], of=of[1:]))
    if not any(piece.axes_along([d]) for d in of if d is not None):
        return value
    spec = piece.spec_of([tensor.shape[d] if d is not None else 1 for d in of], of)
    assert spec is not None
    return gather_tensor_parallel(value.contiguous(), spec)


def _filled(local: Tensor, piece: Piece, dims: tuple[int, ...], neutral: float) -> Tensor:
    """`local`, or where this rank has nothing along `dims`, one neutral element in its place."""
    if all(local.shape[d] for d in dims):
        return local
    return local.new_full([1 if d in dims else size for d, size in enumerate(local.shape)], neutral)


# Reductions


def summed(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, reduce: Any) -> Any:
    """sum, nansum, prod, count_nonzero."""
    tensor = args[0]
    dims, keepdim = _dims(op, args, kwargs)
    groups = tensor.piece.axes_along(dims)
    wanted = kwargs.get("dtype") or tensor.dtype
    if reduce == PRODUCT and wanted.is_complex and groups:
        refuse(op, args, kwargs)
    if wanted in _HALF and groups and op._schema.name != "aten::count_nonzero":
        value = combine(
            op(tensor._local_tensor, *args[1:], **{**kwargs, "dtype": torch.float32}), groups, reduce
        )
        value = value.to(wanted)
    else:
        value = combine(op(tensor._local_tensor, *args[1:], **kwargs), groups, reduce)
    return _spread(tensor, value, dims, keepdim=keepdim)


def mean(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    dims, keepdim = _dims(op, args, kwargs)
    groups = tensor.piece.axes_along(dims)
    wanted = kwargs.get("dtype") or tensor.dtype
    if not (wanted.is_floating_point or wanted.is_complex):
        return op(torch.empty(tensor.shape, dtype=wanted, device="meta"))  # torch's own error
    if not groups:
        return _spread(tensor, op(tensor._local_tensor, *args[1:], **kwargs), dims, keepdim=keepdim)
    wide = torch.float32 if wanted in _HALF else wanted
    total = combine(tensor._local_tensor.sum(dims, keepdim=keepdim, dtype=wide), groups, SUM)
    count = math.prod(tensor.shape[d] for d in dims)
    return _spread(tensor, (total / count).to(wanted), dims, keepdim=keepdim)


def norm(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    dims, keepdim = _dims(op, args, kwargs)
    order = _argument(op, args, kwargs, "ord" if op._schema.name.endswith("vector_norm") else "p")
    p = 2.0 if order is None else float(order)
    groups = tensor.piece.axes_along(dims)
    wanted = _argument(op, args, kwargs, "dtype") or tensor.dtype
    if p < 0 and not math.isinf(p):
        refuse(op, args, kwargs, f"for p = {p} on tensors sharded by rows")
    if math.isinf(p) and any(tensor.shape[d] == 0 for d in dims):
        refuse(op, args, kwargs, "along an empty dim")
    local = _filled(tensor._local_tensor, tensor.piece, dims, math.inf if p < 0 else 0.0)
    wide = torch.float32 if wanted in _HALF else wanted
    value = torch.linalg.vector_norm(local, p, dims, keepdim, dtype=wide)
    if groups:
        (value,) = combine_powers([value], [groups], p)
    return _spread(tensor, value.to(wanted.to_real()), dims, keepdim=keepdim)


def extreme(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, largest: bool) -> Any:
    """amax, amin, and max and min without a dim."""
    tensor = args[0]
    if len(op._schema.returns) != 1:
        return along(op, args, kwargs)
    dims, keepdim = _dims(op, args, kwargs)
    if any(tensor.shape[d] == 0 for d in dims) or tensor.is_complex():
        refuse(op, args, kwargs)
    if tensor.is_floating_point():
        worst = -math.inf if largest else math.inf
    elif tensor.dtype == torch.bool:
        worst = not largest
    else:
        limits = torch.iinfo(tensor.dtype)
        worst = limits.min if largest else limits.max
    local = _filled(tensor._local_tensor, tensor.piece, dims, worst)
    value = combine(op(local, *args[1:], **kwargs), tensor.piece.axes_along(dims), MAX if largest else MIN)
    return _spread(tensor, value, dims, keepdim=keepdim)


def truth(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, reduce: Any) -> Any:
    """any, all."""
    tensor = args[0]
    dims, keepdim = _dims(op, args, kwargs)
    value = combine(op(tensor._local_tensor, *args[1:], **kwargs), tensor.piece.axes_along(dims), reduce)
    return _spread(tensor, value, dims, keepdim=keepdim)


def variance(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, root: bool) -> Any:
    """var, std: the mean of squared distances from the mean."""
    tensor = args[0]
    dims, keepdim = _dims(op, args, kwargs)
    if not tensor.piece.axes_along(dims) and tensor._local_tensor.numel():  # of no rows torch warns
        return _spread(tensor, op(tensor._local_tensor, *args[1:], **kwargs), dims, keepdim=keepdim)
    if tensor.is_complex() or not tensor.is_floating_point():
        refuse(op, args, kwargs)
    unbiased = _argument(op, args, kwargs, "unbiased", True)
    correction = _argument(op, args, kwargs, "correction")
    correction = int(unbiased) if correction is None else correction
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    squares = (wide - wide.mean(dims, keepdim=True)).square().sum(dims, keepdim=keepdim)
    found = squares / max(0, math.prod(tensor.shape[d] for d in dims) - correction)
    return (found.sqrt() if root else found).to(tensor.dtype)


def along(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Ops along one trailing dim, in which each row has its own answer."""
    tensor = args[0]
    if not isinstance(tensor, ShardedRows) or _argument(op, args, kwargs, "dim") is None:
        refuse(op, args, kwargs)
    dims, _ = _dims(op, args, kwargs)
    if not dims or tensor.piece.axes_along(dims):
        refuse(op, args, kwargs, "along a dim that is cut over ranks")
    found = op(tensor._local_tensor, *args[1:], **kwargs)

    def wrap(value: Tensor) -> Tensor:
        stays = value.ndim == tensor.ndim
        of = [None if d in dims else d for d in range(1, tensor.ndim) if stays or d not in dims]
        sizes = [
            tensor.shape[d] if d is not None else size for d, size in zip(of, value.shape[1:], strict=True)
        ]
        return rows(value, tensor.piece.with_trailing(sizes, of=of))

    return wrap(found) if isinstance(found, Tensor) else tuple(wrap(value) for value in found)


def equal(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """`torch.equal`: collective over the axes that cut either."""
    a, b = args
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool((a == b).all().item())


REDUCTIONS: dict[str, Handler] = {
    "sum": partial(summed, reduce=SUM),
    "nansum": partial(summed, reduce=SUM),
    "count_nonzero": partial(summed, reduce=SUM),
    "prod": partial(summed, reduce=PRODUCT),
    "mean": mean,
    "norm": norm,
    "linalg_vector_norm": norm,
    "amax": partial(extreme, largest=True),
    "amin": partial(extreme, largest=False),
    "max": partial(extreme, largest=True),
    "min": partial(extreme, largest=False),
    "any": partial(truth, reduce=MAX),
    "all": partial(truth, reduce=MIN),
    "var": partial(variance, root=False),
    "std": partial(variance, root=True),
    "equal": equal,
    **dict.fromkeys(
        ("argmax", "argmin", "cumsum", "cumprod", "logcumsumexp", "logsumexp", "sort", "topk",
         "_softmax", "_log_softmax"), along,
    ),
}  # fmt: skip
