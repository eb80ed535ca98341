"""Where threads stand, told without their frame objects.

Walking another thread's frames by `sys._current_frames()` can crash the process while a compiler traces
there: its frames end without their objects. `faulthandler` reads the stacks as they lie in memory.
"""

from __future__ import annotations

import faulthandler
import re
import tempfile
from typing import NamedTuple

_THREAD = re.compile(r"hread 0x([0-9a-f]+)\b[^\n]*\n((?: [^\n]*\n)*)")
_CALL = re.compile(r'  File "(.*)", line (\d+) in (.*)')


class Call(NamedTuple):
    """One line of a stack."""

    file: str
    line: int
    function: str


def calls_of(thread: int) -> tuple[list[Call], bool]:
    """What a thread is in, innermost first, and whether that is all: the deepest hundred calls are seen."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        dumped = file.read().decode(errors="replace")
    for found in _THREAD.finditer(dumped):
        if int(found[1], 16) == thread:
            calls = [Call(one[1], int(one[2]), one[3].strip()) for one in _CALL.finditer(found[2])]
            return calls, "\n  ..." not in f"\n{found[2]}"
    return [], True
