"""Gradients that lie end to end in one reduced shard, taken as that shard.

    reduced shard    A A A A B B C C C -     gradients A, B and C are views; padding is zero

An operation that is elementwise, or sums over all, then costs one operation in place of one for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any

from torch import Tensor

from shardwise import _compat


def declare(shard: Any, used: int) -> None:
    """Say that the views of `shard` that tensors are have `used` elements together, and the rest is zero."""
    shard.used = used


def merged(locals_: Sequence[Tensor]) -> list[Tensor]:
    """Merge views of a declared shard into it, where all are there, and drop tensors without elements.

    At least one tensor is left.
    """
    found: list[Tensor] = []
    views: dict[int, tuple[Tensor, list[Tensor]]] = {}
    latest, members = None, found
    for local in locals_:
        base = _compat.base_of(local)
        if base is None:
            if local.numel():
                found.append(local)
            continue
        if base is not latest:
            latest = base
            members = views.setdefault(id(base), (base, []))[1]
        members.append(local)
    for base, members in views.values():
        found.extend([base] if _are_all_of(base, members) else members)
    return found or list(locals_[:1])


def _are_all_of(base: Tensor, members: Sequence[Tensor]) -> bool:
    used = getattr(base, "used", None)
    sizes = list(map(Tensor.numel, members))
    if used is None or sum(sizes) != used:
        return False
    begins = list(compress(map(Tensor.storage_offset, members), sizes))
    return len(set(begins)) == len(begins)
