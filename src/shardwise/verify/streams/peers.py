"""Collectives that each rank runs a second time when it wants to, so that no two ranks wait for each other.

A rank that waits for a collective announces it after a moment; whichever rank waits runs what others have
announced. Each stream has groups of its own for this: on two streams ranks may differ in order.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from shardwise import _compat
from shardwise.planner.noop_group import NoopGroup

_LOOKS_EVERY_SECONDS, _TELLS_AFTER_SECONDS = 0.002, 0.02
_WAITERS = 64  # waits may nest: what others wait for may wait itself


@dataclass
class _Known:
    """The twins of a default group, kept as long as it: a destroyed twin leaves its name in the store."""

    twins: dict[tuple[str, int], dist.ProcessGroup] = field(default_factory=dict)
    simulations: int = 0


_known: weakref.WeakKeyDictionary[dist.ProcessGroup, _Known] = weakref.WeakKeyDictionary()


class Peers:
    """The other ranks of one simulation.

    Attributes:
        put_off: the collectives that are still to run, by what ranks call them: how to run each.
    """

    def __init__(self) -> None:
        self.put_off: dict[str, Callable[[], None]] = {}
        self._counts: dict[str, int] = {}
        self._waiters = ThreadPoolExecutor(_WAITERS)
        self._run = 0
        if (world := dist.group.WORLD) is not None:
            known = _known.setdefault(world, _Known())
            self._run = known.simulations = known.simulations + 1

    def twin(self, group: dist.ProcessGroup, line: int, before: Callable[[], None]) -> dist.ProcessGroup:
        """Return a group of the same ranks for a line's second run; call `before` if it must be made."""
        if isinstance(group, NoopGroup):
            return group
        world = dist.group.WORLD
        assert world is not None
        twins, key = _known.setdefault(world, _Known()).twins, (group.group_name, line)
        if key not in twins:
            before()
            twins[key] = dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True)
        return twins[key]

    def name(self, twin: dist.ProcessGroup) -> str:
        """Name the next collective of a twin, equally on all its ranks."""
        count = self._counts[twin.group_name] = self._counts.get(twin.group_name, 0) + 1
        return f"shardwise/second/{self._run}/{twin.group_name}/{count}"

    def wait(self, work: Any, name: str | None = None) -> None:
        """Wait for a collective, by its name if it is a second one; meanwhile run what others wait for."""
        if work is None:
            return
        if work.is_completed():
            work.wait()
            return
        ended = self._waiters.submit(work.wait)  # as not every work knows when it is completed
        began = time.monotonic()
        while not wait([ended], _LOOKS_EVERY_SECONDS).done:
            if time.monotonic() - began > _TELLS_AFTER_SECONDS:
                store = _compat.default_store()
                if name is not None:
                    store.set(name, "")
                    name = None
                for wanted, run in list(self.put_off.items()):
                    if wanted in self.put_off and store.check([wanted]):
                        run()
        ended.result()
