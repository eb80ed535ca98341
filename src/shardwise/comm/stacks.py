"""The stack of another thread.

`sys._current_frames` reads the list of threads under its lock. `faulthandler` takes no lock: it can meet a
thread that C++ code is just adding, and crash the process. A frame leads to its caller while both run.
Compiled code has its own frames, whose callers may be lost once they end. So a stack is read in one turn of
the interpreter, in which no other thread runs. While torch compiles, no stack is available.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from shardwise import _compat

_TURN_S = 0.05  # much longer than reading takes, in case the system lets another process run meanwhile
_reading = threading.Lock()


def calls_of(thread: int) -> list[str] | None:
    """Return a thread's calls as `file:line, in function`, innermost first; None while torch compiles."""
    frames = []
    # Do not wait for a compilation: it may last longer than other ranks wait for a sign of life.
    with _compat.no_compilation() as quiet:
        if not quiet:
            return None
        with _exclusive_turn():
            frame = sys._current_frames().get(thread)
            while frame is not None:
                # Only what must be read in this turn.
                frames.append((frame.f_code, frame.f_lineno))
                frame = frame.f_back
    return [f"{code.co_filename}:{line}, in {code.co_name}" for code, line in frames]


@contextmanager
def _exclusive_turn() -> Iterator[None]:
    """Keep other threads from running, also in finalizers that garbage collection would run."""
    # One at a time: a second reader would save this one's interval as the usual one, and leave it set.
    with _reading:
        interval, collects = sys.getswitchinterval(), gc.isenabled()
        sys.setswitchinterval(_TURN_S)
        gc.disable()
        try:
            time.sleep(1e-6)  # ends this turn; the next is as long as it was just set
            yield
        finally:
            sys.setswitchinterval(interval)
            if collects:
                gc.enable()
    time.sleep(1e-6)  # a waiting thread has started with the long interval
