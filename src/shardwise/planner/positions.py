"""Check for sequences longer than a model's table of learned positions, which fake tensors cannot show.

Models count positions and look them up: `table(torch.arange(length))`. A count is known by its storage and
two numbers, so the last position of any view of it is known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.errors import ShardingError

aten = torch.ops.aten


class Count(NamedTuple):
    """A storage's elements: `first`, `first + step`, ..."""

    first: int
    step: int

    def last_of(self, view: Tensor) -> int:
        """Return the greatest element of `view`, for an ascending count."""
        strides = zip(view.shape, view.stride(), strict=True)
        place = view.storage_offset() + sum((size - 1) * stride for size, stride in strides)
        return self.first + self.step * int(place)


def count_of(func: Any, args: Any, count_of_operand: Callable[[Tensor], Count | None]) -> Count | None:
    """Return the count that an operator's result holds, if any; `count_of_operand` returns an operand's."""
    if func.overloadpacket is aten.arange:
        begin, step = (args[0] if len(args) > 1 else 0), (args[2] if len(args) > 2 else 1)
        is_count = isinstance(begin, int) and isinstance(step, int) and step > 0
        return Count(begin, step) if is_count else None
    adds = func.overloadpacket is aten.add and len(args) == 2 and isinstance(args[1], int)
    if not adds and func.overloadpacket is not aten._to_copy:
        return None
    operand = count_of_operand(args[0])
    if operand is None or args[0].dim() != 1 or args[0].storage_offset() or not args[0].is_contiguous():
        return None
    return operand._replace(first=operand.first + (args[1] if adds else 0))


def check_lookup(func: Any, args: Any, count_of_operand: Callable[[Tensor], Count | None]) -> None:
    """Raise ShardingError if a table has no row for the last position that is looked up in it."""
    if func.overloadpacket is not aten.embedding or not args[1].numel():
        return
    table, positions = args[:2]
    count = count_of_operand(positions)
    if count is not None:
        check_positions(count.last_of(positions) + 1, len(table))


def check_positions(needed: int, learned: int) -> None:
    """Raise ShardingError if a sequence needs more positions than were learned."""
    if needed > learned:
        raise ShardingError(
            f"the model looks up {needed} positions, but its table has only {learned} learned ones; plan a"
            " shorter sequence, or a model with more positions"
        )
