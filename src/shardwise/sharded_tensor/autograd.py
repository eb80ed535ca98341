"""Differentiable collectives.

A plain tensor beside sharded ones is *replicated*: the tensor and its gradient are the same on every rank of
the group. Hence

    forward                                    backward
    replicated: identity                       all-reduce: every rank's shards give a part of the gradient
    summed: all-reduce                         identity: the gradient is replicated already
    moved: boxes from ranks to other ranks     the same boxes back
    moved to all: every box to every rank      this rank's boxes of the gradient

All use `linked`: forward runs without autograd, and backward is stated explicitly. A rank that holds no shard
takes part with an empty tensor (`ShardedTensor.anchor`), so its autograd graph has the same collectives.
Autograd runs them in the reverse order of their creation, which is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise import _compat
from shardwise.comm.agree import Agreement
from shardwise.comm.api import backend_of
from shardwise.comm.arithmetic import extreme
from shardwise.comm.exchange import exchange, gather, part
from shardwise.comm.watch import explaining
from shardwise.layout import Box, Message, transfer
from shardwise.sharded_tensor import failure
from shardwise.sharded_tensor.group import is_outside


class _Linked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, make: Callable[..., Any], back: Callable[..., Any], *inputs: Tensor) -> Any:
        ctx.back = back
        return make(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.back(*grads)


# linked(make, back, *inputs) returns make(*inputs); back(*grads) returns the gradients of the inputs.
linked: Callable[..., Any] = _compat.apply_of(_Linked)


def replicated(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return `tensor`, equal on every rank, to use with local shards; its gradient is summed over `group`."""
    if not (tensor.requires_grad and torch.is_grad_enabled()) or is_outside(group) or group.size() == 1:
        return tensor

    def backward(grad: Tensor) -> tuple[Tensor]:
        text = f"the gradient of a plain tensor of size {tuple(grad.shape)}, {grad.dtype}"
        with failure.comparing(text, device=grad.device, group=group, subject="what to sum"):
            pass
        return (all_reduced(grad, group),)

    return cast(Tensor, linked(lambda t: t.view_as(t), backward, tensor))


def summed(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum every rank's `tensor` (all of one shape and dtype) on every rank. Collective over `group`."""
    return cast(Tensor, linked(lambda t: all_reduced(t, group), lambda grad: (grad,), tensor))


def with_value(partial: Tensor, value: Tensor) -> Tensor:
    """Return `value`, which all ranks know already; its gradient goes to this rank's `partial` sum."""
    return cast(Tensor, linked(lambda _: value.clone(), lambda grad: (grad,), partial))


def tied(tensor: Tensor, ends: Sequence[Tensor]) -> Tensor:
    """Return `tensor`; its backward also runs those of `ends`, with gradients of zero."""
    inputs = [nothing_of(end) for end in ends if end.requires_grad]
    if not inputs:
        return tensor
    nothing = [end.new_empty(0) for end in inputs]
    # Not `view_as`: its strides may differ where a size is 1, and torch refuses to add such a view in place.
    return cast(Tensor, linked(lambda t, *_: t[...], lambda grad: (grad, *nothing), tensor, *inputs))


def nothing_of(*tensors: Tensor) -> Tensor:
    """Return an empty 1-D tensor, which is connected to all of `tensors` in the autograd graph."""
    empty = [torch.atleast_1d(tensor).narrow(0, 0, 0).reshape(-1) for tensor in tensors]
    return empty[0] if len(empty) == 1 else torch.cat(empty)


def all_reduced(tensor: Tensor, group: dist.ProcessGroup, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """Return a reduction without gradient, in new memory, or raise if a rank has failed. Collective."""
    # gloo cannot reduce bool, nor bfloat16 before some version: use a dtype that holds their values.
    carrier = {torch.bool: torch.uint8}.get(tensor.dtype, tensor.dtype)
    if group.size() == 1:
        return tensor.detach().to(carrier, copy=True, memory_format=torch.contiguous_format).to(tensor.dtype)
    count, has_flag = tensor.numel(), tensor.is_cpu
    reduced = torch.empty(count + has_flag, dtype=carrier, device=tensor.device)
    reduced[:count].view(tensor.shape).copy_(tensor.detach())
    success = 1 if op == dist.ReduceOp.MIN else 0  # the flag of a rank without a failure
    if has_flag:
        reduced[count] = 1 - success if failure.current else success
    with explaining(group, "reduce parts of a tensor"):
        dist.all_reduce(reduced, op=op, group=group)
    if has_flag and reduced[count].item() != success:
        failure.raise_everywhere(group)
    return reduced.resize_(tensor.shape).to(tensor.dtype)


def all_extreme(tensor: Tensor, group: dist.ProcessGroup, *, largest: bool) -> Tensor:
    """Reduce to the maximum or minimum over ranks, NaN where any rank has NaN; no gradient. Collective."""
    op = dist.ReduceOp.MAX if largest else dist.ReduceOp.MIN
    return extreme(tensor.detach(), lambda part: all_reduced(part, group, op), largest=largest)


Route = tuple[list[Message], list[Box], list[Box]]  # of a rank: messages, boxes that it has and gets


def moved(
    tensors: Sequence[Tensor],
    route: Route,
    *,
    group: dist.ProcessGroup,
    anchor: Tensor,
    like: torch.memory_format = torch.contiguous_format,
    agreement: Agreement | None = None,
    to_all: Sequence[Sequence[Box]] | None = None,
) -> tuple[list[Tensor], Tensor]:
    """Return the boxes that this rank gets, and an empty tensor that stands for them in the autograd graph.

    Collective. The boxes of all ranks are an exact cover before and after.

    Args:
        anchor: an empty tensor that requires grad if the whole source does.
        like: memory format of the results.
        agreement: an agreement about these messages, in progress; see `exchange`.
        to_all: if the target, and so its gradient, is the whole tensor on every rank: each rank's boxes.
    """
    nothing = anchor.detach().new_empty(0)
    messages, source, target = route

    def forward(_: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        make = partial(torch.empty, dtype=nothing.dtype, device=nothing.device, memory_format=like)
        results = [make(box.sizes) for box in target]
        sent = list(zip(source, tensors, strict=True))
        if to_all is None or nothing.is_meta or backend_of(group, nothing.device) == "gloo":
            buffers = list(zip(target, results, strict=True))
            exchange_values(messages, source=sent, target=buffers, group=group, agreement=agreement)
        else:
            if agreement is not None:
                agreement.confirm()
            for box, tensor in sent:
                part(target[0], results[0], box).copy_(tensor)
            gather(to_all, results[0], group=group)
        return nothing.new_empty(0), *results

    def backward(_: Tensor, *grads: Tensor) -> tuple[Tensor, ...]:
        if to_all is not None:
            # Copies: views would keep all of the whole gradient alive, and share it with its other users.
            parts = (part(target[0], grads[0], box) for box in source)
            return nothing, *(grad.clone(memory_format=torch.contiguous_format) for grad in parts)
        back = [Message(m.receiver, m.sender, m.box, m.target, m.source) for m in messages]
        received = [nothing.new_empty(box.sizes) for box in source]  # filled completely
        sent, buffers = list(zip(target, grads, strict=True)), list(zip(source, received, strict=True))
        text = f"gradients of moved values, {nothing.dtype}"
        with failure.comparing(text, device=nothing.device, group=group, subject="what to move") as agreement:
            exchange_values(back, source=sent, target=buffers, group=group, agreement=agreement)
        return nothing, *received

    outputs = linked(forward, backward, anchor, *tensors)
    return list(outputs[1:]), outputs[0]


def exchange_values(
    messages: Sequence[Message],
    *,
    source: Sequence[tuple[Box, Tensor]],
    target: Sequence[tuple[Box, Tensor]],
    group: dist.ProcessGroup,
    agreement: Agreement | None = None,
) -> None:
    """Call `exchange`, unless tensors are on the meta device and have no values."""
    if any(tensor.device.type == "meta" for _, tensor in [*source, *target][:1]):
        if agreement is not None:
            agreement.confirm()
        return
    exchange(messages, source=source, target=target, group=group, agreement=agreement)


def fill(
    source_boxes: Sequence[Sequence[Box]],
    target_boxes: Sequence[Sequence[Box]],
    *,
    source: Sequence[Tensor],
    target: Sequence[Tensor],
    group: dist.ProcessGroup,
    wire: Tensor,
) -> None:
    """Fill this rank's `target`, a tensor for each box it wants, from all ranks' boxes. Collective.

    Args:
        source_boxes, target_boxes: of every rank of the group; each element that a rank lacks is sent once.
        source: this rank's tensors, one for each box it holds.
        wire: a tensor with the dtype and device in which values are sent; others are converted.
    """
    rank, target = group.rank(), [tensor.detach() for tensor in target]
    kind = wire.dtype, wire.device
    buffers = [t if (t.dtype, t.device) == kind else wire.new_empty(t.shape) for t in target]
    messages = transfer(source_boxes, target_boxes, rank=rank)
    received = list(zip(target_boxes[rank], buffers, strict=True))
    sent = [(box, t.detach().to(wire)) for box, t in zip(source_boxes[rank], source, strict=True)]
    exchange_values(messages, source=sent, target=received, group=group)
    for tensor, buffer in zip(target, buffers, strict=True):
        if buffer is not tensor:
            tensor.copy_(buffer)
