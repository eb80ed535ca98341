"""Largest and smallest elements of whole sharded tensors, and where they are.

Along dims that no shard cuts the result is sharded, otherwise plain (`ops.reduce`). The gradient of an
extreme is spread evenly over all elements that have it, on whatever ranks; along one dim with indices it is
the first one's alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from shardwise.layout import Box
from shardwise.sharded_tensor.autograd import all_reduced
from shardwise.sharded_tensor.ops.elementwise import elementwise
from shardwise.sharded_tensor.ops.reduction import (
    MAX,
    MIN,
    Derivative,
    Dims,
    as_torch,
    count_of,
    differentiable,
    dims_of,
    each_shard,
    given,
    is_local,
    kept_size,
    needs_grad,
    slices,
    total_of,
    wide_of,
    without,
)
from shardwise.sharded_tensor.refuse import refuse
from shardwise.sharded_tensor.registry import handles
from shardwise.sharded_tensor.tensor import ShardedTensor

_T: Any = Tensor


def extreme(sharded: ShardedTensor, dims: Dims, *, largest: bool) -> Tensor:
    """The largest or smallest elements along `dims`, which it keeps, without gradient. Collective."""
    dtype, wide = sharded.dtype, wide_of(sharded.dtype)
    if dtype.is_floating_point:
        worst: float = -math.inf if largest else math.inf
    else:
        limits = torch.iinfo(torch.int64)
        worst = limits.min if largest else limits.max
    better = torch.maximum if largest else torch.minimum
    found = torch.full(kept_size(sharded, dims), worst, dtype=wide, device=sharded.anchor.device)
    for tensor, box in zip(sharded.tensors, sharded.boxes, strict=True):
        if tensor.numel():
            local = (torch.amax if largest else torch.amin)(tensor.detach(), dims, keepdim=True)
            place = slices(box, dims)
            found[place] = better(found[place], local.to(wide))
    if not found.numel():
        return found.to(dtype)
    if wide != torch.int64:  # a backend's maximum may lose what is not a number: it travels beside
        no_number = found.isnan()
        found = torch.stack(
            [found.masked_fill(no_number, worst), no_number.to(wide) * (1 if largest else -1)]
        )
    found = all_reduced(found, sharded.process_group, MAX if largest else MIN)
    if wide != torch.int64:
        found = found[0].masked_fill(found[1] != 0, math.nan)
    return found.to(dtype)


def _has(tensor: Tensor, value: Tensor) -> Tensor:
    """Where `tensor` is `value`, or both are no number."""
    return torch.where(value.isnan(), tensor.isnan(), tensor == value)


def evenly(
    value: Tensor, sharded: ShardedTensor, dims: Dims, *, of: Callable[[Tensor], Tensor]
) -> Derivative:
    """The derivative of an extreme: the gradient in equal parts for all elements that have it. Collective."""
    if not needs_grad(sharded):
        return lambda tensor, box, grad: grad
    with torch.no_grad():
        number = total_of(
            sharded,
            dims,
            lambda t, place: _has(of(t), value[place]).sum(dims, keepdim=True),
            dtype=torch.int64,
        )

    def derivative(tensor: Tensor, box: Box, grad: Tensor) -> Tensor:
        place = slices(box, dims)
        return grad * _has(of(tensor), value[place]) / number[place]

    return derivative


@handles(torch.amax, _T.amax, torch.amin, _T.amin)
def _extremes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    sharded, dim, keepdim = given("input dim keepdim", func, args, kwargs)
    dims = dims_of(sharded, dim)
    if sharded.dtype.is_complex or count_of(sharded, dims) == 0:
        as_torch(func, sharded, dims)
    if is_local(sharded, dims):
        return each_shard(sharded, dims, keepdim=keepdim, function=lambda t: func(t, dims, bool(keepdim)))
    value = extreme(sharded, dims, largest=func.__name__ == "amax")
    spread = evenly(value, sharded, dims, of=lambda t: t)
    return without(differentiable(value, sharded, dims, spread), dims, keepdim)


@handles(torch.max, _T.max, torch.min, _T.min)
def _extreme_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of all elements; along one dim with indices; or, with another tensor, element by element."""
    largest = func.__name__ == "max"
    if any(isinstance(value, Tensor) for value in (*args[1:], *kwargs.values())):
        return elementwise(torch.maximum if largest else torch.minimum, args, kwargs)
    sharded, dim, keepdim = given("input dim keepdim", func, args, kwargs)
    if dim is None:
        return _extremes(torch.amax if largest else torch.amin, (sharded,), {})
    values, indices = _along(func, sharded, dim, keepdim, largest=largest)
    kind: Any = torch.return_types.max if largest else torch.return_types.min
    return kind((values, indices))


@handles(torch.argmax, _T.argmax, torch.argmin, _T.argmin)
def _index_of_extreme(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Along one dim: the first of several."""
    sharded, dim, keepdim = given("input dim keepdim", func, args, kwargs)
    if dim is None:
        refuse(func, args, kwargs)
    with torch.no_grad():
        return _along(torch.max, sharded, dim, keepdim, largest=func.__name__ == "argmax")[1]


def _best(best: Any, dim: int, keepdim: bool, which: int, tensor: Tensor) -> Tensor:
    return cast(Tensor, best(tensor, dim, keepdim)[which])


def _along(
    func: Any, sharded: ShardedTensor, dim: int, keepdim: Any, *, largest: bool
) -> tuple[Tensor, Tensor]:
    """The extremes along one dim and the first place of each; of that element alone is the gradient."""
    dims, best = dims_of(sharded, dim), torch.max if largest else torch.min
    if not dims:
        refuse(func, (sharded, dim), {})
    if sharded.dtype.is_complex or count_of(sharded, dims) == 0:
        as_torch(func, sharded, dim)
    (along,) = dims
    if is_local(sharded, dims):
        both = [
            each_shard(sharded, dims, keepdim=keepdim, function=partial(_best, best, along, bool(keepdim), i))
            for i in (0, 1)
        ]
        return both[0], both[1]
    value, last = extreme(sharded, dims, largest=largest), torch.iinfo(torch.int64).max
    index = torch.full(value.shape, last, device=value.device)
    for tensor, box in zip(sharded.tensors, sharded.boxes, strict=True):
        if tensor.numel():
            place, found = slices(box, dims), best(tensor.detach(), along, True)
            at = (found.indices + box.offsets[along]).masked_fill(~_has(found.values, value[place]), last)
            index[place] = torch.minimum(index[place], at)
    if index.numel():
        index = all_reduced(index, sharded.process_group, MIN)

    def derivative(tensor: Tensor, box: Box, grad: Tensor) -> Tensor:
        places = torch.arange(box.offsets[along], box.ends[along], device=tensor.device)
        places = places.reshape([-1 if d == along else 1 for d in range(tensor.ndim)])
        return grad * (places == index[slices(box, dims)])

    value = differentiable(value, sharded, dims, derivative)
    return without(value, dims, keepdim), without(index, dims, keepdim)
