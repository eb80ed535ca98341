"""Arguments of torch functions, each under one name; and operands as the parts that fit each local shard.

Whether operands fit is decided by the metadata of all ranks, so every rank refuses the same ones. An operand
of fewer dims, or of size 1 in some, broadcasts as in torch:

    a plain tensor      replicated: the part that meets the shard's box
    a sharded tensor    the shard that is the projection of the box, on the same rank
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardwise.errors import ShardingError, here
from shardwise.layout import Box
from shardwise.layout.regroup import expand_box
from shardwise.sharded_tensor.autograd import linked, nothing_of, replicated
from shardwise.sharded_tensor.metadata import ShardedTensorMetadata
from shardwise.sharded_tensor.refuse import refuse
from shardwise.sharded_tensor.registry import Args, Kwargs, handles
from shardwise.sharded_tensor.tensor import ShardedTensor

_F = TypeVar("_F", bound=Callable[..., Any])

_ALIASES = {
    **dict.fromkeys(("self", "x", "A", "tensor"), "input"),
    "axis": "dim",
    "keepdims": "keepdim",
    "train": "training",
    "ord": "p",
    "from": "a",
    "to": "b",
}


def functions(names: str) -> list[Any]:
    """List the functions of torch, methods of `Tensor` and special functions of these names."""
    holders = (torch, Tensor, torch.special)
    return [getattr(holder, name) for name in names.split() for holder in holders if hasattr(holder, name)]


def rule(*funcs: Any, takes: str) -> Callable[[_F], _F]:
    """Register the decorated `do(func, *values)` for every torch function in `funcs`.

    `takes` names the values in order, beginning with the sharded tensor as "input"; missing ones are None. If
    the first is not sharded, or there is an `out`, the function is refused.
    """
    names = takes.split()

    def register(do: _F) -> _F:
        handles(*funcs)(lambda func, args, kwargs: do(func, *bind_arguments(names, func, args, kwargs)))
        return do

    return register


def called_as(*funcs: Any) -> Callable[[_F], _F]:
    """Register the decorated function for every torch function in `funcs`, whose signature it has."""

    def register(do: _F) -> _F:
        handles(*funcs)(lambda func, args, kwargs: do(*args, **kwargs))
        return do

    return register


def by_name(func: Any, args: Args, kwargs: Kwargs) -> dict[str, Any]:
    """Return the arguments of a Python function by its own names for them, with its defaults."""
    bound = _signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


_signature = functools.lru_cache(inspect.signature)


def bind_arguments(names: list[str], func: Any, args: Args, kwargs: Kwargs) -> list[Any]:
    """Return the arguments in the order of `names`, None for what is not given."""
    if not kwargs and args and len(args) <= len(names) and isinstance(args[0], ShardedTensor):
        return [*args, *[None] * (len(names) - len(args))]
    values = dict(zip(names, args, strict=False))
    for name, value in kwargs.items():
        values[name if name in names else _ALIASES.get(name, name)] = value
    if len(args) > len(names) or any(name not in (*names, "out") for name in values):
        raise TypeError(f"{func.__name__}() takes {names}, found {len(args)} arguments and {list(kwargs)}")
    if values.get("out") is not None or not isinstance(values.get("input"), ShardedTensor):
        refuse(func, args, kwargs)
    return [values.get(name) for name in names]


def probe(tensor: Tensor) -> Tensor:
    """Return a meta tensor of this shape and dtype, to find out the result of an operation in torch."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def raise_as_torch(func: Any, sharded: ShardedTensor, *args: Any) -> None:
    """Raise torch's error for a whole tensor of this shape and dtype, if there is one. Local."""
    size = sharded.metadata().size
    # Not all functions of nothing raise on the meta device.
    func(torch.empty(size, dtype=sharded.dtype, device="meta" if size.numel() else "cpu"), *args)


def within(whole: Tensor, box: Box, *, size: Sequence[int]) -> Tensor:
    """Return the part of a tensor, broadcasting to the whole `size`, that lies in `box`: a view."""
    first = len(box.sizes) - whole.ndim
    for dim in range(whole.ndim):
        if whole.shape[dim] == size[first + dim]:
            whole = whole.narrow(dim, box.offsets[first + dim], box.sizes[first + dim])
    return whole


def unsharded(operand: Any) -> Any:
    """Return a sharded tensor as a whole one, any other operand (even a DTensor) unchanged. Collective."""
    return operand.full_tensor() if isinstance(operand, ShardedTensor) else operand


def anchor_of(sharded: ShardedTensor) -> Tensor:
    """Return an empty 1-D tensor that depends on all that this rank has of `sharded`, even no shards."""
    return nothing_of(*sharded.tensors) if sharded.tensors else sharded.anchor


def total_of(parts: Sequence[tuple[Box, Tensor]], size: Sequence[int], anchor: Tensor) -> Tensor:
    """Sum `parts`, each in its box of `size` with zeros around it; depends on `anchor` too. Local."""
    connected = anchor.requires_grad or not parts
    total = anchor.new_zeros(size) + anchor.sum(dtype=anchor.dtype) if connected else None
    for box, tensor in parts:
        padding: list[int] = []
        for start, end, length in zip(box.offsets[::-1], box.ends[::-1], size[::-1], strict=True):
            padding += [start, length - end]
        padded = F.pad(tensor, padding) if any(padding) else tensor
        total = padded if total is None else total + padded
    return cast(Tensor, total)


def broadcast(operands: Sequence[Any]) -> tuple[ShardedTensor, ShardedTensorMetadata]:
    """Return the sharded operand that gives an elementwise result its cut, and the result's metadata. Local.

    It is the first of the largest. If plain operands make the result larger still, its shards are expanded
    along the dims that it lacks or that have one element.
    """
    tensors = [operand for operand in operands if isinstance(operand, Tensor)]
    sharded = [tensor for tensor in tensors if isinstance(tensor, ShardedTensor)]
    leader = sharded[0]
    for candidate in sharded[1:]:
        check_group(leader, candidate)
        largest, size = leader.metadata().size, candidate.metadata().size
        if size != largest and (size.numel(), len(size)) > (largest.numel(), len(largest)):
            leader = candidate
    metadata = leader.metadata()
    shapes = [t.metadata().size if isinstance(t, ShardedTensor) else t.shape for t in tensors]
    old = metadata.size
    size = old if all(shape in (metadata.size, ()) for shape in shapes) else torch.broadcast_shapes(*shapes)
    if size != old:
        metadata = metadata.map(size, lambda box: expand_box(box, old=old, new=size))
    return leader, metadata


def parts(operand: Any, *, leader: ShardedTensor, metadata: ShardedTensorMetadata) -> list[Any]:
    """List the part of `operand` at each local shard of `metadata`, which `broadcast` cut by `leader`.

    On a rank without shards, returns one stand-in: empty, and of the same dtype, number of dims (none or
    some) and autograd graph. Raises ShardingError, on every rank, if a rank lacks a part that it needs.
    """
    count = max(1, len(leader.tensors))
    if not isinstance(operand, Tensor):
        return [operand] * count
    if isinstance(operand, ShardedTensor):
        if operand.metadata().cut_as(leader.metadata()):
            return operand.tensors or [_stand_in(operand)]
        projections = _projections(operand, leader=leader, metadata=metadata)
        return projections or [_stand_in(operand)]
    whole = replicated(operand, leader.process_group)
    if whole.ndim == 0:
        return [whole] * count
    if not leader.tensors:
        return [nothing_of(whole)]
    if metadata is leader.metadata():
        boxes = leader.boxes
    else:
        boxes = [shard.box for shard in metadata.held_by(dist.get_rank())]
    return [within(whole, box, size=metadata.size) for box in boxes]


def _projections(
    operand: ShardedTensor, *, leader: ShardedTensor, metadata: ShardedTensorMetadata
) -> list[Tensor]:
    """List, for each local box of `metadata`, the shard of `operand` that is its projection."""
    places = {(shard.rank, shard.box) for shard in operand.metadata().shards_metadata}
    tensors: dict[Box | None, Tensor] = dict(zip(operand.boxes, operand.tensors, strict=True))
    rank, projections = dist.get_rank(), []
    for shard in metadata.shards_metadata:
        projection = _project(shard.box, size=operand.metadata().size, onto=metadata.size)
        if (shard.rank, projection) not in places and not shard.box.is_empty:
            left, right = (f"{tuple(t.metadata().size)} by {t.sharding_spec()!r}" for t in (leader, operand))
            raise ShardingError(
                f"{here()}: tensors cut otherwise cannot be combined: {left} and {right}; call .reshard() on"
                " one with the other's sharding_spec()"
            )
        if shard.rank != rank:
            continue
        if projection in tensors:
            projections.append(tensors[projection])
            continue
        sizes = shard.box.sizes[len(shard.box.sizes) - operand.ndim :]
        nothing = operand.anchor.new_zeros(sizes if 0 in sizes else ())
        if operand.requires_grad:
            nothing = nothing + anchor_of(operand).sum()
        projections.append(nothing if 0 in sizes else nothing.reshape((1,) * operand.ndim))
    return projections


def _project(box: Box, *, size: torch.Size, onto: torch.Size) -> Box | None:
    """Project a box of a tensor of size `onto` on one that broadcasts to it; None if it does not."""
    first = len(onto) - len(size)
    if first < 0:
        return None
    dims = list(zip(size, onto[first:], box.offsets[first:], box.sizes[first:], strict=True))
    if any(extent not in (1, whole) for extent, whole, _, _ in dims):
        return None
    cut = [(offset, length) if extent == whole else (0, 1) for extent, whole, offset, length in dims]
    return Box(tuple(offset for offset, _ in cut), tuple(length for _, length in cut))


def _stand_in(sharded: ShardedTensor) -> Tensor:
    """Make an operand for a rank without shards of the result: empty, or 0-D where all shards are."""
    anchor = anchor_of(sharded)
    if sharded.ndim:
        return anchor
    # 0-D differs from 1-D: torch chooses the dtype of a result by tensors with dims first.
    # Neither 0 nor 1, where gradients of quotients and logarithms are not numbers; integers divide by it.
    value = 0.5 if anchor.is_floating_point() else 1

    def number(anchor: Tensor) -> Tensor:
        shared = anchor.detach()  # with the anchor's version: who writes one has written the other
        shared.data = anchor.new_full((), value)
        return shared

    return cast(Tensor, linked(number, lambda grad: (grad.new_empty(0),), anchor))


def check_group(left: ShardedTensor, right: ShardedTensor) -> None:
    if left.process_group is right.process_group:
        return
    left_ranks, right_ranks = (dist.get_process_group_ranks(tensor.process_group) for tensor in (left, right))
    if left_ranks != right_ranks:
        raise ShardingError(
            f"{here()}: tensors of different process groups cannot be combined: {left._name()} on ranks"
            f" {left_ranks}, {right._name()} on ranks {right_ranks}; make both with one process_group"
        )
