"""Sharded tensors in other processes: pickled, or by reference over torch RPC, which pickles, too.

A process's worker id must be its global rank, as `init_rpc(name, rank=dist.get_rank(), ...)` makes it. Each
process keeps its registered tensors by number, weakly: once a tensor is gone, only references keep its shards
alive.

A process group cannot be pickled. A pickled sharded tensor records its rank and the number of ranks. When
loaded, it takes the group of the innermost `load_with_process_group`, or the default group.

A pickle can run any code when it is loaded. This library itself never loads one: checkpoints use
`torch.distributed.checkpoint` or safetensors files, and messages of peers are text and tensor bytes.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch.distributed as dist
from torch.distributed import rpc

from shardwise.comm.agree import together
from shardwise.errors import ShardingError, here
from shardwise.sharded_tensor.check import tell_all
from shardwise.sharded_tensor.group import group_or_default
from shardwise.sharded_tensor.metadata import Shard, ShardedTensorMetadata
from shardwise.sharded_tensor.spec import ShardingSpec
from shardwise.sharded_tensor.tensor import ShardedTensor

_registered: weakref.WeakValueDictionary[int, ShardedTensor] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def register_shards(sharded: ShardedTensor) -> None:
    """Make every rank's shards reachable from the others, or raise on all. Collective over the group."""
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


# Pickles

_group: ContextVar[dist.ProcessGroup | None] = ContextVar("shardwise_load_group", default=None)


@contextmanager
def load_with_process_group(process_group: dist.ProcessGroup | None) -> Iterator[dist.ProcessGroup | None]:
    """Load sharded tensors that the block unpickles into `process_group`.

    It must have the same size, and give this process the same rank, as the group of the pickled tensor.
    """
    token = _group.set(process_group)
    try:
        yield process_group
    finally:
        _group.reset(token)


def _reduce(sharded: ShardedTensor, protocol: Any) -> tuple[Any, ...]:
    """Return the function and arguments with which `pickle` rebuilds a sharded tensor."""
    group = sharded.process_group
    shards = [(shard.tensor.detach(), shard.metadata) for shard in sharded.local_shards()]
    is_parameter = bool(getattr(sharded, "_is_param", False))
    ranks = (group.rank(), group.size(), dist.get_rank(), dist.get_world_size())
    return _rebuild, (shards, sharded.metadata(), sharded._spec, ranks, is_parameter)


ShardedTensor.__reduce_ex__ = _reduce  # type: ignore[method-assign, assignment]


def _rebuild(
    shards: list[tuple[Any, Any]],
    metadata: ShardedTensorMetadata,
    spec: ShardingSpec | None,
    origin: tuple[int, int, int, int],
    is_parameter: bool,
) -> ShardedTensor:
    group = group_or_default(_group.get())
    ranks = (group.rank(), group.size(), dist.get_rank(), dist.get_world_size())
    if ranks != origin:
        raise ShardingError(
            f"{here()}: a sharded tensor pickled by rank {origin[0]} of a group of {origin[1]} (global rank"
            f" {origin[2]} of {origin[3]}) cannot be loaded by rank {ranks[0]} of {ranks[1]} (global"
            f" {ranks[2]} of {ranks[3]}); load it on the same rank within load_with_process_group(...), or"
            " save it with torch.distributed.checkpoint, which loads into any world size"
        )
    local_shards = [Shard(tensor, place) for tensor, place in shards]
    sharded = ShardedTensor.wrap(local_shards, metadata, process_group=group, sharding_spec=spec)
    sharded.requires_grad_(metadata.tensor_properties.requires_grad)
    if is_parameter:
        sharded._is_param = True
    return sharded
