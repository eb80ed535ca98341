"""The same elements in another shape: what is cut stays cut, along the dim that it becomes."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from shardwise.tensor_parallel.nodes import args_of, is_tensor, op_of
from shardwise.tensor_parallel.partition import Partition, aten
from shardwise.tensor_parallel.placement import REPLICATE, Split, regroup, with_dim
from shardwise.tensor_parallel.rules.linear import expert_cut
from shardwise.tensor_parallel.rules.registry import aten_rule


@aten_rule("view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as")
def view(p: Partition, node: fx.Node) -> None:
    x = args_of(node)[0]
    if str(node.target).endswith("view.dtype"):
        return p.repeat(node)
    at = p.stays(x)
    found = regroup(at, p.shape(x), p.shape(node)) if isinstance(at, Split) else at
    empty = isinstance(at, Split) and any(at.size(rank) == 0 for rank in range(p.ranks))
    if isinstance(found, Split) and empty and (found.block or at.block):  # type: ignore[union-attr]
        found = None  # no size of -1 where there are no elements
    here = p.take(x, at)
    if isinstance(found, Split):
        return p.keep(node, p.emit(aten.reshape.default, here, _cut_sizes(p, node, found)), found)
    here = p.take(x) if found is None else here
    return p.keep(node, p.emit(aten.reshape.default, here, _sizes(p, node)), found or REPLICATE)


def _sizes(p: Partition, node: fx.Node) -> list[Any]:
    """The whole value's new sizes: numbers, or nodes of this rank's program where they are symbolic."""
    known = p.shape(node)
    asked: Any = node.args[1] if len(node.args) > 1 and op_of(node) != "unflatten" else None
    if isinstance(asked, (list, tuple)) and len(asked) == len(known):
        taken = [p.take(size) for size in asked]
        return [new if isinstance(new, int) else size for size, new in zip(taken, known, strict=True)]
    if sum(not isinstance(size, int) for size in known) > 1:
        return [size if isinstance(size, int) else _size_node(p, node, d) for d, size in enumerate(known)]
    return [size if isinstance(size, int) else -1 for size in known]


def _size_node(p: Partition, node: fx.Node, dim: int) -> fx.Node:
    """A symbolic size of the result, from a dim of the source that has it."""
    x = args_of(node)[0]
    at = p.placement(x)
    for d, size in enumerate(p.shape(x)):
        cut = isinstance(at, Split) and at.dim == d
        if not cut and str(size) == str(p.shape(node)[dim]):
            return p.emit(aten.sym_size.int, p.values[x].node, d)
    return p.emit(aten.sym_size.int, p.emit(node.target, p.take(x), *node.args[1:]), dim)


def _cut_sizes(p: Partition, node: fx.Node, found: Split) -> list[Any]:
    """This rank's new sizes, where the result is cut as `found`."""
    sizes = _sizes(p, node)
    if found.block is None:
        return with_dim(sizes, found.dim, found.size(p.rank))
    if all(not isinstance(size, int) or size != -1 for d, size in enumerate(sizes) if d != found.dim):
        return with_dim(sizes, found.dim, -1)
    blocks = p.emit(operator.floordiv, sizes[found.dim], found.block)
    return with_dim(sizes, found.dim, p.emit(operator.mul, blocks, found.size(p.rank)))


@aten_rule("transpose", "permute", "t", "numpy_T", "mT", "movedim", "moveaxis", "swapaxes", "swapdims")
def permute(p: Partition, node: fx.Node) -> None:
    x, *rest = args_of(node)
    probe = torch.empty([*range(len(p.shape(x)))], device="meta")  # every dim of a size of its own
    order = list(node.target(probe, *rest).shape)  # type: ignore[operator]
    if x in p.parameters and (wanted := expert_cut(p, node)) is not None:
        p.take(x, wanted.on(order[wanted.dim]))
    elif order == [1, 0] and _is_cut_later(p, x):
        return p.transpose_later(node)
    at = p.stays(x)
    return p.locally(node, {x: at}, at.on(order.index(at.dim)) if isinstance(at, Split) else at)


def _is_cut_later(p: Partition, x: fx.Node) -> bool:
    """Is `x` a matrix that a linear layer will cut, transposed for the backward before?"""
    parameter = p.parameters.get(x)
    if parameter is None or parameter.style is None or parameter.placement is not None:
        return False
    return any(user.target is aten.linear.default and user.args[1] is x for user in x.users)


@aten_rule("unsqueeze")
def unsqueeze(p: Partition, node: fx.Node) -> None:
    x, dim = args_of(node)
    at = p.stays(x)
    dim %= len(p.shape(x)) + 1
    made = p.emit(node.target, p.take(x, at), dim)
    return p.keep(node, made, at.on(at.dim + (at.dim >= dim)) if isinstance(at, Split) else at)


@aten_rule("squeeze")
def squeeze(p: Partition, node: fx.Node) -> None:
    x, *rest = args_of(node)
    sizes = p.shape(x)
    asked = range(len(sizes)) if not rest else rest[0] if isinstance(rest[0], (list, tuple)) else [rest[0]]
    gone = {int(d) % len(sizes) for d in asked if isinstance(sizes[int(d)], int) and sizes[int(d)] == 1}
    at = p.stays(x)
    if isinstance(at, Split) and at.dim in gone:
        return p.repeat(node)
    made = p.emit(aten.squeeze.dims, p.take(x, at), sorted(gone))
    return p.keep(node, made, at.on(at.dim - sum(d < at.dim for d in gone)) if isinstance(at, Split) else at)


@aten_rule("expand", "expand_as", "broadcast_to")
def expand(p: Partition, node: fx.Node) -> None:
    x, asked = args_of(node)[:2]
    if is_tensor(asked):  # cut as that one is
        cut = p.cut_of(asked)
        mine = REPLICATE if cut is None else p.aligned(x, cut, p.shape(node))
        return p.locally(node, {x: mine, asked: cut or REPLICATE}, cut or REPLICATE)
    at = p.stays(x)
    new = len(asked) - len(p.shape(x))
    if isinstance(at, Split) and p.is_spread(x, at.dim, p.shape(node)[at.dim + new]):
        return p.repeat(node)
    here, sizes = p.take(x, at), [p.take(size) for size in asked]
    if isinstance(at, Split):
        at = at.on(at.dim + new)
        sizes = with_dim(sizes, at.dim, -1)
    return p.keep(node, p.emit(aten.expand.default, here, sizes), at)


@aten_rule("repeat")
def repeat(p: Partition, node: fx.Node) -> None:
    """Whole copies along each dim: of the cut one only if it is not repeated."""
    x, counts = args_of(node)
    at = p.cut_of(x)
    new = len(counts) - len(p.shape(x))
    if at is None or counts[at.dim + new] != 1:
        return p.repeat(node)
    return p.locally(node, {x: at}, at.on(at.dim + new))


@aten_rule("repeat_interleave.self_int")
def repeat_interleave(p: Partition, node: fx.Node) -> None:
    """Every element so many times over: heads of keys, for the queries that share them."""
    x, count, *rest = args_of(node)
    dim: Any = rest[0] if rest else node.kwargs.get("dim")
    at = p.cut_of(x)
    if at is None or dim is None:
        return p.repeat(node)
    dim %= len(p.shape(x))
    if at.dim == dim and (not isinstance(count, int) or at.block):
        return p.repeat(node)
    # the size of the output may be given: it is the whole one
    made = p.emit(node.target, p.take(x, at), p.take(count), dim)
    return p.keep(node, made, at.scaled(count) if at.dim == dim else at)


@aten_rule("sym_size")
def sym_size(p: Partition, node: fx.Node) -> None:
    """A size of the whole value, from a value that has it whole."""
    x, dim = args_of(node)
    at = p.placement(x)
    dim %= len(p.shape(x))
    size = p.shape(x)[dim]
    cut = isinstance(at, Split) and at.dim == dim
    here = p.take(x) if cut and not isinstance(size, int) else p.values[x].node
    return p.keep(node, size if cut and isinstance(size, int) else p.emit(node.target, here, dim), REPLICATE)


aten_rule("sym_numel", "sym_stride")(Partition.repeat)  # of the whole value
