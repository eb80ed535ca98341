"""Ending a run where it can go on: a signal on any rank is a request that all ranks hear at the same step.

Signals come to ranks at different moments, and to some ranks alone. So the handler only notes the request,
and ranks agree: each `asked` begins an all-reduce of what this rank noted and answers with the one before,
which has arrived meanwhile. It runs in a gloo group of its own, so no device and no other collective waits.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from shardwise.checkpoint.background import failed_here, wait_for_saving
from shardwise.comm.watch import group_of_all, look_into, order_of, raise_explained

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_TWICE = 3.0  # seconds after which another signal means "at once": launchers pass one on within less


class StopSignals:
    """SIGTERM and Ctrl-C, on whichever rank, as a question that all ranks answer equally:

        with StopSignals() as stop:
            for step in range(done, steps):
                ...
                if stop.asked() or (step + 1) % 100 == 0:
                    save(path, state(), step=step + 1)
                if stop:
                    break

    Collective over the default process group, to enter and to ask; without one this process is alone. Every
    rank asks once a step. The answer is one step late: a signal during a step is heard at the end of the
    next. Another signal, more than 3 s after the first, does what it does elsewhere. Enter it in the main
    thread, where Python handles signals.
    """

    def __init__(self) -> None:
        self._noted = 0  # the signal's number
        self._at = 0.0
        self._answer = 0  # the number that all ranks know of
        self._before: dict[int, Any] = {}
        self._group: dist.ProcessGroup | None = None
        self._pending: tuple[dist.Work, torch.Tensor] | None = None

    def __enter__(self) -> StopSignals:
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._group = group_of_all("enter StopSignals")
            look_into(self._group)
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._group is not None and kind is None:
            self._arrived()
            dist.destroy_process_group(self._group)

    def __bool__(self) -> bool:
        """Return the last answer of `asked`."""
        return self._answer != 0

    @property
    def status(self) -> int:
        """Exit status for `sys.exit`: of a process that the signal ended, or 0. Equal on all ranks.

        A launcher that restarts ranks takes 0 for the end of the whole run.
        """
        return 128 + self._answer if self._answer else 0

    def asked(self) -> bool:
        """Return whether a rank has been asked to stop. Equal on all ranks. Collective.

        Raises:
            CheckpointError: on all ranks, if a save in flight has failed.
            RankMismatchError: a rank has ended, or did not come in time.
        """
        if self._group is None:
            self._answer, failed = self._noted, failed_here()
        else:
            self._answer, failed = self._arrived()
        if failed:
            wait_for_saving()
        if self._group is None:
            return self._answer != 0
        flag = torch.tensor([self._noted, int(failed_here())])
        work = dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        self._pending = work, flag
        return self._answer != 0

    def _arrived(self) -> tuple[int, bool]:
        """Return the signal of any rank, and whether any knew of a failed save, when they asked last."""
        if self._pending is None:
            return 0, False
        (work, flag), self._pending = self._pending, None
        try:
            work.wait()
        except RuntimeError as error:
            order = order_of(dist.group.WORLD)
            raise_explained(error, [order] if order else [], "agree whether to stop")
        number, failed = flag.tolist()
        return number, failed != 0

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._noted and time.monotonic() - self._at > _TWICE:
            for each, handler in self._before.items():
                signal.signal(each, handler)
            signal.raise_signal(number)
        if not self._noted:
            self._noted, self._at = number, time.monotonic()
