"""Products with weights: where tensor parallelism happens.

    column   weight cut along its outputs: inputs whole, outputs cut; no communication
    row      weight cut along its inputs, as the incoming activation is cut: terms of a sum, one all-reduce
"""

from __future__ import annotations

from typing import Any

from torch import fx

from shardwise.tensor_parallel.heads import column_ranges
from shardwise.tensor_parallel.partition import Partition, aten
from shardwise.tensor_parallel.placement import PARTIAL, REPLICATE, Placement, Split
from shardwise.tensor_parallel.rules.registry import rule


@rule("aten::linear")
def linear(p: Partition, node: fx.Node) -> None:
    x, weight, bias = (*node.args, None)[:3]
    _product(p, node, x, weight, bias, out_dim=0, in_dim=1)


@rule("aten::addmm")
def addmm(p: Partition, node: fx.Node) -> None:
    bias, x, weight = node.args[:3]
    if node.kwargs or weight not in p.parameters:
        return _general(p, node)
    return _product(p, node, x, weight, bias, out_dim=1, in_dim=0)


@rule("aten::mm")
def mm(p: Partition, node: fx.Node) -> None:
    x, weight = node.args[:2]
    if weight not in p.parameters:
        return _general(p, node)
    return _product(p, node, x, weight, None, out_dim=1, in_dim=0)


def _product(
    p: Partition, node: fx.Node, x: Any, weight: Any, bias: Any, *, out_dim: int, in_dim: int
) -> None:
    """x @ weight + bias, where the weight is a parameter with a style, or any value."""
    style = p.parameters[weight].style if weight in p.parameters else None
    last = len(p.shape(x)) - 1
    at = p.placement(x)

    def call(x: Any, weight: Any, bias: Any) -> fx.Node:
        if out_dim == 0:
            return p.emit(aten.linear.default, x, weight, bias)
        made = p.emit(aten.mm.default, x, weight)
        return made if bias is None else p.emit(aten.add.Tensor, made, bias)

    if style == "column":
        cut = Split(out_dim, column_ranges(p, node, p.hints(weight)[out_dim]))
        local_bias = None if bias is None else p.take(bias, cut.on(0))
        p.keep(node, call(p.take(x), p.take(weight, cut), local_bias), cut.on(last))
        return
    if style == "row" or (isinstance(at, Split) and at.dim == last and p.placement(weight) != REPLICATE):
        cut = at.on(in_dim) if isinstance(at, Split) and at.dim == last else p.evenly(weight, in_dim)
        made = call(p.take(x, cut.on(last)), p.take(weight, cut), None)
        if bias is None:
            p.keep(node, made, PARTIAL)
        else:
            p.keep(node, p.emit(aten.add.Tensor, p.all_reduce(made), p.take(bias)), REPLICATE)
        return
    where: Placement = at if isinstance(at, Split) and at.dim != last else REPLICATE
    p.keep(node, call(p.take(x, where), p.take(weight), p.take(bias)), where)


@rule("aten::matmul", "aten::bmm")
def _general(p: Partition, node: fx.Node) -> None:
    """A product of two activations: cut along a batch dim (heads), rows, columns or the summed dim."""
    a, b = node.args[-2:]
    if node.target is aten.addmm.default:
        return p.keep(node, p.emit(aten.addmm.default, *map(p.take, node.args), **node.kwargs), REPLICATE)
    ndim_a, ndim_b, ndim = len(p.shape(a)), len(p.shape(b)), len(p.shape(node))
    at_a, at_b = p.placement(a), p.placement(b)
    wanted: tuple[Placement, Placement, Placement] = (REPLICATE, REPLICATE, REPLICATE)
    if min(ndim_a, ndim_b) >= 2:
        for at, other_ndim, own_ndim, other in ((at_a, ndim_b, ndim_a, b), (at_b, ndim_a, ndim_b, a)):
            if not isinstance(at, Split) or at.dim >= own_ndim - 2:
                continue
            out = ndim - (own_ndim - at.dim)
            there = other_ndim - (own_ndim - at.dim)
            needs = there >= 0 and p.hints(other)[there] != 1
            mine, theirs = at, at.on(there) if needs else REPLICATE
            wanted = (mine, theirs, at.on(out)) if other is b else (theirs, mine, at.on(out))
            break
        else:
            if isinstance(at_a, Split) and at_a.dim == ndim_a - 2:
                wanted = (at_a, REPLICATE, at_a.on(ndim - 2))
            elif isinstance(at_b, Split) and at_b.dim == ndim_b - 1:
                wanted = (REPLICATE, at_b, at_b.on(ndim - 1))
            elif isinstance(at_a, Split) and isinstance(at_b, Split) and at_a.ranges == at_b.ranges:
                wanted = (at_a, at_b, PARTIAL)
    p.keep(node, p.emit(node.target, p.take(a, wanted[0]), p.take(b, wanted[1])), wanted[2])
