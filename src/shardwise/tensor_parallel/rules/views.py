"""Views of the same elements in another shape: a cut dim stays cut as the dim that it becomes."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from functools import reduce
from typing import Any

from torch import fx

from shardwise.graph.nodes import arguments_of
from shardwise.tensor_parallel.heads import order_of
from shardwise.tensor_parallel.nodes import args_of, is_tensor
from shardwise.tensor_parallel.partition import Partition, aten
from shardwise.tensor_parallel.placement import REPLICATE, Split, groups, regroup, with_dim
from shardwise.tensor_parallel.rules.linear import expert_cut
from shardwise.tensor_parallel.rules.registry import Dims, aten_rule, by_dims


@aten_rule("view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as", "unsqueeze", "squeeze")
def view(p: Partition, node: fx.Node) -> None:
    x = args_of(node)[0]
    if str(node.target).endswith("view.dtype"):
        return p.repeat(node)
    placement = p.stays(x)
    target = regroup(placement, p.shape(x), p.shape(node)) if isinstance(placement, Split) else placement
    local, sizes = p.take(x, REPLICATE if target is None else placement), _sizes(p, node)
    if isinstance(target, Split):
        sizes = with_dim(sizes, target.dim, target.size(p.rank))
        if -1 in sizes and not target.size(p.rank):  # of no elements torch infers no size
            sizes = _infer_size(p, node, local, sizes)
    return p.keep(node, p.emit(aten.reshape.default, local, sizes), target or REPLICATE)


def _sizes(p: Partition, node: fx.Node) -> list[Any]:
    """Return the whole value's new sizes: numbers, or nodes of this rank's program for symbolic ones."""
    shape, arguments = p.shape(node), arguments_of(node)
    sizes = arguments.get("size", arguments.get("shape"))
    if sizes is not None:
        nodes = [p.take(size) for size in sizes]
        return [new if isinstance(new, int) else size for size, new in zip(nodes, shape, strict=True)]
    if sum(not isinstance(size, int) for size in shape) > 1:
        return [size if isinstance(size, int) else _size_node(p, node, d) for d, size in enumerate(shape)]
    return [size if isinstance(size, int) else -1 for size in shape]


def _size_node(p: Partition, node: fx.Node, dim: int) -> fx.Node:
    """Return a symbolic size of the result, from a dim of the source that has it."""
    x = args_of(node)[0]
    placement = p.placement(x)
    for d, size in enumerate(p.shape(x)):
        cut = isinstance(placement, Split) and placement.dim == d
        if not cut and str(size) == str(p.shape(node)[dim]):
            return p.emit(aten.sym_size.int, p.values[x].node, d)
    return p.emit(aten.sym_size.int, p.emit(node.target, p.take(x), *p.take_all(node.args[1:])), dim)


def _infer_size(p: Partition, node: fx.Node, local: fx.Node, sizes: list[Any]) -> list[Any]:
    """Return `sizes` with the size that -1 stands for, from the dims of `local` that become that dim."""
    shape, dim = p.shape(args_of(node)[0]), sizes.index(-1)
    before, after = next(group for group in groups(shape, p.shape(node)) if dim in group[1])
    old_sizes = [n if isinstance(n := shape[d], int) else p.emit(aten.sym_size.int, local, d) for d in before]
    size, rest = _multiply(p, old_sizes), _multiply(p, [sizes[d] for d in after if d != dim])
    return with_dim(sizes, dim, size if rest == 1 else p.emit(operator.floordiv, size, rest))


def _multiply(p: Partition, sizes: Sequence[Any]) -> Any:
    """Multiply sizes: numbers, or nodes of this rank's program."""
    number = math.prod(size for size in sizes if isinstance(size, int))
    factors = [size for size in sizes if not isinstance(size, int)] + [number] * (number != 1)
    return reduce(lambda a, b: p.emit(operator.mul, a, b), factors) if factors else 1


@aten_rule("transpose", "permute", "t", "numpy_T", "mT", "movedim", "moveaxis", "swapaxes", "swapdims")
def permute(p: Partition, node: fx.Node) -> None:
    x = args_of(node)[0]
    order = order_of(node, len(p.shape(x)))
    if x in p.parameters and (weight_cut := expert_cut(p, node)) is not None:
        p.take(x, weight_cut.on(order[weight_cut.dim]))
    return p.follow(node, {x: [order.index(d) for d in range(len(order))]}, linear=True)


@aten_rule("view_as_complex", "view_as_real")
def as_complex(p: Partition, node: fx.Node) -> None:
    """Cut views as complex or real: the last dim, of two elements, becomes one number, or the reverse."""
    x = args_of(node)[0]
    common = min(len(p.shape(x)), len(p.shape(node)))
    return p.follow(node, {x: [d if d < common else None for d in range(len(p.shape(x)))]}, linear=True)


@aten_rule("expand", "expand_as", "broadcast_to")
def expand(p: Partition, node: fx.Node) -> None:
    x, shape = args_of(node)[:2]
    dims = p.spread(x, p.shape(node))
    if is_tensor(shape):  # cut like that tensor
        return p.follow(node, {x: dims, shape: range(len(p.shape(shape)))})
    cut = p.stays(x)
    target = cut if not isinstance(cut, Split) else None if (dim := dims[cut.dim]) is None else cut.on(dim)
    if target is None:
        return p.repeat(node)
    sizes = [-1 if d in dims else p.take(size) for d, size in enumerate(shape)]
    return p.keep(node, p.emit(aten.expand.default, p.take(x, cut), sizes), target)


@by_dims("repeat")
def repeat(p: Partition, node: fx.Node) -> Dims:
    """Repeat whole copies along each dim; the cut dim must not be repeated."""
    x, counts = args_of(node)
    new = len(counts) - len(p.shape(x))
    return {x: [d if counts[d] == 1 else None for d in range(new, len(counts))]}


@aten_rule("repeat_interleave.self_int")
def repeat_interleave(p: Partition, node: fx.Node) -> None:
    """Repeat each element: key heads, for the queries that share them."""
    x, count = args_of(node)[:2]
    dim: Any = arguments_of(node)["dim"]
    cut = p.cut_of(x)
    if cut is None or dim is None:
        return p.repeat(node)
    dim %= len(p.shape(x))
    if cut.dim == dim and not isinstance(count, int):
        return p.repeat(node)
    # an output size argument, which is the whole size, is left out
    result = p.emit(node.target, p.take(x, cut), p.take(count), dim)
    return p.keep(node, result, cut.scaled(count) if cut.dim == dim else cut)


aten_rule("sym_size", "sym_numel", "sym_stride")(Partition.repeat)  # of the whole value
