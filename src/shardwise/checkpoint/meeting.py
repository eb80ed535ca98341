"""Meetings of ranks: in a store that outlives each of them, round by round.

    R/came, R/1, R/2 ...    the processes that came: the rank that each should be, and whether it has state
    R/closed                the members of the round: all expected processes, or those that came in time
    R/beat/1 ...            a counter of each member, which advances until the round has held
    R/broken                why the round failed: its members meet in the next
    R/waiting               the number of processes that came but are not needed

Ranks exchange their addresses through the store to connect. If one died before that, the others would wait
for it. So they wait in a store that checks whether the round's members live; and no round is closed while a
living member of the previous round has not come.

Processes with state take precedence over those without. Replacements may die and be replaced in turn before
the last living rank has noticed the loss, and that rank may be the only one with its part of the state. So a
round of several new processes is closed only after the time to notice, and a new process that is not needed
waits until then.
"""

from __future__ import annotations

import atexit
import itertools
import json
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakSet

from shardwise._compat import PrefixStore, Store
from shardwise.errors import CheckpointError

START = "Start all ranks again from a checkpoint"
_POLL_S = 0.02  # between polls of the store
_NOTICE_S = 6.0  # in which all living ranks notice a loss
_BEAT_S, _SILENT_S = 0.5, 5.0  # between beats; without a beat, until a member counts as dead


class Meeting:
    """The rounds in which this process has met others."""

    def __init__(self, store: Store, *, ranks: int, wait_s: float, timeout: timedelta) -> None:
        self._store = PrefixStore("shardwise/living", store)
        self._ranks, self._wait_s, self.timeout = ranks, wait_s, timeout  # as for `LivingRanks`
        self.round, self.size = -1, 0  # the last round that it joined, and that round's
        self._number: int  # among the processes that came to the round
        self._beating: threading.Event | None = None
        self._stores: list[_WatchedStore] = []  # torch keeps only their C++ parts alive
        _meetings.add(self)

    def join_round(self, rank: int | None, *, has_state: bool) -> tuple[int, bool]:
        """Join the next round; return this process's rank there, and whether its state still counts.

        Returns once all are there or, for a process with state, once it has waited for long enough.
        """
        while True:
            newest = int(self._store.get("round")) if self._store.check(["round"]) else -1
            has_state = has_state and newest <= self.round  # else the others have continued without it
            patience_s = self._wait_s + (0 if has_state else self.timeout.total_seconds())
            if not has_state:
                self._wait_until_needed(rank, newest, patience_s)
            previous = _Pulses(self._store, newest, skip=None) if has_state and newest >= 0 else None
            self._sign_in(newest + 1, rank, has_state=has_state)
            at, started, arrived = f"{self.round}/", time.monotonic(), dict[int, tuple[int | None, bool]]()
            while not self._store.check([f"{at}closed"]):
                self._hear(arrived)
                waited_s = time.monotonic() - started
                late = waited_s > patience_s
                if late and not has_state and len(arrived) < self._ranks:
                    raise CheckpointError(self._explain_absence(rank, newest, arrived, patience_s))
                alive = previous is not None and len(previous.silent()) < len(previous)
                if alive and waited_s < patience_s + self.timeout.total_seconds():
                    late = False
                back = sum(with_state for _, with_state in arrived.values())  # from the previous round
                noticed = waited_s > _NOTICE_S or back >= len(_members(self._store, newest)) - 1
                if late or (noticed and len(arrived) >= self._ranks):
                    # Those with state first, then those that came last.
                    seats = sorted(arrived, key=lambda number: (not arrived[number][1], -number))
                    seats = sorted(seats[: self._ranks])
                    self._store.compare_set(f"{at}closed", "", json.dumps(seats))
                time.sleep(_POLL_S)
            members = _members(self._store, self.round)
            if self._number in members:
                self.size = len(members)
                self._store.set("round", str(self.round))
                self._hear(arrived)
                ranks = [arrived[number][0] for number in members]
                return places(ranks)[members.index(self._number)], has_state
            has_state = False

    def _hear(self, arrived: dict[int, tuple[int | None, bool]]) -> None:
        """Add processes that have come to the round and described themselves: rank, whether with state."""
        for number in range(1, self._store.add(f"{self.round}/came", 0) + 1):
            if number not in arrived and self._store.check([key := f"{self.round}/{number}"]):
                arrived[number] = tuple(json.loads(self._store.get(key)))

    def _wait_until_needed(self, rank: int | None, newest: int, patience_s: float) -> None:
        """Return once a round lacks ranks, its members meet again, or all ranks were restarted."""
        if len(_members(self._store, newest)) < self._ranks:
            return
        started = time.monotonic()
        waiting = self._store.add(f"{newest}/waiting", 1)
        while waiting < self._ranks:
            if any(self._store.check([key]) for key in (f"{newest}/broken", f"{newest + 1}/came")):
                return
            waiting = self._store.add(f"{newest}/waiting", 0)
            if time.monotonic() - started > patience_s:
                raise CheckpointError(
                    f"rank {rank}: the run in this store already has all its {self._ranks} ranks, and they"
                    f" did not meet again in {patience_s:g} s. {START}, with a new store, if they are gone"
                )
            time.sleep(_POLL_S)

    def watched_store(self, name: str) -> Store:
        """Return a part of the store; waits in it end if a member dies before the round has held."""
        self._stores.append(_WatchedStore(self._store, self))
        return PrefixStore(f"{self.round}/{name}", self._stores[-1])

    def has_new(self) -> bool:
        """Return whether any process has joined the next round."""
        return self._store.check([f"{self.round + 1}/came"])

    def hold(self) -> None:
        """Note that the round has held: all are connected, and a death is noticed elsewhere."""
        if self._beating is not None:
            self._beating.set()
            self._thread.join()
            self._beating = None

    def break_up(self, reason: str) -> None:
        """Make members that still connect come to the next round."""
        if self.round >= 0:
            self._store.set(f"{self.round}/broken", reason)

    def pulses(self) -> _Pulses | None:
        """Return the other members' pulses, until the round has held."""
        return _Pulses(self._store, self.round, skip=self._number) if self._beating is not None else None

    def failure(self, pulses: _Pulses) -> str | None:
        """Return why the round has failed, if this is known; None if it has not."""
        if self._store.check([f"{self.round}/broken"]):
            return self._store.get(f"{self.round}/broken").decode()
        if not pulses.silent():
            return None
        reason = f"one of {self.size} that met has given no sign of life for {_SILENT_S:g} s"
        self.break_up(reason)
        return reason

    def _sign_in(self, number: int, rank: int | None, *, has_state: bool) -> None:
        self.hold()
        self.round = number
        self._number = self._store.add(f"{number}/came", 1)
        self._beating = threading.Event()
        self._thread = threading.Thread(
            target=_beat,
            args=(self._store, f"{number}/beat/{self._number}", self._beating),
            name="shardwise-living",
            daemon=True,
        )
        self._thread.start()
        self._store.set(f"{number}/{self._number}", json.dumps([rank, has_state]))

    def _explain_absence(
        self, rank: int | None, newest: int, arrived: Mapping[int, tuple[int | None, bool]], waited_s: float
    ) -> str:
        """Describe why ranks without state cannot begin: not all have come, and none with state."""
        ranks = {rank for rank, _ in arrived.values()}
        missing = ", ".join(str(rank) for rank in range(self._ranks) if rank not in ranks)
        if newest < 0:
            return (
                f"{len(arrived)} of {self._ranks} ranks came within {waited_s:g} s, without ranks {missing}."
                " A run begins with all; start those too, or give a longer timeout"
            )
        return (
            f"rank {rank}: a run has begun in this store, and in {waited_s:g} s none of its ranks came"
            f" to meet this one. {START}, with a new store"
        )


def _members(store: Store, round: int) -> list[int]:
    """Return the members of a round, by number; none before it is closed."""
    if not store.check([f"{round}/closed"]):
        return []
    members: list[int] = json.loads(store.get(f"{round}/closed"))
    return members


def places(old: Sequence[int | None]) -> list[int]:
    """Return each member's rank, in order of arrival: the `old` one if it fits, else the lowest free one."""
    size, ranks = len(old), dict[int, int]()
    for number, rank in enumerate(old):
        if rank is not None and rank < size and rank not in ranks.values():
            ranks[number] = rank
    free = sorted({*range(size)}.difference(ranks.values()))
    unplaced = sorted(
        (index for index in range(size) if index not in ranks),
        key=lambda index: (old[index] is None, old[index] or 0),
    )
    ranks.update(zip(unplaced, free, strict=True))
    return [ranks[number] for number in range(size)]


def _beat(store: Store, key: str, ended: threading.Event) -> None:
    for count in itertools.count():
        store.set(key, str(count))
        if ended.wait(_BEAT_S):
            return


class _Pulses:
    """Watches for members of a round that give no sign of life for a while, by this process's clock."""

    def __init__(self, store: Store, round: int, *, skip: int | None) -> None:
        self._store, self._polled_at = store, 0.0
        keys = [f"{round}/beat/{number}" for number in _members(store, round) if number != skip]
        self._beats: dict[str, tuple[bytes, float]] = dict.fromkeys(keys, (b"", time.monotonic()))

    def __len__(self) -> int:
        return len(self._beats)

    def silent(self) -> list[str]:
        now = time.monotonic()
        if now - self._polled_at > _BEAT_S:
            self._polled_at = now
            for key, (last, _) in self._beats.items():
                if self._store.check([key]) and (count := self._store.get(key)) != last:
                    self._beats[key] = count, now
        return [key for key, (_, at) in self._beats.items() if now - at > _SILENT_S]


def _delegate(name: str) -> Any:
    """Return a method that calls the one of this name of the store itself."""
    return lambda watched, *args: getattr(watched._store, name)(*args)


class _WatchedStore(Store):
    """A store whose `wait` ends if the round has failed."""

    def __init__(self, store: Store, meeting: Meeting) -> None:
        super().__init__()
        self._store, self._meeting = store, meeting

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        began, pulses = time.monotonic(), self._meeting.pulses()
        limit_s = (timeout or self._meeting.timeout).total_seconds()
        while not self._store.check(keys):
            reason = self._meeting.failure(pulses) if pulses is not None else None
            if reason is not None:
                raise RuntimeError(f"a connection between ranks that met was not made: {reason}")
            if time.monotonic() - began > limit_s:
                raise RuntimeError(f"timed out after {limit_s:g} s of waiting for {keys}")
            time.sleep(_POLL_S)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)

    set, add, check = _delegate("set"), _delegate("add"), _delegate("check")
    compare_set, multi_get = _delegate("compare_set"), _delegate("multi_get")
    deleteKey = delete_key = _delegate("delete_key")  # noqa: N815 - what torch calls
    has_extended_api = _delegate("has_extended_api")


_meetings: WeakSet[Meeting] = WeakSet()


def _finish() -> None:
    """End threads before the interpreter ends: inside the store they would abort the process."""
    for meeting in list(_meetings):
        meeting.hold()


atexit.register(_finish)
