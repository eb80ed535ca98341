"""Cuts of tensors, some drawn at random and equal on ranks that seed alike; sharded tensors beside whole."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any
from unittest import mock

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
    construct,
    shard_tensor,
)


def word_bytes(ranks: int | None = None) -> int:
    """What a rank sends for all to agree: 8 bytes to each other one."""
    return 8 * ((ranks or dist.get_world_size()) - 1)


def random_shape(rng: random.Random, *, longest: int = 6) -> tuple[int, ...]:
    """0 to 4 dims, of which one in eight has no element."""
    return tuple(0 if rng.random() < 0.12 else rng.randint(1, longest) for _ in range(rng.randint(0, 4)))


def random_cover(
    rng: random.Random, shape: Sequence[int], *, cuts: int | None = None, dims: Sequence[int] | None = None
) -> list[Box]:
    """The whole, cut again and again (by default up to 6 times) at random places along any of `dims`, also
    into empty boxes, in random order.
    """
    boxes = [Box((0,) * len(shape), tuple(shape))]
    for _ in range((rng.randint(0, 6) if cuts is None else cuts) if len(shape) else 0):
        box = boxes.pop(rng.randrange(len(boxes)))
        dim = rng.choice(range(len(shape)) if dims is None else dims)
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
    chosen = range(dist.get_world_size()) if ranks is None else ranks
    found = random_cover(rng, shape, cuts=cuts, dims=dims)
    return boxes_on(*((box.offsets, box.sizes, rng.choice(chosen)) for box in found))


def counted(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """0, 1, 2, ... in `shape`; of bools, every third true."""
    numbers = torch.arange(torch.Size(shape).numel()).view(tuple(shape))
    return numbers % 3 == 0 if dtype == torch.bool else numbers.to(dtype)


def cut(
    whole: Tensor, spec: ShardingSpec, *, group: dist.ProcessGroup | None = None, requires_grad: bool = False
) -> ShardedTensor:
    """`whole`, equal on every rank, cut by `spec`; ranks do not ask each other whether theirs are equal."""
    with mock.patch.object(construct, "agree_on", lambda make, **_: make()[0]):
        made = shard_tensor(whole, spec, src_rank=None, process_group=group)
    return made.requires_grad_(requires_grad)


_cut = cut


def rows(*ranks: int, dim: int = 0) -> ChunkShardingSpec:
    """Chunks of one dim on global `ranks`, in that order."""
    return ChunkShardingSpec(dim, [f"rank:{rank}/cpu" for rank in ranks])


def boxes_on(*places: tuple[Sequence[int], Sequence[int], int]) -> EnumerableShardingSpec:
    """Shards as (offsets, sizes, global rank)."""
    return EnumerableShardingSpec([ShardMetadata(o, s, f"rank:{rank}/cpu") for o, s, rank in places])


SHAPE = (5, 6)


def everywhere() -> list[str]:
    return [f"rank:{rank}" for rank in range(dist.get_world_size())]


def specs() -> Iterator[ShardingSpec]:
    """Cuts of a `SHAPE`: uneven, with empty shards, without any on some ranks, with several on others."""
    ranks = everywhere()
    last = ranks[-1]
    yield ChunkShardingSpec(0, ranks)
    yield ChunkShardingSpec(1, [*ranks[::-1], *ranks, *ranks])
    yield ChunkShardingSpec(0, [last])
    yield RaggedShardingSpec(0, [0, 5, *[0] * (len(ranks) - 1)], [last, *ranks])
    yield GridShardingSpec([2, 2], [ranks[0], last, last, last])
    places = [
        ((0, 0), (5, 1), last),
        ((0, 1), (2, 5), last),
        ((2, 1), (3, 5), ranks[0]),
        ((5, 2), (0, 3), ranks[0]),
    ]
    yield EnumerableShardingSpec([ShardMetadata(*place) for place in places])


def whole_of(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, ShardedTensor) else tensor


def part(whole: Tensor, box: Box) -> Tensor:
    return whole[tuple(slice(o, e) for o, e in zip(box.offsets, box.ends, strict=True))]


def same(found: Tensor, whole: Tensor, **tolerance: float) -> None:
    """`found` is `whole`: values, shape, dtype, need of a gradient; if sharded, where its shards are."""
    expected = whole.shape, whole.dtype, whole.requires_grad
    assert (found.shape, found.dtype, found.requires_grad) == expected
    pairs = [(found, whole)]
    if isinstance(found, ShardedTensor):
        metadata, properties = found.metadata(), found.metadata().tensor_properties
        assert (metadata.size, properties.dtype, properties.requires_grad) == expected
        metadata.check(range(dist.get_world_size()))
        assert metadata.held_by(dist.get_rank()) == [shard.metadata for shard in found.local_shards()]
        pairs = [(t, part(whole, box)) for t, box in zip(found.tensors, found.boxes, strict=True)]
    for one, other in pairs:
        torch.testing.assert_close(one, other, equal_nan=True, **tolerance)  # type: ignore[arg-type]


def agree(
    function: Callable[..., Any],
    *operands: Any,
    cut: dict[int, ShardingSpec],
    leaves: Collection[int] | None = None,
    group: dist.ProcessGroup | None = None,
    of_gradients: float | None = None,
    **tolerance: float,
) -> Any:
    """Check that `function` of operands, those in `cut` sharded, gives what it gives of whole ones.

    So must the gradients of those in `leaves`, by default of all floating ones. `tolerance` is of the values.
    Returns what it gave: one value or several.
    """

    def given(shards: bool) -> list[Any]:
        found = list(operands)
        for place, value in enumerate(operands):
            if isinstance(value, Tensor):
                needed = value.is_floating_point() if leaves is None else place in leaves
                spec = cut.get(place) if shards else None
                found[place] = _cut(value, spec, group=group) if spec is not None else value.clone()
                found[place].requires_grad_(needed)
        return found

    whole, mine = given(shards=False), given(shards=True)
    expected, found = function(*whole), function(*mine)
    pairs = [(found, expected)]
    if isinstance(expected, (list, tuple)):
        pairs = list(zip(found, expected, strict=True))
    ends: list[tuple[Tensor, Tensor]] = []
    for one, other in pairs:
        if not isinstance(other, Tensor):
            assert one == other
            continue
        same(one, other, **tolerance)
        if not other.requires_grad:
            continue
        weight = torch.linspace(-1, 2, other.numel()).reshape(other.shape).to(other.dtype) + 0.3
        other.backward(weight, retain_graph=True)
        if isinstance(one, ShardedTensor):
            parts = [(tensor, part(weight, box)) for tensor, box in zip(one.tensors, one.boxes, strict=True)]
            ends += parts or [(one.anchor, torch.zeros_like(one.anchor))]
        else:
            ends.append((one, weight))
    if not ends:
        return found
    torch.autograd.backward([end for end, _ in ends], [grad for _, grad in ends])
    close = {} if of_gradients is None else {"rtol": of_gradients, "atol": of_gradients}
    for one, other in zip(mine, whole, strict=True):
        if not isinstance(other, Tensor) or not other.requires_grad:
            continue
        if other.grad is None:  # of the 0-norm, say
            assert one.grad is None or not one.grad.any()
        else:
            assert one.grad is not None
            same(one.grad, other.grad, **close)
    return found


def compare(
    function: Callable[..., Tensor],
    *tensors: tuple[Tensor, ShardingSpec | None],
    group: dist.ProcessGroup | None = None,
    tolerance: float = 1e-12,
) -> Any:
    """`agree` of tensors beside their cuts (None: plain), values and gradients within `tolerance`."""
    cuts = {place: spec for place, (_, spec) in enumerate(tensors) if spec is not None}
    near = {"of_gradients": tolerance, "rtol": tolerance, "atol": tolerance}
    return agree(function, *(tensor.detach() for tensor, _ in tensors), cut=cuts, group=group, **near)
