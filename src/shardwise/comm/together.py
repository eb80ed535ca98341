"""Do something on every rank; where it fails on one, fail on all, in the same words.

Whoever raises alone leaves the others waiting in their next collective. So every rank tells how it went, as
text: what a peer sends is parsed as JSON and never unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from shardwise.comm.boxes import gather_text
from shardwise.comm.watch import announced
from shardwise.errors import CheckpointError, ShardwiseError

_MOST_LINES = 20  # of problems in one error message

_T = TypeVar("_T")


def together(
    what: str,
    action: Callable[[], _T],
    *,
    group: dist.ProcessGroup | None = None,
    kind: type[ShardwiseError] = CheckpointError,
) -> list[_T]:
    """Run `action` on every rank; every rank's result, by rank in the group.

    Collective over `group`, by default all ranks; without a process group this process is alone.

    Args:
        what: is being done, for the error: "loading x".
        action: returns what JSON can hold (tuples come back as lists).
        group: the ranks that take part.
        kind: of the error.

    Raises:
        ShardwiseError: of `kind`, on every rank, with the problems of all, if `action` raised on any.
    """
    result: Any = None
    try:
        result = action()
        text = json.dumps([result, None])
    except Exception as error:
        problem = str(error) if isinstance(error, ShardwiseError) else f"{type(error).__name__}: {error}"
        text = json.dumps([None, problem])
    group = group or (dist.group.WORLD if dist.is_initialized() else None)
    with announced(group, f"tell how {what.partition(' ')[0]} went"):
        told = [json.loads(each) for each in (gather_text(text, group=group) if group else [text])]
    ranks = dist.get_process_group_ranks(group) if group else [0]
    raise_all(what, {rank: found for rank, (_, found) in zip(ranks, told, strict=True)}, kind=kind)
    return [result for result, _ in told]


def raise_all(
    what: str, problems: dict[int, str | None], *, kind: type[ShardwiseError] = CheckpointError
) -> None:
    """Raise if any rank has a problem; for problems that every rank knows. Local."""
    found = {rank: problem for rank, problem in sorted(problems.items()) if problem is not None}
    if found:
        raise kind(f"{what} failed\n{_by_ranks(found)}")


def _by_ranks(problems: dict[int, str]) -> str:
    """One line per distinct problem line, led by the ranks that have it."""
    ranks: dict[str, list[int]] = {}
    for rank, problem in problems.items():
        for line in dict.fromkeys(problem.splitlines()) or ["an error without text"]:
            ranks.setdefault(line, []).append(rank)
    lines = [f"  rank {', '.join(map(str, found))}: {line.strip()}" for line, found in ranks.items()]
    more = [f"  and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else []
    return "\n".join(lines[:_MOST_LINES] + more)
