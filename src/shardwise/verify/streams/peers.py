"""Collectives that each rank runs a second time when it wants to, so that no two ranks wait for each other.

A rank that waits for a collective announces it after a moment; whichever rank waits runs what others have
announced. Each stream has groups of its own for this: on two streams ranks may differ in order.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from shardwise import _compat
from shardwise.planner.noop_group import NoopGroup

_LOOKS_EVERY_SECONDS, _TELLS_AFTER_SECONDS = 0.002, 0.02
_WAITERS = 64  # waits may nest: what others wait for may wait itself


@dataclass
class _Known:
    """State that outlives a simulation: the second groups of a default group, as making them takes long."""

    twins: dict[str, Future[dist.ProcessGroup]] = field(default_factory=dict)
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

    def name(self, group: dist.ProcessGroup, line: str) -> str:
        """Return the name that all ranks of `group` give to the next collective on a line."""
        key = f"{group.group_name}/{line}"
        count = self._counts[key] = self._counts.get(key, 0) + 1
        return f"shardwise/second/{self._run}/{key}/{count}"

    def twin(self, group: dist.ProcessGroup, line: str, name: str) -> dist.ProcessGroup:
        """Return a group of the same ranks for what a line runs a second time.

        The first collective of a line, `name`, makes it, together with whoever runs that collective: ranks
        of several groups may come to their first ones in any order.
        """
        if isinstance(group, NoopGroup):
            return group
        world = dist.group.WORLD
        assert world is not None
        twins, key = _known.setdefault(world, _Known()).twins, f"shardwise/second/{group.group_name}/{line}"
        if key not in twins:
            twins[key] = self._waiters.submit(_compat.second_group, group, key)
        self._until(twins[key], name)
        return twins[key].result()

    def wait(self, work: Any, name: str | None = None) -> None:
        """Wait for a collective, by its name if it is a second one; meanwhile run what others wait for."""
        if work is None:
            return
        if work.is_completed():
            work.wait()
            return
        ended = self._waiters.submit(work.wait)  # as not every work knows when it is completed
        self._until(ended, name)
        ended.result()

    def _until(self, ended: Future[Any], name: str | None) -> None:
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
