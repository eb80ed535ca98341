"""Collectives that gradients pass through.

A plain tensor beside sharded ones is *replicated*: the same on every rank of the group, and so is its
gradient. Hence

    forward                                    backward
    replicated: identity                       all-reduce: every rank's shards give a part of the gradient
    summed: all-reduce                         identity: the gradient is replicated already
    moved: boxes from ranks to other ranks     the same boxes back
    to_whole: every box to every rank          this rank's boxes of the gradient

A rank that holds no shard takes part in all of them with an empty tensor (`ShardedTensor.anchor`): its
autograd graph has the same collectives. Autograd runs them in the reverse order of their making, which is
the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise import _compat
from shardwise.comm.agree import Agreement
from shardwise.comm.exchange import exchange, part
from shardwise.layout import Box, Message
from shardwise.sharded_tensor import failure
from shardwise.sharded_tensor.group import is_outside


def replicated(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`tensor`, equal on every rank, for use with local shards. Its gradient is summed over `group`."""
    if not (tensor.requires_grad and torch.is_grad_enabled()) or is_outside(group) or group.size() == 1:
        return tensor
    return cast(Tensor, _replicated(tensor, group))


def summed(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of every rank's `tensor` (one shape and dtype), on every rank. Collective over `group`."""
    if group.size() == 1:
        return tensor
    return cast(Tensor, _summed(tensor, group))


def all_reduced(tensor: Tensor, group: dist.ProcessGroup, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """A reduction without gradient, in new memory. Collective over `group`.

    Raises:
        ShardingError: on every rank, where on one the operation that asks for it has failed (`failure`).
    """
    # gloo reduces neither bool nor, before some version, bfloat16: through a dtype that holds them.
    carrier = {torch.bool: torch.uint8}.get(tensor.dtype, tensor.dtype)
    if group.size() == 1:
        return tensor.detach().to(carrier, copy=True, memory_format=torch.contiguous_format).to(tensor.dtype)
    count, told = tensor.numel(), tensor.is_cpu
    reduced = torch.empty(count + told, dtype=carrier, device=tensor.device)
    reduced[:count].view(tensor.shape).copy_(tensor.detach())
    right = 1 if op == dist.ReduceOp.MIN else 0  # the flag of a rank that is well
    if told:
        reduced[count] = 1 - right if failure.flag() else right
    dist.all_reduce(reduced, op=op, group=group)
    if told and reduced[count].item() != right:
        failure.raise_everywhere(group)
    return reduced.resize_(tensor.shape).to(tensor.dtype)


def moved(
    tensors: Sequence[Tensor],
    messages: Sequence[Message],
    *,
    source: Sequence[Box],
    target: Sequence[Box],
    group: dist.ProcessGroup,
    anchor: Tensor,
    like: torch.memory_format = torch.contiguous_format,
    agreement: Agreement | None = None,
) -> tuple[list[Tensor], Tensor]:
    """This rank's `target` boxes, filled by `messages` from the ranks' `source` boxes. Collective.

    Both sides are exact covers of one tensor.

    Args:
        tensors: this rank's source boxes.
        messages: those this rank sends or receives.
        anchor: an empty tensor that requires grad where the whole source does.
        like: memory format of what is made.
        agreement: under way, about these messages; see `exchange`.

    Returns:
        The target tensors, and an empty one that keeps a rank without any in the autograd graph.
    """
    outputs = _moved(messages, list(source), list(target), group, like, agreement, anchor, *tensors)
    return list(outputs[1:]), outputs[0]


def to_whole(
    tensors: Sequence[Tensor],
    messages: Sequence[Message],
    *,
    source: Sequence[Box],
    whole: Box,
    group: dist.ProcessGroup,
    anchor: Tensor,
    agreement: Agreement,
) -> Tensor:
    """The whole tensor on every rank, by `messages` from the ranks' `source` boxes. Collective."""
    return cast(Tensor, _to_whole(messages, list(source), whole, group, agreement, anchor, *tensors))


def exchange_values(
    messages: Sequence[Message],
    *,
    source: Sequence[tuple[Box, Tensor]],
    target: Sequence[tuple[Box, Tensor]],
    group: dist.ProcessGroup,
    agreement: Agreement | None = None,
) -> None:
    """`exchange`, where there are values: tensors on the meta device have none."""
    if any(tensor.device.type == "meta" for _, tensor in [*source, *target][:1]):
        if agreement is not None:
            agreement.settle()
        return
    exchange(messages, source=source, target=target, group=group, agreement=agreement)


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduced(grad, ctx.group), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        return all_reduced(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        messages: Sequence[Message],
        source: list[Box],
        target: list[Box],
        group: dist.ProcessGroup,
        like: torch.memory_format,
        agreement: Agreement | None,
        anchor: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.plan = messages, source, target, group
        ctx.anchor = anchor.new_empty(0)
        made = [
            torch.empty(box.sizes, dtype=anchor.dtype, device=anchor.device, memory_format=like)
            for box in target
        ]
        exchange_values(
            messages,
            source=list(zip(source, tensors, strict=True)),
            target=list(zip(target, made, strict=True)),
            group=group,
            agreement=agreement,
        )
        return anchor.new_empty(0), *made

    @staticmethod
    def backward(ctx: Any, anchor: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        messages, source, target, group = ctx.plan
        back = [
            Message(sender=m.receiver, receiver=m.sender, box=m.box, source=m.target, target=m.source)
            for m in messages
        ]
        held = [
            (box, grad if grad is not None else ctx.anchor.new_zeros(box.sizes))
            for box, grad in zip(target, grads, strict=True)
        ]
        received = [(box, ctx.anchor.new_empty(box.sizes)) for box in source]  # all of it comes back
        exchange_values(back, source=held, target=received, group=group)
        return None, None, None, None, None, None, ctx.anchor, *(grad for _, grad in received)


class _ToWhole(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        messages: Sequence[Message],
        source: list[Box],
        whole: Box,
        group: dist.ProcessGroup,
        agreement: Agreement,
        anchor: Tensor,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.source, ctx.anchor = source, anchor.new_empty(0)
        made = torch.empty(whole.sizes, dtype=anchor.dtype, device=anchor.device)
        exchange_values(
            messages,
            source=list(zip(source, tensors, strict=True)),
            target=[(whole, made)],
            group=group,
            agreement=agreement,
        )
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        whole = Box.whole(grad.shape)
        # Copies: views would keep all of the whole gradient alive, and share it with other users of it.
        parts = (part(whole, grad, box).clone(memory_format=torch.contiguous_format) for box in ctx.source)
        return None, None, None, None, None, ctx.anchor, *parts


_replicated = _compat.apply_of(_Replicated)
_summed = _compat.apply_of(_Summed)
_moved = _compat.apply_of(_Moved)
_to_whole = _compat.apply_of(_ToWhole)
