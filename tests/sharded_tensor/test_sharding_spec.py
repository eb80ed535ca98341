"""Specs give exact covers with the chunks of torch.chunk, and metadata gives back a spec that made it."""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from covers import boxes_on, random_spec, rows
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed import _remote_device

from shardwise.errors import ShardingError
from shardwise.layout import cover
from shardwise.sharded_tensor import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    GridShardingSpec,
    RaggedShardingSpec,
    RemoteDevice,
    ShardedTensorMetadata,
    ShardingSpec,
    ShardMetadata,
    TensorProperties,
    infer_sharding_spec,
)

relaxed = settings(max_examples=80)
FLOATS = TensorProperties()
shapes = st.lists(st.integers(0, 7), min_size=1, max_size=4).map(tuple)


def placements(ranks: list[int]) -> list[str]:
    return [f"rank:{rank}/cpu" for rank in ranks]


def chunks(size: int, count: int) -> list[tuple[int, int]]:
    """(offset, length) of each chunk, as torch.chunk cuts them, the missing ones empty at the end."""
    lengths = [len(part) for part in torch.empty(size).chunk(count)]
    lengths += [0] * (count - len(lengths))
    return list(zip(itertools.accumulate(lengths, initial=0), lengths, strict=False))


def told(metadata: ShardedTensorMetadata) -> list[tuple[list[int], list[int], int]]:
    return [(shard.shard_offsets, shard.shard_sizes, shard.rank) for shard in metadata.shards_metadata]


@given(shapes, st.data())
@relaxed
def test_a_chunk_spec_cuts_any_dim_as_torch_chunk_does_for_any_order_of_ranks(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    ranks = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=9))
    metadata = ChunkShardingSpec(dim, placements(ranks)).build_metadata(torch.Size(shape), FLOATS)
    expected = []
    for rank, (start, length) in zip(ranks, chunks(shape[dim], len(ranks)), strict=True):
        offsets, sizes = [0] * len(shape), list(shape)
        offsets[dim], sizes[dim] = start, length
        expected.append((offsets, sizes, rank))
    assert told(metadata) == expected
    assert metadata.size == torch.Size(shape)
    assert metadata.tensor_properties == FLOATS
    metadata.check(range(6))


@given(shapes, st.data())
@relaxed
def test_a_grid_spec_cuts_every_dim_with_the_last_varying_fastest(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    grid = data.draw(st.lists(st.integers(1, 3), min_size=len(shape), max_size=len(shape)))
    count = len(list(itertools.product(*map(range, grid))))
    ranks = data.draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))
    metadata = GridShardingSpec(grid, placements(ranks)).build_metadata(torch.Size(shape), FLOATS)
    cells = itertools.product(*map(chunks, shape, grid))
    assert told(metadata) == [
        ([start for start, _ in cell], [length for _, length in cell], rank)
        for cell, rank in zip(cells, ranks, strict=True)
    ]
    metadata.check(range(6))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.integers(0, 3), st.data())
@relaxed
def test_a_ragged_spec_gives_the_stated_rows_also_none(
    sizes: list[int], after: int, data: st.DataObject
) -> None:
    ranks = data.draw(st.lists(st.integers(0, 5), min_size=len(sizes), max_size=len(sizes)))
    dim = data.draw(st.sampled_from([1, -1]))
    spec = RaggedShardingSpec(dim, sizes, placements(ranks))
    metadata = spec.build_metadata(torch.Size([after, sum(sizes)]), FLOATS)
    starts = itertools.accumulate(sizes, initial=0)
    assert told(metadata) == [
        ([0, start], [after, size], rank) for start, size, rank in zip(starts, sizes, ranks, strict=False)
    ]
    metadata.check(range(6))


@given(st.integers(0, 2**32))
@example(0)
@settings(max_examples=300)
def test_the_inferred_spec_gives_exactly_the_metadata_it_was_inferred_from(seed: int) -> None:
    rng = random.Random(seed)
    shape = torch.Size([rng.randint(0, 6) for _ in range(rng.randint(0, 4))])
    properties = TensorProperties(dtype=torch.bfloat16, requires_grad=True)
    spec = random_spec(rng, shape, [0, 1, 2, 5])
    metadata = spec.build_metadata(shape, properties)
    metadata.check([0, 1, 2, 5])
    inferred = infer_sharding_spec(metadata)
    assert inferred.build_metadata(metadata.size, metadata.tensor_properties) == metadata


@pytest.mark.parametrize(
    "spec",
    [
        rows(2, 0, 1),
        rows(1, 0, dim=1),
        GridShardingSpec([2, 2], placements([3, 1, 0, 2])),
        RaggedShardingSpec(0, [4, 0, 1], placements([0, 1, 2])),
        boxes_on(([0, 0], [5, 2], 0), ([0, 2], [3, 4], 1), ([3, 2], [2, 4], 0)),
    ],
    ids=["rows", "columns", "grid", "ragged", "boxes"],
)
def test_the_plainest_spec_is_inferred(spec: ShardingSpec) -> None:
    assert infer_sharding_spec(spec.build_metadata(torch.Size([5, 6]), FLOATS)) == spec


def test_an_enumerable_spec_only_cuts_the_shape_that_its_shards_cover() -> None:
    spec = boxes_on(([0, 0], [2, 3], 0), ([2, 0], [1, 3], 1))
    cover([shard.box for shard in spec.shards], (3, 3))
    assert spec.build_metadata(torch.Size([3, 3]), FLOATS).shards_metadata == spec.shards
    for shape, words in {
        (4, 3): "9 of the 12",
        (2, 3): "outside the tensor",
        (9,): "outside the tensor",
    }.items():
        with pytest.raises(ShardingError, match=words):
            spec.build_metadata(torch.Size(shape), FLOATS)


# ---------------------------------------------------------------- placements


def test_a_placement_is_text_or_any_object_that_knows_its_rank_and_device() -> None:
    same: list[Any] = [
        "rank:3/cpu",
        "rank:3",
        RemoteDevice("rank:3/cpu"),
        _remote_device("rank:3/cpu"),
        "rank:3/cpu:0",
    ]
    found = [RemoteDevice.of(placement) for placement in same]
    assert len(set(found)) == 1
    assert found[0] == found[-1] != RemoteDevice("rank:3/cuda:0")
    assert (found[0].rank(), found[0].device(), found[0].worker_name()) == (3, torch.device("cpu"), None)
    assert ChunkShardingSpec(0, same).placements == found
    gpu = RemoteDevice.of(_remote_device("rank:1/cuda:2"))
    assert (gpu.rank(), gpu.device(), repr(gpu)) == (1, torch.device("cuda:2"), "rank:1/cuda:2")
    assert gpu.on("cpu") == RemoteDevice("rank:1")
    assert gpu != "rank:1/cuda:2"


@pytest.mark.parametrize("worker", ["trainer0/cpu", "trainer0", _remote_device("trainer0/cpu")])
def test_a_placement_may_name_an_rpc_worker(worker: Any) -> None:
    found = RemoteDevice.of(worker)
    assert (found.rank(), found.worker_name(), found.device()) == (None, "trainer0", torch.device("cpu"))
    assert repr(found.on("cuda:1")) == "trainer0/cuda:1"
    with pytest.raises(ShardingError, match=r"\[0\] \+ \[4\].*trainer0/cpu.*names no rank"):
        _ = ShardMetadata([0], [4], worker).rank


@pytest.mark.parametrize("text", ["rank:0/cuda:1", "rank:12/cpu", "worker/cuda:0", "meta"])
def test_a_placement_survives_pickle_and_its_own_text(text: str) -> None:
    placement = RemoteDevice(text)
    assert pickle.loads(pickle.dumps(placement)) == placement == RemoteDevice(repr(placement))


@pytest.mark.parametrize(
    "wrong", ["rank:x/cpu", "rank:-1/cpu", "rank:0/nowhere", "rank:0/", "", "/cpu", 7, None]
)
def test_what_is_no_placement_is_refused_with_what_was_found(wrong: Any) -> None:
    with pytest.raises(ShardingError, match="a placement is") as error:
        ChunkShardingSpec(0, ["rank:0/cpu", wrong])
    assert repr(wrong) in str(error.value)


# ---------------------------------------------------------------- errors

TWO = ["rank:0/cpu", "rank:1/cpu"]
WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "no such dim": (
        lambda: ChunkShardingSpec(2, TWO).build_metadata(torch.Size([3, 3]), FLOATS),
        "dim 2.*3, 3",
    ),
    "dim of a scalar": (lambda: ChunkShardingSpec(0, TWO).build_metadata(torch.Size([]), FLOATS), "dim 0"),
    "dim by name": (lambda: ChunkShardingSpec("rows", TWO), "an int, found 'rows'"),
    "ragged dim by name": (lambda: RaggedShardingSpec("rows", [1, 2], TWO), "an int, found 'rows'"),
    "no placements": (lambda: ChunkShardingSpec(0, []), "at least one placement"),
    "one text": (lambda: ChunkShardingSpec(0, "rank:0"), "a list"),
    "grid of other count": (lambda: GridShardingSpec([2, 2], TWO), "needs 4 placements.*found 2"),
    "grid of none": (lambda: GridShardingSpec([2, 0], TWO), "GridShardingSpec"),
    "grid of other dims": (
        lambda: GridShardingSpec([2], TWO).build_metadata(torch.Size([2, 2]), FLOATS),
        r"1 dims, found shape \(2, 2\)",
    ),
    "ragged counts": (lambda: RaggedShardingSpec(0, [1, 2, 3], TWO), r"found \[1, 2, 3\] for 2"),
    "ragged negative": (lambda: RaggedShardingSpec(0, [-1, 4], TWO), "at least 0"),
    "ragged sum": (
        lambda: RaggedShardingSpec(0, [1, 3], TWO).build_metadata(torch.Size([5]), FLOATS),
        r"\[1, 3\], together 4, but dim 0 of shape \(5,\) has 5",
    ),
    "no shards": (lambda: EnumerableShardingSpec([]), "at least one shard"),
    "overlap": (lambda: boxes_on(([0], [3], 0), ([2], [3], 1)), r"\(0,\).*\(2,\).*overlap"),
    "mixed dims": (lambda: boxes_on(([0], [3], 0), ([3, 0], [3, 1], 1)), "different numbers of dims"),
    "negative": (lambda: boxes_on(([-1], [3], 0)), "negative"),
    "offsets and sizes": (lambda: boxes_on(([0, 0], [3], 0)), "2 offsets but 1 sizes"),
    "rank outside": (
        lambda: rows(0, 7).build_metadata(torch.Size([4]), FLOATS).check([0, 1]),
        r"shard 1.*rank 7.*\[0, 1\]",
    ),
    "no rank": (
        lambda: ChunkShardingSpec(0, ["cpu"]).build_metadata(torch.Size([4]), FLOATS).check([0]),
        "names no rank",
    ),
    "no shard anywhere": (
        lambda: ShardedTensorMetadata([], torch.Size([0])).check([0]),
        "at least one shard",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_cut_is_refused_with_what_was_expected_and_found(case: str) -> None:
    make, words = WRONG[case]
    with pytest.raises(ShardingError, match=words):
        make()


def test_specs_and_metadata_are_compared_by_value_and_printed_so_that_they_can_be_read() -> None:
    assert rows(0, 1) == ChunkShardingSpec(0, ["rank:0", _remote_device("rank:1/cpu")])
    assert rows(0, 1) != rows(1, 0)
    assert repr(rows(0, 1)) == "ChunkShardingSpec(dim=0, placements=[rank:0/cpu, rank:1/cpu])"
    shard = ShardMetadata((0, 2), torch.Size([3, 4]), "rank:1")
    assert shard == ShardMetadata([0, 2], [3, 4], "rank:1/cpu")
    assert len({shard, ShardMetadata([0, 2], [3, 4], "rank:1/cpu")}) == 1
    assert repr(shard) == "ShardMetadata(shard_offsets=[0, 2], shard_sizes=[3, 4], placement=rank:1/cpu)"
