"""Count the instructions of chosen pieces of a Python program with valgrind's callgrind.

Outside, `run(argv)` starts `argv` under callgrind and returns, by name, the instructions of each time a
piece was measured. Inside, a `Client` brackets the pieces with `measured(name)`; nothing is instrumented
before `start()`, so imports cost seconds instead of minutes. The two sides talk through callgrind's client
requests: a fixed sequence of x86-64 instructions that does nothing on a real processor and that valgrind
recognises.
"""

import ctypes
import mmap
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# The request's address comes in rdi and goes to rax; rdx carries the answer. Four rotations of rdi (by
# 3+13+61+51 = 128 bits, so it is as before) and the exchange of rbx with itself are valgrind's mark.
_REQUEST = bytes.fromhex("4889f8 31d2 48c1c703 48c1c70d 48c1c73d 48c1c733 4887db 4889d0 c3")
_CALLGRIND = (ord("C") << 24) + (ord("T") << 16)
_ZERO, _DUMP_AT, _START = _CALLGRIND + 1, _CALLGRIND + 3, _CALLGRIND + 4


def _make_client() -> ctypes._CFuncPtr:  # type: ignore[name-defined]
    if platform.machine() not in ("x86_64", "AMD64"):
        raise OSError(f"instruction counts need an x86-64 machine, this is {platform.machine()}")
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(_REQUEST)
    call = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p)(
        ctypes.addressof(ctypes.c_char.from_buffer(page))
    )
    call.page = page  # the code lives as long as the function
    return call


class Client:
    """The program's side, to be used in a process started by `run`."""

    def __init__(self) -> None:
        self._call = _make_client()

    def _request(self, code: int, argument: bytes | None = None) -> None:
        address = ctypes.cast(ctypes.c_char_p(argument), ctypes.c_void_p).value or 0
        words = (ctypes.c_uint64 * 6)(code, address)
        self._call(ctypes.addressof(words))

    def start(self) -> None:
        """From here on instructions are counted (and the program runs some fifty times slower)."""
        self._request(_START)

    @contextmanager
    def measured(self, name: str) -> Iterator[None]:
        """Count what runs inside under `name`."""
        label = name.encode()
        self._request(_ZERO)
        yield
        self._request(_DUMP_AT, label)


def run(argv: list[str], *, timeout: float) -> dict[str, list[int]]:
    """Run `python argv` under callgrind for at most `timeout` seconds; instructions per name, in order."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--vgdb=no"]
        command += [f"--callgrind-out-file={folder}/out", sys.executable, *argv]
        environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, timeout=timeout, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr[-4000:]}")
        # Dumps are numbered out.1, out.2, ...; the last, at the end of the program, is plain "out".
        dumps = sorted(Path(folder).glob("out.*"), key=lambda path: int(path.suffix[1:]))
        counts: dict[str, list[int]] = {}
        for dump in dumps:
            text = dump.read_text()
            name = re.search(r"^desc: Trigger: Client Request: (.*)$", text, re.MULTILINE)
            total = re.search(r"^(?:summary|totals): (\d+)", text, re.MULTILINE)
            if name and total:
                counts.setdefault(name[1], []).append(int(total[1]))
        return counts
