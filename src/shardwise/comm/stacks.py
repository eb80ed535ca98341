"""Where another thread stands.

Its frames may be read only while it stands still: one that ends meanwhile can take the process with it.
Python code cannot see to that, as any of its steps may let the other thread go on; `faulthandler`, which
reads all in one call of C, can. While torch compiles, frames end without their objects, so nothing is told
of that time.
"""

from __future__ import annotations

import faulthandler
import re
import tempfile
from typing import NamedTuple

from shardwise import _compat

_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_CALL = re.compile(r'  File "(.*)", line (\d+) in (.*)')


class Call(NamedTuple):
    """One line of a stack."""

    file: str
    line: int
    function: str


def calls_of(thread: int) -> list[Call] | None:
    """What a thread is in, innermost first, up to 100 calls; None while torch compiles."""
    with _compat.no_compilation() as quiet, tempfile.TemporaryFile() as file:
        if not quiet:
            return None
        faulthandler.dump_traceback(file)
        file.seek(0)
        told = file.read().decode()
    calls, is_asked = [], False
    for line in told.splitlines():
        if header := _THREAD.match(line):
            is_asked = int(header[1], 16) == thread
        elif is_asked and (call := _CALL.match(line)):
            calls.append(Call(call[1], int(call[2]), call[3]))
    return calls
