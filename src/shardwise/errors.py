"""The errors that shardwise raises for a user's input.

Every message names the parameter or module (fully qualified name), the rank that found the
problem, what was expected, what was found, and what to do about it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from importlib import import_module
from typing import Any


class ShardwiseError(RuntimeError):
    """Base of every error this library raises on purpose."""


class ShardingError(ShardwiseError, ValueError):
    """A model, mesh or argument that cannot be sharded as asked."""


class LifecycleError(ShardwiseError):
    """A call that the current training state does not allow."""


class RankMismatchError(ShardwiseError):
    """Ranks of one group disagree about what they are about to communicate."""


class CheckpointError(ShardwiseError):
    """A checkpoint that is missing, incomplete, or does not fit the model."""


def from_extra(extra: str, module: str, *, feature: str) -> Any:
    """Import a module that the package's `extra` installs and only `feature` needs.

    Raises:
        ShardwiseError: the module is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise ShardwiseError(f"{feature} needs {name}: pip install 'shardwise[{extra}]' ({error})") from error


def here() -> str:
    """Return the calling process as `rank R`, for messages; `this process` before initialisation."""
    import torch.distributed as dist  # the command reports errors without importing it

    known = dist.is_available() and dist.is_initialized()
    return f"rank {placed(dist.get_rank())}" if known else "this process"


def name_places(places: Callable[[int], str]) -> None:
    """Have messages give ranks' coordinates on a mesh, for the life of the default process group."""
    import torch.distributed as dist

    _places[:] = [(weakref.ref(dist.group.WORLD), places)]


def placed(rank: int) -> str:
    """Return `3`, or `3 (pp 1, dp 1)` if `name_places` gave coordinates."""
    import torch.distributed as dist

    for group, places in _places:
        if dist.is_initialized() and group() is dist.group.WORLD and (place := places(rank)):
            return f"{rank} ({place})"
    return str(rank)


_places: list[tuple[weakref.ref[Any], Callable[[int], str]]] = []
