"""Gradients that lie end to end in one reduced shard, taken as that shard.

    reduced shard    A A A A B B C C C -     gradients A, B and C are views; padding is zero

What treats every element alike, or sums over all, then costs one operation in place of one for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from shardwise import _compat


def declare(shard: Any, used: int) -> None:
    """Say that the views of `shard` that tensors are have `used` elements together, and the rest is zero."""
    shard.used = used


def merged(locals_: Sequence[Tensor]) -> list[Tensor]:
    """The same elements in fewer tensors, one at least: a declared shard in place of its views, where all are
    there, and none without elements.
    """
    found: list[Tensor] = []
    views: dict[int, tuple[Tensor, list[Tensor]]] = {}
    for local in locals_:
        base = _compat.base_of(local)
        if base is None:
            if local.numel():
                found.append(local)
        elif (known := views.get(id(base))) is None:
            views[id(base)] = (base, [local])
        else:
            known[1].append(local)
    for base, members in views.values():
        used = getattr(base, "used", None)
        if used is not None:
            sizes = [(member.storage_offset(), size) for member in members if (size := member.numel())]
            if len(dict(sizes)) == len(sizes) and sum([size for _, size in sizes]) == used:
                found.append(base)
                continue
        found.extend(members)
    return found or list(locals_[:1])
