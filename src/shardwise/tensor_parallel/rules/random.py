"""Random values: every rank draws those of the whole value, in the whole program's order, and keeps its own.

So generators that start equal on all ranks stay equal: what is whole gets the same mask on every rank, parts
get masks that have nothing to do with one another, and a cut program draws what the whole one would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

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
    """Make values that do not depend on the input's."""
    x = args_of(node)[0]
    at = p.cut_of(x)
    if at is None:
        return p.repeat(node)
    op: Any = node.target
    rest, kwargs = args_of(node)[1:], node.kwargs
    made = _drawn(p, p.take(x, at), at, p.shape(x), lambda whole: op(whole, *rest, **kwargs))
    return p.keep(node, made, at)


def dropped(
    p: Partition, here: fx.Node, at: Split, sizes: Sequence[Any], share: float
) -> tuple[fx.Node, fx.Node]:
    """Return this rank's part of a value of `sizes` after dropout of `share`, and its part of the mask."""
    mask = _drawn(p, here, at, sizes, lambda whole: whole.bernoulli(1 - share), of=torch.bool)
    made = p.emit(aten.mul.Tensor, here, mask)
    return p.emit(aten.mul.Tensor, made, 0.0 if share == 1 else 1 / (1 - share)), mask


def _drawn(
    p: Partition,
    here: fx.Node,
    at: Split,
    sizes: Sequence[Any],
    draw: Callable[[Tensor], Tensor],
    *,
    of: torch.dtype | None = None,
) -> fx.Node:
    """Return this rank's part of what `draw` gives for a value of whole `sizes`; `here` is its part."""
    known = [n if isinstance(n, int) else p.emit(aten.sym_size.int, here, dim) for dim, n in enumerate(sizes)]
    whole = p.emit(aten.new_empty.default, here, known, dtype=of)
    return p.cut(p.run(draw, whole), at)
