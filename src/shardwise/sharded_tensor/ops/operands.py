"""The other operands of an operation, as the parts that fit each local shard."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shardwise.errors import ShardingError, here
from shardwise.layout import Box
from shardwise.sharded_tensor import move
from shardwise.sharded_tensor.autograd import replicated
from shardwise.sharded_tensor.tensor import ShardedTensor


def like(sharded: ShardedTensor, operand: Any, *, move_if_needed: bool = False) -> list[Any]:
    """For each local shard of `sharded` (for its anchor, where there is none), what `operand` is there.

    Args:
        operand: a number: itself. A plain tensor, replicated and broadcasting to the whole shape: the part
            in the shard's box. A sharded tensor cut alike: its shard.
        move_if_needed: reshard a tensor cut otherwise (collective) in place of refusing it.

    Raises:
        ShardingError: a sharded tensor of another shape or cut.
    """
    if isinstance(operand, ShardedTensor):
        if operand.metadata().size == sharded.metadata().size and move_if_needed:
            operand = move.move_to(operand, sharded.metadata, spec=sharded._spec, what="the copy")
        if not operand.metadata().cut_as(sharded.metadata()):
            raise ShardingError(
                f"{here()}: tensors cut otherwise cannot be combined: {tuple(sharded.metadata().size)} by"
                f" {sharded.sharding_spec()!r} and {tuple(operand.metadata().size)} by"
                f" {operand.sharding_spec()!r}; call .reshard() on one with the other's sharding_spec()"
            )
        return operand.tensors or [operand.anchor]
    if not isinstance(operand, Tensor) or operand.ndim == 0:
        if isinstance(operand, Tensor):
            operand = replicated(operand, sharded.process_group)
        return [operand] * max(1, len(sharded.tensors))
    whole = replicated(operand, sharded.process_group)
    if not sharded.tensors:
        return [whole.reshape(-1)[:0]]
    return [within(whole, box) for box in sharded.boxes]


def within(whole: Tensor, box: Box) -> Tensor:
    """The part of a tensor, broadcasting to the whole shape, that lies in `box`: a view."""
    first = len(box.sizes) - whole.ndim
    for dim in range(max(0, -first), whole.ndim):
        if whole.shape[dim] != 1:
            whole = whole.narrow(dim, box.offsets[first + dim], box.sizes[first + dim])
    return whole
