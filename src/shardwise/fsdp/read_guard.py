"""Keeping autograd from reading gathered memory that is not there.

What backward needs of a parameter is a view of the group's unsharded memory, which is freed after forward
and filled again before the module's backward. Backward learns that it has reached a module from the hooks
on what its forward returned. A tensor that left forward in another way (kept as an attribute, say) leads
backward inside past these hooks; it would read memory that is freed, or that a gather still writes to.

    version of the memory    while gathered, a number that only this group has; while not, a greater one

Saved tensors remember the version that they saw, and autograd compares. So such a backward stops before it
reads anything, and the number in torch's message says whose parameters it wanted. So does one that needs
parameters as they were before somebody changed one of the group in place.
"""

from __future__ import annotations

import itertools
import re
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Protocol

from torch import Tensor

from shardwise import _compat
from shardwise.errors import LifecycleError, here


class Gathers(Protocol):
    """A group as the guard sees it: its module in words, and whether its memory may be read."""

    @property
    def title(self) -> str: ...

    @property
    def is_unsharded(self) -> bool: ...


_FIRST = 1 << 30  # more in-place changes than any tensor sees
_APART = 1 << 8  # more in-place changes than one pass makes of a group's parameters
_numbers = itertools.count(_FIRST, _APART)
# Weakly, as saved tensors may know a number for longer than its group lives.
_groups: weakref.WeakValueDictionary[int, Gathers] = weakref.WeakValueDictionary()
_VERSION = re.compile(r"is at version \d+; expected version (\d+)")
_CHANGED = (
    "was changed in place while gathered, by the module's forward or between forward and backward, but"
    " backward needs its group's parameters as they were, and the change would be lost when they are freed."
    " Let forward use a changed copy, such as weight.clamp(-1, 1), or change sharded parameters between steps"
)


class ReadGuard:
    """Lets saved tensors of a group's memory be read, or not; `explain` says what went wrong.

    Args:
        tensors: what autograd sees of it, one for each version counter.
    """

    def __init__(self, group: Gathers, tensors: Iterable[Tensor]) -> None:
        number = next(_numbers)
        _groups[number] = group
        behind = tuple(tensors)
        # The same at each gather: what forward saved before memory was freed is read after it was refilled.
        self.open = partial(_compat.set_versions, behind, (number,) * len(behind))  # no Python runs in these
        # Any other version will do, and counting up costs a sixth of setting.
        self.close = partial(_compat.increment_versions, behind)


def explain(error: Exception) -> Exception | None:
    """Return the error to raise in place of one of autograd; None if that has another reason."""
    found = _VERSION.search(str(error))
    # The number that the saved tensor expects is its group's, or one of changes before it was saved.
    group = _groups.get(int(found.group(1)) // _APART * _APART) if found is not None else None
    if group is None:
        return None
    if group.is_unsharded:
        return LifecycleError(f"{here()}: a parameter of {group.title} {_CHANGED}")
    return LifecycleError(
        f"{here()}: backward reached the inside of {group.title} by another way than through what its forward"
        " returned, when its parameters were not gathered. Some tensor left that forward otherwise: as an"
        " attribute of a module, say, or in an object that has no attributes to look at. Return it from"
        " forward as well, and let the loss use what was returned. Or it is a backward through a backward"
        " (create_graph=True): sharded modules have first derivatives only"
    )
