"""Do all ranks mean the same thing by their next collective?

Ranks that built different models would wait for each other forever, or exchange garbage of equal
size. So before the first all-gather every rank sends a 63-bit fingerprint of its layouts, and where
fingerprints differ every rank raises, showing its own layout and the one it disagrees with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from shardwise import _compat
from shardwise.errors import RankMismatchError, here


def fingerprint(text: str) -> int:
    """63 bits of a hash of `text`, the same in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def check_fingerprint(description: str, *, groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
    """Compare `description` over the ranks of `groups`, by its fingerprint.

    Collective over each group in turn. With a shard group and a replicate group, a rank hears of a
    mismatch anywhere on the 2-D mesh: the second exchange also says whether the first found one.

    Args:
        description: the layouts in words, equal on ranks that will communicate alike; the words
            themselves are exchanged only on a mismatch.
        groups: process groups to compare over.
        device: where the groups' backends want their tensors.

    Raises:
        RankMismatchError: on every rank of the groups, if any rank's description differs.
    """
    own = fingerprint(description)
    if _compat.is_fake(torch.empty(0)):
        return  # a plan on fake tensors, which have no values to compare
    clash: str | None = None
    suspected = False
    for group in groups:
        # Start from our own value, so that a group that moves nothing compares as equal.
        mine = torch.tensor([own, int(suspected)], dtype=torch.int64, device=device)
        gathered = [mine.clone() for _ in range(group.size())]
        dist.all_gather(gathered, mine, group=group)
        rows = torch.stack(gathered).tolist()
        differs = any(row[0] != own for row in rows)
        if differs:  # equal on all ranks of the group, which exchange descriptions now
            found = _describe_clash(description, rows, group, device)
            clash = clash or found
        suspected = suspected or differs or any(row[1] for row in rows)
    if suspected:
        raise RankMismatchError(
            f"{here()}: ranks disagree about the sharded model, so their collectives would not match.\n"
            + (clash or "This rank agrees with its own groups; the mismatch is between other ranks.")
            + "\nBuild the same model, with the same fully_shard calls in the same order, on every rank."
        )


def _describe_clash(
    description: str, rows: list[list[int]], group: dist.ProcessGroup, device: torch.device
) -> str:
    from shardwise.comm.boxes import gather_text  # which imports this module

    texts = gather_text(description, group=group, device=device)
    mine = group.rank()
    other = next(r for r, row in enumerate(rows) if row[0] != rows[mine][0])
    lines, theirs = texts[mine].splitlines(), texts[other].splitlines()
    ranks = dist.get_process_group_ranks(group)
    only_mine = [line for line in lines if line not in theirs]
    only_theirs = [line for line in theirs if line not in lines]
    if not only_mine and not only_theirs:
        return f"Between rank {ranks[mine]} and rank {ranks[other]} only the order of parameters differs."
    return "\n".join(
        [f"Only on rank {ranks[mine]}:"]
        + [f"  {line}" for line in only_mine[:20] or ["nothing"]]
        + [f"Only on rank {ranks[other]}:"]
        + [f"  {line}" for line in only_theirs[:20] or ["nothing"]]
    )
