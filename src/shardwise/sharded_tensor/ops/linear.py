"""Products with a sharded factor: `linear` (and so `nn.Linear`), `matmul`, `mm`, `bmm`, `mv`.

The boxes of one sharded factor determine a rank's products: each of its boxes times the matching part of the
other factor, which the rank must also have. Every rank has a plain factor.

    boxes of that factor                           result                              forward communication
    whole along the dim that is summed over        sharded like the factor             none
    cut along it                                   plain: the sum of all products      one all-reduce of it

    linear(plain, weight cut along dim 0)          sharded along the last dim          none
    linear(plain, weight cut along dim 1)          plain                               one all-reduce
    linear(input, weight: both cut on the last)    plain                               one all-reduce
    linear(input cut along batch dims, plain)      sharded like the input              none

A right factor of which one rank holds all gives a plain result. A bias or addend joins after the sum, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.comm.exchange import part
from shardwise.errors import ShardingError, here
from shardwise.layout import Box
from shardwise.sharded_tensor import failure
from shardwise.sharded_tensor.autograd import nothing_of, replicated, summed
from shardwise.sharded_tensor.ops.operands import anchor_of, called_as, check_group, total_of, unsharded
from shardwise.sharded_tensor.registry import Args, Kwargs, handles
from shardwise.sharded_tensor.tensor import ShardedTensor

_T: Any = Tensor


@called_as(F.linear)
def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    # torch judges the dtypes and shapes
    if bias is not None:
        F.linear(_empty(input, 0, 1), _empty(weight, 0, 1), _empty(bias, 0))
    F.linear(_meta(input), _meta(weight), None if bias is None else _meta(bias))
    product = _product(input, weight.t() if weight.ndim > 1 else weight, name="linear")
    if bias is None:
        return product
    if not isinstance(product, ShardedTensor):
        bias = unsharded(bias)
    return product + bias.to(product.dtype)


@handles(torch.matmul, _T.matmul, _T.__matmul__, torch.mm, _T.mm, torch.bmm, _T.bmm, torch.mv, _T.mv)
def _matmul(func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    left, right = [*args, *kwargs.values()]
    func(_meta(left), _meta(right))  # torch judges the shapes
    return _product(left, right, name=func.__name__)


@handles(_T.__rmatmul__)
def _rmatmul(func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    return _product(args[1], args[0], name="matmul")


# Of matrices [*batch, rows, columns]. `summed_dim` is the dim, from the last, of the leading factor that is
# summed over: -1 of a left one, -2 of a right one. Of the other factor it is -3 - summed_dim.


def _product(left: Tensor, right: Tensor, *, name: str, vector: bool = False) -> Tensor:
    """Compute `left @ right`; `left` may be a row that was a vector. Collective where the sum needs it."""
    if right.ndim == 1:
        return _product(left, right.unsqueeze(1), name=name).squeeze(-1)
    if left.ndim == 1:
        return _product(left.unsqueeze(0), right, name=name, vector=True).squeeze(-2)
    shape = torch.matmul(_meta(left), _meta(right)).shape
    if not isinstance(left, ShardedTensor) and not isinstance(right, ShardedTensor):
        return torch.matmul(left, right)
    leader, other, summed_dim = _leader(left, right, name)
    if isinstance(other, ShardedTensor):
        shards, nothing = list(zip(other.boxes, other.tensors, strict=True)), anchor_of(other)
    else:
        whole = replicated(other, leader.process_group)
        shards, nothing = [(Box.whole(whole.shape), whole)], nothing_of(whole)

    def product_of(end: Tensor) -> Tensor:
        """Return an empty product; like one of a shard, it saves for its backward."""
        return torch.mm(end.reshape(0, 1), nothing.reshape(1, 0)).reshape(-1)

    anchor = product_of(anchor_of(leader))

    def result_of(box: Box) -> Box:
        """Return the part of the result that products with a box of the leader make."""
        offsets, sizes = [0] * len(shape), list(shape)
        free, size = -3 - summed_dim, leader.shape
        for dim in (free, *(-dim for dim in range(3, len(size) + 1) if size[-dim] == shape[-dim])):
            offsets[dim], sizes[dim] = box.offsets[dim], box.sizes[dim]
        if box.is_empty and all(sizes):
            sizes[free] = 0
        return Box(tuple(offsets), tuple(sizes))

    products = []
    for box, tensor in zip(leader.boxes, leader.tensors, strict=True):
        if box.is_empty:
            nothing_here = product_of(tensor).sum(dtype=anchor.dtype)  # else bools are summed to an int
            products.append(anchor.new_zeros(result_of(box).sizes) + nothing_here)
            continue
        matching = _matching_box(box, leader.shape, other.shape, summed_dim)
        factor = next(part(outer, shard, matching) for outer, shard in shards if _contains(outer, matching))
        products.append(torch.matmul(tensor, factor) if summed_dim == -1 else torch.matmul(factor, tensor))
    length, nonempty = leader.shape[summed_dim], [box for _, box in _shards(leader) if not box.is_empty]
    complete = length > 0 and all(box.sizes[summed_dim] == length for box in nonempty)
    if complete and ((summed_dim == -1 and not vector) or len(nonempty) > 1):
        return leader.with_tensors(products, metadata=leader.metadata().map(shape, result_of), anchor=anchor)
    boxed = list(zip(map(result_of, leader.boxes), products, strict=True))
    group, text = leader.process_group, f"a product of size {tuple(shape)}, {anchor.dtype}"
    with failure.comparing(text, device=anchor.device, group=group, subject="what to sum"):
        total = total_of(boxed, shape, anchor)
    return summed(total, group)


def _leader(left: Tensor, right: Tensor, name: str) -> tuple[ShardedTensor, Tensor, int]:
    """Return the factor whose boxes determine products, the other, and the first's summed dim. Local."""
    if not isinstance(left, ShardedTensor):
        return cast(ShardedTensor, right), left, -2
    if not isinstance(right, ShardedTensor):
        return left, right, -1
    check_group(left, right)
    for leader, other, dim in ((left, right, -1), (right, left, -2)):
        by_rank: dict[int, list[Box]] = {}
        for rank, box in _shards(other):
            by_rank.setdefault(rank, []).append(box)
        nonempty = [(rank, box) for rank, box in _shards(leader) if not box.is_empty]
        matching = [(rank, _matching_box(box, leader.shape, other.shape, dim)) for rank, box in nonempty]
        if all(any(_contains(box, inner) for box in by_rank.get(rank, [])) for rank, inner in matching):
            return leader, other, dim
    if all(box.is_empty or box.sizes[-2] == right.shape[-2] for _, box in _shards(right)):
        remedy = "pass full_tensor() of the first"
    else:
        placements = getattr(right.sharding_spec(), "placements", "the second's placements")
        remedy = f"call .reshard(ChunkShardingSpec(-1, {placements})) on the first"
    second = cast(ShardedTensor, right.t()) if name == "linear" else right
    raise ShardingError(
        f"{here()}: {name} of {tuple(left.shape)} by {left.sharding_spec()!r} and {tuple(second.shape)} by"
        f" {second.sharding_spec()!r}: ranks lack what their shards meet of the other; {remedy}, so that both"
        " are cut alike along the dim that is summed over, or one is plain"
    )


def _shards(sharded: ShardedTensor) -> list[tuple[int, Box]]:
    return [(shard.rank, shard.box) for shard in sharded.metadata().shards_metadata]


def _matching_box(box: Box, leader: Sequence[int], other: Sequence[int], summed_dim: int) -> Box:
    """Return the part of the other factor that a box of a factor of size `leader` meets."""
    offsets, sizes = [0] * len(other), list(other)
    free = -3 - summed_dim
    offsets[free], sizes[free] = box.offsets[summed_dim], box.sizes[summed_dim]
    for dim in range(3, min(len(leader), len(other)) + 1):
        if other[-dim] != 1 and leader[-dim] != 1:
            offsets[-dim], sizes[-dim] = box.offsets[-dim], box.sizes[-dim]
    return Box(tuple(offsets), tuple(sizes))


def _contains(outer: Box, inner: Box) -> bool:
    starts = zip(outer.offsets, inner.offsets, strict=True)
    ends = zip(outer.ends, inner.ends, strict=True)
    return all(a <= b for a, b in starts) and all(a >= b for a, b in ends)


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, device="meta")


def _empty(tensor: Tensor, *size: int) -> Tensor:
    return torch.empty(size, dtype=tensor.dtype, device=tensor.device)
