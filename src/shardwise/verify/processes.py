"""Run a function on N local processes connected by gloo, and report which one failed and why.

Each process reports over its own pipe: ("alive",) from time to time, then ("done", value) or
("failed", time, message, traceback or None). The parent kills all processes when one fails or dies, or
when none has reported for `timeout` seconds. It names the earliest cause: once one rank is gone, the
others fail too, with errors about lost connections. Rendezvous is through a file in a temporary folder,
so concurrent runs never clash.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import multiprocessing as mp
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise import launch
from shardwise.errors import ShardwiseError, here

GRACE_S = 1.0  # how long to wait for reports of an earlier cause after the first failure
_EXIT_S = 30.0  # a large process on a busy machine takes seconds to end
LOG_LINES = 30
HANGS = 0.9  # after this share of the timeout a process dumps its stack


class RankError(ShardwiseError):
    """A local rank raised, died or hung. `traceback` is its traceback, stack or last output."""

    def __init__(self, message: str, *, rank: int, traceback: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback


@dataclass
class _Child:
    rank: int
    label: str  # its name in messages
    log: Path  # its output
    process: BaseProcess
    pipe: Connection
    done: bool = False
    raised: bool = False
    value: Any = None
    # Time, message, traceback (None if the message is enough).
    failure: tuple[float, str, str | None] | None = None


def run_ranks(
    target: Callable[..., Any], *args: Any, world_size: int, timeout: float, name: str = "rank"
) -> list[Any]:
    """Call `target(alive, *args)` on `world_size` new local processes; return its values by rank.

    `target` is a module-level function. It runs with a gloo default process group of that size and one
    thread per process, and calls `alive` whenever it makes progress. `timeout` is in seconds without
    progress of any process. The output of the processes is captured, and quoted if they fail. Raises
    `RankError` if a process fails; no process outlives the call.
    """
    with tempfile.TemporaryDirectory(prefix="shardwise-ranks-") as folder:
        # Forked from a server that has imported torch, which takes seconds, and started no threads.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed.tensor", "shardwise", "shardwise.verify"])
        children: list[_Child] = []
        try:
            for rank in range(world_size):
                label, log = f"{name} {rank}" if world_size > 1 else name, Path(folder, f"log{rank}")
                receiver, sender = context.Pipe(duplex=False)
                job = (sender, log, rank, world_size, timeout, target, args)
                process = context.Process(target=_main, args=job, daemon=True)
                process.start()
                sender.close()
                children.append(_Child(rank, label, log, process, receiver))
            _listen(children, timeout)
            if failed := [(*child.failure, child) for child in children if child.failure is not None]:
                _, message, trace, child = min(failed, key=itemgetter(0))
                output = "" if trace is None else trace or _tail(child.log)
                raise RankError(message, rank=child.rank, traceback=output)
            return [child.value for child in children]
        finally:
            _end(children)


def _main(
    pipe: Connection, log: Path, rank: int, ranks: int, timeout: float, target: Callable[..., Any], args: Any
) -> None:
    """Run one rank, from setup to its report."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)  # for all output of this process
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=sys.stderr)
    os.environ.update(OMP_NUM_THREADS="1", RANK=f"{rank}", WORLD_SIZE=f"{ranks}", LOCAL_RANK=f"{rank}")
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # works even if the host name does not resolve
    torch.set_num_threads(1)

    def alive() -> None:
        faulthandler.dump_traceback_later(HANGS * timeout, file=sys.stderr)
        pipe.send(("alive",))

    try:
        alive()
        dist.init_process_group(
            "gloo",
            init_method=f"file://{log.parent}/rendezvous",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=timeout + 60.0),  # the parent notices a hang first
        )
        pipe.send(("done", target(alive, *args)))
        pipe.close()
        dist.barrier()  # no process closes its connections while another still uses them
        dist.destroy_process_group()
    except BaseException as error:
        if not pipe.closed:
            short = launch.is_mistake(error) and not launch.shows_all()
            text = str(error).strip().split("\n")[0]
            plain = f"{type(error).__name__}: {text}" if text else type(error).__name__
            message = (
                launch.one_line(error).replace(f": {here()}: ", ": ", 1) if short else plain
            )  # named once
            pipe.send(("failed", time.monotonic(), message, None if short else traceback.format_exc()))
        sys.exit(1)  # which frees what Python keeps a count of, such as locks that processes share


def _listen(children: list[_Child], timeout: float) -> None:
    """Receive reports until all are done, one failed and its grace period is over, or none makes progress."""
    deadline = time.monotonic() + timeout
    grace_end = math.inf
    while open_children := [child for child in children if not child.done and child.failure is None]:
        remaining = min(deadline, grace_end) - time.monotonic()
        ready = wait([child.pipe for child in open_children], max(remaining, 0.0))
        if not ready:
            if grace_end == math.inf:  # the first process still running fails, with the stacks of all
                stacks = "\n".join(f"{child.label}:\n{_tail(child.log)}" for child in open_children)
                waiting = ", ".join(child.label for child in open_children)
                message = f"no process made progress for {timeout:g} s; still running: {waiting}"
                open_children[0].failure = (time.monotonic(), message, stacks)
            return
        deadline = time.monotonic() + timeout
        for child in open_children:
            if child.pipe in ready:
                _take(child)
            if child.failure is not None:
                grace_end = min(grace_end, time.monotonic() + GRACE_S)


def _take(child: _Child) -> None:
    try:
        report = child.pipe.recv()
    except (EOFError, OSError):
        child.process.join(_EXIT_S)  # it has closed its pipe: its memory is being freed
        # a death precedes every error that it causes elsewhere
        child.failure = (-math.inf, f"{child.label}: died ({_death(child.process.exitcode)})", "")
        return
    if report[0] == "done":
        child.done, child.value = True, report[1]
    elif report[0] == "failed":
        _, moment, message, trace = report
        child.raised, child.failure = True, (moment, f"{child.label}: {message}", trace)


def _death(exitcode: int | None) -> str:
    if exitcode is None:
        return f"closed its pipe but did not exit within {_EXIT_S:g} s"
    if exitcode >= 0:
        return f"exit status {exitcode}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-exitcode).name}"
    return f"signal {-exitcode}"


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join(lines[-LOG_LINES:])


def _end(children: list[_Child]) -> None:
    """Let processes exit that will, kill the others, and wait for all."""
    finished = all(child.done for child in children)
    deadline = time.monotonic() + GRACE_S * 5
    for child in children:
        child.process.join(max(deadline - time.monotonic(), 0.0) if finished or child.raised else 0.0)
        if child.process.is_alive():
            child.process.kill()
    for child in children:
        child.process.join()
        child.process.close()
        child.pipe.close()
