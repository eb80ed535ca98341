"""What is wrong on one rank raises on every rank, which says where and what, and leaves the group usable."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covers import boxes_on, counted, cut, rows
from torch import Tensor, nn

from ranks import on_ranks
from shardwise.errors import RankMismatchError, ShardingError
from shardwise.sharded_tensor import (
    ChunkShardingSpec,
    Shard,
    ShardedTensor,
    ShardedTensorMetadata,
    ShardingSpec,
    ShardMetadata,
    TensorProperties,
    empty,
    init_from_local_shards,
    init_from_local_shards_and_global_metadata,
    init_from_local_tensor,
    rand,
    randn,
    shard_tensor,
    zeros,
)

RANKS, ROWS, COLUMNS = 3, 2, 4  # every rank holds ROWS x COLUMNS, rows of a tensor of SIZE
SIZE = (RANKS * ROWS, COLUMNS)
Fault = tuple[Callable[[bool], object], list[str]]  # of "am I the odd rank?"; what the message has


def shard(
    tensor: Tensor | None = None, *, offsets: Any = None, sizes: Any = None, on: str | None = "rank:{me}/cpu"
) -> Shard:
    """This rank's rows, unless told otherwise."""
    me = dist.get_rank()
    tensor = torch.ones(ROWS, COLUMNS) if tensor is None else tensor
    place = ShardMetadata(
        [me * ROWS, 0] if offsets is None else offsets,
        [ROWS, COLUMNS] if sizes is None else sizes,
        None if on is None else on.format(me=me, next=(me + 1) % RANKS),
    )
    return Shard(tensor, place)


def made_of(odd_shards: Callable[[], Any], *size: Any) -> Callable[[bool], object]:
    return lambda odd: init_from_local_shards(odd_shards() if odd else [shard()], *(size if odd else SIZE))


def same_shards() -> list[Shard]:
    return [shard()]


def too_many_rows() -> list[Shard]:
    start = max(0, dist.get_rank() * ROWS - 1)
    return [shard(torch.ones(ROWS + 1, COLUMNS), offsets=[start, 0], sizes=[ROWS + 1, COLUMNS])]


def two_dtypes() -> list[Shard]:
    first = dist.get_rank() * ROWS
    single = torch.ones(1, COLUMNS)
    return [
        shard(single, offsets=[first, 0], sizes=[1, COLUMNS]),
        shard(single.double(), offsets=[first + 1, 0], sizes=[1, COLUMNS]),
    ]


def ones(**options: Any) -> Tensor:
    return torch.ones(ROWS, COLUMNS, **options)


LOCAL_SHARDS: dict[str, Fault] = {
    "overlap": (made_of(too_many_rows, *SIZE), ["overlap", "on rank {odd}", "sizes=(3, 4)", "sizes=(2, 4)"]),
    "hole": (
        made_of(lambda: [shard(torch.ones(1, COLUMNS), sizes=[1, COLUMNS])], *SIZE),
        ["20 of the 24", "Box(offsets=({first}, 0), sizes=(1, 4))"],
    ),
    "no shard": (made_of(list, *SIZE), ["16 of the 24", "sizes=(2, 4)"]),
    "dtype": (
        made_of(lambda: [shard(ones(dtype=torch.float64))], *SIZE),
        ["dtype of the shards", "torch.float32 on rank", "torch.float64 on rank {odd}"],
    ),
    "two dtypes": (made_of(two_dtypes, *SIZE), ["rank {odd}: shard 1", "torch.float64", "torch.float32"]),
    "device": (
        made_of(lambda: [shard(ones(device="meta"), on="rank:{me}/meta")], *SIZE),
        ["device_type of the shards", "cpu on rank", "meta on rank {odd}"],
    ),
    "placement's device": (
        made_of(lambda: [shard(on="rank:{me}/meta")], *SIZE),
        ["rank {odd}: shard 0", "placed on meta", "tensor is on cpu"],
    ),
    "placement's rank": (
        made_of(lambda: [shard(on="rank:{next}/cpu")], *SIZE),
        ["rank {odd}: shard 0", "placed on rank {next}, but rank {odd} holds it"],
    ),
    "no such rank": (
        made_of(lambda: [shard(on="rank:7/cpu")], *SIZE),
        ["rank {odd}: shard 0", "placed on rank 7"],
    ),
    "no placement": (made_of(lambda: [shard(on=None)], *SIZE), ["rank {odd}: shard 0", "placement None"]),
    "a worker": (made_of(lambda: [shard(on="trainer/cpu")], *SIZE), ["rank {odd}: shard 0", "trainer/cpu"]),
    "tensor's size": (
        made_of(lambda: [shard(torch.ones(ROWS, 3))], *SIZE),
        ["rank {odd}: shard 0", "shape [2, 3], expected [2, 4]"],
    ),
    "requires_grad": (
        made_of(lambda: [shard(ones(requires_grad=True))], *SIZE),
        ["requires_grad of the shards", "True on rank {odd}", "False on rank"],
    ),
    "strides": (
        made_of(lambda: [shard(torch.ones(COLUMNS, ROWS).t())], *SIZE),
        ["rank {odd}: shard 0", "not contiguous (strides (1, 2))", ".contiguous()"],
    ),
    "layout": (
        made_of(lambda: [shard(ones().to_sparse())], *SIZE),
        ["rank {odd}: shard 0", "torch.sparse_coo, expected torch.strided"],
    ),
    "no leaf": (
        made_of(lambda: [shard(ones(requires_grad=True) * 2)], *SIZE),
        ["rank {odd}: shard 0", "differentiable", ".detach()"],
    ),
    "dims": (
        made_of(lambda: [shard(torch.ones(8), offsets=[8 * dist.get_rank()], sizes=[8])], *SIZE),
        ["Box(offsets=({start},), sizes=(8,)) extends outside the tensor of shape (6, 4)", "on rank {odd}"],
    ),
    "offsets and sizes": (made_of(lambda: [shard(offsets=[0])], *SIZE), ["1 offsets but 2 sizes"]),
    "negative": (made_of(lambda: [shard(offsets=[-1, 0])], *SIZE), ["rank {odd}: shard 0", "negative"]),
    "outside": (
        made_of(lambda: [shard(offsets=[5, 0])], *SIZE),
        ["offsets=(5, 0)", "extends outside the tensor of shape (6, 4)", "on rank {odd}"],
    ),
    "no shard objects": (made_of(lambda: [ones()], *SIZE), ["rank {odd}", "found shards"]),
    "global size": (made_of(same_shards, 6, 5), ["global size", "[6, 4] on rank", "[6, 5] on rank {odd}"]),
    "negative size": (made_of(same_shards, 6, -4), ["rank {odd}", "(6, -4)"]),
    "no size": (made_of(same_shards, "all"), ["rank {odd}", "all"]),
}


class Failing(ShardingSpec):
    """A user's spec with a mistake."""

    def build_metadata(
        self, tensor_sizes: torch.Size, tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        raise KeyError("a mistake of the user's")


class Reversed(ShardingSpec):
    """The same shards as `rows(0, 1, 2)`, told in another order."""

    def build_metadata(
        self, tensor_sizes: torch.Size, tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        metadata = rows(0, 1, 2).build_metadata(tensor_sizes, tensor_properties)
        metadata.shards_metadata.reverse()
        return metadata


def local(
    odd_tensor: Callable[[], Tensor | None], spec: ShardingSpec | None = None, *size: int
) -> Callable[[bool], object]:
    return lambda odd: init_from_local_tensor(
        odd_tensor() if odd else ones(),
        spec if odd and spec else rows(0, 1, 2),
        *(size if odd and size else SIZE),
    )


LOCAL_TENSOR: dict[str, Fault] = {
    "spec": (local(ones, rows(0, 1, 2, dim=1)), ["rank {odd}: shard 0", "shape [2, 4], expected [6, "]),
    "no tensor": (local(lambda: None), ["rank {odd}", "places 1 shards here, found 0"]),
    "no shard": (local(ones, boxes_on(([0, 0], SIZE, 9))), ["rank {odd}", "rank 9"]),
    "dtype": (local(lambda: ones(dtype=torch.int64)), ["torch.float32 on rank", "torch.int64 on rank {odd}"]),
    "size": (local(ones, None, 6, 5), ["rank {odd}: shard 0", "shape [2, 4], expected [2, 5]"]),
    "failing spec": (local(ones, Failing()), ["rank {odd}", "a mistake of the user's"]),
    "no tensor object": (local(lambda: "rows"), ["rank {odd}", "str"]),
}


def resharded(odd_spec: ShardingSpec) -> Callable[[bool], object]:
    return lambda odd: cut(counted(SIZE), rows(0, 1, 2)).reshard(odd_spec if odd else rows(2, 1, dim=1))


def sharded(odd_tensor: Callable[[], Any], **options: Any) -> Callable[[bool], object]:
    def call(odd: bool) -> object:
        spec = options.get("spec") if odd and "spec" in options else rows(0, 1, 2)
        src_rank = options.get("src_rank", 1) if odd else 1
        return shard_tensor(odd_tensor() if odd else counted(SIZE), spec, src_rank=src_rank)

    return call


DIFFERING: dict[str, Fault] = {
    "other order": (local(ones, Reversed()), ["the spec of the local tensors", "[0, 0]+[2, 4]"]),
    "reshard to other specs": (
        resharded(rows(1, 2, dim=1)),
        ["the reshard", "[0, 0]+[6, 2] on rank:2/cpu", "[0, 0]+[6, 2] on rank:1/cpu"],
    ),
    "reshard along no dim": (resharded(rows(0, dim=5)), ["the reshard", "dim 5", "[0, 0]+[6, 2] on rank:2"]),
    "reshard to no rank": (resharded(rows(0, 8)), ["the reshard", "rank 8", "[0, 0]+[6, 2] on rank:2"]),
    "reshard by a failing spec": (resharded(Failing()), ["the reshard", "a mistake of the user's"]),
    "reshard to no cover": (resharded(boxes_on(([0, 0], [6, 3], 0))), ["the reshard", "18 of the 24"]),
    "shape": (sharded(lambda: counted((6, 5))), ["the tensor to shard", "(6, 4)", "(6, 5)"]),
    "dims": (sharded(lambda: counted((6,))), ["the tensor to shard", "(6, 4)", "(6,)"]),
    "dtype": (sharded(lambda: counted(SIZE, torch.int32)), ["torch.float32", "torch.int32"]),
    "requires_grad": (
        sharded(lambda: counted(SIZE).requires_grad_()),
        ["requires_grad True", "requires_grad False"],
    ),
    "spec": (sharded(lambda: counted(SIZE), spec=rows(0, 2, 1)), ["[2, 0]+[2, 4] on rank:1", "on rank:2"]),
    "source": (sharded(lambda: counted(SIZE), src_rank=2), ["src_rank 1", "src_rank 2"]),
    "no source": (sharded(lambda: counted(SIZE), src_rank=None), ["src_rank 1", "src_rank None"]),
    "no such source": (sharded(lambda: counted(SIZE), src_rank=3), ["src_rank 1", "src_rank 3"]),
    "no tensor": (sharded(lambda: None), ["impossible", "(6, 4)"]),
    "sharded already": (sharded(lambda: cut_locally()), ["impossible", "reshard()", "(6, 4)"]),
}


def cut_locally() -> ShardedTensor:
    metadata = rows(0, 1, 2).build_metadata(torch.Size(SIZE), TensorProperties())
    assert dist.group.WORLD is not None
    return ShardedTensor.wrap([shard()], metadata, process_group=dist.group.WORLD)


def gathered(on_odd: dict[str, Any], **elsewhere: Any) -> Callable[[bool], object]:
    def call(odd: bool) -> object:
        options: dict[str, Any] = {"dst": 1} | (on_odd if odd else elsewhere)
        return cut_locally().gather(**options)

    return call


GATHER: dict[str, Fault] = {
    "other dst": (gathered({"dst": 2}), ["dst [", "one dst"]),
    "no such dst": (gathered({"dst": 3}), ["rank {odd}", "rank 3 of a group of 3"]),
    "no dst": (gathered({"dst": None}), ["rank {odd}", "dst None"]),
    "no tensor": (gathered({"out": "x"}), ["rank {odd}", "out"]),
    "no dtype": (gathered({"dtype": "x"}), ["rank {odd}", "dtype 'x'"]),
    "out's shape": (gathered({"out": torch.empty(6, 5)}), ["rank {odd}", "out"]),
    "out's dtype": (gathered({"out": torch.empty(6, 4, dtype=torch.float16)}), ["rank {odd}", "out"]),
}


FAULTS: dict[str, tuple[dict[str, Fault], type[Exception]]] = {
    "local shards": (LOCAL_SHARDS, ShardingError),
    "local tensor": (LOCAL_TENSOR, ShardingError),
    "differing": (DIFFERING, RankMismatchError),
    "gather": (GATHER, ShardingError),
}


@on_ranks(RANKS, timeout=20)
@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_on_one_rank_raises_on_all_of_them_and_the_group_goes_on(kind: str) -> None:
    rank = dist.get_rank()
    faults, error = FAULTS[kind]
    for index, (name, (call, words)) in enumerate(faults.items()):
        for odd in (index % RANKS, (index + 1) % RANKS):
            with pytest.raises(error) as raised:
                call(rank == odd)
            message = str(raised.value)
            names = {"odd": odd, "next": (odd + 1) % RANKS, "first": odd * ROWS + 1, "start": odd * 8}
            for word in words:
                assert word.format(**names) in message, f"{name} on rank {odd}: {message}"
            alive = torch.ones(())
            dist.all_reduce(alive)
            assert alive == RANKS, name


ALIKE: dict[str, tuple[Callable[[], object], str]] = {
    "reshard along no dim": (lambda: cut_locally().reshard(rows(0, dim=2)), "dim 2"),
    "reshard to no rank": (lambda: cut_locally().reshard(rows(0, 3)), "rank 3"),
    "reshard to another shape": (
        lambda: cut_locally().reshard(boxes_on(([0, 0], (6, 5), 0))),
        r"extends outside the tensor of shape \(6, 4\)",
    ),
    "no source": (lambda: shard_tensor(counted(SIZE), rows(0), src_rank=3), "src_rank 3"),
    "a source without values": (
        lambda: shard_tensor(torch.empty(SIZE, device="meta"), rows(0, 1)),
        "meta device has no values",
    ),
    "gather to no rank": (lambda: cut_locally().gather(-1), "rank -1 of a group of 3"),
    "copy of another shape": (lambda: cut_locally().copy_(cut(counted((6, 5)), rows(0))), "6, 5"),
    # Rank 2 holds nothing of these: it must refuse them all the same.
    "random ints": (lambda: rand(rows(0, 1), SIZE, dtype=torch.int64), "int64"),
    "random bounds": (lambda: rand(rows(0, 1), SIZE, seed=1, low=2.0, high=1.0), "low <= high"),
    "normal spread": (lambda: randn(rows(0, 1), SIZE, seed=1, std=-1.0), "std"),
    "channels last": (
        lambda: empty(rows(0, 1), SIZE, memory_format=torch.channels_last),
        "2 dims cannot lie in torch.channels_last",
    ),
    "no format": (
        lambda: empty(rows(0, 1), SIZE, memory_format=torch.preserve_format),
        "cannot lie in torch.preserve_format",
    ),
    "gradients of ints": (
        lambda: zeros(rows(0, 1), SIZE, dtype=torch.int32, requires_grad=True),
        "torch.int32 cannot require grad",
    ),
    "layout": (lambda: empty(rows(0, 1), SIZE, layout=torch.sparse_coo), "torch.sparse_coo"),
    "layout of one like it": (
        lambda: torch.zeros_like(empty(rows(0, 1), SIZE), layout=torch.sparse_coo),
        "zeros_like.*torch.sparse_coo",
    ),
    "size": (lambda: empty(rows(0, 1), 6, -4), r"\(6, -4\)"),
    "what torch cannot copy": (
        lambda: zeros(rows(0, 1), SIZE, dtype=torch.uint4),
        "cannot copy elements of torch.uint4.*as torch.uint8",
    ),
    "shards of what torch cannot copy": (
        lambda: init_from_local_shards([shard(torch.empty(2, 4, dtype=torch.int2))], SIZE),
        "cannot copy elements of torch.int2",
    ),
    "rank": (lambda: empty(rows(0, 3), SIZE), r"rank 3.*\[0, 1, 2\]"),
    "dtype of the gradient": (
        lambda: setattr(cut(counted(SIZE), rows(0, 1)), "grad", cut(counted(SIZE).double(), rows(0, 1))),
        "float32.*float64",
    ),
    "cut of the gradient": (
        lambda: setattr(cut(counted(SIZE), rows(0, 1)), "grad", cut(counted(SIZE), rows(1, 0))),
        "cut alike",
    ),
}


@on_ranks(RANKS, timeout=20)
def test_what_all_ranks_get_wrong_alike_is_said_alike() -> None:
    for name, (call, words) in ALIKE.items():
        with pytest.raises(ShardingError, match=words):
            call()
        alive = torch.ones(())
        dist.all_reduce(alive)
        assert alive == RANKS, name


@on_ranks(RANKS, timeout=20)
@pytest.mark.parametrize("write", ["multiplies", "assigns"])
def test_a_write_to_a_part_that_fails_on_its_rank_is_not_lost(write: str) -> None:
    spec = ChunkShardingSpec(0, [f"rank:{rank}/cpu" for rank in range(RANKS)])
    whole = shard_tensor(torch.arange(4 * RANKS).view(2 * RANKS, 2), spec)
    if write == "multiplies":
        whole[0].mul_(0.5)  # a result that integers cannot hold
    else:
        whole[0] //= torch.zeros(2, dtype=torch.long)
    for each in (whole, whole[:1]):
        with pytest.raises(RankMismatchError, match=r"rank 0: .*(cast to|Zero)"):
            each.full_tensor()


def same_memory(tensor: ShardedTensor) -> ShardedTensor:
    return init_from_local_shards(tensor.local_shards(), *tensor.shape)


VIEWS: list[Callable[[Any], Any]] = [
    lambda x: x,
    lambda x: x[:],
    lambda x: x.data,
    lambda x: x.detach(),
    lambda x: nn.Parameter(x, requires_grad=False),
    lambda x: x.t(),
    lambda x: x.T,
    lambda x: x.mT,
    lambda x: x.permute(1, 0),
    lambda x: x.movedim(0, 1),
    lambda x: x.swapaxes(0, 1),
    lambda x: x.data.t().detach().unsqueeze(0)[0],
    lambda x: x.reshard(x.sharding_spec()),
    same_memory,
]


@on_ranks(2, timeout=60)
def test_a_write_that_fails_is_known_to_whatever_shares_the_memory() -> None:
    alone = rows(1)  # of which a whole, too, is written on one rank
    for place, spec in enumerate((rows(0, 1), rows(0, 1, 0, 1), rows(0, 1, dim=1), alone)):
        for number, view in enumerate(VIEWS):
            for part in (False, True) if spec is alone else (bool((number + place) % 2),):
                whole = cut(torch.arange(8).view(4, 2), spec)
                other = cut(torch.arange(8).view(4, 2), spec)
                beside = [see(whole) for see in (torch.detach, torch.t, lambda x: x[:2], lambda x: x.data[0])]
                written = view(whole)
                written = written[0] if part else written
                if sum(map(bool, written.metadata().boxes_by_rank((0, 1)))) > 1:  # both ranks hold some
                    with pytest.raises(RuntimeError, match="cast to"):
                        written.mul_(0.5)
                    assert torch.equal(whole.full_tensor(), torch.arange(8).view(4, 2))
                    continue
                written *= 0.5
                for each in (written, whole, whole.t(), *beside, whole.clone(), whole.to(torch.float64)):
                    with pytest.raises(RankMismatchError, match=r"(?s)disagree.*cast to|cast to.*disagree"):
                        each.full_tensor()
                assert torch.equal(other.full_tensor(), torch.arange(8).view(4, 2))
                whole.data = other
                assert torch.equal(whole.full_tensor(), torch.arange(8).view(4, 2))


@on_ranks(2)
def test_a_failure_keeps_nothing_alive() -> None:
    whole = cut(torch.arange(8).view(4, 2), rows(0, 1))
    memory = [weakref.ref(shard.tensor) for shard in whole.local_shards()]
    whole[0].mul_(0.5)
    whole.data = cut(torch.arange(8).view(4, 2), rows(0, 1))
    whole[0].mul_(0.5)
    del whole
    gc.collect()
    assert memory
    assert not any(tensor() is not None for tensor in memory)


@on_ranks(RANKS, timeout=20)
def test_shards_that_are_not_those_of_the_given_metadata_are_refused_everywhere() -> None:
    rank = dist.get_rank()
    properties = TensorProperties()
    metadata = rows(0, 1, 2).build_metadata(torch.Size(SIZE), properties)
    shards: dict[str, list[Shard]] = {
        "holds 0 shards, but the metadata places 1": [],
        "float64, but the metadata says torch.float32": [shard(ones(dtype=torch.float64))],
        "requires_grad True, but the metadata says False": [shard(ones(requires_grad=True))],
        "shard 0 is .*, but the metadata says": [shard(offsets=[1, 0])],
        "not contiguous": [shard(torch.ones(COLUMNS, ROWS).t())],
        "shape .2, 3., expected .2, 4.": [shard(torch.ones(ROWS, 3))],
        "torch.sparse_coo": [shard(ones().to_sparse())],
    }
    for words, given in shards.items():
        with pytest.raises((ShardingError, RankMismatchError), match=f"(?s)rank {rank}.*{words}"):
            init_from_local_shards_and_global_metadata(given, metadata)
    fitting = [shard()] if rank != 1 else []
    with pytest.raises(RankMismatchError, match="impossible: holds 0 shards, but the metadata places 1"):
        init_from_local_shards_and_global_metadata(fitting, metadata)
    incomplete = ShardedTensorMetadata(metadata.shards_metadata[:2], metadata.size, properties)
    with pytest.raises(ShardingError, match="16 of the 24"):
        init_from_local_shards_and_global_metadata([shard()][: 2 - rank], incomplete)
    images = rows(0, 1, 2).build_metadata(torch.Size([3, 2, 2, 2]), properties)
    nhwc = torch.ones(1, 2, 2, 2).to(memory_format=torch.channels_last)
    with pytest.raises((ShardingError, RankMismatchError), match="channels_last, but the metadata says"):
        init_from_local_shards_and_global_metadata([Shard(nhwc, images.held_by(rank)[0])], images)


@on_ranks(RANKS, timeout=20)
def test_formats_that_differ_are_refused_and_ranks_are_named_as_in_the_whole_job() -> None:
    group = dist.new_group([2, 0])
    rank = dist.get_rank()
    if rank == 1:
        outside = empty(rows(0, 2), 4, process_group=group)  # as the others do not: it takes no part
        assert outside.local_shards() == []
        with pytest.raises(ShardingError, match="rank 1 is not in the tensor's process group"):
            init_from_local_shards([], 4, process_group=group)
        return
    image = torch.ones(1, 2, 2, 2)
    if rank == 2:
        image = image.to(memory_format=torch.channels_last)
    first = Shard.from_tensor_and_offsets(image, [rank // 2, 0, 0, 0], rank)
    with pytest.raises(ShardingError, match=r"contiguous_format on rank 0 but torch.channels_last on rank 2"):
        init_from_local_shards([first], 2, 2, 2, 2, process_group=group)
    with pytest.raises(ShardingError, match=r"rank 1, which is not among the ranks \[0, 2\]"):
        empty(rows(0, 1), 4, process_group=group)
    with pytest.raises(ShardingError, match=r"rank 2: shard 0 .* is placed on rank 0, but rank 2 holds it"):
        init_from_local_shards(
            [Shard.from_tensor_and_offsets(torch.ones(2), [rank], 0)], 4, process_group=group
        )
