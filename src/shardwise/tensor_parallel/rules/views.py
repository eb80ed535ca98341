"""The same elements in another shape: what is cut stays cut, along the dim that it becomes."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from shardwise.tensor_parallel.partition import Partition, aten, with_dim
from shardwise.tensor_parallel.placement import PARTIAL, REPLICATE, Placement, Split, regroup
from shardwise.tensor_parallel.rules.linear import expert_cut
from shardwise.tensor_parallel.rules.registry import rule


def start(p: Partition, x: fx.Node) -> tuple[fx.Node, Placement]:
    """An input where it is: terms of a sum stay so if this is their one use."""
    at = p.placement(x)
    if at == PARTIAL and not p.may_stay_partial(x):
        at = REPLICATE
    return p.take(x, at), p.placement(x)


@rule(
    "aten::view", "aten::reshape", "aten::_unsafe_view", "aten::flatten", "aten::unflatten", "aten::view_as"
)
def view(p: Partition, node: fx.Node) -> None:
    x = node.args[0]
    assert isinstance(x, fx.Node)
    if str(node.target).endswith("view.dtype"):
        return p.repeat(node)
    here, at = start(p, x)
    if not isinstance(at, Split):
        return p.keep(node, p.emit(aten.reshape.default, here, _sizes(p, node)), at)
    found = regroup(at, p.shape(x), p.shape(node))
    empty = any(at.size(rank) == 0 for rank in range(p.ranks))
    if found is None or (empty and (found.block or at.block)):  # no size of -1 where there are no elements
        made = p.emit(aten.reshape.default, p.take(x), _sizes(p, node))
        return p.keep(node, made, REPLICATE)
    made = p.emit(aten.reshape.default, here, _cut_sizes(p, node, found))
    return p.keep(node, made, found)


def _sizes(p: Partition, node: fx.Node) -> list[Any]:
    """The whole value's new sizes: numbers, or nodes of this rank's program where they are symbolic."""
    name = str(node.target).split(".")[1]
    known = p.shape(node)
    asked: Any = node.args[1] if len(node.args) > 1 and name != "unflatten" else None
    if isinstance(asked, (list, tuple)) and len(asked) == len(known):
        taken = [p.take(size) for size in asked]
        return [new if isinstance(new, int) else size for size, new in zip(taken, known, strict=True)]
    if sum(not isinstance(size, int) for size in known) > 1:
        return [size if isinstance(size, int) else _size_node(p, node, d) for d, size in enumerate(known)]
    return [size if isinstance(size, int) else -1 for size in known]


def _size_node(p: Partition, node: fx.Node, dim: int) -> fx.Node:
    """A symbolic size of the result, from a dim of the source that has it."""
    x = node.args[0]
    assert isinstance(x, fx.Node)
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
    whole = sizes[found.dim]
    blocks = p.emit(operator.floordiv, whole, found.block)
    return with_dim(sizes, found.dim, p.emit(operator.mul, blocks, found.size(p.rank)))


@rule(
    *(f"aten::{name}" for name in ("transpose", "permute", "t", "numpy_T", "mT", "movedim", "moveaxis")),
    "aten::swapaxes",
    "aten::swapdims",
)
def permute(p: Partition, node: fx.Node) -> None:
    x, *rest = node.args
    assert isinstance(x, fx.Node)
    probe = torch.empty([*range(len(p.shape(x)))], device="meta")  # every dim of a size of its own
    order = list(node.target(probe, *rest).shape)  # type: ignore[operator]
    if x in p.parameters and (wanted := expert_cut(p, node)) is not None:
        p.take(x, wanted.on(order[wanted.dim]))
    elif order == [1, 0] and _is_cut_later(p, x):
        return p.transpose_later(node)
    here, at = start(p, x)
    made = p.emit(node.target, here, *rest)
    p.keep(node, made, at.on(order.index(at.dim)) if isinstance(at, Split) else at)
    return None


def _is_cut_later(p: Partition, x: fx.Node) -> bool:
    """Is `x` a matrix that a linear layer will cut, transposed for the backward before?"""
    parameter = p.parameters.get(x)
    if parameter is None or parameter.style is None or parameter.placement is not None:
        return False
    return any(user.target is aten.linear.default and user.args[1] is x for user in x.users)


@rule("aten::unsqueeze")
def unsqueeze(p: Partition, node: fx.Node) -> None:
    x, dim = node.args
    assert isinstance(x, fx.Node)
    assert isinstance(dim, int)
    here, at = start(p, x)
    dim %= len(p.shape(x)) + 1
    made = p.emit(node.target, here, dim)
    p.keep(node, made, at.on(at.dim + (at.dim >= dim)) if isinstance(at, Split) else at)


@rule("aten::squeeze")
def squeeze(p: Partition, node: fx.Node) -> None:
    x, *rest = node.args
    assert isinstance(x, fx.Node)
    sizes = p.shape(x)
    asked: Any = (
        range(len(sizes)) if not rest else rest[0] if isinstance(rest[0], (list, tuple)) else [rest[0]]
    )
    gone = {int(d) % len(sizes) for d in asked if isinstance(sizes[int(d)], int) and sizes[int(d)] == 1}
    if isinstance(at := p.placement(x), Split) and at.dim in gone:
        return p.repeat(node)
    here, at = start(p, x)
    made = p.emit(aten.squeeze.dims, here, sorted(gone))
    return p.keep(node, made, at.on(at.dim - sum(d < at.dim for d in gone)) if isinstance(at, Split) else at)


@rule("aten::expand", "aten::expand_as", "aten::broadcast_to")
def expand(p: Partition, node: fx.Node) -> None:
    x, asked = node.args[:2]
    assert isinstance(x, fx.Node)
    if not isinstance(asked, (list, tuple)):
        return _expand_as(p, node, x)
    new = len(asked) - len(p.shape(x))
    before = p.placement(x)
    if isinstance(before, Split) and p.is_spread(x, before.dim, p.shape(node)[before.dim + new]):
        return p.repeat(node)
    here, at = start(p, x)
    sizes = [p.take(size) for size in asked]
    if isinstance(at, Split):
        dim = at.dim + new
        made = p.emit(aten.expand.default, here, with_dim(sizes, dim, -1))
        return p.keep(node, made, at.on(dim))
    return p.keep(node, p.emit(aten.expand.default, here, sizes), at)


def _expand_as(p: Partition, node: fx.Node, x: fx.Node) -> None:
    """Expanded to the size of another value, and cut as that one is."""
    other = node.args[1]
    assert isinstance(other, fx.Node)
    at = p.cut_of(other)
    mine = p.take(x, REPLICATE if at is None else p.aligned(x, at, p.shape(node)))
    where: Placement = at or REPLICATE
    p.keep(node, p.emit(node.target, mine, p.take(other, where)), where)


@rule("aten::repeat")
def repeat(p: Partition, node: fx.Node) -> None:
    """Whole copies along each dim: of the cut one only if it is not repeated."""
    x, counts = node.args
    assert isinstance(x, fx.Node)
    assert isinstance(counts, (list, tuple))
    at = p.cut_of(x)
    new = len(counts) - len(p.shape(x))
    if at is None or counts[at.dim + new] != 1:
        return p.repeat(node)
    return p.keep(node, p.emit(node.target, p.take(x, at), [p.take(c) for c in counts]), at.on(at.dim + new))


@rule("aten::repeat_interleave.self_int")
def repeat_interleave(p: Partition, node: fx.Node) -> None:
    """Every element so many times over: heads of keys, for the queries that share them."""
    x, count, *rest = node.args
    dim: Any = rest[0] if rest else node.kwargs.get("dim")
    assert isinstance(x, fx.Node)
    at = p.cut_of(x)
    if at is None or dim is None:
        return p.repeat(node)
    dim = int(dim) % len(p.shape(x))
    if at.dim == dim and (not isinstance(count, int) or at.block):
        return p.repeat(node)
    # the size of the output may be given: it is the whole one
    made = p.emit(node.target, p.take(x, at), p.take(count), dim)
    return p.keep(node, made, at.scaled(count) if at.dim == dim else at)  # type: ignore[arg-type]


@rule("aten::sym_size")
def sym_size(p: Partition, node: fx.Node) -> None:
    """A size of the whole value, from a value that has it whole."""
    x, dim = node.args
    assert isinstance(x, fx.Node)
    assert isinstance(dim, int)
    at = p.placement(x)
    dim %= len(p.shape(x))
    if isinstance(at, Split) and at.dim == dim:
        size = p.shape(x)[dim]
        if isinstance(size, int):
            return p.keep(node, size, REPLICATE)
        p.take(x)
        return p.keep(node, p.emit(node.target, p.take(x), dim), REPLICATE)
    return p.keep(node, p.emit(node.target, p.values[x].node, dim), REPLICATE)


@rule("aten::sym_numel", "aten::sym_stride")
def of_all(p: Partition, node: fx.Node) -> None:
    """Of the whole value."""
    p.repeat(node)


def is_tensor(x: Any) -> bool:
    """Is `x` a node of one tensor?"""
    return isinstance(x, fx.Node) and isinstance(x.meta.get("val"), Tensor)
