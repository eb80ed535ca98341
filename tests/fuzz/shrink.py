"""Makes a failing case smaller: leaves out one thing after another while it still fails in the same way."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

Case = dict[str, Any]
KEPT = ("part", "world", "kind", "operation", "operands", "how", "backend", "differs")
NUMBERS = (1, 2, 3)


def shrink(case: Case, fails: Callable[[Case], bool], *, seconds: float) -> Case:
    """The smallest case found in about `seconds` for which `fails` holds, as it does for `case`."""
    end = time.monotonic() + seconds
    progress = True
    while progress:
        progress = False
        for smaller in candidates(case):
            if time.monotonic() > end:
                return case
            if fails(smaller):
                case, progress = smaller, True
                break
    return case


def candidates(case: Case) -> Iterator[Case]:
    """Smaller cases, those that leave out most first."""
    places = sorted(paths(case), key=lambda path: (len(path), str(path)))
    for path in places:
        if isinstance(path[-1], int) or path[-1] not in KEPT:
            yield without(case, path)
    for world in range(1, case.get("world", 1)):
        yield case | {"world": world}
    for path in places:
        value = at(case, path)
        if isinstance(value, int) and not isinstance(value, bool) and path != ("world",):
            for number in NUMBERS:
                if number < value:
                    yield replaced(case, path, number)


def paths(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of everything in nested mappings and lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*above, key)
        yield from paths(inner, (*above, key))


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def without(case: Case, path: tuple[Any, ...]) -> Case:
    smaller = copy.deepcopy(case)
    del at(smaller, path[:-1])[path[-1]]
    return smaller


def replaced(case: Case, path: tuple[Any, ...], number: int) -> Case:
    smaller = copy.deepcopy(case)
    at(smaller, path[:-1])[path[-1]] = number
    return smaller
