"""A run that goes on while ranks are lost and replaced: those that live keep their processes and their state.

    a rank is lost      what the others are in raises, and ends their attempt at the step
    they meet           through a store that outlives them, with whoever has come to replace it
    they agree          on the last step: who has all gradients of one that another has taken takes it too
    state moves         from copies in the living ranks' memory (`memory.py`) to a model built anew
    the step is tried   again

A step is taken (`commit`) in two parts: all ranks say that they have its gradients, then each steps alone. So
where one rank has stepped, every other can, whatever has been lost since.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist

from shardwise import _compat
from shardwise._compat import Store
from shardwise.checkpoint.background import abandon
from shardwise.checkpoint.meeting import START, Meeting
from shardwise.checkpoint.memory import HostMemory
from shardwise.comm.agree import together
from shardwise.comm.order import first_line
from shardwise.comm.watch import leave_all, look_into, of_transport, order_of, raise_explained
from shardwise.errors import CheckpointError, RankMismatchError, ShardwiseError
from shardwise.files.stores import on_disk

_CONNECT = timedelta(seconds=10)  # that ranks which have met wait for a connection, several times
_LOST = f"A lost rank had what no living one has, or living ranks differ. {START}"


class Training(Protocol):
    """The state that `LivingRanks` keeps: a model, its optimizer and whatever else goes on with them."""

    def state(self) -> dict[str, Any]:
        """Return the state for `checkpoint.save`. `PerRank` must be optional: a new rank has none. Local."""

    def load(self, state: dict[str, Any]) -> None:
        """Take what was filled of such a state."""


_T = TypeVar("_T", bound=Training)


class LivingRanks(Generic[_T]):
    """Train on the ranks that live:

        run = LivingRanks(build, store=store, ranks=4, folder="/dev/shm/my-run")
        while run.training.step < 1000:
            with run.attempt() as training:
                training.loss(batch).backward()
                run.commit(training.advance)

    It makes the default process group, and makes another whenever ranks are lost or come; `build` is called
    after each, on every rank. Started again, the same script is a replacement: it joins those that live. A
    lost rank's shard must be on another rank too, as with HSDP or where parameters are replicated.

    Attributes:
        training: what `build` made last. Meshes and process groups are new with it.
    """

    def __init__(
        self,
        build: Callable[[], _T],
        *,
        resume: Callable[[_T], object] = lambda training: None,
        store: Store,
        ranks: int,
        rank: int | None = None,
        folder: str | os.PathLike[str],
        wait_s: float = 60.0,
        backend: str = "gloo",
        timeout: timedelta = timedelta(minutes=5),
    ) -> None:
        """Meet the other ranks; collective over all that `ranks` counts.

        Args:
            build: makes a model on meshes of the default process group, whatever its size.
            resume: what a run begins with: loads it from storage, if something is there. Called on every rank
                after `build`, where none has taken a step.
            store: that every process reaches and that outlives each: the launcher's TCPStore, a FileStore.
            ranks: of the whole run.
            rank: that this process would be; None takes one that is free.
            folder: as of `HostMemory`, for what ranks hand on. The rank's own, where hosts have no folder.
            wait_s: how long ranks wait for a replacement before those that live go on without. As long as it
                takes for all of them to notice, at least.
            backend: of the process groups.
            timeout: of the process groups. So long, and `wait_s`, a rank without state waits for all others,
                or for one that has state.

        Raises:
            CheckpointError: where this rank came, and neither all others nor one that has state; on every
                rank, where a part of the state was lost with those that had it.
        """
        self._meeting = Meeting(store, ranks=ranks, wait_s=wait_s, timeout=timeout)
        self._build, self._resume = build, resume
        self._folder, self._rank = on_disk(folder) / "handed-on", rank
        self._backend, self._timeout = backend, timeout
        self._met_at = -1
        self._training: _T | None = None
        self._taken: int | None = None  # steps; None while this process has no state
        self._ready: Sequence[Callable[[], object]] = ()  # takes the step, once this rank has its gradients
        self._random: list[torch.Tensor] = []
        self._memory: HostMemory | None = None
        self._go_on(None)

    @property
    def training(self) -> _T:
        assert self._training is not None
        return self._training

    @contextmanager
    def attempt(self) -> Iterator[_T]:
        """Attempt one step, which may not be taken: ask `training` what it has reached. Collective.

        What a lost rank makes others raise ends here, with ranks that have met anew. Random numbers that an
        attempt drew are drawn again. Any other error is raised.
        """
        self._random = _random_state()
        try:
            yield self.training
        except _NewRanks:
            self._go_on(None)
        except RuntimeError as error:
            if not _is_loss(error):
                raise
            leave_all(f"failed, and meets those that live: {first_line(str(error))}")
            self._meeting.break_up(first_line(str(error)))
            self._go_on(error)

    def commit(self, *actions: Callable[[], object]) -> None:
        """Take the step: call `actions`, which communicate nothing, on every rank or on none. Collective.

        Costs an all-reduce of 8 bytes that all ranks wait for.
        """
        self._ready = actions
        flag = torch.tensor([dist.get_rank() == 0 and self._meeting.has_new()])
        try:
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
        except RuntimeError as error:
            order = order_of(dist.group.WORLD)
            raise_explained(error, [order] if order else [], "commit the step")
        self._meeting.hold()
        self._take()
        if self._memory is not None:  # all have loaded what was handed on
            self._memory.keep_only(None)
            self._memory = None
        if flag.item():
            raise _NewRanks

    def _take(self) -> None:
        for action in self._ready:
            action()
        self._ready, self._random = (), _random_state()
        assert self._taken is not None
        self._taken += 1

    # Meeting

    def _go_on(self, error: RuntimeError | None) -> None:
        """Meet, until all that met have the state."""
        while True:
            try:
                if self._meet(error is not None):
                    return
            except RuntimeError as another:
                if not _is_loss(another):
                    self._meeting.hold()
                    raise
                error = another
                self._meeting.break_up(first_line(str(error)))
            else:
                assert error is not None
                raise error  # the same ranks failed at the same step again

    def _meet(self, failed: bool) -> bool:
        """Make a process group of those who are there, and go on from their state; False if that is vain."""
        before = self._meeting.size
        self._rank, counts = self._meeting.come(self._rank, has_state=self._taken is not None)
        if not counts:
            self._forget()
        abandon()
        if dist.is_initialized():
            dist.destroy_process_group()
        _compat.number_groups_anew()
        dist.init_process_group(
            self._backend,
            store=self._meeting.watched("group"),
            rank=self._rank,
            world_size=self._meeting.size,
            timeout=min(self._timeout, _CONNECT),
        )
        self._group = dist.new_group(backend="gloo", timeout=min(self._timeout, _CONNECT))
        for group in (dist.group.WORLD, self._group):
            _compat.set_timeout(group, self._timeout)
        look_into(self._group)
        own = [self._taken, bool(self._ready), self._training is not None]
        by_rank = [tuple(each) for each in together("meeting", lambda: own)]
        steps = [taken for taken, *_ in by_rank if taken is not None]
        newest = max(steps, default=0)
        self._catch_up(by_rank, newest)
        if failed and len(steps) == before and newest == self._met_at:
            return False
        self._met_at = newest
        self._move(newest, keeps=all(has for taken, _, has in by_rank if taken is not None))
        return True

    def _forget(self) -> None:
        """Forget all state: the others went on without this rank, which joins them as a new one."""
        self._training = self._taken = None
        self._ready, self._random = (), []

    def _catch_up(self, by_rank: Sequence[Any], newest: int) -> None:
        """Make sure that all have taken the same steps."""
        for rank, (taken, ready, *_) in enumerate(by_rank):
            if taken is not None and taken != newest and not (ready and taken == newest - 1):
                raise CheckpointError(
                    f"rank {rank} has taken {taken} steps and cannot take the last of {newest}. {START}"
                )
        if self._taken is not None and self._taken < newest:
            self._take()
        self._ready = ()

    def _move(self, taken: int, *, keeps: bool) -> None:
        """Build, and fill what was built with the state of those that had one after so many steps.

        Args:
            keeps: whether all of them have it still; else a meeting broke off once it was copied.
        """
        memory = self._memory = HostMemory(self._folder)
        if not taken:
            memory.clear()
        elif keeps:
            state = {"state": self._training.state()} if self._training is not None else {}
            try:
                memory.save(state, step=self._meeting.round)
            except CheckpointError as error:
                raise CheckpointError(f"{error}\n{_LOST}") from error
            memory.wait()
        self._training = None  # the copy has it: two models need not be there
        training = self._build()
        if taken:
            state = {"state": training.state()}
            if memory.load(state) is None:
                raise CheckpointError(f"{self._folder}: what ranks handed on is gone. {START}")
            training.load(state["state"])
        else:
            self._resume(training)
        if self._random:
            _set_random_state(self._random)
        self._training, self._taken = training, taken


class _NewRanks(Exception):  # noqa: N818 - a reason to meet, no error
    """Ranks wait to join."""


def _is_loss(error: RuntimeError) -> bool:
    """Return whether the error is one that a lost rank makes others raise."""
    return isinstance(error, RankMismatchError) or (
        not isinstance(error, ShardwiseError) and of_transport(error)
    )


def _random_state() -> list[torch.Tensor]:
    devices = [torch.get_device_module()] if torch.accelerator.is_available() else []
    return [each.get_rng_state() for each in (torch, *devices)]


def _set_random_state(states: Sequence[torch.Tensor]) -> None:
    devices = [torch.get_device_module()] if torch.accelerator.is_available() else []
    for each, state in zip((torch, *devices), states, strict=True):
        each.set_rng_state(state)
