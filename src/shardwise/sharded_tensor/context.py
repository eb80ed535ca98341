"""Pickling: shards with the description of the whole, and the process group by context.

A process group cannot be pickled. A pickled sharded tensor knows which rank it was of how many, and takes
the group of the innermost `load_with_process_group` when it is loaded, or the default group.

A pickle can run any code when it is loaded. This library never loads one on its own: checkpoints go
through `torch.distributed.checkpoint` or safetensors files, peers' messages are text and tensor bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch.distributed as dist

from shardwise.errors import ShardingError, here
from shardwise.sharded_tensor.metadata import ShardedTensorMetadata
from shardwise.sharded_tensor.shard import Shard

if TYPE_CHECKING:
    from shardwise.sharded_tensor.spec import ShardingSpec
    from shardwise.sharded_tensor.tensor import ShardedTensor

_group: ContextVar[dist.ProcessGroup | None] = ContextVar("shardwise_load_group", default=None)


@contextmanager
def load_with_process_group(process_group: dist.ProcessGroup | None) -> Iterator[dist.ProcessGroup | None]:
    """Sharded tensors unpickled within belong to `process_group`.

    It must have the size, and give this process the rank, that the group of the pickled tensor had.
    """
    token = _group.set(process_group)
    try:
        yield process_group
    finally:
        _group.reset(token)


class _Outside:
    """What a process has for a group that it is not in: `torch.distributed.new_group` gives it none."""

    def __getattr__(self, name: str) -> NoReturn:
        raise ShardingError(
            f"{here()} is not in the tensor's process group: it knows the metadata and holds no shard; leave"
            " what communicates to the ranks of the group"
        )

    def __repr__(self) -> str:
        return "a process group that this process is not in"


OUTSIDE: Any = _Outside()


def is_outside(group: dist.ProcessGroup) -> bool:
    """Is this process not in the group, and so takes no part in its collectives?"""
    return group is OUTSIDE


def ranks_of(group: dist.ProcessGroup) -> list[int] | None:
    """The global ranks of a group; None where this process is not in it, and does not know them."""
    return None if is_outside(group) else dist.get_process_group_ranks(group)


def group_or_default(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """`process_group`, or the default group where it is None; `OUTSIDE` where this process is in neither.

    Raises:
        ShardingError: there is no default group, or something else than a group is given.
    """
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


def reduced(sharded: ShardedTensor) -> tuple[Any, ...]:
    """What `pickle` stores of a sharded tensor."""
    group = sharded.process_group
    shards = [(shard.tensor.detach(), shard.metadata) for shard in sharded.local_shards()]
    is_parameter = bool(getattr(sharded, "_is_param", False))
    place = (group.rank(), group.size(), dist.get_rank(), dist.get_world_size())
    return _rebuild, (shards, sharded.metadata(), sharded._spec, place, is_parameter)


def _rebuild(
    shards: list[tuple[Any, Any]],
    metadata: ShardedTensorMetadata,
    spec: ShardingSpec | None,
    place: tuple[int, int, int, int],
    is_parameter: bool,
) -> ShardedTensor:
    from shardwise.sharded_tensor.tensor import ShardedTensor

    group = group_or_default(_group.get())
    found = (group.rank(), group.size(), dist.get_rank(), dist.get_world_size())
    if found != place:
        raise ShardingError(
            f"{here()}: a sharded tensor pickled by rank {place[0]} of a group of {place[1]} (global rank"
            f" {place[2]} of {place[3]}) cannot be loaded by rank {found[0]} of {found[1]} (global {found[2]}"
            f" of {found[3]}); load it on the same rank within load_with_process_group(...), or save it with"
            " torch.distributed.checkpoint, which loads into any world size"
        )
    made = ShardedTensor.wrap(
        [Shard(tensor, place_) for tensor, place_ in shards],
        metadata,
        process_group=group,
        sharding_spec=spec,
    )
    made.requires_grad_(metadata.tensor_properties.requires_grad)
    if is_parameter:
        made._is_param = True
    return made
