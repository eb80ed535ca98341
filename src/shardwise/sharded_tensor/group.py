"""Process groups of sharded tensors, also for processes outside them; placements by RPC worker names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch.distributed import rpc

from shardwise.errors import ShardingError, here
from shardwise.sharded_tensor.metadata import RemoteDevice, ShardedTensorMetadata, TensorProperties
from shardwise.sharded_tensor.spec import spec_of


class _Outside:
    """Stand-in for a group that this process is not in: `torch.distributed.new_group` returns none there."""

    def __getattr__(self, name: str) -> NoReturn:
        raise ShardingError(
            f"{here()} is not in the tensor's process group: it knows the metadata and holds no shard; leave"
            " what communicates to the ranks of the group"
        )

    def __repr__(self) -> str:
        return "a process group that this process is not in"


OUTSIDE: Any = _Outside()


def is_outside(group: dist.ProcessGroup) -> bool:
    """Return whether this process is outside the group, and takes no part in its collectives."""
    return group is OUTSIDE


def ranks_of(group: dist.ProcessGroup) -> list[int] | None:
    """Return the global ranks of a group; None if this process is not in it, and so does not know them."""
    return None if is_outside(group) else dist.get_process_group_ranks(group)


def group_or_default(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return `process_group`, or the default group for None; `OUTSIDE` if this process is not in it."""
    if isinstance(process_group, dist.ProcessGroup):
        return process_group
    if process_group is OUTSIDE or process_group is dist.GroupMember.NON_GROUP_MEMBER:
        return cast(dist.ProcessGroup, OUTSIDE)
    if process_group is not None:
        raise ShardingError(f"{here()}: expected a process group, found {process_group!r}")
    default = dist.group.WORLD if dist.is_initialized() else None
    if default is None:
        raise ShardingError(
            "a sharded tensor needs a process group; call torch.distributed.init_process_group first"
        )
    return default


def cut_by(
    spec: Any, size: Sequence[int], properties: TensorProperties, group: dist.ProcessGroup
) -> ShardedTensorMetadata:
    """Return a tensor's shards by `spec`, or raise unless they cover it, on ranks of `group`. Local."""
    metadata = with_ranks(spec_of(spec).build_metadata(torch.Size(size), properties))
    metadata.check(ranks_of(group))
    return metadata


def with_ranks(metadata: ShardedTensorMetadata) -> ShardedTensorMetadata:
    """Replace placements by worker name by those by rank. Raises ShardingError for an unknown worker."""
    named = any(shard.placement and shard.placement.worker_name() for shard in metadata.shards_metadata)
    return metadata.placed(_by_rank) if named else metadata


def _by_rank(place: RemoteDevice) -> RemoteDevice:
    name = place.worker_name()
    if name is None:
        return place
    try:
        worker = rpc.get_worker_info(name)
    except (AttributeError, RuntimeError) as error:
        raise ShardingError(
            f'placement {place} names a worker that torch RPC does not know; use "rank:R/device", or call'
            " torch.distributed.rpc.init_rpc first"
        ) from error
    return RemoteDevice(f"rank:{worker.id}/{place.device()}")
