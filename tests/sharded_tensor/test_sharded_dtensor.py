"""Sharded tensors, DTensors of any mesh and placements, and rows have the same values."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

from ranks import on_ranks
from sharded_tensor.rows.pieces import ANY_RANKS, FOUR_RANKS, parameter, replicated, uneven
from sharded_tensor.rows.pieces import sharded as sharded_rows
from shardwise import _compat, sharded_tensor
from shardwise.errors import RankMismatchError, ShardingError
from shardwise.layout import Box
from shardwise.sharded_tensor import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    GridShardingSpec,
    ShardedTensor,
    ShardMetadata,
    TensorProperties,
    shard_tensor,
)
from shardwise.sharded_tensor.dtensor import from_dtensor, from_rows, to_dtensor, to_rows
from shardwise.sharded_tensor.holding import _table
from shardwise.sharded_tensor.rows import Piece, ShardedRows

SHAPES = [(7,), (8, 3), (5, 6), (1, 9), (0, 4), (3, 0), (4, 5, 3), (16,), (13, 11), (2, 1, 6)]


def whole_of(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(math.prod(shape)).reshape(shape).to(dtype)


def drawn_placements(draw: random.Random, counts: tuple[int, ...], ndim: int) -> list[Placement]:
    placements: list[Placement] = []
    for _ in counts:
        kind = draw.choice(["shard", "shard", "replicate", "strided"])
        dim = draw.randrange(ndim)
        if kind == "shard":
            placements.append(Shard(dim))
        elif kind == "strided":
            placements.append(_compat.StridedShard(dim, split_factor=draw.choice([1, 2, 3, 4])))
        else:
            placements.append(Replicate())
    return placements


cuts_of_a_dim = st.lists(st.tuples(st.sampled_from([None, 1, 2, 3, 5]), st.integers(1, 5)), max_size=3)


@settings(max_examples=150)
@given(size=st.integers(0, 40), cuts=cuts_of_a_dim)
def test_a_dim_is_split_as_chunks_of_its_indices(size: int, cuts: list[tuple[int | None, int]]) -> None:
    expected = {(): torch.arange(size)}
    for factor, count in cuts:
        expected = {
            (*at, index): torch.cat([chunk(part, count)[index] for part in chunk(indices, factor or 1)])
            for at, indices in expected.items()
            for index in range(count)
        }
    placements = [(Shard(0) if f is None else _compat.StridedShard(0, split_factor=f), n) for f, n in cuts]
    found = _table(size, placements)
    assert list(found) == list(expected)
    for at, runs in found.items():
        assert list(itertools.chain(*runs)) == expected[at].tolist()
        assert all(runs)  # none empty
        assert all(one.stop < other.start for one, other in itertools.pairwise(runs))


def chunk(indices: Tensor, count: int) -> list[Tensor]:
    chunks = list(indices.chunk(count))
    return chunks + [indices[:0]] * (count - len(chunks))


def distributed(whole: Tensor, mesh: DeviceMesh, placements: list[Placement]) -> DTensor:
    """By torch, from the equal values of all ranks."""
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def any_cut(draw: random.Random, whole: Tensor, group: dist.ProcessGroup) -> ShardedTensor:
    ranks = dist.get_process_group_ranks(group)
    placements = [f"rank:{rank}" for rank in draw.choices(ranks, k=draw.choice([1, 2, 3, 5]))]
    return ChunkShardingSpec(draw.randrange(whole.ndim), placements).shard(whole, None, group)


def same(found: DTensor, expected: DTensor) -> bool:
    mine, theirs = found.to_local(), expected.to_local()
    return (
        found.placements == expected.placements
        and found.shape == expected.shape
        and mine.shape == theirs.shape
        and torch.equal(mine, theirs)
    )


@on_ranks(4)
def test_random_meshes_and_placements_go_both_ways() -> None:
    draw = random.Random(7)
    meshes = []
    for counts in ((4,), (2, 2), (1, 4), (2, 1, 2)):
        meshes.append(DeviceMesh("cpu", torch.arange(4).view(counts)))
    meshes += [DeviceMesh("cpu", [[0, 2], [1, 3]]), DeviceMesh("cpu", [[[0], [2]], [[1], [3]]])]
    for index in range(120):
        mesh, shape = draw.choice(meshes), draw.choice(SHAPES)
        whole = whole_of(shape, draw.choice([torch.float32, torch.bfloat16, torch.int32]))
        placements = drawn_placements(draw, tuple(mesh.shape), len(shape))
        case = (index, mesh.mesh.tolist(), placements, shape)
        expected = distributed(whole, mesh, placements)
        made = from_dtensor(expected)
        made.metadata().check(range(4))
        for box, tensor in zip(made.boxes, made.tensors, strict=True):
            slices = tuple(slice(o, e) for o, e in zip(box.offsets, box.ends, strict=True))
            assert torch.equal(tensor, whole[slices]), case
        if index % 10:  # the rest communicates, which takes its time
            continue
        assert torch.equal(made.full_tensor(), whole), case
        if not any(isinstance(placement, _compat.StridedShard) for placement in placements):
            assert torch.equal(expected.full_tensor(), whole), case
        assert same(to_dtensor(made, mesh, placements), expected), case
        cut = any_cut(draw, whole, dist.group.WORLD)
        assert same(to_dtensor(cut, mesh, placements), expected), case


@on_ranks(4)
def test_ranks_must_ascend_along_an_axis_that_cuts() -> None:
    flat, square = DeviceMesh("cpu", [2, 0, 3, 1]), DeviceMesh("cpu", [[0, 3], [1, 2]])
    whole = whole_of((8, 4))
    sharded = shard_tensor(whole, ChunkShardingSpec(0, ["rank:0"]))
    for mesh, placements in ((flat, [Replicate()]), (square, [Replicate(), Shard(0)])):
        made = to_dtensor(sharded, mesh, placements)
        assert torch.equal(made.full_tensor(), whole)
        assert torch.equal(from_dtensor(made).full_tensor(), whole)
    for mesh, placements, axis in ((flat, [Shard(0)], 0), (square, [Shard(1), Shard(0)], 0)):
        expected = rf"ranks of mesh .* do not ascend along axis {axis}, .* use a mesh on which they ascend"
        with pytest.raises(ShardingError, match=expected):
            to_dtensor(sharded, mesh, placements)
        with pytest.raises(ShardingError, match=expected):
            from_dtensor(distributed(whole, mesh, placements))


@on_ranks(4)
def test_a_mesh_of_some_ranks() -> None:
    rank, whole = dist.get_rank(), whole_of((7, 4))
    mesh = DeviceMesh("cpu", [1, 3])
    dtensor = distributed(whole, mesh, [Shard(0)])
    made = from_dtensor(dtensor, process_group=dist.group.WORLD)
    assert [len(shards) for shards in made.metadata().boxes_by_rank(range(4))] == [0, 1, 0, 1]
    assert torch.equal(made.full_tensor(), whole)
    returned = to_dtensor(made, mesh, [Shard(1)])
    assert same(returned, distributed(whole, mesh, [Shard(1)]))
    if rank not in (1, 3):
        with pytest.raises(
            ShardingError, match=rf"rank {rank}: no process group is known .* pass process_group="
        ):
            from_dtensor(dtensor)
        return
    own = from_dtensor(dtensor)
    assert dist.get_process_group_ranks(own.process_group) == [1, 3]
    assert torch.equal(own.full_tensor(), whole)
    assert own.sharding_spec() == ChunkShardingSpec(0, ["rank:1", "rank:3"])
    other = DeviceMesh("cpu", torch.tensor([1, 0]), _init_backend=False)
    with pytest.raises(
        ShardingError, match=r"ranks \[0\] of the mesh \[1, 0\] are not among the ranks \[1, 3\]"
    ):
        to_dtensor(own, other, [Shard(0)])


@on_ranks(4)
def test_a_slice_of_a_mesh_and_its_replicas() -> None:
    rank, whole = dist.get_rank(), whole_of((6, 4)) + 100 * (dist.get_rank() // 2)
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("copies", "parts"))
    one_copy = from_dtensor(distributed(whole, mesh["parts"], [Shard(0)]))
    assert torch.equal(one_copy.full_tensor(), whole)
    both = from_dtensor(distributed(whole_of((6, 4)), mesh, [Replicate(), Shard(0)]))
    assert [len(boxes) for boxes in both.metadata().boxes_by_rank(range(4))] == [1, 1, 0, 0]
    assert both.local_shards() == [] if rank > 1 else both.local_tensor().shape == (3, 4)
    grid = from_dtensor(distributed(whole_of((6, 4)), mesh, [Shard(1), Shard(0)]))
    assert grid.sharding_spec() == GridShardingSpec([2, 2], ["rank:0", "rank:2", "rank:1", "rank:3"])


@on_ranks(4)
def test_what_shares_memory() -> None:
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2))
    whole = whole_of((8, 8))
    strided: Any = _compat.StridedShard
    for placements, shards, shared in (
        ([Shard(0), Shard(1)], 1, True),
        ([strided(0, split_factor=2), Shard(1)], 2, True),
        ([strided(1, split_factor=2), Shard(0)], 2, False),
    ):
        dtensor = distributed(whole, mesh, placements)
        made = from_dtensor(dtensor)
        assert len(made.tensors) == shards
        dtensor.to_local().fill_(-1)
        assert all(bool((tensor == -1).all()) == shared for tensor in made.tensors)
        assert all(tensor.is_contiguous() for tensor in made.tensors)
    arriving = distributed(whole, mesh, [Shard(0), Shard(1)]).redistribute(
        placements=[Replicate()] * 2, async_op=True
    )
    assert all(type(tensor) is torch.Tensor for tensor in from_dtensor(arriving).tensors)
    transposed = distributed(whole.clone(), mesh, [Shard(0), Shard(1)]).t()
    assert from_dtensor(transposed).tensors[0].is_contiguous()
    assert torch.equal(from_dtensor(transposed).full_tensor(), whole.t())
    parameter = torch.nn.Parameter(distributed(whole, mesh, [Shard(0), Shard(1)]))
    assert not from_dtensor(parameter).requires_grad
    made = from_dtensor(parameter)
    copied = to_dtensor(made, mesh, [Shard(0), Shard(1)])
    copied.to_local().zero_()
    assert torch.equal(made.full_tensor(), whole)


@on_ranks(2)
def test_results_whose_gradient_would_be_lost_are_refused() -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    leaf = distributed(whole_of((4, 3)), mesh, [Shard(0)]).requires_grad_()
    sharded = from_dtensor(leaf).requires_grad_()
    result, own = leaf * 2, sharded * 2
    with pytest.raises(ShardingError, match=r"no gradient passes from a DTensor .* \(4, 3\) .* detach\(\)"):
        from_dtensor(result)
    with pytest.raises(ShardingError, match=r"no gradient passes from a ShardedTensor .* detach\(\)"):
        to_dtensor(own, mesh, [Shard(1)])
    with pytest.raises(ShardingError, match=r"no gradient passes from a ShardedRows .* detach\(\)"):
        from_rows(parameter(whole_of((4, 3)), uneven) * 2)
    with torch.no_grad():
        assert torch.equal(from_dtensor(result), own.detach())
    made = [to_dtensor(each, mesh, [Shard(1)]) for each in (sharded, own.detach())]
    assert not any(each.requires_grad or each.to_local().requires_grad for each in made)
    assert torch.equal(made[1].full_tensor(), result.detach().full_tensor())


@on_ranks(4)
def test_a_stated_order_of_axes_is_followed() -> None:
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2))
    whole = whole_of((9, 2))
    plain = distributed(whole, mesh, [Shard(0), Shard(0)])
    order: Any = _compat.DTensorSpec.compute_default_shard_order(plain.placements)
    reversed_order = tuple(entry._replace(mesh_dims=(1, 0)) for entry in order)
    spec = _compat.DTensorSpec(
        mesh, plain.placements, tensor_meta=_compat.spec_of(plain).tensor_meta, shard_order=reversed_order
    )
    inner, outer = mesh.get_local_rank(1), mesh.get_local_rank(0)
    local = whole.chunk(2)[inner].chunk(2)[outer].clone()
    assert torch.equal(from_dtensor(_compat.dtensor(local, spec)).full_tensor(), whole)


@on_ranks(4)
def test_shards_of_any_kind_become_dtensors() -> None:
    mesh = DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]]))
    boxes = [
        ((0, 0), (2, 5), 3),
        ((2, 0), (4, 2), 3),
        ((2, 2), (1, 3), 0),
        ((3, 2), (3, 3), 2),
        ((6, 0), (0, 5), 1),
    ]
    spec = EnumerableShardingSpec([ShardMetadata(o, s, f"rank:{r}") for o, s, r in boxes])
    whole = whole_of((6, 5))
    sharded = shard_tensor(whole, spec)
    for placements in itertools.product([Shard(0), Shard(-1), Replicate()], repeat=2):
        made = to_dtensor(sharded, mesh, placements)
        assert same(made, distributed(whole, mesh, list(made.placements)))
        assert all(placement.dim >= 0 for placement in made.placements if isinstance(placement, Shard))
    assert torch.equal(to_dtensor(sharded, mesh, [Shard(1), Shard(0)]).full_tensor(), whole)
    scalar = EnumerableShardingSpec([ShardMetadata([], [], "rank:2")])
    made = to_dtensor(shard_tensor(torch.tensor(3.5), scalar), mesh, [Replicate(), Replicate()])
    assert made.to_local() == 3.5
    back = from_dtensor(made)
    assert back.metadata().boxes_by_rank(range(4)) == [[Box((), ())], [], [], []]
    assert torch.equal(back.full_tensor(), torch.tensor(3.5))


@on_ranks(2)
def test_what_cannot_be_converted_is_refused_everywhere() -> None:
    rank, mesh = dist.get_rank(), DeviceMesh("cpu", [0, 1])
    partial = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    with pytest.raises(ShardingError, match=rf"rank {rank}: .* on mesh axis 0.* call redistribute\(\)"):
        from_dtensor(partial)
    sharded = shard_tensor(torch.ones(3, 2), ChunkShardingSpec(0, ["rank:0", "rank:1"]))
    for placements, expected in (
        ([Partial()], "partial sums"),
        ([Shard(0), Shard(1)], "a mesh of 1 axes needs one placement for each, found 2"),
        ([Shard(2)], "cuts dim 2 of a tensor of shape"),
        ([Shard(-3)], "cuts dim -3 of a tensor of shape"),
    ):
        with pytest.raises(ShardingError, match=expected):
            to_dtensor(sharded, mesh, placements)
    with pytest.raises(RankMismatchError, match="the DTensor to make"):
        to_dtensor(sharded, mesh, [Shard(rank)])


Listed = list[tuple[tuple[int, int], tuple[int, int]]]  # offsets and sizes of one rank's shards


@pytest.mark.parametrize(
    ("placement", "listed"),
    [
        (Shard(1), [[((0, 0), (4, 2)), ((0, 2), (4, 1))], [((0, 3), (4, 3))]]),
        (Shard(0), [[((0, 0), (1, 6))], [((1, 0), (3, 6))]]),
        (Replicate(), [[], [((0, 0), (4, 6))]]),
        (Replicate(), [[((0, 0), (4, 6))], [((0, 0), (4, 6))]]),
    ],
    ids=["columns", "rows", "a table on one rank", "replicas"],
)
@on_ranks(2)
def test_shards_that_torchrec_lists_are_taken_as_they_are(placement: Placement, listed: list[Listed]) -> None:
    whole, mesh = whole_of((4, 6), torch.float64), DeviceMesh("cpu", [0, 1])
    mine = listed[dist.get_rank()]
    shards = [
        whole[row : row + rows, column : column + columns].contiguous()
        for (row, column), (rows, columns) in mine
    ]
    local = LocalShardsWrapper(shards, [offsets for offsets, _ in mine])
    made = DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    found = from_dtensor(made)
    assert torch.equal(found.full_tensor(), whole)
    assert len(found.metadata().shards_metadata) == len({tuple(place) for one in listed for place in one})
    for shard in found.tensors:
        assert any(shard.data_ptr() == own.data_ptr() for own in shards)


# Rows of the contiguous layout


@on_ranks(4)
def test_rows_of_every_kind_go_both_ways() -> None:
    draw = random.Random(3)
    for cut in FOUR_RANKS:
        for whole in (whole_of((7, 5)), whole_of((4,), torch.bfloat16), whole_of((2, 3, 2))):
            param = parameter(whole, cut)
            made = from_rows(param)
            members = dist.get_process_group_ranks(made.process_group)
            assert members == ([0, 1, 2, 3] if cut is not replicated else members)
            assert len(members) == (2 if cut is replicated else 4)
            assert torch.equal(made.full_tensor(), whole), cut
            assert not made.requires_grad
            assert made.tensors[0].data_ptr() == param.local.data_ptr()
            if cut in (*ANY_RANKS, replicated):
                read = from_dtensor(param)
                assert torch.equal(read.full_tensor(), whole), cut
                with pytest.raises(ShardingError, match="use to_rows"):
                    to_dtensor(read, param.device_mesh, param.placements)
            everywhere = from_rows(param, process_group=dist.group.WORLD)
            assert torch.equal(everywhere.full_tensor(), whole), cut
            for source in (whole + 1, (whole + 2).double()):
                to_rows(any_cut(draw, source, dist.group.WORLD), param)
                assert torch.equal(param.full_tensor(), source.to(whole.dtype)), cut
            for source in (everywhere.clone(), made.clone()):
                param.local.zero_()
                to_rows(source, param)
                assert torch.equal(param.full_tensor(), (whole + 2)), cut


@on_ranks(2)
def test_rows_that_every_rank_has_are_held_by_the_first() -> None:
    box = Box((0, 0), (3, 2))
    rows = ShardedRows.wrap(whole_of((3, 2)), Piece(torch.Size((3, 2)), (), lambda rank: box))
    made = from_rows(rows)
    assert made.metadata().boxes_by_rank([0, 1]) == [[box], []]
    assert torch.equal(made.full_tensor(), whole_of((3, 2)))
    to_rows(made + 1, rows)
    assert torch.equal(rows.local, whole_of((3, 2)) + 1)


@on_ranks(2)
def test_rows_that_do_not_fit_are_refused_everywhere() -> None:
    rank = dist.get_rank()
    source = shard_tensor(whole_of((6, 2)), ChunkShardingSpec(0, ["rank:0", "rank:1"]))
    with pytest.raises(ShardingError, match=r"shape \(6, 2\) on every rank, found \(6, 3\) on rank 0"):
        to_rows(source, sharded_rows(whole_of((6, 3)), uneven))
    assert dist.group.WORLD is not None
    cut = ChunkShardingSpec(0, [f"rank:{rank}"]).build_metadata(torch.Size((6, 2)), TensorProperties())
    other = ShardedTensor.wrap(
        [sharded_tensor.Shard(torch.zeros(6, 2), cut.shards_metadata[0])], cut, process_group=dist.group.WORLD
    )
    with pytest.raises(RankMismatchError, match="disagree about the sharded tensor to copy into rows"):
        to_rows(other, sharded_rows(whole_of((6, 2)), uneven))
    alone = dist.new_group([rank], use_local_synchronization=True)
    with pytest.raises(ShardingError, match="elements of shape"):
        from_rows(sharded_rows(whole_of((6, 2)), uneven), process_group=alone)
