"""Repeats of collectives, which each rank runs at a time of its choice without deadlock.

A rank that waits for a collective announces it after a moment; every waiting rank runs the collectives that
others have announced. Each stream has its own groups for this, as ranks may order two streams differently.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch.distributed as dist

from shardwise import _compat
from shardwise.errors import ShardwiseError
from shardwise.planner.noop_group import NoopGroup

_LOOKS_EVERY_SECONDS, _TELLS_AFTER_SECONDS = 0.002, 0.02
_WAITERS = 64  # waits may nest: a collective that others wait for may itself wait
# What outlives a simulation, by default group: the number of simulations, and second groups, slow to make.
_simulations = weakref.WeakKeyDictionary[dist.ProcessGroup, int]()
_twins = weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Future[dist.ProcessGroup]]]()


class Peers:
    """The other ranks of one simulation."""

    def __init__(self) -> None:
        self.deferred: dict[str, Callable[[], None]] = {}  # run deferred collectives, by names on all ranks
        self._counts = Counter[str]()
        self._waiters = ThreadPoolExecutor(_WAITERS)
        self._run = 0
        if (world := dist.group.WORLD) is not None:
            self._run = _simulations[world] = _simulations.get(world, 0) + 1

    def name(self, group: dist.ProcessGroup, line: str) -> str:
        """Return the name of the next collective on a line, equal on all ranks of `group`."""
        key = f"{group.group_name}/{line}"
        self._counts[key] += 1
        return f"shardwise/second/{self._run}/{key}/{self._counts[key]}"

    def twin(self, group: dist.ProcessGroup, line: str, name: str) -> dist.ProcessGroup:
        """Return a group of the same ranks for a line's repeated collectives.

        The first collective of a line, `name`, makes the group, together with all ranks that run it. Ranks
        of several groups may reach their first collectives in any order.
        """
        if isinstance(group, NoopGroup):
            return group
        world = dist.group.WORLD
        if world is None:
            raise ShardwiseError(
                "the default process group was destroyed inside a simulation, whose collectives were still to"
                " run again; destroy it after the simulation"
            )
        twins, key = _twins.setdefault(world, {}), f"shardwise/second/{group.group_name}/{line}"
        if key not in twins:
            twins[key] = self._waiters.submit(_compat.second_group, group, key)
        self._until(twins[key], name)
        return twins[key].result()

    def wait(self, work: Any, name: str | None = None) -> None:
        """Wait for a collective (`name`: a repeated one), and meanwhile run what others wait for."""
        if work is None:
            return
        if work.is_completed():
            work.wait()
            return
        ended = self._waiters.submit(work.wait)  # not every work knows when it is completed
        self._until(ended, name)
        ended.result()

    def _until(self, ended: Future[Any], name: str | None) -> None:
        began = time.monotonic()
        while not wait([ended], _LOOKS_EVERY_SECONDS).done:
            if time.monotonic() - began > _TELLS_AFTER_SECONDS:
                if name is not None:
                    _compat.default_store().set(name, "")
                    name = None
                self.run_awaited()

    def run_awaited(self) -> None:
        """Run the deferred collectives that other ranks have announced."""
        store = _compat.default_store()
        for name, run in list(self.deferred.items()):
            if name in self.deferred and store.check([name]):
                run()
