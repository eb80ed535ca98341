"""Operators that define how gradients flow where one rank's program meets other ranks.

If every rank has a whole value, every rank has its whole gradient, never a multiple. The gradient of a cut
value, or of a term of a sum, is this rank's own; if several ranks have the same elements, their gradients of
these are terms of a sum. These operators convert between the two:

    replicated   a whole value enters work that ranks divide: gradients are summed over ranks
    repeated     several ranks hold the same elements of a cut parameter: their gradients are summed
    once         all ranks computed the same whole value: only the first rank passes the gradient on
    summed       the result of an all-reduce is the sum of terms: each term has the gradient of the sum
    gathered     the result of an all-gather is whole: each rank has the gradient of its part
    scattered    the result of a reduce-scatter is a part of the sum: each term has the gradient of all parts
    untrainable  the program was cut without these: there is no correct gradient

Backward also needs buffers as forward read them:

    unwritten    a buffer's value before the program wrote to it

None communicates in forward: collectives are separate nodes, whose inputs are detached. In backward,
replicated, repeated and scattered are collective over the group. Ranks reach them in one order, as autograd
goes through a program from its end to its beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise import _compat
from shardwise.errors import ShardingError, here

c10d: Any = _compat.functional_collectives


def _sum(x: Tensor, group: str) -> Tensor:
    total: Tensor = c10d.wait_tensor(c10d.all_reduce(x.contiguous(), "sum", group))
    return total


@torch.library.custom_op("shardwise::replicated", mutates_args=())
def replicated(x: Tensor, group: str) -> Tensor:
    """Return a copy of `x`, which is equal on every rank; its gradient is the sum of the ranks' gradients."""
    return x.clone()


@torch.library.custom_op("shardwise::repeated", mutates_args=())
def repeated(x: Tensor, dim: int, pieces: Sequence[int], total: int, group: str) -> Tensor:
    """Return a copy of `x`; gradients of elements that several ranks hold are summed over these ranks.

    Args:
        x: this rank's part of a parameter that is cut along `dim`.
        pieces: for each interval of the dim that other ranks also hold: its begin, its size, and its begin
            among all elements that several ranks hold.
        total: number of elements of the dim that several ranks hold.
        group: the ranks.
    """
    return x.clone()


@torch.library.custom_op("shardwise::once", mutates_args=())
def once(x: Tensor, rank: int) -> Tensor:
    """Return a copy of `x`; rank 0 passes the gradient on, the others pass zeros."""
    return x.clone()


@torch.library.custom_op("shardwise::summed", mutates_args=())
def summed(term: Tensor, total: Tensor) -> Tensor:
    """Return a copy of `total`, the sum of all ranks' `term`."""
    return total.clone()


@torch.library.custom_op("shardwise::gathered", mutates_args=())
def gathered(part: Tensor, whole: Tensor, rank: int) -> Tensor:
    """Return a copy of `whole`, the concatenation along dim 0 of all ranks' `part`, all of one size."""
    return whole.clone()


@torch.library.custom_op("shardwise::scattered", mutates_args=())
def scattered(term: Tensor, share: Tensor, ranks: int, group: str) -> Tensor:
    """Return a copy of `share`: this rank's part, of `ranks` along dim 0, of the sum of all `term`s."""
    return share.clone()


@torch.library.custom_op("shardwise::unwritten", mutates_args=())
def unwritten(x: Tensor) -> Tensor:
    """Return a copy of `x`; for a plain clone, torch.compile would save the original, which is written to."""
    return x.clone()


@torch.library.custom_op("shardwise::untrainable", mutates_args=())
def untrainable(x: Tensor) -> Tensor:
    """Return a copy of `x` without a gradient: backward raises ShardingError."""
    return x.clone()


@torch.library.custom_op("shardwise::refused", mutates_args=())
def refused(gradient: Tensor) -> Tensor:
    """Raise ShardingError; an operator, so that it raises when it runs and not when it is traced."""
    raise ShardingError(
        f"{here()}: cannot run backward: the program was cut for inference, so its ranks do not exchange"
        " gradients; create it with tensor_parallel_transformation(..., training=True), or run it under"
        " torch.no_grad()"
    )


def _add_backward(op: Any, backward: Callable[..., Tensor], *, copies: int = 0) -> None:
    """Register `backward` for `op`, which copies its input at `copies`; only the first input has a gradient.

    `backward` gets the result's gradient, the first input's shape, and the inputs that are not tensors.
    """

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.known = inputs[0].shape, *(x for x in inputs[1:] if not isinstance(x, Tensor))
        ctx.others = (None,) * (len(inputs) - 1)

    op.register_fake(lambda *inputs: torch.empty_like(inputs[copies]))
    op.register_autograd(
        lambda ctx, gradient: (backward(gradient, *ctx.known), *ctx.others), setup_context=keep
    )


def _sum_shared(
    gradient: Tensor,
    shape: torch.Size,
    dim: int,
    pieces: Sequence[int],
    total: int,
    group: str,
) -> Tensor:
    each = list(zip(*[iter(pieces)] * 3, strict=True))
    terms = gradient.new_zeros([*shape[:dim], total, *shape[dim + 1 :]])
    for begin, size, place in each:
        terms.narrow(dim, place, size).copy_(gradient.narrow(dim, begin, size))
    sums = _sum(terms, group)
    made = gradient.clone()
    for begin, size, place in each:
        made.narrow(dim, begin, size).copy_(sums.narrow(dim, place, size))
    return made


def _all_parts(gradient: Tensor, shape: torch.Size, ranks: int, group: str) -> Tensor:
    whole = c10d.all_gather_into_tensor(gradient.contiguous(), ranks, group)
    parts: Tensor = c10d.wait_tensor(whole)
    return parts


_add_backward(replicated, lambda gradient, _, group: _sum(gradient, group))
_add_backward(repeated, _sum_shared)
_add_backward(once, lambda gradient, _, rank: gradient if rank == 0 else torch.zeros_like(gradient))
_add_backward(unwritten, lambda gradient, _: gradient)
_add_backward(untrainable, lambda gradient, _: refused(gradient))
_add_backward(summed, lambda gradient, _: gradient, copies=1)
_add_backward(gathered, lambda gradient, own, rank: gradient.narrow(0, rank * own[0], own[0]), copies=1)
_add_backward(scattered, _all_parts, copies=1)
refused.register_fake(torch.empty_like)

ops: Any = torch.ops.shardwise  # as graphs call them: `ops.replicated.default`
