"""Products with a sharded factor: `linear`, so `nn.Linear`, and `matmul`, `mm`, `bmm`, `mv`, `addmm`.

The boxes of one sharded factor say which products a rank makes: each of its boxes times what it meets of the
other factor, which must be there too. A plain one is there on every rank.

    boxes of that factor                           result                              forward communication
    whole along the dim that is summed over        sharded like the factor             none
    cut along it                                   plain: the sum of all products      one all-reduce of it

    linear(plain, weight cut along dim 0)          sharded along the last dim          none
    linear(plain, weight cut along dim 1)          plain                               one all-reduce
    linear(input cut along its last dim,
           weight cut along dim 1 alike)           plain                               one all-reduce
    linear(input cut along batch dims, plain)      sharded like the input              none

A right factor of which one rank holds all gives a plain result. A bias or addend joins after the sum, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.comm.exchange import part
from shardwise.errors import ShardingError, here
from shardwise.layout import Box
from shardwise.sharded_tensor.autograd import nothing_of, replicated, summed
from shardwise.sharded_tensor.ops.arguments import called_as
from shardwise.sharded_tensor.ops.operands import anchor_of, check_group
from shardwise.sharded_tensor.registry import handles
from shardwise.sharded_tensor.tensor import ShardedTensor

_T: Any = Tensor


# ------------------------------------------------------------ the functions


@called_as(F.linear)
def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if weight.ndim != 2:
        raise ShardingError(
            f"{here()}: linear takes a weight of 2 dims beside a ShardedTensor, found shape"
            f" {tuple(weight.shape)}; use matmul"
        )
    if bias is not None:  # torch judges the dtypes and shapes
        F.linear(_empty(input, 0, 1), _empty(weight, 0, 1), _empty(bias, 0))
        F.linear(_meta(input), _meta(weight), _meta(bias))
    made = _product(input, weight.t(), name="linear")
    if bias is None:
        return made
    if isinstance(bias, ShardedTensor) and not isinstance(made, ShardedTensor):
        bias = bias.full_tensor()
    return made + bias.to(made.dtype)


@handles(torch.matmul, _T.matmul, _T.__matmul__, torch.mm, _T.mm, torch.bmm, _T.bmm, torch.mv, _T.mv)
def _matmul(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    one, two = [*args, *kwargs.values()]
    func(_meta(one), _meta(two))  # torch judges the shapes
    return _product(one, two, name=func.__name__)


@handles(_T.__rmatmul__)
def _rmatmul(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return _product(args[1], args[0], name="matmul")


@handles(torch.addmm, _T.addmm, torch.baddbmm, _T.baddbmm, torch.addmv, _T.addmv)
def _addmm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    scales = {name: kwargs[name] for name in ("beta", "alpha") if name in kwargs}
    addend, one, two = [*args, *(value for name, value in kwargs.items() if name not in scales)]
    func(*(_meta(tensor) for tensor in (addend, one, two)))
    made = _product(one, two, name=func.__name__)
    beta, alpha = scales.get("beta", 1), scales.get("alpha", 1)
    made = made if alpha == 1 else alpha * made
    return made if beta == 0 else made + (addend if beta == 1 else beta * addend)


# ------------------------------------------------------------ one product


@dataclass(frozen=True)
class _Factor:
    """One side of a product of matrices [*batch, rows, columns].

    Attributes:
        tensor: plain ones are `replicated`.
        summed: its dim that is summed over, from the last: -1 of the left factor, -2 of the right.
    """

    tensor: Tensor
    summed: int

    @property
    def size(self) -> torch.Size:
        return self.tensor.shape

    @property
    def free(self) -> int:
        """Its dim, from the last, that the result has too."""
        return -3 - self.summed

    @property
    def local(self) -> list[tuple[Box, Tensor]]:
        """What this rank has of it."""
        if isinstance(self.tensor, ShardedTensor):
            return list(zip(self.tensor.boxes, self.tensor.tensors, strict=True))
        return [(Box.whole(self.size), self.tensor)]

    @property
    def nothing(self) -> Tensor:
        """Empty, and depending on all that this rank has of it."""
        if isinstance(self.tensor, ShardedTensor):
            return anchor_of(self.tensor)
        return nothing_of(self.tensor)


def _product(left: Tensor, right: Tensor, *, name: str, vector: bool = False) -> Tensor:
    """`left @ right`, where `left` may be a row that was a vector. Collective where the sum needs it."""
    if right.ndim == 1:
        return _product(left, right.unsqueeze(1), name=name).squeeze(-1)
    if left.ndim == 1:
        return _product(left.unsqueeze(0), right, name=name, vector=True).squeeze(-2)
    shape = torch.matmul(_meta(left), _meta(right)).shape
    origin = left if isinstance(left, ShardedTensor) else right
    if not isinstance(origin, ShardedTensor):
        return torch.matmul(left, right)
    group = origin.process_group
    one, two = (
        _Factor(t if isinstance(t, ShardedTensor) else replicated(t, group), dim)
        for t, dim in ((left, -1), (right, -2))
    )
    leader, other = _leader(one, two, name)
    held = cast(ShardedTensor, leader.tensor)
    anchor = torch.mm(one.nothing.reshape(0, 1), two.nothing.reshape(1, 0)).reshape(-1)
    made = []
    for box, tensor in leader.local:
        if box.is_empty:
            made.append(anchor.new_zeros(_result_box(box, leader, other, shape).sizes) + anchor.sum())
            continue
        factor = _supply(other, _needed(box, leader, other))
        made.append(torch.matmul(tensor, factor) if leader is one else torch.matmul(factor, tensor))
    if _stays_sharded(held, leader, by_left=leader is one and not vector):
        metadata = held.metadata().map(shape, lambda box: _result_box(box, leader, other, shape))
        return held.with_tensors(made, metadata=metadata, anchor=anchor)
    whole = anchor.new_zeros(shape) + anchor.sum() if anchor.requires_grad or not made else None
    for (box, _), product in zip(leader.local, made, strict=True):
        placed = _padded(product, _result_box(box, leader, other, shape), shape)
        whole = placed if whole is None else whole + placed
    return summed(cast(Tensor, whole), group)


def _leader(one: _Factor, two: _Factor, name: str) -> tuple[_Factor, _Factor]:
    """Whose boxes say which products are made, and the other; the same on every rank."""
    left, right = one.tensor, two.tensor
    if not isinstance(left, ShardedTensor) or not isinstance(right, ShardedTensor):
        return (one, two) if isinstance(left, ShardedTensor) else (two, one)
    check_group(left, right)
    for leader, other in ((one, two), (two, one)):
        held: dict[int, list[Box]] = {}
        for shard in cast(ShardedTensor, other.tensor).metadata().shards_metadata:
            held.setdefault(shard.rank, []).append(shard.box)
        if all(
            box.is_empty or any(_contains(mine, _needed(box, leader, other)) for mine in held.get(rank, []))
            for rank, box in _shards(cast(ShardedTensor, leader.tensor))
        ):
            return leader, other
    if all(box.is_empty or box.sizes[-2] == two.size[-2] for _, box in _shards(right)):
        remedy = "pass full_tensor() of the first"
    else:
        placements = getattr(right.sharding_spec(), "placements", "the second's placements")
        remedy = f"call .reshard(ChunkShardingSpec(-1, {placements})) on the first"
    shown = cast(ShardedTensor, right.t()) if name == "linear" else right
    raise ShardingError(
        f"{here()}: {name} of {tuple(left.shape)} by {left.sharding_spec()!r} and {tuple(shown.shape)} by"
        f" {shown.sharding_spec()!r}: ranks lack what their shards meet of the other; {remedy}, so that both"
        " are cut alike along the dim that is summed over, or one is plain"
    )


def _shards(sharded: ShardedTensor) -> list[tuple[int, Box]]:
    return [(shard.rank, shard.box) for shard in sharded.metadata().shards_metadata]


def _stays_sharded(sharded: ShardedTensor, leader: _Factor, *, by_left: bool) -> bool:
    """Is every product complete, and the result cut as the leader?"""
    filled = [box for _, box in _shards(sharded) if not box.is_empty]
    complete = all(box.sizes[leader.summed] == leader.size[leader.summed] for box in filled)
    return complete and leader.size[leader.summed] > 0 and (by_left or len(filled) > 1)


# ------------------------------------------------------------ boxes


def _needed(box: Box, leader: _Factor, other: _Factor) -> Box:
    """What a box of `leader` meets of `other`."""
    offsets, sizes = [0] * len(other.size), list(other.size)
    offsets[other.summed], sizes[other.summed] = box.offsets[leader.summed], box.sizes[leader.summed]
    for dim in range(3, min(len(box.sizes), len(sizes)) + 1):
        if sizes[-dim] != 1 and leader.size[-dim] != 1:
            offsets[-dim], sizes[-dim] = box.offsets[-dim], box.sizes[-dim]
    return Box(tuple(offsets), tuple(sizes))


def _result_box(box: Box, leader: _Factor, other: _Factor, size: Sequence[int]) -> Box:
    """What products with a box of `leader` are of the result."""
    offsets, sizes = [0] * len(size), list(size)
    offsets[leader.free], sizes[leader.free] = box.offsets[leader.free], box.sizes[leader.free]
    for dim in range(3, len(box.sizes) + 1):
        if leader.size[-dim] == size[-dim]:
            offsets[-dim], sizes[-dim] = box.offsets[-dim], box.sizes[-dim]
    if box.is_empty and all(sizes):
        sizes[leader.free] = 0
    return Box(tuple(offsets), tuple(sizes))


def _supply(factor: _Factor, box: Box) -> Tensor:
    """The part of `factor` in `box`, which this rank has."""
    return next(part(mine, tensor, box) for mine, tensor in factor.local if _contains(mine, box))


def _contains(outer: Box, inner: Box) -> bool:
    starts = zip(outer.offsets, inner.offsets, strict=True)
    ends = zip(outer.ends, inner.ends, strict=True)
    return all(a <= b for a, b in starts) and all(a >= b for a, b in ends)


def _padded(tensor: Tensor, box: Box, size: Sequence[int]) -> Tensor:
    """`tensor`, which lies in `box`, with zeros around it up to `size`."""
    around: list[int] = []
    for start, end, length in zip(reversed(box.offsets), reversed(box.ends), reversed(size), strict=True):
        around += [start, length - end]
    return F.pad(tensor, around) if any(around) else tensor


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, device="meta")


def _empty(tensor: Tensor, *size: int) -> Tensor:
    return torch.empty(size, dtype=tensor.dtype, device=tensor.device)
