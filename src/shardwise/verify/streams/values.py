"""Values of a simulated device that runs operations in another order, one that its events allow.

There are two worlds of memory. In the first, each operator runs at once, in the host's order, which gives
shapes and reference values. In the second, each block of the device has a shadow. An operation is deferred
and runs on shadows later: once all that its stream's clock comes after has run, and either the `Order` or a
wait of the host requires it. An operation that does not wait for another may therefore run before it.

    memory without values  is NaN, in both worlds
    freed memory           is reused at once, in the worst way: when a later allocation on the same stream is
                           first used, the freed shadow becomes NaN; if an operation then still writes the
                           freed shadow, the later allocation becomes NaN
    host memory            that copies read or write while the host continues has a shadow too

Values that the host reads are compared bit for bit, and at the end all memory that still exists. If the other
ranks do not exist, what they would be sent is compared too. On real ranks each collective runs a second time,
on shadows, in a separate group per stream.
"""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise import _compat
from shardwise.comm.count import on_tensors, tensors_in
from shardwise.errors import ShardwiseError
from shardwise.planner.noop_group import NoopGroup
from shardwise.verify.streams import operators
from shardwise.verify.streams.clocks import Clock, Operation
from shardwise.verify.streams.device import SimTensor, Simulation, bare_of, span
from shardwise.verify.streams.memory import Block
from shardwise.verify.streams.orders import Order
from shardwise.verify.streams.peers import Peers

# Operators that do not read what they write, although their schema would allow it.
_OVERWRITE = ("copy_", "_foreach_copy_", "zero_", "_foreach_zero_", "fill_")
_NO_VALUE = 255  # in every byte: NaN in each floating dtype


@dataclass(frozen=True)
class Difference:
    """A value that differs in this order.

    Attributes:
        what: a block of memory, or a value.
        seen: where it was found.
        first: the first operation that computed a different value.
    """

    what: str
    seen: str
    first: Operation | None

    def __str__(self) -> str:
        begins = f"; the first operation whose numbers differ is {self.first}" if self.first else ""
        return f"{self.what} differs from the CPU's result {self.seen}{begins}"


@dataclass(slots=True, eq=False)
class _Job:
    """A deferred operation."""

    operation: Operation
    clock: Clock  # of what must run before it
    number: int  # in the host's order
    begin: Callable[[], None]
    run: Callable[[], Any]
    uses: list[_Shadow]
    writes: list[_Shadow]
    started: bool = False
    runs: bool = False


@dataclass(slots=True, eq=False)
class _Shadow:
    """A block's contents in the second world.

    Attributes:
        before: freed shadows on which operations were still to run when this one was allocated.
        after: shadows that were allocated later and are in use.
        waiting: operations that are still to run on it.
        is_new_on_host: whether its contents before the operation being deferred are unknown.
    """

    block: Block
    memory: torch.UntypedStorage
    real: weakref.ref[torch.UntypedStorage]  # its memory in the first world
    before: list[_Shadow] = field(default_factory=list)
    after: list[_Shadow] = field(default_factory=list)
    waiting: list[_Job] = field(default_factory=list)
    is_new_on_host: bool = False

    def forget(self) -> None:
        _forget(self.memory)

    def may_be_given_out(self) -> bool:
        """Return whether every stream passed to `record_stream` is done with this memory."""
        return not any(job.operation.line in self.block.guarded for job in self.waiting)


class Late:
    """Runs a simulation's operations a second time, in another order."""

    def __init__(self, simulation: Simulation, order: Order, differences: list[Difference]) -> None:
        self.simulation, self.order, self.differences = simulation, order, differences
        self._chance = random.Random(order.seed or 0)
        self._waiting: dict[int, deque[_Job]] = {}  # by line
        self._freed: dict[int, list[_Shadow]] = {}  # by owner, with something still to run
        self._stalled: list[Operation] = []
        self._numbers = count()
        self._threads: set[int] = set()  # those that have deferred operations
        self.peers = Peers()
        self._first: Operation | None = None
        simulation.late, simulation.timeline.waited = self, self.run_until

    # Memory

    def allocated(self, block: Block, storage: torch.UntypedStorage, *, blank: bool) -> None:
        """Record an allocated block. If it is `blank`, it has no values in the first world either."""
        if blank:
            _forget(storage)
        freed = self._freed[block.owner] = [one for one in self._freed.get(block.owner, ()) if one.waiting]
        block.shadow = _Shadow(block, torch.UntypedStorage(storage.nbytes()), weakref.ref(storage))
        block.shadow.before = list(freed)
        block.shadow.forget()

    def freed(self, block: Block) -> None:
        """Record that a block was freed."""
        if block.shadow is not None:
            self._freed.setdefault(block.owner, []).append(block.shadow)

    def _shadow_of(self, tensor: Tensor) -> _Shadow | None:
        low, _ = span(tensor)
        simulation = self.simulation
        block = (simulation.memory if isinstance(tensor, SimTensor) else simulation.host).at(low)
        if block is None:
            return None
        if block.shadow is None:  # host memory, which has a shadow from now on
            storage = tensor.untyped_storage()
            block.shadow = _Shadow(block, storage.clone(), weakref.ref(storage), is_new_on_host=True)
        return block.shadow  # type: ignore[no-any-return]

    def _twin(self, tensor: Tensor) -> Tensor:
        """Return the tensor in the second world; a copy if it is on the host and not tracked."""
        with _compat.below_modes():
            shadow = self._shadow_of(tensor) if tensor.numel() else None
            if shadow is None:
                return bare_of(tensor).clone()
            offset = (span(tensor)[0] - shadow.block.low) // tensor.element_size()
            twin = torch.empty(0, dtype=tensor.dtype)
            return twin.set_(shadow.memory, offset, tensor.shape, tensor.stride())

    # Deferring

    def operator(
        self,
        operation: Operation,
        func: Any,
        args: Any,
        kwargs: Any,
        outcome: Any,
        random_state: Tensor | None,
    ) -> None:
        """Defer, in the second world, an operator that has run in the first."""
        how = operators.of(func)
        reads, writes = how.accesses(args, kwargs)
        if how.name in _OVERWRITE:
            reads = [t for t in reads if all(t is not one for one in writes)]
        twin = _Memo(self._twin)
        given, named = on_tensors(args, twin), on_tensors(kwargs, twin)

        def again() -> Any:
            with torch.random.fork_rng((), enabled=random_state is not None):
                if random_state is not None:
                    torch.set_rng_state(random_state)
                return func(*given, **named)

        self._put_off(operation, again, twin, reads, writes, outcome)

    def collective(
        self,
        operation: Operation,
        group: dist.ProcessGroup,
        again: Callable[..., Any],
        given: Any,
        read: Sequence[Tensor],
        written: Sequence[Tensor],
        outcome: Any = None,
    ) -> None:
        """Defer a collective that ran in the first world; `again(group, given, outcome)` repeats it."""
        twin = _Memo(self._twin)
        twins, results = on_tensors(given, twin), on_tensors(outcome, twin)
        line = self.simulation.timeline.lines[operation.line]
        name, clock = self.peers.name(group, line.key), dict(line.clock)

        sent = [(twin(t), _bytes(t)) for t in read if t.numel()] if isinstance(group, NoopGroup) else []

        def run() -> None:
            self.peers.put_off.pop(name)
            for now, was in sent:
                if not torch.equal(_bytes(now), was):
                    self._differs("data sent to other ranks", f"in {operation}", operation)
            twin_group = self.peers.twin(group, line.key, name)
            self.peers.wait(again(twin_group, twins, results), name)

        self.peers.put_off[name] = lambda: self.run_until(clock)
        self._put_off(operation, run, twin, read, written, outcome)

    def moved(
        self, operation: Operation, before: Block, block: Block, storage: torch.UntypedStorage, nbytes: int
    ) -> None:
        """Record that a storage with values was resized, and how many bytes of them stay."""
        with _compat.below_modes():
            _of_bytes(storage)[nbytes:].fill_(_NO_VALUE)
        old, new = _of_bytes(before.shadow.memory)[:nbytes], _of_bytes(block.shadow.memory)[:nbytes]
        shadows = [before.shadow, block.shadow]
        self._wait_for_turn(
            operation, lambda: new.copy_(old), shadows, [block.shadow], begin=_begin([old], [new])
        )

    def _put_off(
        self,
        operation: Operation,
        again: Callable[[], Any],
        twin: _Memo,
        read: Sequence[Tensor],
        written: Sequence[Tensor],
        outcome: Any,
    ) -> None:
        returned = [twin(t) for t in tensors_in(outcome)]
        value = outcome if isinstance(outcome, (bool, int, float, complex)) else None
        changed = {id(t): t for t in (*written, *tensors_in(outcome)) if t.numel()}
        expected = [(twin(t), self._shadow_of(t) is None, _bytes(t)) for t in changed.values()]

        def run() -> None:
            seen = f"in {operation}"
            try:
                result = again()
            except (RuntimeError, IndexError) as error:
                self._differs("an argument", f"{seen}, which fails: {error}", operation)
                return
            for to, made in zip(returned, tensors_in(result), strict=False):
                if to.shape != made.shape:
                    self._differs("a shape", f"{seen}: {tuple(made.shape)}", operation)
                elif to.data_ptr() != made.data_ptr():
                    to.copy_(made)
            if value is not None and result != value and value == value:
                self._differs("a value read by the host", f"{seen}: {result} instead of {value}", operation)
            for now, read_by_host, was in expected:
                if not torch.equal(_bytes(now), was):
                    self._first = self._first or operation
                    if read_by_host:
                        self._differs("a value read by the host", seen, operation)

        for t in changed.values():
            if (shadow := self._shadow_of(t)) is not None and shadow.is_new_on_host:
                with _compat.below_modes():
                    _forget_values(twin(t))
        kept = {id(t): twin(t) for t in read if t.numel()}
        begin = _begin(list(kept.values()), [twin(t) for key, t in changed.items() if key not in kept])
        uses = [shadow for t in twin.asked if t.numel() and (shadow := self._shadow_of(t))]
        writes = [shadow for t in changed.values() if (shadow := self._shadow_of(t))]
        self._wait_for_turn(operation, run, uses, writes, begin=begin)

    def _wait_for_turn(
        self,
        operation: Operation,
        run: Callable[[], Any],
        uses: list[_Shadow],
        writes: list[_Shadow],
        *,
        begin: Callable[[], None],
    ) -> None:
        clock = dict(self.simulation.timeline.lines[operation.line].clock)
        self._threads.add(threading.get_ident())
        job = _Job(
            operation,
            clock,
            next(self._numbers),
            begin,
            run,
            list(dict.fromkeys(uses)),
            list(dict.fromkeys(writes)),
        )
        self._waiting.setdefault(operation.line, deque()).append(job)
        for shadow in job.uses:
            shadow.is_new_on_host = False
            shadow.waiting.append(job)
        if self.order.runs_at_once(operation, clock, self._stalled, self._chance):
            self.run_until(clock)
        self._begin_what_can()

    # Running

    def run_until(self, clock: Clock) -> None:
        """Run only what comes before `clock`."""
        while wanted := [
            jobs[0]
            for line, jobs in self._waiting.items()
            if jobs and jobs[0].operation.tick <= clock.get(line, 0)
        ]:
            ready = [job for job in wanted if not job.runs and self._is_ready(job)]
            if not ready and any(jobs[0].runs for jobs in self._waiting.values() if jobs):
                return  # something that another rank needs waits for that rank
            if not ready:
                raise ShardwiseError(f"operations wait for one another: {', '.join(map(str, wanted))}")
            by_seed = self.order.seed is not None
            self._run(self._chance.choice(ready) if by_seed else min(ready, key=lambda job: job.number))

    def host_blocks(self) -> None:
        """Run everything before this thread blocks in a host collective, where it can run nothing for others.

        A thread that defers nothing, such as a watchdog that probes connections, skips this.
        """
        if threading.get_ident() in self._threads:
            self.run_all()

    def pause(self, seconds: float) -> None:
        """Sleep, as a host that waits for other ranks' words; what they await of it runs."""
        if threading.get_ident() in self._threads:
            self.peers.run_what_others_await()
        time.sleep(seconds)

    def run_all(self) -> None:
        self.run_until({line: jobs[-1].operation.tick for line, jobs in self._waiting.items() if jobs})

    def _is_ready(self, job: _Job) -> bool:
        return all(
            jobs[0] is job or jobs[0].operation.tick > job.clock.get(line, 0)
            for line, jobs in self._waiting.items()
            if jobs
        )

    def _begin_what_can(self) -> None:
        """Begin operations that could run now; what they write has no value until they finish."""
        for jobs in self._waiting.values():
            if jobs and not jobs[0].started and self._is_ready(jobs[0]):
                job, jobs[0].started = jobs[0], True
                self._use(job, job.begin)

    def _run(self, job: _Job) -> None:
        job.started = job.runs = True
        if job.operation in self._stalled:
            self._stalled.remove(job.operation)
        for shadow in job.uses:
            shadow.waiting.remove(job)
        self._use(job, job.run)
        self._waiting[job.operation.line].popleft()
        self._begin_what_can()

    def _use(self, job: _Job, action: Callable[[], Any]) -> None:
        with _compat.below_modes():
            for shadow in job.uses:
                shadow.before = [freed for freed in shadow.before if freed.waiting]
                for freed in shadow.before:
                    if freed.may_be_given_out():
                        freed.forget()
                        if shadow not in freed.after:
                            freed.after.append(shadow)
            action()
            for shadow in job.writes:
                for later in shadow.after:
                    later.forget()

    # Comparing

    def host_reads(self, tensors: Iterable[Tensor], name: str) -> None:
        """Prepare for a read of the host's own memory."""
        for tensor in tensors:
            shadow = getattr(self.simulation.host.at(span(tensor)[0]), "shadow", None)
            if shadow is not None and not torch.equal(_bytes(self._twin(tensor)), _bytes(tensor)):
                writers = (job.operation for job in shadow.waiting if shadow in job.writes)
                self._differs("a value read by the host", f"in {name}", next(writers, self._first))

    def host_wrote(self, tensors: Iterable[Tensor]) -> None:
        """Record that the host has written its own memory, at once."""
        for tensor in tensors:
            block = self.simulation.host.at(span(tensor)[0])
            if block is not None and block.shadow is not None:
                with _compat.below_modes():
                    self._twin(tensor).copy_(tensor)

    def finish(self, name: Callable[[Block, int], str]) -> None:
        """Run what is left, and compare all memory that still exists."""
        self.run_all()
        for block in (*self.simulation.memory.living(), *self.simulation.host.living()):
            shadow = block.shadow
            real = None if shadow is None else shadow.real()
            if real is not None and not torch.equal(_of_bytes(real), _of_bytes(shadow.memory)):
                self._differs(name(block, block.low), "at the end", self._first)

    def _differs(self, what: str, seen: str, first: Operation | None) -> None:
        self._first = self._first or first
        self.differences.append(Difference(what, seen, self._first))


def _begin(reads: list[Tensor], overwrites: list[Tensor]) -> Callable[[], None]:
    """Return a function that invalidates what an operation will write, except what it reads."""

    touched = {tensor.untyped_storage().data_ptr() for tensor in overwrites}
    same = [_once(tensor) for tensor in reads if tensor.untyped_storage().data_ptr() in touched]

    def begin() -> None:
        kept = [(tensor, tensor.clone()) for tensor in same]
        for tensor in overwrites:
            _forget_values(tensor)
        for tensor, values in kept:
            tensor.copy_(values)

    return begin


def _forget_values(tensor: Tensor) -> None:
    nothing = torch.full((tensor.element_size(),), _NO_VALUE, dtype=torch.uint8).view(tensor.dtype)
    _once(tensor).copy_(nothing[0])


def _once(tensor: Tensor) -> Tensor:
    """Return a view of `tensor` with dims of stride 0 cut to one element."""
    sizes = [
        size if stride else min(size, 1) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    return tensor.as_strided(sizes, tensor.stride(), tensor.storage_offset())


class _Memo:
    """Cache of the twins of an operation's tensors."""

    def __init__(self, twin: Callable[[Tensor], Tensor]) -> None:
        self._make, self._made = twin, dict[int, Tensor]()
        self.asked: list[Tensor] = []

    def __call__(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._made:
            self._made[id(tensor)] = self._make(tensor)
            self.asked.append(tensor)
        return self._made[id(tensor)]


def _bytes(tensor: Tensor) -> Tensor:
    """Return a bitwise copy of a tensor's values."""
    with _compat.below_modes():
        return bare_of(tensor).clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _of_bytes(storage: torch.UntypedStorage) -> Tensor:
    with _compat.below_modes():
        return torch.empty(0, dtype=torch.uint8).set_(storage)


def _forget(storage: torch.UntypedStorage) -> None:
    with _compat.below_modes():
        _of_bytes(storage).fill_(_NO_VALUE)
