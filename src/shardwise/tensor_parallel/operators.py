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


@torch.library.custom_op("shardwise::refused", mutates_args=())
def refused(gradient: Tensor) -> Tensor:
    """Raise ShardingError; an operator, so that it raises when it runs and not when it is traced."""
    raise ShardingError(
        f"{here()}: cannot run backward: the program was cut for inference, so its ranks do not exchange"
        " gradients; create it with tensor_parallel_transformation(..., training=True), or run it under"
        " torch.no_grad()"
    )


refused.register_fake(torch.empty_like)


def _copy(schema: str, backward: Callable[..., Tensor], *, copies: int = 0) -> Any:
    """Return an operator that copies its input at `copies`; only its first input has a gradient.

    `backward` gets the result's gradient, the first input's shape, and the inputs that are not tensors.
    """

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.constants = inputs[0].shape, *(x for x in inputs[1:] if not isinstance(x, Tensor))
        ctx.no_grads = (None,) * (len(inputs) - 1)

    def copy(*inputs: Any) -> Any:
        return inputs[copies].clone()

    name, bracket, rest = schema.partition("(")
    op = torch.library.custom_op(f"shardwise::{name}", copy, mutates_args=(), schema=bracket + rest)
    op.register_fake(lambda *inputs: torch.empty_like(inputs[copies]))
    op.register_autograd(
        lambda ctx, gradient: (backward(gradient, *ctx.constants), *ctx.no_grads), setup_context=keep
    )
    return op


def _sum_shared(
    gradient: Tensor, shape: torch.Size, dim: int, pieces: Sequence[int], total: int, group: str
) -> Tensor:
    triples = list(zip(*[iter(pieces)] * 3, strict=True))
    terms = gradient.new_zeros([*shape[:dim], total, *shape[dim + 1 :]])
    for begin, size, place in triples:
        terms.narrow(dim, place, size).copy_(gradient.narrow(dim, begin, size))
    sums = _sum(terms, group)
    result = gradient.clone()
    for begin, size, place in triples:
        result.narrow(dim, begin, size).copy_(sums.narrow(dim, place, size))
    return result


def _all_parts(gradient: Tensor, shape: torch.Size, ranks: int, group: str) -> Tensor:
    whole = c10d.all_gather_into_tensor(gradient.contiguous(), ranks, group)
    parts: Tensor = c10d.wait_tensor(whole)
    return parts


replicated = _copy(
    "replicated(Tensor x, str group) -> Tensor", lambda gradient, _, group: _sum(gradient, group)
)
# pieces: of each interval of the dim that other ranks also hold, its begin, its size, and its begin among all
# the `total` elements that several ranks hold
repeated = _copy(
    "repeated(Tensor x, SymInt dim, SymInt[] pieces, SymInt total, str group) -> Tensor", _sum_shared
)
once = _copy(
    "once(Tensor x, SymInt rank) -> Tensor",
    lambda gradient, _, rank: gradient if rank == 0 else torch.zeros_like(gradient),
)
summed = _copy("summed(Tensor term, Tensor total) -> Tensor", lambda gradient, _: gradient, copies=1)
gathered = _copy(
    "gathered(Tensor part, Tensor whole, SymInt rank) -> Tensor",
    lambda gradient, own, rank: gradient.narrow(0, rank * own[0], own[0]),
    copies=1,
)
scattered = _copy(
    "scattered(Tensor term, Tensor share, SymInt ranks, str group) -> Tensor", _all_parts, copies=1
)
# for a plain clone, torch.compile would save the original, which is written to
unwritten = _copy("unwritten(Tensor x) -> Tensor", lambda gradient, _: gradient)
untrainable = _copy("untrainable(Tensor x) -> Tensor", lambda gradient, _: refused(gradient))

ops: Any = torch.ops.shardwise  # as graphs call them: `ops.replicated.default`
