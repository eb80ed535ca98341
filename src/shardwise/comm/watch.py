"""A thread that finds out which rank waits in vain for which, so that no rank waits for a timeout.

While a rank makes progress, this thread only checks that it does. Once the rank has made none for a moment,
in a collective or anywhere else, the thread posts where the rank is and reads where each other rank is:

    another event at the same place     ranks mean different things
    it left the pass before this place  it raised; it will not come
    it has found one of these           so it will not come either
    at the same place, or before it     it is late, or slow: wait

In all but the last case the thread ends the rank's pending messages, and the call that waits for them raises
what was found. A transport's own failure, such as a dead peer, is explained in the same way. A rank that then
raises nothing was not waiting for these messages: it is stuck in something else. If reports are enabled, it
writes one, and its process ends.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import NoReturn
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise import _compat
from shardwise.comm.auto import over_gloo
from shardwise.comm.differences import differences, named
from shardwise.comm.order import STORE_GONE, TIME_TO_READ, Node, Order, Record, event_for, first_line
from shardwise.comm.report import FOLDER, check_folder, write_report
from shardwise.errors import RankMismatchError, ShardwiseError, here
from shardwise.launch import prints_errors_once

_TICK = 0.25  # seconds
_ROLL_CALL = 2.5  # seconds in which a living rank says where it is
_NEARLY = 0.9  # of the timeout: before waiting ranks give up and end
STUCK = 70  # exit status of a process that is ended because it is stuck
_RAISE_GRACE_SECONDS = 2.0  # seconds from a verdict until a waiting rank must have raised it
_JOIN_TIMEOUT_SECONDS = 5.0  # seconds for which the end of a process may wait for the thread
# Different from every tag in use, so that no probe matches a message.
_PROBE_TAG = 0x7D000000
_SOON = timedelta(milliseconds=1)
_TIMEOUT_WORDS = ("imed out", "imeout")  # in errors
_TRANSPORT_ERROR_WORDS = (*_TIMEOUT_WORDS, "gloo", "onnection", "roken pipe", "ocket")

_PROBE = torch.zeros(1)
_log = logging.getLogger("shardwise")
_orders: WeakKeyDictionary[dist.ProcessGroup, Order] = WeakKeyDictionary()


def order_of(group: dist.ProcessGroup | None) -> Order | None:
    """Return the order of `group`'s collectives; None if it is not compared.

    Orders are compared over gloo, and on other backends if the environment sets SHARDWISE_CHECK_ORDER=1; 0
    turns the comparison off. Groups of one rank, and plans on fake tensors, have nothing to compare.
    """
    if group is None or group.size() == 1 or _compat.is_fake(torch.empty(0)):
        return None
    choice = os.environ.get("SHARDWISE_CHECK_ORDER")
    if choice == "0" or (choice is None and not over_gloo(group)):
        return None
    if group not in _orders:
        check_folder()
        # First, since an order stores its group's timeout.
        _compat.follow_timeout(group)
        _orders[group] = Order(group, _compat.default_store())
        _look_after(_orders[group])
    return _orders[group]


def watch_also(group: dist.ProcessGroup) -> None:
    """End waits in `group`, which has all ranks, when the default group's order finds them vain. Local."""
    order = order_of(dist.group.WORLD)
    if order is not None:
        # `_interrupt` ends messages of these groups, in any of which this rank may be waiting.
        order.groups.add(group)


def leave_all(reason: str) -> None:
    """Tell the other ranks that this one will join none of their collectives. Local."""
    for order in list(_orders.values()):
        order.leave(reason)


def explained(error: RuntimeError, orders: Sequence[Order], operation: str) -> RuntimeError:
    """Return an error that explains a transport's failure, in one of `orders`; any other error unchanged.

    Waits up to a few seconds for ranks to tell each other where they are.
    """
    if isinstance(error, ShardwiseError) or not orders:
        return error
    verdict = next((order.verdict for order in orders if order.verdict is not None), None)
    if verdict is None:
        if not of_transport(error):
            return error
        # After a timeout all connections may be intact.
        closed = not any(word in str(error) for word in _TIMEOUT_WORDS)
        verdicts = (_roll_call(order, closed=closed) for order in orders)
        verdict = next((words for words in verdicts if words is not None), None)
        verdict = verdict or orders[0].account(f"failed: {first_line(str(error))}")
    # Other ranks must hear of it before this one's process ends.
    for order in orders:
        order.verdict = verdict
        order.leave(f"failed to {operation}: {verdict}")
    write_report(orders[0], first_line(str(error)))
    return RankMismatchError(f"{here()}: could not {operation}: {verdict}")


def raise_explained(error: RuntimeError, orders: Sequence[Order], operation: str) -> NoReturn:
    explanation = explained(error, orders, operation)
    if explanation is error:
        raise error
    raise explanation from error


def of_transport(error: RuntimeError) -> bool:
    return any(word in str(error) for word in _TRANSPORT_ERROR_WORDS)


@contextmanager
def announced(group: dist.ProcessGroup | None, operation: str) -> Iterator[None]:
    """Announce a collective of `group` that the block issues, in words equal on ranks that do the same."""
    order = order_of(group)
    if order is None:
        yield
        return
    order.advance(event_for(operation))
    try:
        yield
    except RuntimeError as error:
        raise_explained(error, [order], first_line(operation))


def group_of_all(purpose: str) -> dist.ProcessGroup:
    """Make a gloo group of all ranks beside the default group, with its timeout. Collective."""
    whole = dist.group.WORLD
    assert whole is not None
    with announced(whole, purpose):
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=_compat.timeout_of(whole))
        return group


@contextmanager
def explaining(group: dist.ProcessGroup, operation: str) -> Iterator[None]:
    """Explain failures of the block, in which ranks of `group` do what they have agreed on, or agree."""
    order = order_of(group)  # on every rank: a rank without an order gives no sign of life
    if order is None:
        yield
        return
    previous, order.waits = order.waits, True  # blocks may be nested
    try:
        yield
    except RuntimeError as error:
        raise_explained(error, [order], operation)
    finally:
        order.waits = previous


@contextmanager
def watched_stages(stages: DeviceMesh) -> Iterator[None]:
    """Run a pipeline step so that ranks that wait for a stage that raised or ended learn which, in seconds.

        with watched_stages(mesh["pp"]):
            schedule.step(inputs, target=targets)

    Collective over the ranks of the stages, over gloo; on other backends it does nothing, unless the
    environment sets SHARDWISE_CHECK_ORDER=1.

    Raises:
        RankMismatchError: instead of a transport's failure; it names the rank.
    """
    order, operation = order_of(stages.get_group()), "run a step of the pipeline"
    if order is None:
        yield
        return
    order.advance(event_for(operation))
    try:
        yield
    except Exception as error:
        root: BaseException = error
        while root.__cause__ is not None and not isinstance(root, ShardwiseError):
            root = root.__cause__  # torch wraps what a stage raised
        if isinstance(root, RuntimeError):
            root = explained(root, [order], operation)
        # In all groups: other ranks of this stage wait for it too.
        leave_all(f"raised {type(root).__name__} in a step of the pipeline: {first_line(str(root))}")
        # A verdict, since peers are at the same event: only ranks further on see that this one left.
        order.verdict = order.verdict or f"{here()} {order.left}"
        with suppress(RuntimeError):
            order.post()
        if isinstance(root, ShardwiseError):
            raise root from error
        raise


def conflict(order: Order, records: Mapping[int, Record]) -> str | None:
    """Return why this rank would wait in vain; None if nothing is wrong."""
    for rank, record in sorted(records.items()):
        # A peer with a verdict has closed its connections.
        problem = record["verdict"] or _mismatch(order, rank, record) or _departure(order, rank, record)
        if problem is not None:
            return problem
    return None


def _mismatch(order: Order, rank: int, record: Record) -> str | None:
    passes, depth = record["passes"], record["depth"]
    end = order.latest if passes == order.passes else order.ended.get(passes)
    if end is None or (depth > end.depth and passes == order.passes):
        return None  # the other rank is ahead, so it compares
    if depth > end.depth:
        own_text = f"end a pass that began before, to {order.doing()}"
    else:
        node = end.ancestor(depth)
        if node.digest.hex() == record["digest"]:
            return None
        own_text = node.event.text
    texts = {order.ranks[order.rank]: own_text, order.ranks[rank]: order.text_of(rank)}
    return f"ranks disagree about what to do next, so they wait for each other.\n{differences(texts)}"


def _departure(order: Order, rank: int, record: Record) -> str | None:
    earlier = (record["passes"], record["depth"]) < (order.passes, order.latest.depth)
    # If this rank left the same pass and began another, so will its peers: all had the same error.
    if record["left"] is None or not earlier or record["passes"] in order.abandoned:
        return None
    return f"{named([order.ranks[rank]])} will not come to {order.doing()}: it {record['left']}"


def _roll_call(order: Order, *, closed: bool = False) -> str | None:
    """Return which rank is wrong or gone after a failure. `closed`: the failure was a closed connection."""
    started, silent = time.monotonic(), set(range(order.size)) - {order.rank}
    dead = {rank for other in list(_orders.values()) if other.store is order.store for rank in other.dead}
    # Ranks found to be gone in another group of this store are not waited for again.
    known_dead = {rank for rank in silent if order.ranks[rank] in dead}
    try:
        # Signs of life are counted, not timed: clocks of hosts differ.
        posts = {rank: record["posts"] for rank, record in order.read().items()}
        while (silent | order.lost_connections) - known_dead and time.monotonic() - started < _ROLL_CALL:
            # With two ranks it is impossible to say which one was cut off.
            if closed and order.size > 2:
                order.lost_connections |= _broken(order)
            order.post()
            records = order.read()
            problem = conflict(order, records) or _cut_off(order, records)
            if problem is not None:
                return problem
            silent -= {rank for rank, record in records.items() if record["posts"] != posts.get(rank)}
            time.sleep(_TICK)
    except RuntimeError:
        return STORE_GONE
    if not silent:
        return None
    silent = silent & _broken(order) or silent  # a rank that is only slow still has its connection
    order.dead = [order.ranks[rank] for rank in sorted(silent)]
    return (
        f"no sign of life from {named(order.dead)} for {_ROLL_CALL:g} s,"
        f" after a connection broke while this rank waited to {order.doing()}: it has ended, after"
        " fewer steps than this one or by an error that its own log has, or died"
    )


def _cut_off(order: Order, records: Mapping[int, Record]) -> str | None:
    """Return which rank all others have lost though it lives; None if no single rank is, as with two."""
    cut = {rank: set(record["cut from"]) for rank, record in records.items()}
    cut[order.rank] = order.lost_connections
    lost = [a for a in cut if all(a in cut[b] and b in cut[a] for b in cut if b != a)]
    if order.size < 3 or len(cut) < order.size or len(lost) != 1:
        return None
    return (
        f"{named([order.ranks[lost[0]]])} has lost its connections to all other ranks, which have theirs to"
        " each other: see to the network of its host"
    )


def _broken(order: Order) -> set[int]:
    """Return the peers whose connection has ended, which gloo reports on a send; nobody receives this one."""
    broken = set()
    # A copy: groups may be freed during the loop.
    for group in list(order.groups):
        for peer in set(range(group.size())) - {group.rank()}:
            try:
                group.send([_PROBE], peer, _PROBE_TAG)
            except RuntimeError:
                broken.add(peer)
    return broken


def _interrupt(order: Order) -> None:
    """End this rank's pending sends and receives."""
    # gloo ends all messages of a group when one of them times out.
    for group in list(order.groups):
        with suppress(RuntimeError, ValueError):
            peer = (group.rank() + 1) % group.size()
            # Nobody sends this: it exists to time out, which also raises here.
            group.recv([_PROBE], peer, _PROBE_TAG).wait(_SOON)


def _end_if_stuck(order: Order, orders: Sequence[Order], *, logged: bool) -> None:
    """Log what was found if nothing has raised it; then end the process, if reports are enabled."""
    if any(other.raised or other.left for other in orders):
        return
    if not logged:
        _log.error("%s: %s", here(), order.verdict)
    if FOLDER not in os.environ:
        return
    reason = f"ended by shardwise, with status {STUCK}: it was stuck, and no other rank waits for it any more"
    write_report(order, reason)
    _log.error("%s: %s", here(), reason)
    # Flush log handlers, since `os._exit` does not.
    logging.shutdown()
    # `sys.exit` would end only this thread.
    os._exit(STUCK)


class _Watch(threading.Thread):
    def __init__(self) -> None:
        super().__init__(name="shardwise-watch", daemon=True)
        # Weakly, since an order lives as long as its process group.
        self.positions: WeakKeyDictionary[Order, tuple[int, Node]] = WeakKeyDictionary()
        self.moved: tuple[float, ref[Order]] | None = None  # the last progress: when, and which order
        self.verdict_times: WeakKeyDictionary[Order, float] = WeakKeyDictionary()  # when a verdict was found
        self.unlogged: WeakSet[Order] = WeakSet()  # whose verdict this rank is about to raise and print
        self.lock = threading.Lock()
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(_TICK):
            self._check_orders()

    def end(self) -> None:
        """End the thread before the interpreter ends: inside the store it would abort the process."""
        self.ended.set()
        self.join(_JOIN_TIMEOUT_SECONDS)
        if any(order.verdict or order.left for order in list(self.positions)):
            time.sleep(TIME_TO_READ.total_seconds())  # the store may end with this process

    def _check_orders(self) -> None:
        with self.lock:
            orders = list(self.positions.items())
        for order, earlier in orders:
            position = (order.passes, order.latest)
            if position != earlier:
                self.positions[order] = position
                self.moved = time.monotonic(), ref(order)
            # A rank that has announced nothing yet and waits for no other has nothing to compare.
            elif order.verdict is None and (
                order.passes or order.latest is not order.root or order.left or order.waits
            ):
                # At the end of a run the store may end first.
                with suppress(RuntimeError, ValueError, KeyError):
                    self._judge(order, earlier)
            elif time.monotonic() - self.verdict_times.get(order, math.inf) > _RAISE_GRACE_SECONDS:
                _end_if_stuck(order, [other for other, _ in orders], logged=order not in self.unlogged)
                self.unlogged.discard(order)
        order_moved = self.moved[1]() if self.moved else None
        if self.moved and order_moved and time.monotonic() - self.moved[0] > _NEARLY * order_moved.timeout:
            write_report(order_moved, f"stood still for {_NEARLY * order_moved.timeout:g} s")
            # One report per standstill: it is set again when this rank makes progress.
            self.moved = None

    def _judge(self, order: Order, earlier: tuple[int, Node]) -> None:
        order.post()
        records = order.read()
        verdict = conflict(order, records)
        if verdict is None and any(record["cut from"] for record in records.values()):
            order.lost_connections |= _broken(order)  # no error tells it, if it waits for another rank
            verdict = _cut_off(order, records)
        # A wait in the store does not end when a rank does, so check connections.
        if verdict is None and order.asking and _broken(order):
            verdict = _roll_call(order)
        # If the rank has moved meanwhile, the comparison is out of date.
        if verdict is None or earlier != (order.passes, order.latest):
            return
        order.verdict = verdict
        # From here on the rank has a moment to raise before it counts as stuck.
        self.verdict_times[order] = time.monotonic()
        # A rank that raised has already said why; the error of one that is about to is printed.
        if order.left is None and prints_errors_once():
            self.unlogged.add(order)
        elif order.left is None:
            _log.error("%s: %s", here(), verdict)
        order.post()
        write_report(order, "found that it would wait in vain")
        # After setting the verdict: the call that this ends reads it.
        _interrupt(order)


_watch: list[_Watch] = []


def _look_after(order: Order) -> None:
    if not _watch or not _watch[0].is_alive():  # a fork leaves threads behind
        _watch[:] = [_Watch()]
        _watch[0].start()
        atexit.register(_watch[0].end)
    # The thread may be iterating over them.
    with _watch[0].lock:
        _watch[0].positions[order] = (order.passes, order.latest)
