"""Random values: every rank draws those of the whole value, in the whole program's order, and keeps its own.

So generators that begin alike on all ranks stay alike: what is whole gets the same mask on every rank, parts
get masks that have nothing to do with one another, and a cut program draws what the whole one would.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from shardwise.tensor_parallel.nodes import args_of
from shardwise.tensor_parallel.partition import Partition, aten
from shardwise.tensor_parallel.placement import Split
from shardwise.tensor_parallel.rules.pointwise import pointwise
from shardwise.tensor_parallel.rules.registry import aten_rule


@aten_rule("dropout", "native_dropout")
def dropout(p: Partition, node: fx.Node) -> None:
    x, share, train = args_of(node)
    at = p.cut_of(x)
    if train is False:
        return pointwise(p, node)
    if at is None:
        return p.repeat(node)
    made, mask = dropped(p, p.take(x, at), at, p.shape(x), share)
    return p.keep(node, made if node.target is aten.dropout.default else (made, mask), at)


@aten_rule("rand_like", "randn_like", "randint_like", "bernoulli.p")
def like(p: Partition, node: fx.Node) -> None:
    """Values that do not depend on the input's."""
    x = args_of(node)[0]
    at = p.cut_of(x)
    if at is None:
        return p.repeat(node)
    here = p.take(x, at)
    whole = p.emit(aten.new_empty.default, here, whole_sizes(p, here, at, p.shape(x)))
    drawn = p.emit(node.target, whole, *node.args[1:], **node.kwargs)
    return p.keep(node, p.cut(drawn, at), at)


def dropped(
    p: Partition, here: fx.Node, at: Split, sizes: Sequence[Any], share: float
) -> tuple[fx.Node, fx.Node]:
    """This rank's part of a value of whole `sizes` after dropout of `share`, and its part of the mask."""
    whole = p.emit(aten.new_empty.default, here, whole_sizes(p, here, at, sizes), dtype=torch.bool)
    mask = p.cut(p.emit(aten.bernoulli.p, whole, 1 - share), at)
    made = p.emit(aten.mul.Tensor, here, mask)
    return p.emit(aten.mul.Tensor, made, 0.0 if share == 1 else 1 / (1 - share)), mask


def whole_sizes(p: Partition, here: fx.Node, at: Split, sizes: Sequence[Any]) -> list[Any]:
    """`sizes` as numbers, or nodes of this rank's program, whose part of such a value is `here`."""
    found: list[Any] = []
    for dim, size in enumerate(sizes):
        if isinstance(size, int):
            found.append(size)
            continue
        local = p.emit(aten.sym_size.int, here, dim)
        if dim == at.dim and at.block is not None:
            local = p.emit(operator.mul, p.emit(operator.floordiv, local, at.size(p.rank)), at.block)
        found.append(local)
    return found
