"""Operations along some dims of a value: local if another dim is cut, otherwise on the whole value."""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from shardwise.graph.nodes import arguments_of
from shardwise.tensor_parallel.nodes import args_of, is_tensor, op_of
from shardwise.tensor_parallel.partition import Partition, aten
from shardwise.tensor_parallel.placement import PARTIAL
from shardwise.tensor_parallel.rules.registry import Dims, aten_rule, by_dims

# Operations whose results have the dims of their input. Some name the dims that must be whole; for others, a
# number of last dims must be whole.
_NAMED = (
    *("_safe_softmax", "cumsum", "cumprod", "logcumsumexp", "sort", "argsort", "flip", "glu"),
    *("topk", "kthvalue", "roll", "diff", "index_select"),
)
_LAST = {
    **dict.fromkeys(("max_pool1d", "avg_pool1d", "adaptive_avg_pool1d"), 1),
    **dict.fromkeys(("tril", "triu", "max_pool2d", "max_pool2d_with_indices", "avg_pool2d"), 2),
    **dict.fromkeys(("adaptive_avg_pool2d", "_adaptive_avg_pool2d", "adaptive_max_pool2d"), 2),
    **dict.fromkeys(("upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d"), 2),
    **dict.fromkeys(("max_pool3d", "avg_pool3d"), 3),
}
_SHAPES = ("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm")  # as many as in their shape
_PADS = ("constant_pad_nd", "pad")  # the padding has two numbers for each


@by_dims(*_NAMED, *_LAST, *_SHAPES, *_PADS)
def along(p: Partition, node: fx.Node) -> Dims:
    """Cut operations along some dims, which must be whole."""
    args, op = args_of(node), op_of(node)
    ndim, arguments = len(p.shape(args[0])), arguments_of(node)
    if op in _NAMED:
        whole = _dims(arguments.get("dim", arguments.get("dims")), ndim)
    else:
        count = _LAST.get(op) or len(args[1]) // (2 if op in _PADS else 1)
        whole = set(range(ndim - count, ndim))
    return {args[0]: [None if d in whole else d for d in range(ndim)]}


def _dims(argument: Any, ndim: int) -> set[int]:
    """Return the dims that an argument names; all dims if it names none, or the value has none."""
    if argument is None or argument == [] or not ndim:
        return set(range(ndim))
    return {int(d) % ndim for d in (argument if isinstance(argument, (list, tuple)) else [argument])}


@aten_rule(
    *("sum", "mean", "amax", "amin", "any", "all", "argmax", "argmin", "max", "min", "median"),
    *("prod", "var", "var_mean", "std", "std_mean", "logsumexp", "count_nonzero"),
    *("norm", "linalg_vector_norm"),
)
def reduce(p: Partition, node: fx.Node) -> None:
    """Reduce over some dims or all. A sum or mean over the cut dim gives a term of the whole one."""
    x, *rest = args_of(node)
    op, cut, ndim = op_of(node), p.cut_of(x), len(p.shape(x))
    if op in ("max", "min") and rest and is_tensor(rest[0]):
        return p.repeat(node)
    arguments = arguments_of(node)
    dims, keep = _dims(arguments.get("dim"), ndim), arguments.get("keepdim", False)
    counts = [p.shape(x)[d] for d in dims]
    is_linear = op == "sum" or (op == "mean" and all(isinstance(size, int) for size in counts))
    if cut is None or cut.dim not in dims or not is_linear or not cut.disjoint:
        dropped = [0 if keep else sum(e < d for e in dims) for d in range(ndim)]
        kept = [None if d in dims else d - dropped[d] for d in range(ndim)]
        return p.follow(node, {x: kept}, linear=op == "sum")
    total = p.emit(aten.sum.dim_IntList, p.take(x, cut), sorted(dims), keep, dtype=node.meta["val"].dtype)
    return p.keep(node, p.emit(aten.div.Tensor, total, math.prod(counts)) if op == "mean" else total, PARTIAL)
