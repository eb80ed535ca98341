"""Sums, means, norms, extremes and similar reductions, of whole tensors.

Along trailing dims each row has its own result: no communication, and the result has the same cut. Over
dim 0 the results of the ranks' rows are combined by an all-reduce over every process group that cuts the
tensor along a reduced dim, and the result is a plain whole tensor, equal on all ranks.

Ranks combine values in fp32 or wider, and round them to the result's dtype at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise import _compat
from shardwise.comm.arithmetic import extreme
from shardwise.comm.watch import announced
from shardwise.sharded_tensor.ops.reduce import dims_of, wide_of, worst_of
from shardwise.sharded_tensor.registry import Args, Handler, Kwargs
from shardwise.sharded_tensor.rows import convert
from shardwise.sharded_tensor.rows.convert import gather_even
from shardwise.sharded_tensor.rows.elementwise import refuse, rows
from shardwise.sharded_tensor.rows.tensor import ShardedRows

Groups = Sequence[dist.ProcessGroup]
SUM, PRODUCT, MAX, MIN = dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MAX, dist.ReduceOp.MIN
_NAMES = {SUM: "sum", PRODUCT: "product", MAX: "max", MIN: "min"}
HALF = (torch.bfloat16, torch.float16)


def combine(value: Tensor, groups: Groups, reduce: Any) -> Tensor:
    """Return the ranks' values combined, elementwise, in their dtype. Collective over `groups`."""
    wide = wide_of(value.dtype)

    def over_groups(value: Tensor) -> Tensor:
        for group in groups:
            value = all_reduced(value, reduce, group)
        return value

    if reduce in (MAX, MIN):
        return extreme(value.to(wide), over_groups, largest=reduce == MAX).to(value.dtype)
    return over_groups(value.to(wide, copy=True, memory_format=torch.contiguous_format)).to(value.dtype)


def all_reduced(value: Tensor, reduce: Any, group: dist.ProcessGroup) -> Tensor:
    """Return `value` itself, or in a graph, where a tracer's tensors stand for values, another."""
    if type(value) is Tensor:
        with announced(group, f"reduce rows to the {_NAMES[reduce]} of {list(value.shape)} values"):
            dist.all_reduce(value, op=reduce, group=group)
        return value
    return _compat.traced_all_reduce(value, _NAMES[reduce], group.group_name)


def combine_powers(norms: Tensor, axes: Sequence[Groups], p: float, *, root: bool = True) -> Tensor:
    """Return the p-norms of whole tensors from those of local rows, in fp64: [tensors] to [tensors].

    Collective: one all-reduce for each process group, of all norms that it cuts. `axes[i]` are the groups
    that cut tensor i. Without `root`, norms are sums of powers on the way out.
    """
    infinite = math.isinf(p)
    powers = not infinite and p != 0
    values = norms.to(torch.float64)
    values = values.pow(p) if powers else values
    reduce = SUM if not infinite else MAX if p > 0 else MIN
    # Hashing all costs more.
    distinct = [groups for i, groups in enumerate(axes) if i == 0 or groups != axes[i - 1]]
    for group in dict.fromkeys(group for groups in distinct for group in groups):
        members = [i for i, groups in enumerate(axes) if group in groups]
        if len(members) == len(axes):
            values = combine(values, (group,), reduce)
        else:
            indices = torch.tensor(members, device=values.device)
            values = values.index_copy(0, indices, combine(values[indices], (group,), reduce))
    return values.pow(1 / p) if powers and root else values


class _Call:
    """One call of a reduction of rows along `dims`, which `groups` cut; `dtype` is requested or the rows'."""

    def __init__(self, op: Any, args: Args, kwargs: Kwargs) -> None:
        self.op, self.args, self.kwargs = op, args, kwargs
        if not isinstance(args[0], ShardedRows) or any(
            isinstance(value, Tensor) for value in (*args[1:], *kwargs.values())
        ):
            self.refuse("with an out= on tensors sharded by rows")
        self.tensor: ShardedRows = args[0]
        self.local = self.tensor._local_tensor
        self.dims = dims_of(self.tensor, self.argument("dim"))
        self.keepdim = bool(self.argument("keepdim", False))
        self.groups = self.tensor.piece.axes_along(self.dims)
        self.dtype: torch.dtype = self.argument("dtype") or self.tensor.dtype

    def argument(self, name: str, default: Any = None) -> Any:
        for place, argument in enumerate(self.op._schema.arguments):
            if argument.name == name:
                fallback = argument.default_value if argument.has_default_value() else default
                return self.args[place] if place < len(self.args) else self.kwargs.get(name, fallback)
        return default

    @property
    def count(self) -> int:
        return math.prod(self.tensor.shape[d] for d in self.dims)

    def on(self, local: Tensor, **options: Any) -> Any:
        return self.op(local, *self.args[1:], **{**self.kwargs, **options})

    def fill_empty(self, neutral: float) -> Tensor:
        """Return the local rows, or where there is nothing along `dims`, one neutral element in its place."""
        if all(self.local.shape[d] for d in self.dims):
            return self.local
        sizes = [1 if d in self.dims else size for d, size in enumerate(self.local.shape)]
        return self.local.new_full(sizes, neutral)

    def spread(self, value: Tensor) -> Tensor:
        """Return `value`, reduced on all ranks that cut `dims`: sharded rows, or if dim 0 went whole."""
        piece, shape = self.tensor.piece, self.tensor.shape
        keep = value.ndim == len(shape)
        dims = [None if d in self.dims else d for d in range(len(shape)) if keep or d not in self.dims]
        sizes = [size if d is None else shape[d] for d, size in zip(dims, value.shape, strict=True)]
        if 0 not in self.dims:
            return rows(value, piece.with_trailing(sizes[1:], dims=dims[1:]))
        return gather_even(value, sizes, piece.even_cuts_of(dims))

    def refuse(self, context: str = "") -> NoReturn:
        refuse(self.op, self.args, self.kwargs, context)


def reduction(op: Any, args: Args, kwargs: Kwargs, *, rule: Callable[[_Call], Any]) -> Any:
    """Reduce local rows along dims that no group cuts; let `rule` reduce all ranks' rows along others."""
    call = _Call(op, args, kwargs)
    is_local = not call.groups and call.local.numel()  # of no elements the op may warn
    result = call.on(call.local) if is_local else rule(call)
    if call.tensor.requires_grad and torch.is_grad_enabled():
        cut_gradient(call.tensor)
    return call.spread(result) if isinstance(result, Tensor) else tuple(map(call.spread, result))


def cut_gradient(tensor: ShardedRows) -> None:
    """Cut the gradient of `tensor` as it is itself: that of a sum is whole along the dims of the sum."""
    if tensor.cuts_gradient:
        return
    tensor.cuts_gradient = True
    piece = tensor.piece

    def cut(grad: Tensor) -> Tensor:
        is_cut = isinstance(grad, ShardedRows) and grad.piece == piece
        return grad if is_cut else rows(convert.rows_of(grad, piece), piece)

    # The base class's: it stays, and the reducer looks for users' own alone.
    Tensor.register_hook(tensor, cut)  # type: ignore[no-untyped-call]


def _along(call: _Call) -> Any:
    """Apply an op that has a result for each row."""
    if call.groups:
        call.refuse("along a dim that is cut over ranks")
    return call.on(call.local)


def _combine_results(call: _Call, *, reduce: Any) -> Tensor:
    if reduce == PRODUCT and call.dtype.is_complex and call.groups:
        call.refuse()
    if call.dtype not in HALF or not any(argument.name == "dtype" for argument in call.op._schema.arguments):
        return combine(call.on(call.local), call.groups, reduce)
    return combine(call.on(call.local, dtype=torch.float32), call.groups, reduce).to(call.dtype)


def _mean(call: _Call) -> Tensor:
    if not (call.dtype.is_floating_point or call.dtype.is_complex):
        call.on(torch.empty(call.tensor.shape, dtype=call.dtype, device="meta"))  # raises torch's own error
    wide = torch.float32 if call.dtype in HALF else call.dtype
    total = combine(call.local.sum(call.dims, keepdim=call.keepdim, dtype=wide), call.groups, SUM)
    return (total / call.count).to(call.dtype)


def _norm(call: _Call) -> Tensor:
    order = call.argument("ord", call.argument("p"))
    p = 2.0 if order is None else float(order)
    if p < 0 and not math.isinf(p) and (call.groups or not call.count):
        call.refuse(f"for p = {p} on tensors sharded by rows")
    if math.isinf(p) and not call.count:
        call.refuse("along an empty dim")
    wide = torch.float32 if call.dtype in HALF else call.dtype
    local = call.fill_empty(math.inf if p < 0 else 0.0)
    value = torch.linalg.vector_norm(local, p, call.dims, call.keepdim, dtype=wide)
    norm = combine_powers(value[None], [call.groups], p)[0]
    return norm.to(call.dtype.to_real())


def _extreme(call: _Call, *, largest: bool) -> Any:
    if len(call.op._schema.returns) > 1:  # with indices
        return _along(call)
    dtype = call.tensor.dtype
    if not call.count or dtype.is_complex:
        call.refuse()
    local = call.fill_empty(worst_of(dtype, largest=largest))
    return combine(call.on(local), call.groups, MAX if largest else MIN)


def _variance(call: _Call, *, root: bool) -> Tensor:
    """Return the mean of squared distances from the mean."""
    if not call.tensor.is_floating_point():
        call.refuse()
    correction = call.argument("correction")
    if correction is None:
        correction = int(call.argument("unbiased", True))
    wide = call.tensor.to(torch.promote_types(call.tensor.dtype, torch.float32))
    distances: Any = wide - wide.mean(call.dims, keepdim=True)
    squares = distances._local_tensor.square().sum(call.dims, keepdim=call.keepdim)
    variance: Tensor = combine(squares, call.groups, SUM) / max(0, call.count - correction)
    return (variance.sqrt() if root else variance).to(call.tensor.dtype)


def equal(op: Any, args: Args, kwargs: Kwargs) -> bool:
    """Run `torch.equal`. Collective over the axes that cut either."""
    a, b = args
    return a.shape == b.shape and a.dtype == b.dtype and bool((a == b).all().item())


_RULES: dict[str, Callable[[_Call], Any]] = {
    **dict.fromkeys(("sum", "nansum", "count_nonzero"), partial(_combine_results, reduce=SUM)),
    "prod": partial(_combine_results, reduce=PRODUCT),
    "any": partial(_combine_results, reduce=MAX),
    "all": partial(_combine_results, reduce=MIN),
    "mean": _mean,
    **dict.fromkeys(("norm", "linalg_vector_norm"), _norm),
    **dict.fromkeys(("amax", "max"), partial(_extreme, largest=True)),
    **dict.fromkeys(("amin", "min"), partial(_extreme, largest=False)),
    "var": partial(_variance, root=False),
    "std": partial(_variance, root=True),
    **dict.fromkeys(
        ("argmax", "argmin", "cumsum", "cumprod", "logcumsumexp", "logsumexp", "sort", "topk",
         "_softmax", "_log_softmax"), _along,
    ),
}  # fmt: skip
REDUCTIONS: dict[str, Handler] = {name: partial(reduction, rule=rule) for name, rule in _RULES.items()}
REDUCTIONS["equal"] = equal
