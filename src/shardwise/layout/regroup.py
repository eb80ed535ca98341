"""Dims that hold the same elements before and after a reshape: arithmetic on shapes alone.

A reshape falls into groups of dims that hold each other's elements, as few at a time as possible:

    (4, 6, 5) to (2, 2, 30)     4 to (2, 2), and (6, 5) to 30
    (4, 1) to (4,)              4 to 4, and 1 to nothing
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

Groups = list[tuple[list[int], list[int]]]


def regrouped(
    old: Sequence[Any],
    new: Sequence[Any],
    *,
    same: Callable[[Any, Any], bool] = operator.eq,
    hint: Callable[[Any], int] = int,
) -> Groups:
    """Group dims of `old` and of `new`; without elements, only equal dims at the ends are separate.

    Args:
        old, new: sizes, numbers or symbols; as many elements each.
        same: are two sizes equal?
        hint: a size as a number, to tell which of two is the smaller.
    """
    if any(isinstance(size, int) and size == 0 for size in old):
        return _without_elements(old, new, same)
    found: Groups = []
    i = j = 0
    while i < len(old) or j < len(new):
        before, after = [i] if i < len(old) else [], [j] if j < len(new) else []
        i, j = i + 1, j + 1
        while not same(one := _product(old, before), other := _product(new, after)):
            if i < len(old) and (hint(one) < hint(other) or j >= len(new)):
                before.append(i)
                i += 1
            elif j < len(new):
                after.append(j)
                j += 1
            else:
                break
        found.append((before, after))
    return found


def _product(sizes: Sequence[Any], dims: Sequence[int]) -> Any:
    return math.prod(sizes[dim] for dim in dims)


def _without_elements(old: Sequence[Any], new: Sequence[Any], same: Callable[[Any, Any], bool]) -> Groups:
    most = min(len(old), len(new))
    first = next((d for d in range(most) if not same(old[d], new[d])), most)
    most -= first
    last = next((d for d in range(most) if not same(old[-1 - d], new[-1 - d])), most)
    middle = list(range(first, len(old) - last)), list(range(first, len(new) - last))
    ends = [([len(old) - d], [len(new) - d]) for d in range(last, 0, -1)]
    return [*(([d], [d]) for d in range(first)), *([middle] if any(middle) else []), *ends]
