"""Products with weights, the core of tensor parallelism.

column   weight cut along its outputs: inputs whole, outputs cut; no communication
row      weight cut along its inputs, like the incoming activation: terms of a sum, one all-reduce
"""

from __future__ import annotations

from typing import Any

from torch import fx

from shardwise.graph.nodes import arguments_of
from shardwise.tensor_parallel.heads import column_ranges
from shardwise.tensor_parallel.nodes import args_of, op_of
from shardwise.tensor_parallel.partition import Partition, aten
from shardwise.tensor_parallel.placement import PARTIAL, REPLICATE, Split
from shardwise.tensor_parallel.rules.registry import Dims, aten_rule, by_dims, rule


@aten_rule("linear")
def linear(p: Partition, node: fx.Node) -> None:
    x, weight, bias = arguments_of(node).values()
    return _product(p, node, x, weight, bias, out_dim=0)


@aten_rule("addmm")
def addmm(p: Partition, node: fx.Node) -> None:
    bias, x, weight = args_of(node)[:3]
    if node.kwargs or weight not in p.parameters:
        return p.repeat(node)
    return _product(p, node, x, weight, bias, out_dim=1)


@aten_rule("mm", "matmul", "bmm")
def product(p: Partition, node: fx.Node) -> None:
    """Multiply parameters or activations: cut along a batch dim (heads), rows, columns or summed dim."""
    a, b = args_of(node)
    cut = expert_cut(p, b) if b in p.parameters else None
    if cut is not None:
        inner = None if cut.dim == 2 else cut.on(2)
        return p.locally(node, {b: cut} | ({a: inner} if inner else {}), cut if inner is None else PARTIAL)
    styled = b in p.parameters and p.parameters[b].style is not None and len(p.shape(b)) == 2
    if styled or (b in p.parameters and op_of(node) == "mm"):
        return _product(p, node, a, b, None, out_dim=1)
    last, rows = len(p.shape(a)) - 1, len(p.shape(b)) - 2
    cut_a, cut_b = p.placement(a), p.placement(b)
    if rows >= 0 and isinstance(cut_b, Split) and cut_b.dim == rows:
        same_cut = isinstance(cut_a, Split) and cut_a.dim == last and cut_a.on(0) == cut_b.on(0)
        source = b  # a parameter, maybe transposed, is better used in parts than gathered
        while source not in p.parameters and op_of(source) in ("t", "transpose", "permute"):
            source = source.args[0]
        if same_cut or (cut_a == REPLICATE and source in p.parameters):
            once = cut_b.once()
            return p.locally(node, {a: once.on(last), b: once}, PARTIAL)
    return p.follow(node, _factors(p, node, a, b))


def _product(p: Partition, node: fx.Node, x: Any, weight: Any, bias: Any, *, out_dim: int) -> None:
    """Compute x @ weight + bias; the weight is a parameter with a style, or any value."""
    parameter, in_dim = p.parameters.get(weight), 1 - out_dim
    style = None if parameter is None else parameter.style
    prior = p.placement(weight) if parameter is None else parameter.placement
    if isinstance(prior, Split):
        style = "column" if prior.dim == out_dim else "row"
    last = len(p.shape(x)) - 1
    cut = p.placement(x)

    def call(x: Any, weight: Any, bias: Any) -> fx.Node:
        if out_dim == 0:
            return p.emit(aten.linear.default, x, weight, bias)
        result = p.emit(aten.mm.default if last == 1 else aten.matmul.default, x, weight)
        return result if bias is None else p.emit(aten.add.Tensor, result, bias)

    if style == "column":
        w_cut = prior
        if not isinstance(w_cut, Split):
            w_cut = Split(out_dim, column_ranges(p, node, p.hints(weight)[out_dim], dim=last))
        local_bias = None if bias is None else p.take(bias, w_cut.on(0))
        return p.keep(node, call(p.take(x), p.take(weight, w_cut), local_bias), w_cut.on(last))
    if style == "row" or (isinstance(cut, Split) and cut.dim == last and p.placement(weight) != REPLICATE):
        w_cut = prior if isinstance(prior, Split) and prior.disjoint else p.evenly(weight, in_dim)
        if isinstance(cut, Split) and cut.dim == last and cut.disjoint and not isinstance(prior, Split):
            w_cut = cut.on(in_dim)
        result = call(p.take(x, w_cut.on(last)), p.take(weight, w_cut), None)
        if bias is None:
            return p.keep(node, result, PARTIAL)
        return p.keep(node, p.emit(aten.add.Tensor, p.all_reduce(result), p.take(bias)), REPLICATE)
    return p.follow(node, {x: [*range(last), None]})


@rule("transformers::grouped_mm_fallback", "aten::_grouped_mm")
def grouped(p: Partition, node: fx.Node) -> None:
    """Multiply rows of x by the matrix [in, out] of their expert; every rank has a part of each expert."""
    x, weight = args_of(node)[:2]
    cut = expert_cut(p, weight) or p.placement(weight)
    if not isinstance(cut, Split) or len(p.shape(weight)) != 3 or cut.dim == 0:
        return p.repeat(node)
    if cut.dim == 2:
        return p.locally(node, {weight: cut}, cut.on(1))
    return p.locally(node, {x: cut.on(1), weight: cut}, PARTIAL)


def expert_cut(p: Partition, weight: Any) -> Split | None:
    """Return the cut of experts' weights [experts, in, out]; None unless a parameter is still to be cut."""
    source: Any = weight if weight in p.parameters else weight.args[0] if weight.args else None
    parameter = p.parameters.get(source)
    experts = (u for u in weight.users if "grouped_mm" in str(u.target) or op_of(u) == "bmm")
    user = next((u for u in experts if u.args[1] is weight and len(p.shape(weight)) == 3), None)
    if parameter is None or parameter.style is None or parameter.placement is not None or user is None:
        return None
    if parameter.style == "column":
        return Split(2, column_ranges(p, user, p.hints(weight)[2], dim=len(p.shape(user)) - 1))
    placement = p.placement(user.args[0])
    terms = isinstance(placement, Split) and placement.dim == len(p.shape(user)) - 1 and placement.disjoint
    return placement.on(1) if isinstance(placement, Split) and terms else p.evenly(weight, 1)


@by_dims("baddbmm")
def baddbmm(p: Partition, node: fx.Node) -> Dims:
    """Multiply batches of matrices, and add to each product."""
    first, a, b = args_of(node)[:3]
    return {**_factors(p, node, a, b), first: p.spread(first, p.shape(node))}


def _factors(p: Partition, node: fx.Node, a: Any, b: Any) -> dict[fx.Node, list[int | None]]:
    """Return dims of a product's factors: of batches, rows of the first, columns of the second."""
    ndim, ndim_a, ndim_b = len(p.shape(node)), len(p.shape(a)), len(p.shape(b))
    if min(ndim_a, ndim_b) < 2:
        return {}
    of_a, of_b = (p.spread(x, [*p.shape(node)[:-2], *p.shape(x)[-2:]])[:-2] for x in (a, b))
    return {a: [*of_a, None, None]} if a is b else {a: [*of_a, ndim - 2, None], b: [*of_b, None, ndim - 1]}
