"""How a weight's outputs are best cut: whole attention heads, and the parts of a fused projection each.

The outputs of a projection are one dim. Views further on show what they mean: a dim of 96 that becomes
(6, 16) is six heads, one of 96 split into three of 32 is three projections. `column_ranges` follows the outputs
to such views and cuts so that every rank has whole heads of every part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, fx

from shardwise.tensor_parallel.partition import Partition
from shardwise.tensor_parallel.placement import Ranges, even, normal


@dataclass(frozen=True)
class Stretch:
    """Outputs from `begin` on, `count` units of `unit` each."""

    begin: int
    count: int
    unit: int


def column_ranges(p: Partition, node: fx.Node, size: int) -> Ranges:
    """For every rank, which of the `size` outputs of `node` (its last dim) it computes."""
    stretches = sorted(set(_stretches(p, node, 0, size)), key=lambda s: s.begin)
    if not stretches or sum(s.count * s.unit for s in stretches) != size:
        return even(size, p.ranks)
    by_part = [even(s.count * s.unit, p.ranks, unit=s.unit) for s in stretches]
    return tuple(
        normal(
            [(s.begin + b, s.begin + e) for s, part in zip(stretches, by_part, strict=True) for b, e in part[rank]]
        )
        for rank in range(p.ranks)
    )


def _stretches(p: Partition, node: fx.Node, begin: int, size: int) -> Iterator[Stretch]:
    """The units of the `size` outputs in the last dim of `node`, which begin at `begin` among all."""
    for user in node.users:
        name = getattr(user.target, "__name__", "").split(".")[0]
        value = user.meta.get("val")
        if name in ("view", "reshape", "_unsafe_view", "unflatten") and isinstance(value, Tensor):
            sizes, before = p.hints(user), p.hints(node)
            if sizes[-1] == size and len(sizes) != len(before):
                yield from _stretches(p, user, begin, size)  # batch dims merged or split
            elif sizes[-1] != size and len(sizes) > len(before) - 1:
                yield from _heads(sizes, begin, size)
        elif name in ("split", "chunk", "split_with_sizes") and isinstance(value, (tuple, list)):
            at = begin
            for index, part in enumerate(value):
                for item in user.users:
                    if item.args[1] == index:
                        found = list(_stretches(p, item, at, part.shape[-1]))
                        yield from found or [Stretch(at, part.shape[-1], 1)]
                at += part.shape[-1]
        elif name in ("add", "mul", "clone", "contiguous", "dropout", "to", "_to_copy", "alias", "getitem"):
            if isinstance(value, Tensor) and value.shape[-1] == size:
                yield from _stretches(p, user, begin, size)


def _heads(sizes: list[int], begin: int, size: int) -> Iterator[Stretch]:
    """The dims that the last one became: (heads, width), or (3, heads, width) of a fused projection."""
    inner, dims = 1, []
    for length in reversed(sizes):
        dims.insert(0, length)
        inner *= length
        if inner == size:
            break
    if inner != size or len(dims) < 2:
        return
    *outer, heads, width = dims
    blocks = 1
    for length in outer:
        blocks *= length
    for block in range(blocks):
        yield Stretch(begin + block * heads * width, heads, width)
