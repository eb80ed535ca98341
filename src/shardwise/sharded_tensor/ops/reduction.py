"""What reductions of whole sharded tensors are made of.

Whether one is local follows from the cut alone (`is_local`): then `each_shard` gives a sharded tensor.
Otherwise shards' parts are combined into a plain tensor with the reduced dims kept (`total_of`,
`differentiable`), and `without` drops them at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise import _compat
from shardwise.layout import Box
from shardwise.sharded_tensor.autograd import summed
from shardwise.sharded_tensor.ops.operands import anchor_of
from shardwise.sharded_tensor.refuse import refuse
from shardwise.sharded_tensor.tensor import ShardedTensor

Slices = tuple[slice, ...]
Dims = tuple[int, ...]
Derivative = Callable[[Tensor, Box, Tensor], Tensor]  # by a shard, its box, and the gradient of its part
MAX, MIN = dist.ReduceOp.MAX, dist.ReduceOp.MIN
_ALIASES = {"self": "input", "x": "input", "A": "input", "axis": "dim", "keepdims": "keepdim", "ord": "p"}


def given(names: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments in the order of `names`, None for what is not given."""
    known = names.split()
    found = dict(zip(known, args, strict=False))
    for name, value in kwargs.items():
        found[_ALIASES.get(name, name)] = value
    if len(args) > len(known) or any(name not in (*known, "out") for name in found):
        raise TypeError(f"{func.__name__}() takes {known}, found {len(args)} arguments and {list(kwargs)}")
    if found.get("out") is not None or not isinstance(found.get("input"), ShardedTensor):
        refuse(func, args, kwargs)
    return [found.get(name) for name in known]


def dims_of(sharded: ShardedTensor, dim: Any) -> tuple[int, ...]:
    """All that `dim` names, from 0 on and in order; every one for None and for none."""
    ndim = len(sharded.metadata().size)
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(ndim))
    named = [dim] if isinstance(dim, int) else list(dim)
    least = max(ndim, 1)
    for d in named:
        if not -least <= d < least:
            raise IndexError(f"Dimension out of range (expected in [{-least}, {least - 1}], but got {d})")
    dims = tuple(sorted(d % least for d in named))
    if len(set(dims)) != len(dims):
        raise RuntimeError(f"duplicate dims in {named}")
    return dims if ndim else ()


def is_local(sharded: ShardedTensor, dims: Dims) -> bool:
    """Does every shard have all elements along `dims`, of which there are some, and are other dims left?"""
    size = sharded.metadata().size
    return (
        len(dims) < len(size)
        and count_of(sharded, dims) > 0
        and all(shard.shard_sizes[d] == size[d] for shard in sharded.metadata().shards_metadata for d in dims)
    )


def each_shard(
    sharded: ShardedTensor, dims: Dims, *, keepdim: Any, function: Callable[[Tensor], Tensor]
) -> ShardedTensor:
    """`function`, which reduces `dims`, of every shard. Local."""
    size = sharded.metadata().size

    def kept(values: Sequence[int], reduced: int) -> tuple[int, ...]:
        return tuple(reduced if d in dims else v for d, v in enumerate(values) if keepdim or d not in dims)

    metadata = sharded.metadata().map(
        kept(size, 1), lambda box: Box(kept(box.offsets, 0), kept(box.sizes, 1))
    )
    if sharded.tensors:
        return sharded.with_tensors([function(tensor) for tensor in sharded.tensors], metadata=metadata)
    empty = sharded.anchor.reshape([size[d] if d in dims else 0 for d in range(len(size))])
    return sharded.with_tensors([], metadata=metadata, anchor=function(empty).reshape(-1))


def kept_size(sharded: ShardedTensor, dims: Dims) -> list[int]:
    """The whole size after `dims` are reduced to one element each."""
    return [1 if d in dims else length for d, length in enumerate(sharded.metadata().size)]


def slices(box: Box, dims: Dims) -> Slices:
    """Where a box lies after `dims` are reduced to one element each."""
    return tuple(
        slice(0, 1) if d in dims else slice(offset, offset + size)
        for d, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True))
    )


def without(value: Tensor, dims: Dims, keepdim: Any) -> Tensor:
    """`value` without the reduced `dims`, unless they are to be kept."""
    return value if keepdim else value.reshape([v for d, v in enumerate(value.shape) if d not in dims])


def wide_of(dtype: torch.dtype) -> torch.dtype:
    """What values of a dtype are combined in: at least fp32, and int64 for integers and bools."""
    if dtype.is_floating_point:
        return torch.promote_types(dtype, torch.float32)
    return dtype if dtype.is_complex else torch.int64


def count_of(sharded: ShardedTensor, dims: Dims) -> int:
    """How many elements become one."""
    return math.prod(sharded.metadata().size[d] for d in dims)


def needs_grad(sharded: ShardedTensor) -> bool:
    """Does autograd record what is computed of it? The same on every rank."""
    return torch.is_grad_enabled() and sharded.requires_grad


def as_torch(func: Any, sharded: ShardedTensor, *args: Any) -> None:
    """Raise what torch raises for a whole tensor of this shape and dtype, if anything. Local."""
    size = sharded.metadata().size
    # Not all functions of nothing raise on the meta device.
    func(torch.empty(size, dtype=sharded.dtype, device="meta" if size.numel() else "cpu"), *args)


def total_of(
    sharded: ShardedTensor,
    dims: Dims,
    function: Callable[[Tensor, Slices], Tensor],
    *,
    dtype: torch.dtype,
) -> Tensor:
    """The sum over all shards of `function(shard, place in the sum)`, which sums `dims` and keeps them.

    Collective; differentiable.
    """
    total = torch.zeros(kept_size(sharded, dims), dtype=dtype, device=sharded.anchor.device)
    for tensor, box in zip(sharded.tensors, sharded.boxes, strict=True):
        place = slices(box, dims)
        total[place] = total[place] + function(tensor, place)
    if not sharded.tensors:
        total = total + anchor_of(sharded).sum().to(dtype)
    return summed(total, sharded.process_group) if total.numel() else total


class _Reduced(torch.autograd.Function):
    """A value that all ranks have computed without autograd, with its derivative by each local shard."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, derivative: Derivative, held: Any, anchor: Tensor, *tensors: Tensor
    ) -> Tensor:
        ctx.derivative, ctx.held, ctx.anchor = derivative, held, anchor.new_empty(0)
        ctx.save_for_backward(*tensors)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = (
            ctx.derivative(tensor, box, grad[place]).to(tensor.dtype)
            for tensor, (box, place) in zip(ctx.saved_tensors, ctx.held, strict=True)
        )
        return None, None, None, ctx.anchor, *grads


_reduced = _compat.apply_of(_Reduced)


def differentiable(value: Tensor, sharded: ShardedTensor, dims: Dims, derivative: Derivative) -> Tensor:
    """`value`, to which every shard's `derivative` belongs. Local."""
    if not needs_grad(sharded):
        return value
    held = [(box, slices(box, dims)) for box in sharded.boxes]
    return cast(Tensor, _reduced(value, derivative, held, sharded.anchor, *sharded.tensors))
