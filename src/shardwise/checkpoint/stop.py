"""Stopping a run so that it can be resumed: a signal on any rank reaches all ranks at the same step.

Signals reach ranks at different moments, and only some ranks. So the handler only notes the request, and
ranks agree: each `asked` starts an all-reduce of this rank's note and returns the result of the previous one,
which has finished meanwhile. It uses a separate gloo group, so no device and no other collective waits.
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
from shardwise.comm.watch import group_of_all, order_of, raise_explained, watch_also

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_TWICE = 3.0  # seconds after which another signal means "at once"; launchers forward one within less


class StopSignals:
    """Turns SIGTERM and Ctrl-C on any rank into an answer that is equal on all ranks:

        with StopSignals() as stop:
            for step in range(done, steps):
                ...
                if stop.asked() or (step + 1) % 100 == 0:
                    save(path, state(), step=step + 1)
                if stop:
                    break

    Entering and asking are collective over the default process group; without one, only this process takes
    part. Every rank asks once per step. The answer is one step late: a signal during a step is reported at
    the end of the next. Another signal, more than 3 s after the first, has its usual effect. Enter it in the
    main thread, where Python handles signals.
    """

    def __init__(self) -> None:
        self._noted = 0  # the signal's number
        self._noted_at = 0.0
        self._answer = 0  # the signal's number that all ranks know
        self._handlers: dict[int, Any] = {}
        self._group: dist.ProcessGroup | None = None
        self._pending: tuple[dist.Work, torch.Tensor] | None = None

    def __enter__(self) -> StopSignals:
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._group = group_of_all("enter StopSignals")
            watch_also(self._group)
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self._group is not None and kind is None:
            self._receive_answer()
            dist.destroy_process_group(self._group)

    def __bool__(self) -> bool:
        """Return the last answer of `asked`."""
        return self._answer != 0

    @property
    def status(self) -> int:
        """The exit status for `sys.exit`: that of a process ended by the signal, or 0. Equal on all ranks.

        To a launcher that restarts ranks, 0 means the end of the whole run.
        """
        return 128 + self._answer if self._answer else 0

    def asked(self) -> bool:
        """Return whether any rank has been asked to stop. Equal on all ranks. Collective.

        Raises:
            CheckpointError: on all ranks, if a save in flight has failed.
            RankMismatchError: a rank has ended, or did not come in time.
        """
        self._answer, failed = (self._noted, failed_here()) if self._group is None else self._receive_answer()
        if failed:
            wait_for_saving()
        if self._group is not None:
            flag = torch.tensor([self._noted, int(failed_here())])
            work = dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group, async_op=True)
            assert work is not None
            self._pending = work, flag
        return bool(self)

    def _receive_answer(self) -> tuple[int, bool]:
        """Return any rank's signal, and whether any knew of a failed save, as of the previous `asked`."""
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
        if self._noted and time.monotonic() - self._noted_at > _TWICE:
            for signum, handler in self._handlers.items():
                signal.signal(signum, handler)
            signal.raise_signal(number)
        if not self._noted:
            self._noted, self._noted_at = number, time.monotonic()
