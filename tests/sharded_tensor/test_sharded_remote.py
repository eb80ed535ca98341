"""Other ranks' shards by reference over torch RPC, and placements by the name of an RPC worker."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from covers import rows
from torch.distributed import rpc

from ranks import on_ranks
from shardwise.errors import ShardingError
from shardwise.sharded_tensor import (
    ChunkShardingSpec,
    Shard,
    ShardedTensor,
    ShardMetadata,
    empty,
    init_from_local_shards,
    shard_tensor,
    zeros,
)
from shardwise.sharded_tensor.metadata import RemoteDevice


def start(path: Path, rank: int) -> None:
    """As the user does it; a file and the loopback device are enough on one machine."""
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}", rpc_timeout=60)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=dist.get_world_size(), rpc_backend_options=options)


def placements(sharded: ShardedTensor) -> list[str]:
    return [str(shard.placement) for shard in sharded.metadata().shards_metadata]


@on_ranks(3)
def test_remote_shards_are_the_other_ranks_shards(tmp_path: Path) -> None:
    rank = dist.get_rank()
    whole = torch.arange(12.0).view(6, 2)
    spec = rows(2, 0, 2)  # nothing on rank 1
    with pytest.raises(ShardingError, match=r"ranks 0, 1, 2: references to shards.*call.*init_rpc first"):
        zeros(spec, 6, 2, init_rrefs=True)
    named = ChunkShardingSpec(0, ["worker1/cpu", "rank:0/cpu"])
    with pytest.raises(ShardingError, match=r"placement worker1/cpu names a worker.*init_rpc first"):
        empty(named, 6, 2)

    start(tmp_path / "rpc", rank)
    try:
        held = init_from_local_shards(shard_tensor(whole, spec).local_shards(), (6, 2), init_rrefs=True)
        found = held.remote_shards()
        assert list(found) == [other for other in (0, 2) if other != rank]
        assert [len(shards) for shards in found.values()] == [1 if other == 0 else 2 for other in found]
        for other, shards in found.items():
            assert all(reference.owner().id == other for reference in shards)
            for reference, expected in zip(shards, held.metadata().held_by(other), strict=True):
                shard = reference.to_here()
                assert isinstance(shard, Shard)
                assert shard.metadata == expected
                first = expected.shard_offsets[0]
                assert torch.equal(shard.tensor, whole[first : first + 2])
        found.clear()
        assert held.remote_shards()
        with pytest.raises(ShardingError, match="init_rrefs=True"):
            shard_tensor(whole, spec).remote_shards()

        by_name = zeros(named, 6, 2)
        assert placements(by_name) == ["rank:1/cpu", "rank:0/cpu"]
        assert len(by_name.tensors) == (rank < 2)
        other_cut = held.reshard(ChunkShardingSpec(1, ["worker2", "worker1/cpu"]))
        assert placements(other_cut) == ["rank:2/cpu", "rank:1/cpu"]
        assert torch.equal(other_cut.full_tensor(), whole)
        with pytest.raises(ShardingError, match="placement nobody/cpu names a worker"):
            empty(ChunkShardingSpec(0, ["nobody/cpu"]), 6, 2)

        group = dist.new_group([2, 1])
        if rank:
            spec_of_two = rows(1, 2)
            of_two = zeros(spec_of_two, 6, 2, process_group=group, init_rrefs=True)
            assert list(of_two.remote_shards()) == [3 - rank]
        assert_forgotten(spec)
    finally:
        rpc.shutdown()


def assert_forgotten(spec: ChunkShardingSpec) -> None:
    """Neither the tensor nor its shards live on once all ranks have dropped it."""
    made = zeros(spec, 6, 2, init_rrefs=True)
    gone = [weakref.ref(made), *(weakref.ref(shard.tensor) for shard in made.local_shards())]
    dist.barrier()
    del made
    gc.collect()
    assert gone[0]() is None
    for _ in range(3000):  # references are released over the network
        done = torch.tensor(all(reference() is None for reference in gone), dtype=torch.int32)
        dist.all_reduce(done, op=dist.ReduceOp.MIN)
        if done:
            break
    assert [reference() for reference in gone] == [None] * len(gone)


def test_placements_by_rank_need_no_rpc() -> None:
    from shardwise.sharded_tensor.group import with_ranks
    from shardwise.sharded_tensor.metadata import ShardedTensorMetadata

    shards = [ShardMetadata([0], [2], "rank:0/cpu"), ShardMetadata([2], [2], RemoteDevice("rank:1"))]
    metadata = ShardedTensorMetadata(shards, torch.Size([4]))
    assert with_ranks(metadata) is metadata
