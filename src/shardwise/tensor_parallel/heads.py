"""The best cut of a weight's outputs: by whole attention heads, in each part of a fused projection.

The outputs of a projection are one dim. Their later use shows what they mean: 96 that become (6, 16) are six
heads, 96 split into three of 32 are three projections, and repeated key heads each belong to that many query
heads. `column_ranges` follows the outputs and cuts them so that every rank has whole heads of every part, and
the key and value heads that its queries use; ranks may share these::

    8 outputs, 2 key heads of 4, each for 3 heads of queries, 3 ranks    ((0, 4),), ((0, 8),), ((4, 8),)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from shardwise.graph.nodes import arguments_of
from shardwise.tensor_parallel.nodes import args_of, op_of, several
from shardwise.tensor_parallel.partition import Partition
from shardwise.tensor_parallel.placement import Interval, Ranges, even, groups, hint, normal, same_size

_PARTS = ("split", "chunk", "split_with_sizes", "unbind", "select", "slice", "narrow", "tensor_split")
_PERMUTES = ("transpose", "permute", "t", "squeeze")
_ATTENTION = ("scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu")


@dataclass(frozen=True)
class Stretch:
    """Outputs from `begin` on: `count` units of `unit` outputs, each unit used by `shared` heads."""

    begin: int
    count: int
    unit: int = 1
    shared: int = 1

    @property
    def end(self) -> int:
        return self.begin + self.count * self.unit


def column_ranges(p: Partition, node: fx.Node, size: int, *, dim: int) -> Ranges:
    """Return, for every rank, which of the `size` outputs of `node`, along `dim`, it computes."""
    shares: list[list[Interval]] = [[] for _ in range(p.ranks)]
    for stretch in _finest(list(_Tracker(p).follow(node, dim, Stretch(0, size))), size):
        heads = even(stretch.count * stretch.shared, p.ranks)  # those that use it are cut evenly
        for share, part in zip(shares, heads, strict=True):
            for begin, end in part:
                first, last = begin // stretch.shared, -(-end // stretch.shared)
                share.append((stretch.begin + first * stretch.unit, stretch.begin + last * stretch.unit))
    return tuple(map(normal, shares))


def _finest(stretches: list[Stretch], size: int) -> list[Stretch]:
    """Return stretches that cover the outputs once; of overlapping ones, the most specific."""
    finest: list[Stretch] = []
    for stretch in sorted(stretches, key=lambda s: (-s.shared, -s.unit, s.end - s.begin, s.begin)):
        if all(stretch.end <= rival.begin or rival.end <= stretch.begin for rival in finest):
            finest.append(stretch)
    finest.sort(key=lambda s: s.begin)
    begins, ends = [*(s.begin for s in finest), size], [0, *(s.end for s in finest)]
    gaps = [Stretch(end, begin - end) for begin, end in zip(begins, ends, strict=True) if begin > end]
    return sorted([*finest, *gaps], key=lambda s: s.begin)


class _Tracker:
    """Follows a dim of a value through the program as long as its elements stay separate."""

    def __init__(self, p: Partition) -> None:
        self.p = p
        self.visited: set[tuple[fx.Node, int, Stretch]] = set()

    def follow(self, node: fx.Node, dim: int, stretch: Stretch) -> Iterator[Stretch]:
        """Yield what is known of `stretch`, whose units are the elements of `dim` of `node`."""
        if (node, dim, stretch) in self.visited:
            return
        self.visited.add((node, dim, stretch))
        if stretch.count > 1 or stretch.shared > 1:
            yield stretch
        for user in node.users:
            name, value = op_of(user), user.meta.get("val")
            if name in _PARTS and user.args[0] is node:
                yield from self._follow_parts(user, name, dim, stretch)
            elif name in _ATTENTION and node in user.args[1:3]:
                yield from self._share(stretch, self.p.hints(user.args[0])[-3])  # type: ignore[arg-type]
            elif isinstance(value, Tensor):
                yield from self._follow_user(node, user, name, dim, stretch)

    def _share(self, stretch: Stretch, heads: int) -> Iterator[Stretch]:
        if stretch.count and heads > stretch.count and heads % stretch.count == 0:
            yield replace(stretch, shared=stretch.shared * (heads // stretch.count))

    def _follow_user(
        self, node: fx.Node, user: fx.Node, name: str, dim: int, stretch: Stretch
    ) -> Iterator[Stretch]:
        sizes, new_sizes = self.p.hints(node), self.p.hints(user)
        if name in ("view", "reshape", "_unsafe_view", "unflatten", "flatten", "unsqueeze"):
            yield from self._follow_view(node, user, dim, stretch)
        elif name in _PERMUTES:
            new_dim = self._dim_after(node, user, dim)
            if new_dim is not None:
                yield from self.follow(user, new_dim, stretch)
        elif name == "repeat_interleave" and len(new_sizes) == len(sizes):
            yield from self._share(stretch, new_sizes[dim])
        elif name in ("linear", "mm", "bmm", "matmul", "embedding", "addmm", "baddbmm"):
            return
        else:
            shifted = dim + len(new_sizes) - len(sizes)
            if shifted >= 0 and new_sizes[shifted] == sizes[dim]:
                yield from self.follow(user, shifted, stretch)

    def _follow_parts(self, user: fx.Node, name: str, dim: int, stretch: Stretch) -> Iterator[Stretch]:
        axis = part_dim(user, len(self.p.shape(args_of(user)[0])))
        value: Any = user.meta["val"]
        pieces: list[tuple[fx.Node, Tensor, int]] = []
        if isinstance(value, (tuple, list)):
            offset = 0
            for index, piece in enumerate(value):
                pieces += [(item, piece, offset) for item in user.users if item.args[1] == index]
                offset += 1 if name == "unbind" else hint(piece.shape[axis])
        else:
            arguments = arguments_of(user)
            begin = arguments.get("start", arguments.get("index"))
            begin = begin if isinstance(begin, int) else 0
            pieces = [(user, value, begin % stretch.count if axis == dim and begin < 0 else begin)]
        drops = name in ("unbind", "select")
        for item, piece, begin in pieces:
            if axis != dim:
                yield from self.follow(item, dim - (drops and axis < dim), stretch)
            elif not drops:
                begins = stretch.begin + begin * stretch.unit
                yield from self.follow(
                    item, dim, replace(stretch, begin=begins, count=hint(piece.shape[dim]))
                )

    def _follow_view(self, node: fx.Node, user: fx.Node, dim: int, stretch: Stretch) -> Iterator[Stretch]:
        old, new = self.p.shape(node), self.p.shape(user)
        before, after = next(g for g in groups(old, new) if dim in g[0])
        if before == [dim]:
            yield from self._follow_dims(user, after, stretch)
        elif len(before) == 2 and before[0] == dim and len(after) == 1 and _is_expanded(node):
            yield from self._share(stretch, self.p.hints(user)[after[0]])
        elif before[-1] == dim and len(after) > 1 and stretch.count % self.p.hints(user)[after[-1]] == 0:
            width = self.p.hints(user)[after[-1]]  # heads of all rows become one dim
            yield replace(stretch, count=stretch.count // width, unit=width * stretch.unit)

    def _follow_dims(self, user: fx.Node, dims: list[int], stretch: Stretch) -> Iterator[Stretch]:
        """Follow a dim that became `dims`: (heads, width), or (3, heads, width) if the 3 are taken apart."""
        if not dims:  # it had one element
            return
        sizes = self.p.hints(user)
        if sizes[dims[0]] == 1 and len(dims) == 2:  # one head, or only another dim
            yield from self.follow(
                user, dims[0], replace(stretch, count=1, unit=stretch.count * stretch.unit)
            )
        dims = [d for d in dims if sizes[d] != 1] or dims[:1]
        heads = next((d for d in dims if not self._is_unbound(user, d)), dims[0])
        outer, inner = 1, 1
        for d in dims:
            outer, inner = (outer * sizes[d], inner) if d < heads else (outer, inner * sizes[d])
        inner //= sizes[heads] or 1
        block = sizes[heads] * inner * stretch.unit
        for index in range(outer):
            part = Stretch(stretch.begin + index * block, sizes[heads], inner * stretch.unit, stretch.shared)
            yield from self.follow(user, heads, part)

    def _is_unbound(self, node: fx.Node, dim: int) -> bool:
        """Return whether elements of `dim` are selected one by one, like those of a fused projection."""
        for user in node.users:
            op, ndim = op_of(user), len(self.p.shape(node))
            if op in (*_PERMUTES, "unsqueeze", "contiguous", "clone"):
                new_dim = self._dim_after(node, user, dim)
                unbound = new_dim is not None and self._is_unbound(user, new_dim)
            else:
                unbound = op in _PARTS and part_dim(user, ndim) == dim
                if unbound and op not in ("unbind", "select"):
                    unbound = all(hint(piece.shape[dim]) == 1 for piece in several(user.meta["val"]))
            if unbound:
                return True
        return False

    def _dim_after(self, node: fx.Node, user: fx.Node, dim: int) -> int | None:
        """Return the dim of `user`, which permutes, adds or drops dims, that is `dim` of `node`."""
        old, new = self.p.shape(node), self.p.shape(user)
        if op_of(user) in ("transpose", "permute", "t"):
            return order_of(user, len(old)).index(dim)
        after = next(after for before, after in groups(old, new) if dim in before)
        intact = len(after) == 1 and same_size(old[dim], new[after[0]])  # squeeze drops dims of size 1
        return after[0] if intact else None


def _is_expanded(node: fx.Node) -> bool:
    while op_of(node) in ("clone", "contiguous", "to", "_to_copy"):
        node = args_of(node)[0]
    return op_of(node) == "expand"


def order_of(node: fx.Node, ndim: int) -> list[int]:
    """Return the source's dim for each dim of a transposed or permuted value."""
    target: Any = node.target
    probe = torch.empty([*range(ndim)], device="meta")  # every dim has its own size
    return list(target(probe, *node.args[1:]).shape)


def part_dim(node: fx.Node, ndim: int) -> int:
    """Return the dim along which a split, a slice or another of `_PARTS` takes parts."""
    return int(arguments_of(node)["dim"]) % ndim
