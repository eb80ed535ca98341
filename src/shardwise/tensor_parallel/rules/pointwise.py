"""Elementwise operations, on inputs that broadcast to one shape, and random values.

Every rank draws random numbers for the whole value, in the whole program's order, and keeps its part. So
generators that start equal on all ranks stay equal: a whole value gets the same mask on every rank, parts get
independent masks, and a cut program draws what the whole one would.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from shardwise.tensor_parallel.nodes import args_of, is_tensor, op_of, several
from shardwise.tensor_parallel.partition import Partition, aten
from shardwise.tensor_parallel.placement import PARTIAL, REPLICATE, Split
from shardwise.tensor_parallel.rules.registry import aten_rule

# Elementwise, though torch does not tag them as such.
_UNTAGGED = {
    *("_to_copy", "to", "type_as", "contiguous", "clone", "alias", "detach", "lift_fresh_copy", "copy"),
    *("zeros_like", "ones_like", "full_like", "empty_like"),
    *("masked_fill", "where", "fill", "nan_to_num", "isclose", "isfinite", "isinf", "logical_not"),
}
# f(a + b) = f(a) + f(b): a term of a sum may stay one.
_LINEAR = {"alias", "clone", "contiguous", "detach", "neg"}


def is_pointwise(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags:  # drawing for a part differs from drawing for the whole
        return False
    return torch.Tag.pointwise in tags or _aten_op(node) in _UNTAGGED


def _aten_op(node: fx.Node) -> str:
    return op_of(node) if getattr(node.target, "namespace", None) == "aten" else ""


def pointwise(p: Partition, node: fx.Node) -> None:
    """Cut every input, and the result, like the first input that is cut."""
    inputs = [x for x in node.all_input_nodes if is_tensor(x)]
    if _keeps_terms(p, node, inputs):
        return p.locally(node, {x: p.placement(x) for x in inputs}, PARTIAL)
    sizes = several(node.meta["val"])[0].shape
    dims = {x: p.spread(x, sizes) for x in inputs}
    cut = [x for x in inputs if isinstance(at := p.placement(x), Split) and dims[x][at.dim] is not None]
    if all(p.is_gathered(x) for x in cut):
        return p.repeat(node)  # a whole result needs no later gather
    return p.follow(node, dims)


def _keeps_terms(p: Partition, node: fx.Node, inputs: list[fx.Node]) -> bool:
    partial, op = [x for x in inputs if p.may_stay_partial(x)], _aten_op(node)
    if not partial or op in _LINEAR:
        return bool(partial)
    if op in ("add", "sub"):
        return len(partial) == len(inputs) == 2
    if op == "mul" and len(partial) == 1 and len(inputs) == 2 and node.args[0] is not node.args[1]:
        (factor,) = (x for x in inputs if x is not partial[0])
        return p.placement(factor) == REPLICATE
    if node.kwargs:  # such as a rounding mode
        return False
    scalar = op in ("mul", "div") and len(inputs) == 1
    return scalar and all(isinstance(a, (int, float)) and math.isfinite(a) for a in args_of(node)[1:])


@aten_rule("dropout", "native_dropout")
def dropout(p: Partition, node: fx.Node) -> None:
    x, rate, train = args_of(node)
    cut = p.cut_of(x)
    if train is False or (node.target is aten.dropout.default and rate in (0, 1)):  # draws nothing
        return pointwise(p, node)
    if cut is None:
        return p.repeat(node)
    result, mask = apply_dropout(p, p.take(x, cut), cut, p.shape(x), rate)
    return p.keep(node, result if node.target is aten.dropout.default else (result, mask), cut)


@aten_rule("rand_like", "randn_like", "randint_like", "bernoulli.p")
def random_like(p: Partition, node: fx.Node) -> None:
    """Draw random values in the shape of the input."""
    x = args_of(node)[0]
    cut = p.cut_of(x)
    if cut is None:
        return p.repeat(node)
    op: Any = node.target
    rest, kwargs = args_of(node)[1:], node.kwargs
    result = _draw(p, p.take(x, cut), cut, p.shape(x), lambda whole: op(whole, *rest, **kwargs))
    return p.keep(node, result, cut)


def apply_dropout(
    p: Partition, local: fx.Node, cut: Split, sizes: Sequence[Any], rate: float
) -> tuple[fx.Node, fx.Node]:
    """Return this rank's part of a value of `sizes` after dropout of `rate`, and its part of the mask."""
    mask = _draw(p, local, cut, sizes, lambda whole: whole.bernoulli(1 - rate), dtype=torch.bool)
    result = p.emit(aten.mul.Tensor, local, mask)
    return p.emit(aten.mul.Tensor, result, 0.0 if rate == 1 else 1 / (1 - rate)), mask


def _draw(
    p: Partition,
    local: fx.Node,
    cut: Split,
    sizes: Sequence[Any],
    draw: Callable[[Tensor], Tensor],
    *,
    dtype: torch.dtype | None = None,
) -> fx.Node:
    """Return this rank's part of what `draw` returns for a value of whole `sizes`; `local` is its part."""
    shape = [n if isinstance(n, int) else p.emit(aten.sym_size.int, local, d) for d, n in enumerate(sizes)]
    whole = p.emit(aten.new_empty.default, local, shape, dtype=dtype)
    return p.cut(p.run(draw, whole), cut)
