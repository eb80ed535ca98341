"""References to shards of other processes, over torch RPC.

A process's worker id must be its global rank, as `init_rpc(name, rank=dist.get_rank(), ...)` makes it. Each
process keeps its registered tensors by number, weakly: once a tensor is gone, only references keep its shards
alive.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch.distributed as dist
from torch.distributed import rpc

from shardwise.comm.agree import together
from shardwise.errors import ShardingError
from shardwise.sharded_tensor.check import tell_all
from shardwise.sharded_tensor.metadata import Shard
from shardwise.sharded_tensor.tensor import ShardedTensor

_registered: weakref.WeakValueDictionary[int, ShardedTensor] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def register_shards(sharded: ShardedTensor) -> None:
    """Make every rank's shards reachable from the others. Collective over the group.

    Raises:
        ShardingError: on every rank, if RPC is not initialised on some, or a worker's id is not its rank.
    """
    group = sharded.process_group
    operation = "referring to shards by torch RPC"
    references: dict[int, list[rpc.RRef[Shard]]] = {}

    def register() -> int:
        try:
            worker = rpc.get_worker_info().id
        except (AttributeError, RuntimeError) as error:  # not built into torch, not initialised
            raise ShardingError(
                "references to shards need torch RPC; call torch.distributed.rpc.init_rpc first"
            ) from error
        if worker != dist.get_rank():
            raise ShardingError(
                f"torch RPC has this process as worker {worker}; give init_rpc the process's rank"
            )
        number = next(_numbers)
        _registered[number] = sharded
        return number

    def request_references() -> None:
        holders = {shard.rank for shard in sharded.metadata().shards_metadata}
        futures = {
            rank: rpc.rpc_async(rank, _references, args=(number,))
            for rank, number in zip(dist.get_process_group_ranks(group), numbers, strict=True)
            if rank != dist.get_rank() and rank in holders
        }
        references.update((rank, future.wait()) for rank, future in futures.items())

    numbers = tell_all(operation, register, group=group)
    # This also ensures that no rank drops its tensor before all have their references.
    together(operation, request_references, group=group, kind=ShardingError)
    sharded._remote = references


def _references(number: int) -> list[Any]:
    """Return references to the shards of a tensor registered here; other ranks call it over RPC."""
    return [rpc.RRef(shard) for shard in _registered[number].local_shards()]
