"""Sharded tensors made in every way, in whole groups and in parts of them, and what they then hold."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covers import boxes_on, counted, cut, rows, word_bytes
from torch import Tensor

from ranks import RankPool, on_ranks
from shardwise.comm.count import CommCounter
from shardwise.errors import ShardingError
from shardwise.sharded_tensor import (
    ChunkShardingSpec,
    GridShardingSpec,
    RaggedShardingSpec,
    Shard,
    ShardedTensor,
    ShardedTensorMetadata,
    ShardingSpec,
    ShardMetadata,
    TensorProperties,
    empty,
    full,
    init_from_local_shards,
    init_from_local_shards_and_global_metadata,
    init_from_local_tensor,
    ones,
    rand,
    randn,
    shard_tensor,
    zeros,
)
from shardwise.sharded_tensor.group import group_or_default
from shardwise.tensor_parallel.package import default_group

# On ranks 0 to 2: one shard each; none on rank 1; several on rank 0, none on rank 2.
SPECS: list[ShardingSpec] = [
    rows(2, 0, 1),
    ChunkShardingSpec(-1, ["rank:0", "rank:2"]),
    boxes_on(([0, 0], [5, 2], 0), ([0, 2], [3, 5], 1), ([3, 2], [2, 5], 0)),
    rows(0, 1, 2, 0, 1, 2, 0),
]
SIZE = (5, 7)


def sent(counter: CommCounter) -> int:
    """The bytes that this rank sends, received ones left out."""
    return sum(call.bytes for call in counter.calls if not call.kind.startswith("rec"))


@on_ranks(3)
def test_filled_tensors_have_their_values_everywhere_and_are_made_with_a_word_from_each_rank() -> None:
    makes: list[tuple[Callable[..., ShardedTensor], Tensor]] = [
        (zeros, torch.zeros(SIZE)),
        (ones, torch.ones(SIZE)),
        (lambda spec, *size, **options: full(spec, size, 2.5, **options), torch.full(SIZE, 2.5)),
        (lambda spec, *size, **options: full(spec, size, 7, **options), torch.full(SIZE, 7)),
        (lambda spec, *size, **options: full(spec, size, True, **options), torch.full(SIZE, True)),
    ]
    for spec in SPECS:
        for make, expected in makes:
            with CommCounter() as counter:
                made = make(spec, *SIZE)
                typed = make(spec, *SIZE, dtype=torch.bfloat16, requires_grad=True)
            assert sent(counter) == 2 * word_bytes()
            assert made.dtype == expected.dtype
            assert torch.equal(made.full_tensor(), expected)
            assert typed.dtype == torch.bfloat16
            assert typed.requires_grad
            assert typed.is_leaf
            assert all(tensor.requires_grad for tensor in typed.tensors)
            assert torch.equal(typed.detach().full_tensor(), expected.bfloat16())


@on_ranks(3)
def test_what_a_tensor_says_of_itself_is_the_same_on_every_rank() -> None:
    for spec in SPECS:
        made = empty(spec, SIZE, dtype=torch.float16, requires_grad=True)
        by_class = ShardedTensor(spec, *SIZE, dtype=torch.float16, requires_grad=True)
        assert type(by_class) is ShardedTensor
        assert by_class.metadata() == made.metadata()
        properties = TensorProperties(dtype=torch.float16, requires_grad=True)
        assert made.metadata() == spec.build_metadata(torch.Size(SIZE), properties)
        assert made.sharding_spec() is spec
        assert (made.shape, made.size(), made.size(1), made.dim(), made.numel()) == (SIZE, SIZE, 7, 2, 35)
        assert (made.ndim, len(made), made.device.type, made.is_meta) == (2, 5, "cpu", False)
        held = made.metadata().held_by(dist.get_rank())
        assert [shard.metadata for shard in made.local_shards()] == held
        assert [list(shard.tensor.shape) for shard in made.local_shards()] == [p.shard_sizes for p in held]
        if len(held) == 1:
            assert made.local_tensor() is made.local_shards()[0].tensor
        else:
            with pytest.raises(ShardingError, match=rf"needs one local shard, found {len(held)}"):
                made.local_tensor()


@on_ranks(2)
def test_options_are_kept_and_passed_on_to_every_shard() -> None:
    images = empty(rows(1, 0), 4, 3, 2, 2, memory_format=torch.channels_last)
    assert images.metadata().tensor_properties.memory_format == torch.channels_last
    assert images.local_tensor().is_contiguous(memory_format=torch.channels_last)
    torch.set_default_dtype(torch.float64)
    assert zeros(rows(0), 3).dtype == torch.float64
    on_meta = ones(GridShardingSpec([2], ["rank:0/meta", "rank:1/meta"]), 6)
    assert on_meta.is_meta
    assert on_meta.local_tensor().is_meta
    for empty_size in [(), (0, 4), (3, 0)]:
        spec = boxes_on(([0] * len(empty_size), empty_size, 1))
        assert torch.equal(ones(spec, empty_size).full_tensor(), torch.ones(empty_size))
    assert ones(rows(0, 1), 3).requires_grad is False


@on_ranks(2)
def test_pinned_memory_is_had_where_there_is_an_accelerator_and_refused_on_all_ranks_elsewhere() -> None:
    plain = ones(rows(1), 4)
    assert not plain.is_pinned()
    if torch.accelerator.is_available():
        assert ones(rows(1), 4, pin_memory=True).is_pinned()
        assert plain.pin_memory().is_pinned()
        return
    for call in (lambda: ones(rows(1), 4, pin_memory=True), plain.pin_memory):
        with pytest.raises(ShardingError, match=f"rank {dist.get_rank()}: pinned memory"):
            call()


# ---------------------------------------------------------------- random values


def random_values() -> list[Tensor]:
    """The same tensors for any number of ranks, the specs chosen by that number."""
    ranks = [f"rank:{rank}" for rank in range(dist.get_world_size())]
    specs = [
        ChunkShardingSpec(0, ranks),
        ChunkShardingSpec(1, ranks[::-1] * 2),
        RaggedShardingSpec(0, [0, 6], [ranks[0], ranks[-1]]),
        GridShardingSpec([2, 2], (ranks * 4)[:4]),
    ]
    found = []
    for spec in specs:
        drawn = [
            rand(spec, 6, 5, seed=3),
            rand(spec, (6, 5), seed=3, low=-2.0, high=5.0, dtype=torch.float64),
            randn(spec, 6, 5, seed=3, dtype=torch.bfloat16),
            randn(spec, 6, 5, seed=4, mean=1.0, std=0.1, requires_grad=True),
        ]
        torch.manual_seed(11 if dist.get_rank() == 0 else 100 + dist.get_rank())
        drawn += [rand(spec, 6, 5), randn(spec, 6, 5), randn(spec, 6, 5)]
        found.append([tensor.detach().full_tensor() for tensor in drawn])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    return found[0]


def test_random_values_depend_on_the_seed_alone_not_on_the_spec_or_the_number_of_ranks(
    ranks: RankPool,
) -> None:
    by_size = [ranks(random_values, world_size=size) for size in (1, 2, 3, 4)]
    first = by_size[0][0]
    for answers in by_size:
        for answer in answers:
            assert all(torch.equal(a, b) for a, b in zip(first, answer, strict=True))
    assert len({tuple(tensor.flatten().tolist()) for tensor in first}) == len(first)
    assert 0 <= first[0].min() <= first[0].max() < 1
    assert -2 <= first[1].min() < 0 < first[1].max() < 5
    assert 0.9 < first[3].mean() < 1.1


@on_ranks(3)
def test_a_seed_of_its_own_comes_from_the_first_rank_and_a_given_one_from_nowhere() -> None:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    before = torch.get_rng_state()
    with CommCounter() as counter:
        randn(rows(0, 1), 6, seed=5)
    assert sent(counter) == word_bytes()
    assert torch.equal(torch.get_rng_state(), before)
    with CommCounter() as counter:
        drawn = randn(rows(1, 2), 6)
    assert sent(counter) == 2 * word_bytes() + 8
    assert not torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(0)
    seed = int(torch.empty((), dtype=torch.int64).random_())
    assert torch.equal(drawn.full_tensor(), randn(rows(1, 2), 6, seed=seed).full_tensor())


# ---------------------------------------------------------------- from what ranks hold


@on_ranks(3)
def test_local_shards_become_one_tensor_that_shares_their_memory() -> None:
    rank = dist.get_rank()
    whole = counted(SIZE)
    for spec in SPECS:
        shards = cut(whole, spec).local_shards()
        copies = [Shard(shard.tensor.clone(), shard.metadata) for shard in shards]
        made = init_from_local_shards(copies, *SIZE)
        assert [t.data_ptr() for t in made.tensors] == [s.tensor.data_ptr() for s in copies]
        assert torch.equal(made.full_tensor(), whole)
        by_rank = sorted(made.metadata().shards_metadata, key=lambda place: place.rank)
        assert made.metadata().shards_metadata == by_rank
        assert made.metadata().size == torch.Size(SIZE)
        again = init_from_local_shards(copies, SIZE)
        assert again.metadata() == made.metadata()
        assert again.sharding_spec() == made.sharding_spec()
        known = copy.deepcopy(cut(whole, spec).metadata())
        with CommCounter() as counter:
            told = init_from_local_shards_and_global_metadata(
                shards, copy.deepcopy(known), sharding_spec=spec
            )
        assert sent(counter) == word_bytes()
        assert told.metadata() == known
        assert told.sharding_spec() is spec
        assert torch.equal(told.full_tensor(), whole)
    leaf = torch.ones(2, dtype=torch.float64, requires_grad=True)
    trained = init_from_local_shards([Shard.from_tensor_and_offsets(leaf, [2 * rank], rank)], 6)
    assert trained.metadata().tensor_properties == TensorProperties(dtype=torch.float64, requires_grad=True)
    assert trained.requires_grad
    assert trained.sharding_spec() == rows(0, 1, 2)
    images = torch.ones(1, 2, 2, 2).to(memory_format=torch.channels_last)
    made = init_from_local_shards([Shard.from_tensor_and_offsets(images, [rank, 0, 0, 0], rank)], 3, 2, 2, 2)
    assert made.metadata().tensor_properties.memory_format == torch.channels_last


@on_ranks(3)
def test_ranks_without_shards_learn_everything_from_the_others() -> None:
    rank = dist.get_rank()
    held = [Shard.from_tensor_and_offsets(torch.ones(4, dtype=torch.int16), [0], 1)] if rank == 1 else []
    made = init_from_local_shards(held, 4)
    assert made.dtype == torch.int16
    assert torch.equal(made.full_tensor(), torch.ones(4, dtype=torch.int16))
    nothing = [Shard.from_tensor_and_offsets(torch.ones(0, 3), [0, 0], 0)] if rank == 0 else []
    assert torch.equal(init_from_local_shards(nothing, 0, 3).full_tensor(), torch.ones(0, 3))
    with pytest.raises(ShardingError, match="at least one shard"):
        init_from_local_shards([], 0)


@on_ranks(3)
def test_a_local_tensor_becomes_the_shard_that_the_spec_gives_its_rank() -> None:
    whole, rank = counted(SIZE), dist.get_rank()
    for spec in (rows(2, 0, 1), ChunkShardingSpec(-1, ["rank:0", "rank:2"])):
        expected = cut(whole, spec)
        own = expected.local_tensor().clone() if expected.local_shards() else None
        made = init_from_local_tensor(own, spec, *SIZE)
        assert made.metadata() == expected.metadata()
        assert made.sharding_spec() is spec
        assert own is None or made.local_tensor() is own
        assert torch.equal(made.full_tensor(), whole)
    typed = init_from_local_tensor(torch.ones(2).bool() if rank == 1 else None, rows(1), 2)
    assert typed.metadata().tensor_properties.dtype == torch.bool


@on_ranks(3)
def test_a_whole_tensor_is_cut_from_one_rank_or_by_every_rank_from_its_own() -> None:
    rank = dist.get_rank()
    for dtype in (torch.float32, torch.bool, torch.bfloat16, torch.int64):
        whole = counted(SIZE, dtype)
        for src_rank, spec in enumerate(SPECS[:3]):
            given = whole if rank == src_rank else torch.zeros_like(whole)
            with CommCounter() as counter:
                made = shard_tensor(given, spec, src_rank=src_rank)
            assert torch.equal(made.full_tensor(), whole)
            assert made.sharding_spec() is spec
            away = sum(place.box.numel for place in made.metadata().shards_metadata if place.rank != src_rank)
            sent = counter.bytes("send") - word_bytes()
            assert sent == (away * whole.element_size() if rank == src_rank else 0)
            with CommCounter() as counter:
                own = spec.shard(given, src_rank=None)
            assert counter.bytes("send") == counter.bytes("recv") == word_bytes()
            assert {call.kind for call in counter.calls} == {"send", "recv"}
            pairs = zip(own.tensors, made.tensors, strict=True)
            assert all(torch.equal(a, b) for a, b in pairs) == (rank == src_rank or not own.tensors)
    transposed = shard_tensor(counted((7, 5)).t(), SPECS[0])
    assert torch.equal(transposed.full_tensor(), counted((7, 5)).t())
    source = counted(SIZE).requires_grad_()
    trained = shard_tensor(source, SPECS[2], src_rank=None)
    assert trained.requires_grad
    assert trained.is_leaf
    assert all(t.untyped_storage().nbytes() == 4 * t.numel() for t in trained.tensors)
    assert source.grad_fn is None


# ---------------------------------------------------------------- in a part of the ranks


@on_ranks(4)
def test_a_subgroup_places_by_global_ranks_and_counts_its_own_for_src_and_dst() -> None:
    group, rank = dist.new_group([1, 2, 3]), dist.get_rank()
    if rank:
        spec = rows(3, 1)  # rank 2 is in the group and holds nothing
        whole = counted(SIZE)
        given = whole if rank == 3 else torch.zeros(SIZE)
        made = shard_tensor(given, spec, src_rank=2, process_group=group)
        assert made.process_group is group
        assert len(made.local_shards()) == {1: 1, 2: 0, 3: 1}[rank]
        assert torch.equal(made.full_tensor(), whole)
        found = made.gather(1)
        assert (found is None) == (rank != 2)
        assert rank != 2 or torch.equal(found, whole)
        filled = ones(spec, SIZE, process_group=group)
        torch.manual_seed(rank)
        drawn = rand(spec, SIZE, process_group=group)
        torch.manual_seed(1)
        expected = rand(rows(1, 2, dim=1), SIZE, process_group=group)
        assert torch.equal(drawn.full_tensor(), expected.full_tensor())
        local = init_from_local_shards(filled.local_shards(), SIZE, process_group=group)
        own = made.local_tensor() if made.local_shards() else None
        again = init_from_local_tensor(own, spec, SIZE, process_group=group)
        assert torch.equal(local.full_tensor() + again.full_tensor(), whole + 1)
        own_metadata = ShardedTensorMetadata(
            [ShardMetadata([0, 0], SIZE, "rank:3")], torch.Size(SIZE), TensorProperties()
        )
        alone = [Shard(torch.ones(SIZE), own_metadata.shards_metadata[0])] if rank == 3 else []
        from_metadata = init_from_local_shards_and_global_metadata(alone, own_metadata, process_group=group)
        assert torch.equal(from_metadata.full_tensor(), torch.ones(SIZE))
    dist.barrier()


# ---------------------------------------------------------------- the whole on one rank


@on_ranks(3)
def test_gather_fills_what_it_is_given_in_the_dtype_that_was_asked_for() -> None:
    rank, whole = dist.get_rank(), counted(SIZE)
    for dst, spec in enumerate(SPECS[:3]):
        made = cut(whole, spec, requires_grad=True)

        def gathered(**options: Any) -> Tensor | None:
            found = made.gather(dst, **options)  # noqa: B023 - called in this turn of the loop
            assert (found is None) == (rank != dst)  # noqa: B023
            assert found is None or not found.requires_grad
            return found

        on_dst = rank == dst
        plain = gathered()
        as_double = gathered(dtype=torch.float64)
        out = torch.zeros(7, 5).t() if on_dst else None
        filled = gathered(out=out)
        narrow = torch.zeros(SIZE, dtype=torch.bfloat16) if on_dst else None
        converted = gathered(out=narrow, enforce_dtype=True)
        wide = torch.zeros(SIZE, dtype=torch.float64) if on_dst else None
        asked = gathered(out=wide, dtype=torch.float64)
        if on_dst:
            assert filled is out
            assert converted is narrow
            assert asked is wide
            for found, expected in [
                (plain, whole),
                (as_double, whole.double()),
                (filled, whole),
                (converted, whole.bfloat16()),
                (asked, whole.double()),
            ]:
                assert found.dtype == expected.dtype
                assert torch.equal(found, expected)
        with CommCounter() as counter:
            made.gather(dst, dtype=torch.float64)
        away = 0 if on_dst else sum(tensor.numel() for tensor in made.tensors)
        assert counter.bytes("send") == 8 * away + word_bytes()


def test_what_is_no_group_is_refused_and_so_is_none_where_there_is_no_default_group() -> None:
    with pytest.raises(ShardingError, match="expected a process group, found 'world'"):
        group_or_default("world")  # type: ignore[arg-type]
    for ask in (lambda: group_or_default(None), default_group):
        with pytest.raises(ShardingError, match="init_process_group first"):
            ask()


@on_ranks(1)
def test_a_shard_is_compared_with_the_first_that_has_the_property() -> None:
    last = torch.zeros(2, 2, 2, 2)
    tensors = [torch.zeros(1, 1, 1, 1), last.to(memory_format=torch.channels_last), last]
    shards = [Shard.from_tensor_and_offsets(t, [o, 0, 0, 0], 0) for o, t in enumerate(tensors)]
    with pytest.raises(ShardingError, match=r"shard 2 .* has memory_format .*but one before it has .*last"):
        init_from_local_shards(shards, 5, 2, 2, 2)
