"""What an operator does to rows: a table that `ops` fills, and that tensors ask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
HANDLERS: dict[Any, Handler] = {}  # by operator, once it was asked for
_finders: list[Callable[[Any], Handler]] = []


def register(finder: Callable[[Any], Handler]) -> Callable[[Any], Handler]:
    """Let `finder` decide what an operator does that is met for the first time."""
    _finders.append(finder)
    return finder


def handler_of(op: Any) -> Handler:
    (finder,) = _finders
    handler = HANDLERS[op] = finder(op)
    return handler
