"""Where another thread stands.

`sys._current_frames` reads the list of threads under its lock, and a frame object outlives its call.
`faulthandler` takes no lock: it can meet a thread that C++ code is just adding, and end the process.
While torch compiles, calls end without their frame objects, so nothing is told of that time.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

from shardwise import _compat


class Call(NamedTuple):
    """One line of a stack."""

    file: str
    line: int
    function: str


def calls_of(thread: int) -> list[Call] | None:
    """What a thread is in, innermost first; None while torch compiles."""
    calls = []
    with _compat.no_compilation() as quiet:
        if not quiet:
            return None
        frame = sys._current_frames().get(thread)
        while frame is not None:
            calls.append(Call(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
            frame = frame.f_back
    return calls
