"""Ways to cut tensors, and what a sharded result is compared with, for tests of layers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.layout import Box
from shardwise.sharded_tensor import (
    EnumerableShardingSpec,
    ShardedTensor,
    ShardingSpec,
    ShardMetadata,
    shard_tensor,
)


def cpu(*ranks: int) -> list[str]:
    return [f"rank:{rank}/cpu" for rank in ranks]


def boxes(
    shape: Sequence[int],
    rng: random.Random,
    *,
    cuts: int,
    ranks: Sequence[int] | None = None,
    dims: Sequence[int] | None = None,
) -> EnumerableShardingSpec:
    """`cuts + 1` random boxes, cut along `dims`, on any of `ranks`: some of these have several, some none."""
    found = [Box((0,) * len(shape), tuple(shape))]
    for _ in range(cuts):
        box = found.pop(rng.randrange(len(found)))
        dim = rng.choice(dims if dims is not None else range(len(shape)))
        at = rng.randint(0, box.sizes[dim])
        for start, size in ((0, at), (at, box.sizes[dim] - at)):
            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[dim], sizes[dim] = offsets[dim] + start, size
            found.append(Box(tuple(offsets), tuple(sizes)))
    chosen = ranks if ranks is not None else range(dist.get_world_size())
    return EnumerableShardingSpec(
        [ShardMetadata(box.offsets, box.sizes, cpu(rng.choice(chosen))[0]) for box in found]
    )


def whole_of(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, ShardedTensor) else tensor


def compare(
    function: Callable[..., Tensor],
    *tensors: tuple[Tensor, ShardingSpec | None],
    group: dist.ProcessGroup | None = None,
    tolerance: float = 1e-12,
) -> Tensor:
    """`function` of the tensors cut by their specs (None: plain) gives what it gives of the whole ones.

    Values and the gradients of all floating tensors, within `tolerance`. Returns the former's result.
    """
    references = [tensor.detach().clone() for tensor, _ in tensors]
    given = [
        tensor.detach().clone()
        if spec is None
        else shard_tensor(tensor.detach(), spec, src_rank=None, process_group=group)
        for tensor, spec in tensors
    ]
    for one, other in zip(references, given, strict=True):
        if one.is_floating_point():
            one.requires_grad_()
            other.requires_grad_()
    expected, found = function(*references), function(*given)
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(expected.shape, generator=generator, dtype=expected.dtype)
    close(whole_of(found), expected, tolerance)
    (expected * weights).sum().backward()
    (whole_of(found) * weights).sum().backward()
    for one, other in zip(references, given, strict=True):
        if one.requires_grad:
            close_gradient(other, one.grad, tolerance)
    return found


def close_gradient(tensor: Tensor, expected: Any, tolerance: float) -> None:
    """Is the gradient of `tensor`, by local shard where it is sharded, the `expected` one of the whole?"""
    if not isinstance(tensor, ShardedTensor):
        close(tensor.grad, expected, tolerance)
        return
    for part, box in zip(tensor.tensors, tensor.boxes, strict=True):
        if part.numel():
            close(part.grad, expected[tuple(map(slice, box.offsets, box.ends))], tolerance)


def close(found: Any, expected: Any, tolerance: float) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
