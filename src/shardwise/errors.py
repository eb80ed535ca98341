"""The errors that shardwise raises for a user's input.

Every message names the parameter or module (fully qualified name), the rank that found the
problem, what was expected, what was found, and what to do about it.
"""

from __future__ import annotations


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


def here() -> str:
    """Return `rank R` of the calling process, for messages; `rank ?` before initialisation."""
    import torch.distributed as dist  # the command reports errors without it

    known = dist.is_available() and dist.is_initialized()
    return f"rank {dist.get_rank()}" if known else "rank ?"
