"""The process group of a sharded tensor, also on processes that are not in it."""

from __future__ import annotations

from typing import Any, NoReturn, cast

import torch.distributed as dist

from shardwise.errors import ShardingError, here


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
