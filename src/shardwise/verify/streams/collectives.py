"""Collectives of a simulated device: the stream each runs on, and when it ends.

A synchronous collective runs on the current stream. An asynchronous one runs on its group's stream, after
everything issued to the current stream so far. `wait` on its work makes the stream that is then current wait
for it; until then its tensors stay alive, as with NCCL's process group. A message outside a batch runs on a
stream of its pair of ranks, as it does there unless the group was made for one device. Under a no-op group
every rank is assumed to be like this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise import _compat
from shardwise._compat import AsyncCollectiveTensor, resolve_process_group, storage_id, wait_for_collective
from shardwise.comm.count import on_tensors, tensors_in
from shardwise.comm.kinds import NATIVE, WAIT
from shardwise.planner.noop_group import COLLECTIVES, NoopGroup
from shardwise.verify.streams.clocks import Clock, Line, Operation, merge
from shardwise.verify.streams.device import NAME, SimTensor, Simulation, bare_of, memory_of, on_device
from shardwise.verify.streams.operators import Touched
from shardwise.verify.streams.streams import Stream

MESSAGES = ("send", "recv")
# These methods write the first argument and read the second; all others read and write every tensor.
_TWO_SIDED = ("gather", "scatter", "all_to_all", "alltoall")


class _Work(dist.Work):
    """Stand-in for the work of an asynchronous collective."""

    def __init__(self, collectives: Collectives, line: Line, tensors: list[Tensor]) -> None:
        super().__init__()
        self.collectives, self._tensors = collectives, tensors
        self._clock = dict(line.clock)

    def wait(self, timeout: Any = None) -> bool:
        current = self.collectives.simulation.timeline.current()
        merge(current.line.clock, self._clock)
        self._tensors = []
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """Wait, then return True: a caller that polls would poll until completion."""
        self.collectives.simulation.timeline.host_waits(self._clock)
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return _Future(self, self._tensors)


class _Future(torch.futures.Future[Any]):
    """Stand-in for the future of an asynchronous collective; its callbacks run on a separate stream."""

    def __init__(self, work: _Work, value: Any) -> None:
        super().__init__()
        self._work = work
        self.set_result(value)

    def wait(self) -> Any:
        self._work.wait()
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> torch.futures.Future[Any]:
        collectives = self._work.collectives
        stream = Stream(name="the stream of a callback")
        with stream:
            self._work.wait()
            value = callback(self)
        return _Future(_Work(collectives, stream.line, []), value)

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.then(callback)


class _Works(dist.Work):
    """The work of several collectives. Each is waited for only once: a second wait on gloo never returns."""

    def __init__(self, works: list[Any]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: Any = None) -> bool:
        works, self._works = self._works, []
        for work in works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


@dataclass(frozen=True)
class _Part:
    """A collective, alone or of a batch: how and on which tensors to run it, what it reads and writes."""

    run: Callable[..., Any]
    inputs: tuple[Any, dict[str, Any]]
    operation: Operation
    touched: Touched


class _Backend:
    """Stand-in for the device's backend, such as NCCL's; point-to-point batches go through it."""

    supports_coalescing = True

    def __init__(self, get_backend: Callable[[], Any]) -> None:
        self._get_backend = get_backend  # a no-op group has none

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._get_backend(), name)


class Collectives:
    """Reports all collectives on a simulation's tensors to it."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self._lines: dict[str, Line] = {}
        # By address of a functional collective's result: the clock to wait for, and tensors kept until then.
        self._functional: dict[int, tuple[Clock, list[Tensor]]] = {}
        self._batches: dict[str, list[_Part]] = {}  # by group

    def line_of(self, group: dist.ProcessGroup, pair: str = "") -> Line:
        """Return the line of a group's asynchronous collectives, or of messages between two of its ranks."""
        key = f"{group.group_name}{pair and '/'}{pair}"
        if key not in self._lines:
            ranks = f"process group of {group.size()} ranks ({group.group_name})"
            of = f"ranks {pair} in the {ranks}" if pair else f"the {ranks}"
            self._lines[key] = self.simulation.timeline.line(f"asynchronous stream of {of}", key)
        return self._lines[key]

    def method(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a process group's method."""

        def run(group: dist.ProcessGroup, args: Any, kwargs: Any) -> Any:
            work = original(group, *args, **kwargs)
            if isinstance(group, NoopGroup):
                _as_equal_ranks(name, args, group.size())
            return work

        def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            tensors = list(tensors_in((args, kwargs)))
            if name == "barrier":  # NCCL's barrier blocks the host until the current stream reaches it
                self.simulation.timeline.current().synchronize()
            if not any(isinstance(tensor, SimTensor) for tensor in tensors):
                if self.simulation.late is not None:
                    self.simulation.late.host_blocks()
                return run(group, args, kwargs)
            batch = self._batches.get(group.group_name)
            line = self.simulation.timeline.current().line
            if name in MESSAGES and batch is None:
                line = self.line_of(group, "{} and {}".format(*sorted((group.rank(), args[1]))))
            elif batch is not None or asks_async(args, kwargs):
                line = self.line_of(group)
            touched = _accesses(name, args, tensors)
            operation = self.issue(name, touched, line)
            part = _Part(run, (args, kwargs), operation, touched)
            if batch is not None:
                batch.append(part)
                return None
            work = self._run(group, [part])
            if line is self.simulation.timeline.current().line:
                return work
            work.wait()  # the simulation decides what runs when
            return _Work(self, line, tensors)

        return call

    def start_coalescing(self, group: dist.ProcessGroup) -> None:
        """Begin a batch of collectives, which run together when it ends."""
        self._batches[group.group_name] = []

    def is_batch(self, group: dist.ProcessGroup) -> bool:
        """Return whether a batch has begun that has not ended."""
        return group.group_name in self._batches

    def end_coalescing(self, group: dist.ProcessGroup) -> dist.Work:
        """Run the collectives of a batch, and return work that waits for them."""
        parts = self._batches.pop(group.group_name)
        self._run(group, parts).wait()
        tensors = list(tensors_in([part.touched for part in parts]))
        return _Work(self, self.line_of(group), tensors)

    def _run(self, group: dist.ProcessGroup, parts: list[_Part]) -> dist.Work:
        def run(group: dist.ProcessGroup, inputs: Any, outcome: Any) -> dist.Work:
            return _Works([part.run(group, *of_part) for part, of_part in zip(parts, inputs, strict=True)])

        inputs = [part.inputs for part in parts]
        work, late = run(group, inputs, None), self.simulation.late
        if late is not None and parts:
            late.peers.wait(work)
            read, written = (list(tensors_in([part.touched[i] for part in parts])) for i in (0, 1))
            late.collective(parts[-1].operation, group, run, inputs, (read, written))
        return work

    def issue(self, name: str, touched: Touched, line: Line) -> Operation:
        """Report a collective on `line`, with its reads and writes, to the simulation."""
        simulation = self.simulation
        merge(line.clock, simulation.timeline.current().line.clock)
        operation = simulation.timeline.issue(line, name)
        read, written = ([t for t in tensors if isinstance(t, SimTensor)] for tensors in touched)
        simulation.touch((read, written), operation, line)
        return operation

    def functional(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a functional collective, which is asynchronous until `wait_tensor`."""
        simulation = self.simulation
        namespace, _, name = func.name().partition("::")
        if name.partition(".")[0] == "_wrap_tensor_autograd":
            return AsyncCollectiveTensor(args[0])
        bare = on_tensors(args, bare_of)
        result = func(*bare, **on_tensors(kwargs, bare_of))
        if namespace == NATIVE:
            return on_tensors(result, on_device)  # reported by the process group's method
        if name.partition(".")[0] == WAIT:
            clock, _ = self._functional.pop(args[0].untyped_storage().data_ptr(), ({}, []))
            merge(simulation.timeline.current().line.clock, clock)
            return args[0]
        input_ids = {storage_id(t) for t in tensors_in(bare)}
        created = [t for t in tensors_in(result) if storage_id(t) not in input_ids]
        for tensor in created:
            simulation.record_allocation(tensor.untyped_storage(), f"{tuple(tensor.shape)} of {name}")
        group = resolve_process_group(args[-1])
        tensors = [tensor for tensor in tensors_in(args) if isinstance(tensor, SimTensor)]
        if isinstance(group, NoopGroup):
            for out, source in zip(tensors_in(result), tensors, strict=False):
                _fill(name, bare_of(out), memory_of(source), group.size())
        in_place = name.partition(".")[0].endswith(("_", "_out"))
        written = tensors if in_place else [on_device(t) for t in created]
        operation = self.issue(name, (tensors, written), self.line_of(group))
        if simulation.late is not None:
            real = not isinstance(group, NoopGroup)
            if real:
                simulation.late.run_all()  # during the wait, this rank cannot run what others wait for
            for tensor in tensors_in(result):
                wait_for_collective(tensor)

            def rerun(group: dist.ProcessGroup, inputs: Any, outcome: list[Tensor]) -> None:
                args, kwargs = inputs
                if isinstance(group, NoopGroup):
                    for out, source in zip(outcome, tensors_in(args), strict=False):
                        _fill(name, out, source, group.size())
                    return
                results = tensors_in(func(*args[:-1], group.group_name, **kwargs))
                for out, result in zip(outcome, results, strict=True):
                    out.copy_(wait_for_collective(result))

            simulation.late.collective(operation, group, rerun, (args, kwargs), (tensors, written), written)
            if real:
                simulation.late.run_all()  # nor while the repeated collective waits
        for tensor in created or tensors:
            alive = [*tensors, *created]
            self._functional[tensor.untyped_storage().data_ptr()] = dict(self.line_of(group).clock), alive
        return on_tensors(result, on_device) if created else args[0]


def asks_async(args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether a process group's method is called asynchronously."""
    options = [option for option in (*args, *kwargs.values()) if hasattr(option, "asyncOp")]
    return bool(options and options[0].asyncOp) or kwargs.get("async_op") is True


def _accesses(name: str, args: Any, tensors: Sequence[Tensor]) -> Touched:
    """Return the tensors that a process group's method reads, and those that it writes."""
    if name in MESSAGES:
        return (tensors, []) if name == "send" else ([], tensors)
    if len(args) < 2 or not any(word in name for word in _TWO_SIDED):
        return tensors, tensors
    written, read = list(tensors_in(args[0])), list(tensors_in(args[1]))
    if "gather" in name and len(written) == len(read) == 1:
        written = _all_but(read[0], written[0])
    return read, written


def _all_but(part: Tensor, whole: Tensor) -> list[Tensor]:
    """Return the parts that an all-gather writes; in place, this excludes this rank's own part."""
    begin = part.storage_offset() - whole.storage_offset()
    end = begin + part.numel()
    if storage_id(part) != storage_id(whole) or begin < 0 or end > whole.numel():
        return [whole]
    flat = whole.reshape(-1)
    return [flat[:begin], flat[end:]]


def _as_equal_ranks(name: str, args: Any, ranks: int) -> None:
    """Write a no-op group's results as if all ranks sent what this rank sends; messages get zeros."""
    if name == "recv":
        for tensor in tensors_in(args[0]):
            bare_of(tensor).zero_()
    if len(args) > 1 and any(word in name for word in _TWO_SIDED):
        outs, sources = list(tensors_in(args[0])), list(tensors_in(args[1]))
        for index, out in enumerate(outs):
            _fill(name, bare_of(out), bare_of(sources[index % len(sources)]), ranks)


def _fill(name: str, out: Tensor, source: Tensor, ranks: int) -> None:
    flat, values = out.reshape(-1), source.reshape(-1)
    if out.data_ptr() == source.data_ptr() and out.numel() == source.numel():
        return
    if "gather" in name and flat.numel() == ranks * values.numel():
        flat.view(ranks, -1).copy_(values.clone())
    elif "scatter" in name and values.numel() == ranks * flat.numel():
        flat.copy_(values[: flat.numel()])
    elif values.numel():  # in an all-to-all, even equal ranks may receive more or less than they send
        flat.copy_(values.repeat(-(-flat.numel() // values.numel()))[: flat.numel()])
    else:
        flat.zero_()


@contextmanager
def reporting_to(simulation: Simulation) -> Iterator[Collectives]:
    """Report all collectives inside the context to `simulation`."""
    collectives = Collectives(simulation)
    simulation.functional = collectives.functional
    kinds: tuple[type, ...] = (dist.ProcessGroup, NoopGroup)
    with ExitStack() as stack:
        for kind in kinds:
            for name in {*COLLECTIVES, "allgather_coalesced", "recv_anysource"} & set(vars(kind)):
                method = collectives.method(name, vars(kind)[name])
                stack.enter_context(mock.patch.object(kind, name, method))
        backend_of = getattr(dist.ProcessGroup, _compat.BACKEND_OF)

        def get_backend(group: dist.ProcessGroup, device: torch.device) -> Any:
            if device.type != NAME:
                return backend_of(group, device)
            return _Backend(lambda: backend_of(group, torch.device("cpu")))

        replacements: dict[str, Any] = {
            _compat.BACKEND_OF: get_backend,
            _compat.START_COALESCING: lambda group, device: collectives.start_coalescing(group),
            _compat.END_COALESCING: lambda group, device: collectives.end_coalescing(group),
        }
        stack.enter_context(mock.patch.multiple(dist.ProcessGroup, **replacements))
        send_batch = dist.batch_isend_irecv

        def batch(messages: list[dist.P2POp]) -> list[dist.Work]:
            group = messages[0].group if messages else None
            if not isinstance(group, NoopGroup):
                return send_batch(messages)
            collectives.start_coalescing(group)
            works = send_batch(messages)
            # Before torch 2.15 it batches only messages of groups of its own class.
            return [collectives.end_coalescing(group)] if collectives.is_batch(group) else works

        stack.enter_context(mock.patch.object(dist, "batch_isend_irecv", batch))
        of = dist.get_backend_config
        stack.enter_context(
            mock.patch.object(dist, "get_backend_config", lambda group=None: f"{of(group)},{NAME}:simulated")
        )
        stack.enter_context(
            mock.patch.object(torch.futures, "wait_all", lambda futures: [f.wait() for f in futures])
        )
        yield collectives
