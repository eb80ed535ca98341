"""Where another thread stands.

Its frames may be walked only while it stands still: one that ends meanwhile can take the process with it, and
while torch compiles, frames end without their objects. So nothing is told of a thread during a compilation,
and this one keeps the interpreter to itself while it walks.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

from shardwise import _compat

_LONG = 1.0  # seconds; a walk takes some microseconds


class Call(NamedTuple):
    """One line of a stack."""

    file: str
    line: int
    function: str


def calls_of(thread: int) -> list[Call] | None:
    """What a thread is in, innermost first; None while torch compiles."""
    with _compat.no_compilation() as quiet:
        return _walked(thread) if quiet else None


def _walked(thread: int) -> list[Call]:
    calls = []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(_LONG)
    try:
        frame = sys._current_frames().get(thread)
        while frame is not None:
            calls.append(Call(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
            frame = frame.f_back
    finally:
        sys.setswitchinterval(interval)
    return calls
