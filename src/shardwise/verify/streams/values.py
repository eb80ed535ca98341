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
from collections.abc import Callable, Iterable
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
from shardwise.verify.streams.clocks import Clock, Operation, Order, comes_after
from shardwise.verify.streams.collectives import MESSAGES
from shardwise.verify.streams.device import SimTensor, Simulation, bare_of, span
from shardwise.verify.streams.memory import Block
from shardwise.verify.streams.peers import Peers

# Operators that do not read what they write, although their schema would allow it.
_OVERWRITE = ("copy_", "_foreach_copy_", "zero_", "_foreach_zero_", "fill_")
# CPU kernels that check no index: with one that has no value they would write into memory of others.
_UNCHECKED = "_embedding_bag"
_NO_VALUE = 255  # in every byte: NaN in each floating dtype


@dataclass(frozen=True)
class Difference:
    """A value that differs in this order."""

    what: str  # a block of memory, or a value
    seen: str  # where it was found
    first: Operation | None  # that computed a different value

    def __str__(self) -> str:
        begins = f"; the first operation whose numbers differ is {self.first}" if self.first else ""
        return f"{self.what} differs from the CPU's result {self.seen}{begins}"


@dataclass(slots=True, eq=False)
class _Job:
    operation: Operation
    clock: Clock  # of what must run before it
    number: int  # in the host's order
    begin: Callable[[], None]
    run: Callable[[], Any]
    uses: list[_Shadow]
    writes: list[_Shadow]
    started: bool = False
    is_running: bool = False


@dataclass(slots=True, eq=False)
class _Shadow:
    """A block's contents in the second world."""

    block: Block
    memory: torch.UntypedStorage
    real: weakref.ref[torch.UntypedStorage]  # its memory in the first world
    # Freed shadows on which operations were still to run when this one was allocated.
    predecessors: list[_Shadow] = field(default_factory=list)
    successors: list[_Shadow] = field(default_factory=list)  # allocated later and in use
    waiting: list[_Job] = field(default_factory=list)  # operations that are still to run on it
    is_new_on_host: bool = False  # whether its contents before the operation being deferred are unknown


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
        simulation.late, simulation.timeline.on_wait = self, self.run_until

    # Memory

    def record_allocation(self, block: Block, storage: torch.UntypedStorage, *, blank: bool) -> None:
        """Record an allocated block. If it is `blank`, it has no values in the first world either."""
        if blank:
            _forget(storage)
        freed = self._freed[block.owner] = [s for s in self._freed.get(block.owner, ()) if s.waiting]
        block.shadow = _Shadow(block, torch.UntypedStorage(storage.nbytes()), weakref.ref(storage))
        block.shadow.predecessors = list(freed)
        _forget(block.shadow.memory)

    def record_free(self, block: Block) -> None:
        if block.shadow is not None:
            self._freed.setdefault(block.owner, []).append(block.shadow)

    def _shadow_of(self, tensor: Tensor) -> _Shadow | None:
        low, _ = span(tensor)
        simulation = self.simulation
        block = (simulation.memory if isinstance(tensor, SimTensor) else simulation.host).at(low)
        if block is None:
            return None
        if block.shadow is None:  # host memory, which has a shadow from now on
            storage = simulation.pinned_storage(tensor) or tensor.untyped_storage()
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
        self, operation: Operation, func: Any, args: Any, kwargs: Any, outcome: Any, rng_state: Tensor | None
    ) -> None:
        """Defer, in the second world, an operator that has run in the first."""
        op = operators.of(func)
        reads, writes = op.accesses(args, kwargs)
        if op.name in _OVERWRITE:
            reads = [t for t in reads if all(t is not written for written in writes)]
        twin = _Memo(self._twin)
        twin_args, twin_kwargs = on_tensors(args, twin), on_tensors(kwargs, twin)

        def rerun() -> Any:
            if op.name.startswith(_UNCHECKED) and any(_is_negative(at) for at in twin_args[1:5]):
                raise IndexError("an index has no value")
            with torch.random.fork_rng((), enabled=rng_state is not None):
                if rng_state is not None:
                    torch.set_rng_state(rng_state)
                return func(*twin_args, **twin_kwargs)

        self._defer(operation, rerun, twin, (reads, writes), outcome)

    def collective(
        self,
        operation: Operation,
        group: dist.ProcessGroup,
        rerun: Callable[..., Any],
        inputs: Any,
        touched: operators.Touched,
        outcome: Any = None,
    ) -> None:
        """Defer a collective that ran in the first world; `rerun(group, inputs, outcome)` repeats it."""
        twin = _Memo(self._twin)
        twins, results = on_tensors(inputs, twin), on_tensors(outcome, twin)
        line = self.simulation.timeline.lines[operation.line]
        name, clock = self.peers.name(group, line.key), dict(line.clock)
        # Messages need no order among collectives, and ranks outside a pair make no group of its own.
        order = group.group_name if operation.name in MESSAGES else line.key

        sent = [(twin(t), _bytes(t)) for t in touched[0] if t.numel()] if isinstance(group, NoopGroup) else []

        def run() -> None:
            self.peers.deferred.pop(name)
            for current, original in sent:
                if not torch.equal(_bytes(current), original):
                    self._report("data sent to other ranks", f"in {operation}", operation)
            twin_group = self.peers.twin(group, order, name)
            self.peers.wait(rerun(twin_group, twins, results), name)

        self.peers.deferred[name] = lambda: self.run_until(clock)
        self._defer(operation, run, twin, touched, outcome)

    def record_move(
        self, operation: Operation, old_block: Block, block: Block, storage: torch.UntypedStorage, nbytes: int
    ) -> None:
        """Record that a storage with values was resized, and how many bytes of them stay."""
        with _compat.below_modes():
            _as_bytes(storage)[nbytes:].fill_(_NO_VALUE)
        old, new = _as_bytes(old_block.shadow.memory)[:nbytes], _as_bytes(block.shadow.memory)[:nbytes]
        shadows = [old_block.shadow, block.shadow]
        self._wait_for_turn(
            operation, lambda: new.copy_(old), shadows, [block.shadow], begin=_begin([old], [new])
        )

    def _defer(
        self, op: Operation, rerun: Callable[[], Any], twin: _Memo, touched: operators.Touched, outcome: Any
    ) -> None:
        reads, writes = touched
        returned = [twin(t) for t in tensors_in(outcome)]
        value = outcome if isinstance(outcome, (bool, int, float, complex)) else None
        changed = {id(t): t for t in (*writes, *tensors_in(outcome)) if t.numel()}
        expected = [(twin(t), self._shadow_of(t) is None, _bytes(t)) for t in changed.values()]

        def run() -> None:
            place = f"in {op}"
            try:
                result = rerun()
            except (RuntimeError, IndexError) as error:
                self._report("an argument", f"{place}, which fails: {error}", op)
                return
            for target, source in zip(returned, tensors_in(result), strict=False):
                if target.shape != source.shape:
                    self._report("a shape", f"{place}: {tuple(source.shape)}", op)
                elif target.data_ptr() != source.data_ptr():
                    target.copy_(source)
            if value is not None and result != value and value == value:
                self._report("a value read by the host", f"{place}: {result} instead of {value}", op)
            for current, read_by_host, original in expected:
                if not torch.equal(_bytes(current), original):
                    self._first = self._first or op
                    if read_by_host:
                        self._report("a value read by the host", place, op)

        for t in changed.values():
            if (shadow := self._shadow_of(t)) is not None and shadow.is_new_on_host:
                with _compat.below_modes():
                    _forget_values(twin(t))
        inputs = {id(t): twin(t) for t in reads if t.numel()}
        begin = _begin(list(inputs.values()), [twin(t) for key, t in changed.items() if key not in inputs])
        uses = [shadow for t in twin if t.numel() and (shadow := self._shadow_of(t))]
        overwritten = [shadow for t in changed.values() if (shadow := self._shadow_of(t))]
        self._wait_for_turn(op, run, uses, overwritten, begin=begin)

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
        used, written = (list(dict.fromkeys(shadows)) for shadows in (uses, writes))
        job = _Job(operation, clock, next(self._numbers), begin, run, used, written)
        self._waiting.setdefault(operation.line, deque()).append(job)
        for shadow in job.uses:
            shadow.is_new_on_host = False
            shadow.waiting.append(job)
        if self.order.runs_at_once(operation, clock, self._stalled, self._chance):
            self.run_until(clock)
        self._begin_ready()

    # Running

    def run_until(self, clock: Clock) -> None:
        """Run only the operations that come before `clock`."""
        while heads := [
            jobs[0]
            for line, jobs in self._waiting.items()
            if jobs and jobs[0].operation.tick <= clock.get(line, 0)
        ]:
            ready = [job for job in heads if not job.is_running and self._is_ready(job)]
            if not ready and any(jobs[0].is_running for jobs in self._waiting.values() if jobs):
                return  # something that another rank needs waits for that rank
            if not ready:
                raise ShardwiseError(f"operations wait for one another: {', '.join(map(str, heads))}")
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
            self.peers.run_awaited()
        time.sleep(seconds)

    def run_all(self) -> None:
        self.run_until({line: jobs[-1].operation.tick for line, jobs in self._waiting.items() if jobs})

    def _is_ready(self, job: _Job) -> bool:
        return all(
            jobs[0] is job or jobs[0].operation.tick > job.clock.get(line, 0)
            for line, jobs in self._waiting.items()
            if jobs
        )

    def _begin_ready(self) -> None:
        """Begin operations that could run now; what they write has no value until they finish."""
        for jobs in self._waiting.values():
            if jobs and not jobs[0].started and self._is_ready(jobs[0]):
                job, jobs[0].started = jobs[0], True
                self._use(job, job.begin)

    def _run(self, job: _Job) -> None:
        job.started = job.is_running = True
        if job.operation in self._stalled:
            self._stalled.remove(job.operation)
        for shadow in job.uses:
            shadow.waiting.remove(job)
        self._use(job, job.run)
        self._waiting[job.operation.line].popleft()
        self._begin_ready()

    def _use(self, job: _Job, action: Callable[[], Any]) -> None:
        with _compat.below_modes():
            for shadow in job.uses:
                shadow.predecessors = [freed for freed in shadow.predecessors if freed.waiting]
                for freed in shadow.predecessors:
                    # once every stream passed to `record_stream` is done with this memory
                    if not any(comes_after(freed.block.guard, job.operation) for job in freed.waiting):
                        _forget(freed.memory)
                        if shadow not in freed.successors:
                            freed.successors.append(shadow)
            action()
            for shadow in job.writes:
                for later in shadow.successors:
                    _forget(later.memory)

    # Comparing

    def host_reads(self, tensors: Iterable[Tensor], name: str) -> None:
        """Prepare for a read of the host's own memory."""
        for tensor in tensors:
            shadow = getattr(self.simulation.host.at(span(tensor)[0]), "shadow", None)
            if shadow is not None and not torch.equal(_bytes(self._twin(tensor)), _bytes(tensor)):
                writers = (job.operation for job in shadow.waiting if shadow in job.writes)
                self._report("a value read by the host", f"in {name}", next(writers, self._first))

    def record_host_write(self, tensors: Iterable[Tensor]) -> None:
        """Record that the host has written its own memory, at once."""
        for tensor in tensors:
            block = self.simulation.host.at(span(tensor)[0])
            if block is not None and block.shadow is not None:
                with _compat.below_modes():
                    self._twin(tensor).copy_(tensor)

    def finish(self, name: Callable[[Block, int], str]) -> None:
        """Run the remaining operations, and compare all memory that still exists."""
        self.run_all()
        for block in (*self.simulation.memory.living(), *self.simulation.host.living()):
            shadow = block.shadow
            real = None if shadow is None else shadow.real()
            if real is not None and not torch.equal(_as_bytes(real), _as_bytes(shadow.memory)):
                self._report(name(block, block.low), "at the end", self._first)

    def _report(self, subject: str, place: str, first: Operation | None) -> None:
        self._first = self._first or first
        self.differences.append(Difference(subject, place, self._first))


def _begin(reads: list[Tensor], overwrites: list[Tensor]) -> Callable[[], None]:
    """Return a function that invalidates the memory that an operation will write, except its inputs."""

    touched = {tensor.untyped_storage().data_ptr() for tensor in overwrites}
    shared = [_once(tensor) for tensor in reads if tensor.untyped_storage().data_ptr() in touched]

    def begin() -> None:
        saved = [(tensor, tensor.clone()) for tensor in shared]
        for tensor in overwrites:
            _forget_values(tensor)
        for tensor, values in saved:
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


class _Memo(dict[Tensor, Tensor]):
    """The twins of an operation's tensors; each is made when it is first asked for."""

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        self.make = make

    def __call__(self, tensor: Tensor) -> Tensor:
        if tensor not in self:
            self[tensor] = self.make(tensor)
        return self[tensor]


def _is_negative(argument: Any) -> bool:
    indices = isinstance(argument, Tensor) and not argument.is_floating_point()
    return indices and bool((argument < 0).any())


def _bytes(tensor: Tensor) -> Tensor:
    """Return a bitwise copy of a tensor's values."""
    with _compat.below_modes():
        return bare_of(tensor).clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    with _compat.below_modes():
        return torch.empty(0, dtype=torch.uint8).set_(storage)


def _forget(storage: torch.UntypedStorage) -> None:
    with _compat.below_modes():
        _as_bytes(storage).fill_(_NO_VALUE)
