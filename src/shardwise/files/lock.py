"""One writer in a folder at a time: a lock that the system releases when its process ends.

    PATH/.saving    exists while a process writes; gives other writers its host, process id and start time

A killed process leaves the file but no lock. Without file locks (Windows, some file systems), nothing is
locked.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from shardwise.errors import CheckpointError

_NAME = ".saving"
_locks: dict[Path, int] = {}  # open files, by folder


def lock(folder: Path) -> None:
    """Lock a folder for this process, unless it already holds the lock.

    Raises:
        CheckpointError: another process holds it.
    """
    if sys.platform == "win32" or folder in _locks:
        return
    import fcntl

    file = folder / _NAME
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if file.exists() and os.path.samestat(os.fstat(descriptor), file.stat()):
                break
        except (BlockingIOError, PermissionError) as error:  # which one depends on the system
            raise CheckpointError(f"{folder}: {_holder(descriptor)}") from error
        except OSError:
            break
        os.close(descriptor)  # its holder has since removed the file
    since = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    me = {"host": socket.gethostname(), "process": os.getpid(), "since": since}
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(me).encode(), 0)
    _locks[folder] = descriptor


def unlock(folder: Path) -> None:
    """Release the lock of a folder, if this process holds it."""
    descriptor = _locks.pop(folder, None)
    if descriptor is not None:
        with suppress(OSError):
            (folder / _NAME).unlink()
        os.close(descriptor)


def _holder(descriptor: int) -> str:
    """Describe the process that holds the lock, and close the file."""
    owner: dict[str, object] = {}
    with suppress(ValueError):
        owner = json.loads(os.pread(descriptor, 4096, 0))
    os.close(descriptor)
    return (
        f"process {owner.get('process', '?')} on host {owner.get('host', '?')} has been saving there since"
        f" {owner.get('since', '?')}. Use a separate folder for each run, or wait until that process is done"
    )
