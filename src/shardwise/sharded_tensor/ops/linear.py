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
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardwise.errors import ShardingError, here
from shardwise.layout import Box
from shardwise.sharded_tensor.autograd import replicated, summed
from shardwise.sharded_tensor.ops.operands import anchor_of
from shardwise.sharded_tensor.registry import handles
from shardwise.sharded_tensor.tensor import ShardedTensor

_T: Any = Tensor


# ------------------------------------------------------------ the functions


@handles(F.linear)
def _linear(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.ndim != 2:
            raise ShardingError(
                f"{here()}: linear takes a weight of 2 dims beside a ShardedTensor, found shape"
                f" {tuple(weight.shape)}; use matmul"
            )
        if bias is not None:  # torch judges the dtypes and shapes
            F.linear(_empty(input, 0, 1), _empty(weight, 0, 1), _empty(bias, 0))
            F.linear(_meta(input), _meta(weight), _meta(bias))
        made = _product(input, weight, name="linear", transposed=True)
        if bias is None:
            return made
        addend = bias if isinstance(made, ShardedTensor) else _whole(bias)
        return made + addend.to(made.dtype)

    return linear(*args, **kwargs)


@handles(torch.matmul, _T.matmul, _T.__matmul__, torch.mm, _T.mm, torch.bmm, _T.bmm, torch.mv, _T.mv)
def _matmul(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    def matmul(
        input: Tensor, other: Tensor | None = None, *, mat2: Tensor | None = None, vec: Tensor | None = None
    ) -> Tensor:
        second = next(tensor for tensor in (other, mat2, vec) if tensor is not None)
        return _product(input, second, name=func.__name__, meant=func)

    return matmul(*args, **kwargs)


@handles(_T.__rmatmul__)
def _rmatmul(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return _product(args[1], args[0], name="matmul")


@handles(torch.addmm, _T.addmm, torch.baddbmm, _T.baddbmm, torch.addmv, _T.addmv)
def _addmm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    def addmm(
        input: Tensor,
        one: Tensor | None = None,
        two: Tensor | None = None,
        *,
        beta: float = 1,
        alpha: float = 1,
        **named: Tensor,
    ) -> Tensor:
        factors = [tensor for tensor in (one, two) if tensor is not None] + list(named.values())
        func(*(_meta(tensor) for tensor in (input, *factors)))
        product = _product(factors[0], factors[1], name=func.__name__)
        scaled = product if alpha == 1 else alpha * product
        return scaled if beta == 0 else scaled + (input if beta == 1 else beta * input)

    return addmm(*args, **kwargs)


# ------------------------------------------------------------ one product


@dataclass(frozen=True)
class _Factor:
    """One side of a product, as matrices [*batch, rows, columns].

    Attributes:
        size: of the whole.
        summed: its dim that is summed over, from the last: -1 of the left factor, -2 of the right.
        whole: the tensor, where it is plain.
        local: this rank's boxes and tensors, where it is sharded.
        shards: every shard's rank and box.
        nothing: empty, and depends on all that this rank has of it.
        origin: the sharded tensor that it is.
    """

    size: tuple[int, ...]
    summed: int
    nothing: Tensor
    whole: Tensor | None
    local: Sequence[tuple[Box, Tensor]]
    shards: Sequence[tuple[int, Box]]
    origin: ShardedTensor | None

    @property
    def free(self) -> int:
        """Its dim, from the last, that the result has too."""
        return -3 - self.summed


def _product(
    left: Tensor, right: Tensor, *, name: str, transposed: bool = False, meant: Any = torch.matmul
) -> Tensor:
    """`left @ right`, or `left @ right.T`. Collective where the sum needs it."""
    shown = meant(_meta(left), _meta(right).T if transposed else _meta(right))  # torch judges the shapes
    origin = left if isinstance(left, ShardedTensor) else right
    if not isinstance(origin, ShardedTensor):
        return torch.matmul(left, right.T if transposed else right)
    group = origin.process_group
    one, two = _factor(left, -1, group), _factor(right, -2, group, transposed=transposed)
    leader, other = _leader(one, two, name)
    size = (*torch.broadcast_shapes(one.size[:-2], two.size[:-2]), one.size[-2], two.size[-1])
    boxes = [_result_box(box, leader, other, size) for _, box in leader.shards]
    dropped = [dim for dim, tensor in ((-2, left), (-1, right)) if tensor.ndim == 1]
    anchor = torch.mm(one.nothing.reshape(0, 1), two.nothing.reshape(1, 0)).reshape(-1)
    made = []
    for box, tensor in leader.local:
        if box.is_empty:
            made.append(anchor.new_zeros(_result_box(box, leader, other, size).sizes) + anchor.sum())
            continue
        factor = _supply(other, _needed(box, leader, other))
        assert factor is not None
        made.append(torch.matmul(tensor, factor) if leader is one else torch.matmul(factor, tensor))
    if _stays_sharded(leader, left):
        it = iter(boxes)
        metadata = cast(ShardedTensor, leader.origin).metadata()
        metadata = metadata.map(shown.shape, lambda box: _without(next(it), dropped))
        made = [_squeezed(tensor, dropped) for tensor in made]
        return cast(ShardedTensor, leader.origin).with_tensors(made, metadata=metadata, anchor=anchor)
    whole = anchor.new_zeros(size) + anchor.sum() if anchor.requires_grad or not made else None
    for (box, _), part in zip(leader.local, made, strict=True):
        placed = _padded(part, _result_box(box, leader, other, size), size)
        whole = placed if whole is None else whole + placed
    assert whole is not None
    return _squeezed(summed(whole, group), dropped)


def _factor(tensor: Tensor, summed: int, group: dist.ProcessGroup, *, transposed: bool = False) -> _Factor:
    def as_matrix(tensor: Tensor) -> Tensor:
        if tensor.ndim == 1:
            return tensor.unsqueeze(0 if summed == -1 else 1)
        return tensor.transpose(-2, -1) if transposed else tensor

    def as_matrix_box(box: Box) -> Box:
        o, s = box.offsets, box.sizes
        if len(s) == 1:
            return Box((0, *o), (1, *s)) if summed == -1 else Box((*o, 0), (*s, 1))
        return Box((*o[:-2], o[-1], o[-2]), (*s[:-2], s[-1], s[-2])) if transposed else box

    size = as_matrix_box(Box.whole(tensor.shape)).sizes
    if not isinstance(tensor, ShardedTensor):
        whole = as_matrix(replicated(tensor, group))
        return _Factor(size, summed, whole.reshape(-1)[:0], whole, [], [], None)
    local = [
        (as_matrix_box(box), as_matrix(part)) for box, part in zip(tensor.boxes, tensor.tensors, strict=True)
    ]
    shards = [(shard.rank, as_matrix_box(shard.box)) for shard in tensor.metadata().shards_metadata]
    return _Factor(size, summed, anchor_of(tensor), None, local, shards, tensor)


def _leader(one: _Factor, two: _Factor, name: str) -> tuple[_Factor, _Factor]:
    """Whose boxes say which products are made, and the other; the same on every rank."""
    if one.origin is None or two.origin is None:
        return (two, one) if one.origin is None else (one, two)
    groups = [dist.get_process_group_ranks(whole.process_group) for whole in (one.origin, two.origin)]
    if groups[0] != groups[1]:
        raise ShardingError(
            f"{here()}: {name} of tensors of different process groups, of ranks {groups[0]} and {groups[1]};"
            " make both with one process_group"
        )
    for leader, other in ((one, two), (two, one)):
        held: dict[int, list[Box]] = {}
        for rank, box in other.shards:
            held.setdefault(rank, []).append(box)
        if all(
            box.is_empty or any(_contains(mine, _needed(box, leader, other)) for mine in held.get(rank, []))
            for rank, box in leader.shards
        ):
            return leader, other
    raise _refusal(one, two, name)


def _refusal(one: _Factor, two: _Factor, name: str) -> ShardingError:
    left, right = cast(ShardedTensor, one.origin), cast(ShardedTensor, two.origin)
    if all(box.is_empty or box.sizes[two.summed] == two.size[two.summed] for _, box in two.shards):
        remedy = "pass full_tensor() of the first"
    else:
        spec = right.sharding_spec()
        placements = getattr(spec, "placements", "the second's placements")
        remedy = f"call .reshard(ChunkShardingSpec(-1, {placements})) on the first"
    return ShardingError(
        f"{here()}: {name} of {tuple(left.metadata().size)} by {left.sharding_spec()!r} and"
        f" {tuple(right.metadata().size)} by {right.sharding_spec()!r}: ranks lack what their shards meet of"
        f" the other; {remedy}, so that both are cut alike along the dim that is summed over, or one is plain"
    )


def _stays_sharded(leader: _Factor, left: Tensor) -> bool:
    """Is every product complete, and the result cut as the leader?"""
    filled = [box for _, box in leader.shards if not box.is_empty]
    complete = all(box.sizes[leader.summed] == leader.size[leader.summed] for box in filled)
    by_left = leader.origin is left and left.ndim > 1
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


def _supply(factor: _Factor, box: Box) -> Tensor | None:
    """The part of `factor` in `box`, if this rank has it."""
    held = factor.local if factor.whole is None else [(Box.whole(factor.size), factor.whole)]
    for mine, tensor in held:
        if _contains(mine, box):
            for dim, (start, length) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                if length != mine.sizes[dim]:
                    tensor = tensor.narrow(dim, start - mine.offsets[dim], length)
            return tensor
    return None


def _contains(outer: Box, inner: Box) -> bool:
    starts = zip(outer.offsets, inner.offsets, strict=True)
    ends = zip(outer.ends, inner.ends, strict=True)
    return all(a <= b for a, b in starts) and all(a >= b for a, b in ends)


def _padded(tensor: Tensor, box: Box, size: Sequence[int]) -> Tensor:
    """`tensor`, which lies in `box`, with zeros around it up to `size`."""
    if box.sizes == tuple(size):
        return tensor
    around: list[int] = []
    for start, end, length in zip(reversed(box.offsets), reversed(box.ends), reversed(size), strict=True):
        around += [start, length - end]
    return F.pad(tensor, around)


def _without(box: Box, dims: Sequence[int]) -> Box:
    kept = [dim for dim in range(len(box.sizes)) if dim - len(box.sizes) not in dims]
    return Box(tuple(box.offsets[dim] for dim in kept), tuple(box.sizes[dim] for dim in kept))


def _squeezed(tensor: Tensor, dims: Sequence[int]) -> Tensor:
    """Without `dims`, which have one element or, in an empty shard, none."""
    if not dims:
        return tensor
    kept = [length for dim, length in enumerate(tensor.shape) if dim - tensor.ndim not in dims]
    return tensor.reshape(kept)


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, device="meta")


def _empty(tensor: Tensor, *size: int) -> Tensor:
    return torch.empty(size, dtype=tensor.dtype, device=tensor.device)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, ShardedTensor) else tensor
