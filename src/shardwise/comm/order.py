"""The order of a process group's collectives: whether ranks issue the same ones in the same order.

Ranks that differ would exchange garbage of equal size, abort, or wait for each other until a timeout. So
every collective is announced here before it is issued:

    the same as last time       nothing is sent: one comparison of two references
    anything else               all ranks compare what they are about to do, through the store

A pass is a path in a tree of agreed events. Ranks that follow the same path in equal trees need no messages.
A rank that leaves its tree first asks the others; those that continued as last time wait in a collective that
it does not join. So no rank exchanges data with a rank that means something else. `comm.watch` finds out
which rank waits in vain for which, and why.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakSet, WeakValueDictionary, ref

import torch
import torch.distributed as dist

from shardwise import _compat
from shardwise._compat import Store
from shardwise.comm.differences import differences
from shardwise.comm.stacks import calls_of
from shardwise.errors import RankMismatchError, here

_PASSES_KEPT = 64  # ended passes that are kept to be compared with peers that still wait in one
_LONGEST_PASS = 100_000  # events; a longer pass, without a forward, starts again
_LARGEST_TREE = 1_000_000  # events; a larger tree is dropped, on all ranks at the same event
_DIGEST = 64  # characters
TIME_TO_READ = timedelta(seconds=2)
_POLL_LEAST_SECONDS, _POLL_MOST_SECONDS = 20e-6, 2e-3  # between polls
STORE_GONE = "the store of the process group is gone: the rank that holds it, usually rank 0, has ended"
_LIBRARIES = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))

Record = dict[str, Any]


class Event:
    """A rank's next operation, in words that are equal on ranks that do the same. Made by `event_for`."""

    __slots__ = ("__weakref__", "advice", "digest", "text")

    def __init__(self, text: str, advice: str) -> None:
        self.text, self.advice = text, advice  # the latter for the error if ranks differ
        self.digest = hashlib.sha256(text.encode()).digest()


# `advance` compares by identity, so equal words are one object; held weakly, since models come and go.
_events: WeakValueDictionary[str, Event] = WeakValueDictionary()

_ADVICE = (
    "Build the same model, with the same fully_shard calls in the same order, and make the same calls on"
    " every rank."
)


def event_for(text: str, *, advice: str = _ADVICE) -> Event:
    """Return the event with these words; equal words give the same object."""
    return _events.setdefault(text, Event(text, advice))


class Node:
    """An event together with all events before it in its pass."""

    # There may be a million of these.
    __slots__ = ("children", "depth", "digest", "event", "likely", "parent")

    def __init__(self, event: Event, parent: Node | None) -> None:
        self.event = event
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        path_digest = b"" if parent is None else parent.digest
        # Covers the whole path to here, so equal digests mean equal passes up to this event.
        self.digest: bytes = hashlib.sha256(path_digest + event.digest).digest()
        self.children: dict[Event, Node] = {}
        self.likely: Node | None = None  # what followed last time

    def ancestor(self, depth: int) -> Node:
        node = self
        while node.depth > depth:
            assert node.parent is not None
            node = node.parent
        return node


class Backward(NamedTuple):
    """A backward pass: its thread, and the callback that autograd calls at its end, or drops if it fails."""

    thread: int
    end: ref[Callable[[], None]]


class Order:
    """The sequence of events of one process group, on this rank. Made by `watch.order_of`."""

    passes = 0  # that have begun
    left: str | None = None  # why this rank does not continue its pass, if it has left it
    backward: Backward | None = None  # the running one
    asking = False  # this rank waits for the others' words in the store, where no connection can break
    verdict: str | None = None  # what was found wrong; every later announcement raises it
    raised = False  # an announcement has raised it
    waits = False  # this rank may wait in something that was not announced
    _nodes = 0  # of the tree
    _posted: str | None = None
    _posted_at: Node | None = None
    pause: Callable[[float], None] = staticmethod(time.sleep)  # between two looks at the store

    def __init__(self, group: dist.ProcessGroup, store: Store) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.ranks = dist.get_process_group_ranks(group)
        # Groups of these ranks, in which this one may be waiting. Weakly: `comm.watch` keeps this order for
        # as long as the group lives.
        self.groups = WeakSet([group])
        self.timeout = _compat.timeout_of(group).total_seconds()
        self.store = store
        name = f"shardwise/{group.group_name}/{self.ranks[0]}-{self.ranks[-1]}/{self.size}"
        # A store may outlive its process groups, so each of them gets its own prefix.
        self.prefix = f"{name}/{store.add(f'{name}/{self.rank}', 1)}/"
        self.root = self.latest = Node(event_for(""), None)  # `latest`: the event last announced
        self.ended: OrderedDict[int, Node] = OrderedDict()  # the last events of earlier passes, by number
        # The latest of the passes that this rank left before it began another.
        self.abandoned: deque[int] = deque(maxlen=_PASSES_KEPT)
        self.lost_connections: set[int] = set()  # to these ranks of the group; known after a failure
        self.dead: list[int] = []  # global ranks that were found to give no sign of life
        self._posts = itertools.count()

    def advance(self, event: Event) -> None:
        """Announce what this rank does next. Collective over the group if it differs from last time.

        Raises:
            RankMismatchError: ranks mean different things, or one of them has left, or did not come in time.
        """
        likely = self.latest.likely
        # With a verdict, a known event is asked about too, which raises: its collective would not end.
        if likely is not None and likely.event is event and self.verdict is None:
            self.latest = likely
        else:
            self._agree(event)

    def begin_pass(self, event: Event) -> None:
        """Announce that a root module's forward begins."""
        if self.left is not None or self.backward is not None:
            self._abandon_pass()
        # Announced in the previous pass, where a rank that still continues it announces another event.
        self.advance(event)
        self._end_pass()

    def begin_backward(self, end: Callable[[], None]) -> None:
        """Note a backward in this thread, which calls `end` when it finishes; only autograd holds `end`."""
        self.backward = Backward(threading.get_ident(), ref(end))
        if self.left is not None:  # the error was caught: others may wait for this rank after all
            self.left = None
            self.post()

    def leave(self, reason: str) -> None:
        """Tell the other ranks that this one does not continue its pass."""
        self.left = self.left or reason  # later errors follow from the first
        with suppress(RuntimeError):  # the store may be gone already, with the rank that holds it
            self.post()

    def _abandon_pass(self) -> None:
        reason = self.left or self._left_backward()
        self.left = self.backward = None
        if reason is not None:
            # Peers had the same error and leave too: `comm.watch` must not report them as departed.
            self.abandoned.append(self.passes)
            self.post()

    def _end_pass(self) -> None:
        # Ranks that wait in an earlier pass compare with what this one did there.
        self.ended[self.passes] = self.latest
        if len(self.ended) > _PASSES_KEPT:
            self.ended.popitem(last=False)
        if self._nodes > _LARGEST_TREE:
            self._nodes = 0
            self.root = Node(event_for(""), None)
        self.passes += 1
        self.latest = self.root

    def _agree(self, event: Event) -> None:
        parent = self.latest
        node = parent.children.get(event) or Node(event, parent)
        # Set before asking: `comm.watch` tells the others that this rank is here.
        self.latest = node
        place = f"{self.prefix}{self.passes}.{node.depth}/"
        keys = [f"{place}{rank}" for rank in range(self.size)]
        try:
            # Digests are compared; texts are printed if they differ.
            self.store.set(keys[self.rank], node.digest.hex() + event.text)
            self._wait_for(keys)
            words = [value.decode() for value in self.store.multi_get(keys)]
        except dist.DistError as error:
            raise RankMismatchError(f"{here()}: could not {first_line(event.text)}: {STORE_GONE}") from error
        if any(word[:_DIGEST] != node.digest.hex() for word in words):
            texts = {rank: word[_DIGEST:] for rank, word in zip(self.ranks, words, strict=True)}
            self._let_read(place)
            self.left = "found that ranks disagree about what to do next"
            self._end_pass()  # on all ranks, which may then begin the same next one
            raise RankMismatchError(
                f"{here()}: ranks disagree about what to do next, so their collectives would not match.\n"
                f"{differences(texts)}\n{event.advice}"
            )
        # All have posted this word, so all have read the previous one.
        if self._posted is not None:
            self.store.delete_key(self._posted)
        self._posted = keys[self.rank]
        # Agreed: ranks that do the same next time need not ask. Added to the tree only now: every rank must
        # drop its tree in the same pass, or it would ask ranks that do not answer.
        if event not in parent.children:
            parent.children[event] = node
            self._nodes += 1
        parent.likely = node
        if node.depth > _LONGEST_PASS:
            self._end_pass()

    def _let_read(self, place: str) -> None:
        """Wait briefly until all ranks have read the store, which may end with this rank when it raises."""
        keys = [f"{place}read/{rank}" for rank in range(self.size)]
        with suppress(RuntimeError):
            self.store.set(keys[self.rank], "")
            self.store.wait(keys, TIME_TO_READ)

    def _wait_for(self, keys: list[str]) -> None:
        started, pause = time.monotonic(), _POLL_LEAST_SECONDS
        # A broken connection does not end a wait in the store, so the watch thread checks connections.
        self.asking = True
        # Polled, so that a verdict of the watch thread ends the wait.
        while not self.store.check(keys):
            if self.verdict is None and time.monotonic() - started > self.timeout:
                self.verdict = self.account(f"waited {self.timeout:g} s, its timeout")
            if self.verdict is not None:
                break
            # Short pauses at first, since ranks come nearly together; then longer ones: all poll one store.
            self.pause(pause)
            pause = min(2 * pause, _POLL_MOST_SECONDS)
        self.asking = False
        if self.verdict is not None:
            # This tells the watch thread that the process is not stuck.
            self.raised = True
            raise RankMismatchError(f"{here()}: {self.verdict}")

    # Where ranks stand

    def post(self) -> None:
        if self.latest is not self._posted_at:  # in full, since errors print it where ranks differ
            self._posted_at = self.latest
            # Before the record: a rank that reads the record asks for this text next.
            self.store.set(f"{self.prefix}text/{self.rank}", self.latest.event.text)
        record = {
            "passes": self.passes,
            "depth": self.latest.depth,
            "digest": self.latest.digest.hex(),
            "event": self.doing(),
            "left": self.left or self._left_backward(),
            "verdict": self.verdict,
            "cut from": sorted(self.lost_connections),
            "frame": _frame(),
            "posts": next(self._posts),  # shows others that this rank is alive
        }
        self.store.set(f"{self.prefix}at/{self.rank}", json.dumps(record))

    def read(self) -> dict[int, Record]:
        """Return the latest record of each other rank, by rank in the group."""
        keys = {rank: f"{self.prefix}at/{rank}" for rank in range(self.size) if rank != self.rank}
        if not self.store.check(list(keys.values())):
            # The store would wait for a missing key.
            keys = {rank: key for rank, key in keys.items() if self.store.check([key])}
        records = self.store.multi_get(list(keys.values()))
        return {rank: json.loads(record) for rank, record in zip(keys, records, strict=True)}

    def text_of(self, rank: int) -> str:
        """Return the text of the event that a rank of the group had announced last when it last posted."""
        return str(self.store.get(f"{self.prefix}text/{rank}").decode())

    def doing(self) -> str:
        return first_line(self.latest.event.text) or "begin"

    def account(self, failure: str) -> str:
        """Describe where every rank is, after a failure that nothing explains."""
        me = f"rank {self.ranks[self.rank]}"  # other ranks read this text too
        lines = [f"{me} {failure}; it was about to {self.doing()}. The others, when last heard of:"]
        # The store may have ended with its rank: the error then says at least where this one is.
        with suppress(RuntimeError):
            records = self.read()
            for rank in sorted({*range(self.size)} - {self.rank}):
                if (record := records.get(rank)) is None:
                    lines.append(f"  rank {self.ranks[rank]} has not said where it is")
                    continue
                late = (record["passes"], record["depth"]) < (self.passes, self.latest.depth)
                lines.append(
                    f"  rank {self.ranks[rank]} {'has not come' if late else 'is there'}: it was about to"
                    f" {record['event']}, at {record['frame']}"
                )
        return "\n".join(lines)

    def _left_backward(self) -> str | None:
        """Return why backward ended early, if it did; autograd then drops `end` without calling it."""
        backward = self.backward
        # The watch thread calls this too, and this rank may have begun another backward meanwhile.
        if backward is None or backward.end() is not None or self.backward is not backward:
            return None
        return f"left its backward before the end, after it had begun to {self.doing()}"


def first_line(text: str) -> str:
    return text.partition("\n")[0]


def _frame() -> str:
    calls = calls_of(threading.main_thread().ident or 0)
    if calls is None:
        return "a compilation"
    users = [call for call in calls if not call.startswith(_LIBRARIES)]
    return next(iter((*users, *reversed(calls))), "?")
