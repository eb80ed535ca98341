"""Shapes, exact covers and sharding specs drawn at random, equal on ranks that seed alike."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.layout import Box
from shardwise.sharded_tensor import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    GridShardingSpec,
    RaggedShardingSpec,
    ShardedTensor,
    ShardingSpec,
    ShardMetadata,
    shard_tensor,
)


def word_bytes(ranks: int | None = None) -> int:
    """What a rank sends for all to agree: 8 bytes to each other one."""
    return 8 * ((ranks or dist.get_world_size()) - 1)


def random_shape(rng: random.Random, *, longest: int = 6) -> tuple[int, ...]:
    """0 to 4 dims, of which one in eight has no element."""
    return tuple(0 if rng.random() < 0.12 else rng.randint(1, longest) for _ in range(rng.randint(0, 4)))


def random_cover(rng: random.Random, shape: Sequence[int], *, cuts: int = 6) -> list[Box]:
    """The whole, cut again and again at random places, also into empty boxes, in random order."""
    boxes = [Box((0,) * len(shape), tuple(shape))]
    for _ in range(rng.randint(0, cuts) if len(shape) else 0):
        box = boxes.pop(rng.randrange(len(boxes)))
        dim = rng.randrange(len(shape))
        cut = rng.randint(0, box.sizes[dim])
        low, high = list(box.sizes), list(box.sizes)
        low[dim], high[dim] = cut, box.sizes[dim] - cut
        offsets = list(box.offsets)
        offsets[dim] += cut
        boxes += [Box(box.offsets, tuple(low)), Box(tuple(offsets), tuple(high))]
    rng.shuffle(boxes)
    return boxes


def random_spec(rng: random.Random, shape: Sequence[int], ranks: Sequence[int]) -> ShardingSpec:
    """Any of the specs, with any number of shards on each of the global `ranks`."""

    def placed(count: int) -> list[str]:
        return [f"rank:{rng.choice(ranks)}/cpu" for _ in range(count)]

    kind = rng.choice(["chunk", "grid", "ragged", "boxes", "boxes", "boxes"]) if len(shape) else "boxes"
    dim = rng.randrange(-len(shape), len(shape)) if len(shape) else 0
    if kind == "chunk":
        return ChunkShardingSpec(dim, placed(rng.randint(1, 6)))
    if kind == "grid":
        grid = [rng.randint(1, 3) for _ in shape]
        return GridShardingSpec(grid, placed(len(list(itertools.product(*map(range, grid))))))
    if kind == "ragged":
        cuts = sorted(rng.randint(0, shape[dim]) for _ in range(rng.randint(0, 4)))
        sizes = [end - start for start, end in itertools.pairwise([0, *cuts, shape[dim]])]
        return RaggedShardingSpec(dim, sizes, placed(len(sizes)))
    boxes = random_cover(rng, shape)
    places = zip(boxes, placed(len(boxes)), strict=True)
    return EnumerableShardingSpec([ShardMetadata(box.offsets, box.sizes, place) for box, place in places])


def counted(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """0, 1, 2, ... in `shape`; of bools, every third true."""
    numbers = torch.arange(torch.Size(shape).numel()).view(tuple(shape))
    return numbers % 3 == 0 if dtype == torch.bool else numbers.to(dtype)


def cut(
    whole: Tensor, spec: ShardingSpec, *, group: dist.ProcessGroup | None = None, requires_grad: bool = False
) -> ShardedTensor:
    """`whole`, equal on every rank, cut by `spec`."""
    return shard_tensor(whole, spec, src_rank=None, process_group=group).requires_grad_(requires_grad)


def rows(*ranks: int, dim: int = 0) -> ChunkShardingSpec:
    """Chunks of one dim on global `ranks`, in that order."""
    return ChunkShardingSpec(dim, [f"rank:{rank}/cpu" for rank in ranks])


def boxes_on(*places: tuple[Sequence[int], Sequence[int], int]) -> EnumerableShardingSpec:
    """Shards as (offsets, sizes, global rank)."""
    return EnumerableShardingSpec([ShardMetadata(o, s, f"rank:{rank}/cpu") for o, s, rank in places])
