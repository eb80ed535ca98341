"""A run that continues while ranks are lost and replaced: living ranks keep their processes and their state.

    a rank is lost      the others' current operations raise, and end their attempt at the step
    they meet           through a store that outlives them, together with any replacement
    they agree          on the last step: a rank with all gradients of a step that another has taken takes it
    state moves         from copies in the living ranks' memory (`memory.py`) to a newly built model
    the step is tried   again

A step is taken (`commit`) in two parts: all ranks confirm that they have its gradients, then each steps
alone. So if one rank has stepped, every other can, whatever has been lost since.
"""

from __future__ import annotations

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
from shardwise.comm.watch import leave_all, of_transport, order_of, raise_explained, watch_also
from shardwise.errors import CheckpointError, RankMismatchError, ShardwiseError
from shardwise.files.stores import StrPath, on_disk

_CONNECT = timedelta(seconds=10)  # for a connection after a meeting; may be waited for several times
_LOST = f"A lost rank had what no living one has, or living ranks differ. {START}"


class Training(Protocol):
    """The state that `LivingRanks` keeps: a model, its optimizer and whatever else continues with them."""

    def state(self) -> dict[str, Any]:
        """Return the state for `checkpoint.save`. `PerRank` must be optional: a new rank has none. Local."""

    def load(self, state: dict[str, Any]) -> None:
        """Load such a state after it was filled."""


_T = TypeVar("_T", bound=Training)


class LivingRanks(Generic[_T]):
    """Trains on the ranks that live:

        run = LivingRanks(build, store=store, ranks=4, folder="/dev/shm/my-run")
        while run.training.step < 1000:
            with run.attempt() as training:
                training.loss(batch).backward()
                run.commit(training.advance)

    It makes the default process group, and a new one whenever ranks are lost or join; after each, every rank
    calls `build`. A restarted script is a replacement: it joins the living ranks. A lost rank's shard must
    also be on another rank, as with HSDP or replicated parameters.

    Attributes:
        training: the latest result of `build`, with new meshes and process groups.
    """

    def __init__(
        self,
        build: Callable[[], _T],
        *,
        resume: Callable[[_T], object] = lambda training: None,
        store: Store,
        ranks: int,
        rank: int | None = None,
        folder: StrPath,
        wait_s: float = 60.0,
        backend: str = "gloo",
        timeout: timedelta = timedelta(minutes=5),
    ) -> None:
        """Meet the other ranks; collective over all `ranks`.

        Args:
            build: makes a model on meshes of the default process group, whatever its size.
            resume: loads the initial state from storage, if there is one. Called on every rank after `build`,
                if no rank has taken a step.
            store: a store that every process reaches and that outlives them: the launcher's TCPStore, or a
                FileStore.
            ranks: the number of ranks of the whole run.
            rank: the rank that this process should be; None takes a free one.
            folder: as for `HostMemory`, for state that ranks pass on; a folder per rank if hosts share none.
            wait_s: how long ranks wait for a replacement before the living ones continue without it. It must
                be long enough for all of them to notice a loss.
            backend: the backend of the process groups.
            timeout: the timeout of the process groups. A rank without state waits this long, plus `wait_s`,
                for all others, or for one that has state.

        Raises:
            CheckpointError: neither all other ranks came, nor one that has state; on every rank, if a part of
                the state was lost with the ranks that had it.
        """
        self._meeting = Meeting(store, ranks=ranks, wait_s=wait_s, timeout=timeout)
        self._build, self._resume = build, resume
        self._folder, self._rank = on_disk(folder) / "handed-on", rank
        self._backend, self._timeout = backend, timeout
        self._met_at = -1
        self._training: _T | None = None
        self._step: int | None = None  # the last one taken; None while this process has no state
        self._actions: Sequence[Callable[[], object]] = ()  # takes the step, once this rank has its gradients
        self._random: list[torch.Tensor] = []
        self._memory: HostMemory | None = None
        self._go_on(None)

    @property
    def training(self) -> _T:
        assert self._training is not None
        return self._training

    @contextmanager
    def attempt(self) -> Iterator[_T]:
        """Attempt one step, which may not be taken: read from `training` how far it is. Collective.

        Errors that a lost rank causes end here, after ranks have met anew. Random numbers that an attempt
        drew are drawn again. Any other error is raised.
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
        """Take the step: call `actions`, which must not communicate, on every rank or on none. Collective.

        Costs an all-reduce of 8 bytes, for which all ranks wait.
        """
        self._actions = actions
        flag = torch.tensor([dist.get_rank() == 0 and self._meeting.has_new()])
        try:
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
        except RuntimeError as error:
            order = order_of(dist.group.WORLD)
            raise_explained(error, [order] if order else [], "commit the step")
        self._meeting.hold()
        self._take_step()
        if self._memory is not None:  # all have loaded the state that was passed on
            self._memory.keep_only(None)
            self._memory = None
        if flag.item():
            raise _NewRanks

    def _take_step(self) -> None:
        for action in self._actions:
            action()
        self._actions, self._random = (), _random_state()
        assert self._step is not None
        self._step += 1

    # Meeting

    def _go_on(self, error: RuntimeError | None) -> None:
        """Meet until all ranks that met have the state."""
        while True:
            try:
                if self._meet(error is not None):
                    return
            except RuntimeError as next_error:
                if not _is_loss(next_error):
                    self._meeting.hold()
                    raise
                error = next_error
                self._meeting.break_up(first_line(str(error)))
            else:
                assert error is not None
                raise error  # the same ranks failed at the same step again

    def _meet(self, failed: bool) -> bool:
        """Make a process group of the ranks that came, and continue from their state; False if in vain."""
        previous_size = self._meeting.size
        self._rank, counts = self._meeting.join_round(self._rank, has_state=self._step is not None)
        if not counts:  # the others continued without this rank, which rejoins as a new one
            self._training = self._step = None
            self._actions, self._random = (), []
        abandon()
        if dist.is_initialized():
            dist.destroy_process_group()
        _compat.number_groups_anew()
        dist.init_process_group(
            self._backend,
            store=self._meeting.watched_store("group"),
            rank=self._rank,
            world_size=self._meeting.size,
            timeout=min(self._timeout, _CONNECT),
        )
        self._group = dist.new_group(backend="gloo", timeout=min(self._timeout, _CONNECT))
        for group in (dist.group.WORLD, self._group):
            _compat.set_timeout(group, self._timeout)
        watch_also(self._group)
        status = [self._step, bool(self._actions), self._training is not None]
        by_rank = [tuple(answer) for answer in together("meeting", lambda: status)]
        steps = [step for step, *_ in by_rank if step is not None]
        newest = max(steps, default=0)
        self._catch_up(by_rank, newest)
        if failed and len(steps) == previous_size and newest == self._met_at:
            return False
        self._met_at = newest
        self._move_state(newest, keeps=all(keeps for step, _, keeps in by_rank if step is not None))
        return True

    def _catch_up(self, by_rank: Sequence[Any], newest: int) -> None:
        """Make sure that all have taken the same steps."""
        for rank, (step, ready, *_) in enumerate(by_rank):
            if step is not None and step != newest and not (ready and step == newest - 1):
                raise CheckpointError(
                    f"rank {rank} has taken {step} of {newest} steps and cannot catch up. {START}"
                )
        if self._step is not None and self._step < newest:
            self._take_step()
        self._actions = ()

    def _move_state(self, step: int, *, keeps: bool) -> None:
        """Build, and fill the result with the state after `step` steps."""
        memory = self._memory = HostMemory(self._folder)
        if not step:
            memory.clear()
        elif keeps:  # else an earlier meeting failed after copying it
            state = {"state": self._training.state()} if self._training is not None else {}
            try:
                memory.save(state, step=self._meeting.round)
            except CheckpointError as error:
                raise CheckpointError(f"{error}\n{_LOST}") from error
            memory.wait()
        self._training = None  # the copy has it: do not hold two models
        training = self._build()
        if step:
            state = {"state": training.state()}
            if memory.load(state) is None:
                raise CheckpointError(f"{self._folder}: the state that ranks handed over is gone. {START}")
            training.load(state["state"])
        else:
            self._resume(training)
        if self._random:
            for generator, random in zip(_generators(), self._random, strict=True):
                generator.set_rng_state(random)
        self._training, self._step = training, step


class _NewRanks(Exception):  # noqa: N818 - a reason to meet, no error
    """Ranks wait to join."""


def _is_loss(error: RuntimeError) -> bool:
    """Return whether the error may be caused by a lost rank."""
    return isinstance(error, RankMismatchError) or (
        not isinstance(error, ShardwiseError) and of_transport(error)
    )


def _generators() -> list[Any]:
    return [torch, torch.get_device_module()] if torch.accelerator.is_available() else [torch]


def _random_state() -> list[torch.Tensor]:
    return [generator.get_rng_state() for generator in _generators()]
