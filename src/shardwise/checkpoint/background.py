"""Background saves: one thread per rank, without collectives, while the run continues.

Ranks coordinate through the staging folder instead: each leaves a description of its part, or the error, and
rank 0 commits once all have. So messages of run and save cannot match each other, and no rank waits for
another. The outcome is reported where all ranks meet anyway: at the next save, load, `wait` or `asked`.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - functions registered later are called first
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from shardwise import _compat
from shardwise.checkpoint.commit import discard, rank_and_size
from shardwise.checkpoint.part import Part, write_part
from shardwise.checkpoint.plan import Chunk
from shardwise.comm.agree import together
from shardwise.errors import CheckpointError
from shardwise.files.stores import Location, location, write_whole

_POLL_S, _POLL_STORE_S = 0.02, 0.2  # seconds between polls for the others' parts
_NICENESS = 10
_PART, _FAILED = "part-{}.json", "failed-{}.json"
_log = logging.getLogger("shardwise")


class Saving:
    """A save in flight, as `save_async` returns it; the next save, load or `StopSignals.asked` also ends it.

    Attributes:
        done: whether this rank has finished its work for the save. Local.
    """

    def __init__(
        self,
        operation: str,
        staging: Location,
        chunks: Sequence[tuple[Chunk, Tensor | bytes]],
        commit: Callable[[list[Part]], Location],
    ) -> None:
        """Begin to write `chunks`, in memory that nothing else changes; rank 0 calls `commit`. Local."""
        self._operation, self._staging = operation, staging
        self._rank, self._size = rank_and_size()
        group = dist.group.WORLD if dist.is_initialized() else None
        self._patience = _compat.timeout_of(group).total_seconds() if group else 0.0
        self._path: Location | None = None
        self._problem: str | None = None
        self._cancelled, self._is_abandoned = threading.Event(), False
        self._thread = threading.Thread(
            target=self._run, args=([*chunks], commit), name="shardwise-save", daemon=True
        )
        _in_flight.append(self)
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """Whether this rank knows that the save failed. Local."""
        return self._problem is not None

    def wait(self) -> Location:
        """Return the checkpoint's directory once it is complete. Collective over the default process group.

        Raises:
            CheckpointError: on every rank, if the save failed on any; earlier checkpoints are untouched.
        """
        if self._is_abandoned:
            if (path := self._join()) is not None:
                return path
            raise CheckpointError(
                f"{self._operation}: ranks met again during the save; `latest_step` tells whether it is"
                " complete"
            )
        if self in _in_flight:
            _in_flight.remove(self)
        try:
            together(self._operation, lambda: self._join() if self._rank else None)
            paths = together(self._operation, lambda: str(self._join()))
        except CheckpointError:
            self._cancelled.set()
            self._thread.join()
            if self._rank == 0:
                discard(self._staging)
            raise
        return location(paths[0])

    def abandon(self) -> None:
        """End the save without lost ranks; it is complete if all had written their parts. Local."""
        self._is_abandoned = True
        self._cancelled.set()
        self._thread.join()
        if self._problem is not None:
            _log.warning("%s was abandoned because ranks met again: %s", self._operation, self._problem)
            if self._rank == 0:
                discard(self._staging)

    def _join(self) -> Location | None:
        self._thread.join()
        if self._problem is not None:
            raise CheckpointError(self._problem)
        return self._path

    def _run(
        self, chunks: list[tuple[Chunk, Tensor | bytes]], commit: Callable[[list[Part]], Location]
    ) -> None:
        if sys.platform == "linux":  # where threads have their own priorities; hashing and writing take long
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            self._leave(_PART, write_part(self._staging, self._rank, chunks))
            chunks.clear()
            if self._rank == 0:
                self._path = commit(self._collect_parts())
        except Exception as error:
            self._problem = (
                str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
            )
            with suppress(Exception):  # whatever a store raises
                self._leave(_FAILED, {"problem": self._problem})

    def _leave(self, name: str, content: Part) -> None:
        write_whole(self._staging / name.format(self._rank), json.dumps(content).encode())

    def _collect_parts(self) -> list[Part]:
        """Return all ranks' parts, once they are complete; delete the files that describe them."""
        started, parts = time.monotonic(), dict[int, Part]()
        poll_s = _POLL_S if isinstance(self._staging, Path) else _POLL_STORE_S
        while len(parts) < self._size:
            names = {file.name for file in self._staging.iterdir()}
            for rank in range(self._size):
                if rank not in parts and (name := _PART.format(rank)) in names:
                    parts[rank] = json.loads((self._staging / name).read_text())
            failed = [rank for rank in range(self._size) if _FAILED.format(rank) in names]
            late = time.monotonic() - started > self._patience and len(parts) < self._size
            if failed or late or self._cancelled.is_set():
                absent = failed or [rank for rank in range(self._size) if rank not in parts]
                raise CheckpointError(f"rank {absent[0]} has not written its part")
            self._cancelled.wait(poll_s)
        for rank in parts:
            (self._staging / _PART.format(rank)).unlink()
        return [parts[rank] for rank in range(self._size)]


_in_flight: list[Saving] = []  # at most one


def wait_for_saving() -> None:
    """Wait for the save in flight, if there is one; then collective, and raises as `Saving.wait` does."""
    for saving in list(_in_flight):
        saving.wait()


def abandon() -> None:
    """Give up the save in flight, if there is one, since its ranks have changed. Local."""
    while _in_flight:
        _in_flight.pop().abandon()


def failed_here() -> bool:
    """Return whether this rank knows that the save in flight failed. Local."""
    return any(saving.failed for saving in _in_flight)


def _finish() -> None:
    """Wait for the save in flight when a process ends without error, and log its failure."""
    if getattr(sys, "last_value", None) is None:
        for saving in _in_flight:
            saving._thread.join()
            if saving.failed:
                _log.error("%s failed: %s", saving._operation, saving._problem)


# Runs before executors refuse work, which clients of stores need to the end; `atexit` would be too late.
getattr(threading, "_register_atexit", atexit.register)(_finish)
