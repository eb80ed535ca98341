"""Keeping autograd from reading gathered memory that is freed or not yet filled.

Autograd saves parameters as views of the group's unsharded memory, which is freed after forward and filled
again before the module's backward. Hooks on what a forward returned show that backward has reached the
module. A tensor that left forward in another way (kept as an attribute, say) leads backward into the module
past these hooks; it would read memory that is freed, or that a gather still writes to.

    version of the memory    while gathered, a number that only this group has; else, a greater one

Saved tensors remember the version that they saw, and autograd compares. So such a backward stops before it
reads anything, and the number in torch's message identifies the group. A backward also stops if it needs
parameters as they were before one of the group was changed in place.
"""

from __future__ import annotations

import itertools
import re
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import Tensor

from shardwise import _compat
from shardwise.errors import LifecycleError, here

Group = Any  # a `ParamGroup`, which imports this file

_FIRST = 1 << 30  # more in-place changes than any tensor sees
_APART = 1 << 8  # more in-place changes than one pass makes of a group's parameters
_numbers = itertools.count(_FIRST, _APART)
# Weak references: saved tensors may keep a number longer than its group lives.
_groups: weakref.WeakValueDictionary[int, Group] = weakref.WeakValueDictionary()
_VERSION = re.compile(r"is at version \d+; expected version (\d+)")
_CHANGED = (
    "was changed in place while gathered, by the module's forward or between forward and backward, but"
    " backward needs its group's parameters as they were, and the change would be lost when they are freed."
    " Let forward use a changed copy, such as weight.clamp(-1, 1), or change sharded parameters between steps"
)
ESCAPED = (
    "A tensor left that forward in another way, such as an attribute of a module, or in an object whose"
    " attributes cannot be inspected. Return it from forward too, and use the returned one in the loss"
)


class ReadGuard:
    """Allows or forbids reading saved tensors of a group's memory: of `tensors`, one per version counter."""

    def __init__(self, group: Group, tensors: Iterable[Tensor]) -> None:
        number = next(_numbers)
        _groups[number] = group
        behind = tuple(tensors)
        # The same at each gather: tensors saved before memory was freed are read after it was refilled.
        self.open = partial(_compat.set_versions, behind, (number,) * len(behind))  # no Python runs in these
        # Any other version will do, and incrementing costs a sixth of setting.
        self.close = partial(_compat.increment_versions, behind)


def explain(error: Exception) -> Exception | None:
    """Return the error to raise instead of autograd's; None if that has another reason."""
    match = _VERSION.search(str(error))
    # The saved tensor expects its group's number, plus the changes before it was saved.
    group = _groups.get(int(match.group(1)) // _APART * _APART) if match is not None else None
    if group is None:
        return None
    if group.is_unsharded:
        return LifecycleError(f"{here()}: a parameter of {group.title} {_CHANGED}")
    return LifecycleError(
        f"{here()}: backward reached the inside of {group.title} other than through the outputs of its"
        f" forward, while its parameters were not gathered. {ESCAPED}. If this is a backward through a"
        " backward (create_graph=True), sharded modules support first derivatives only"
    )
