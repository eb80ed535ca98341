"""A simulated accelerator: a device whose tensors lie in CPU memory, so that code takes its device path.

    torch.device(NAME)    has streams, events, pinned memory, copies from and to the host
    SimTensor             a tensor there; each operator runs at once on the CPU, and the `Simulation` sees it

The device is registered with torch for the rest of the process, and counts as available only while a
simulation runs.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardwise import _compat
from shardwise._compat import TorchDispatchMode
from shardwise.comm.count import on_tensors, tensors_in
from shardwise.errors import ShardwiseError
from shardwise.verify.streams import operators
from shardwise.verify.streams.clocks import Line, Operation
from shardwise.verify.streams.memory import Block, Extent, Memory, Report
from shardwise.verify.streams.operators import Touched
from shardwise.verify.streams.streams import Stream, Timeline, place_in_code

NAME = "lazy"  # a device type of torch that is otherwise unused here: `_compat.register_device`
_DEVICE_OF = torch.ops.prim.device.default


class SimTensor(Tensor):
    """A tensor of the simulated device."""

    is_plain_memory = True  # for `_compat.is_plain`
    __torch_function__ = _compat.NO_TORCH_FUNCTION

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{self.cpu()!r} on the simulated device"

    def __format__(self, spec: str) -> str:
        return object.__format__(self, spec) if self.ndim else format(self.item(), spec)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _compat.as_saved(self)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is _DEVICE_OF:
            return torch.device(NAME, 0)
        if any(kind is not SimTensor and operators.runs_its_own(kind) for kind in types):
            return NotImplemented
        return running().run(func, args, kwargs or {})


def memory_of(tensor: Tensor) -> Tensor:
    """Return the CPU memory of a device tensor, as a tensor.

    Raises:
        RuntimeError: if it was freed. (`set_` would silently give the storage other memory.)
    """
    storage, (low, high) = tensor.untyped_storage(), span(tensor)
    if high - low and high - storage.data_ptr() > storage.nbytes():
        raise RuntimeError(
            f"a tensor of shape {tuple(tensor.shape)} was used after its memory was freed: its storage has"
            f" {storage.nbytes()} bytes left"
        )
    bare = torch.empty(0, dtype=tensor.dtype)
    return bare.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def on_device(memory: Tensor) -> Tensor:
    """Wrap CPU memory as a tensor of the device."""
    wrapped: Tensor = _compat.as_device_tensor(SimTensor, memory, torch.device(NAME, 0))
    return wrapped


def span(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of the first element and of the end of the last."""
    if not tensor.numel():
        return 0, 0
    length = 1 + sum(
        (int(size) - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    low = tensor.untyped_storage().data_ptr() + int(tensor.storage_offset()) * tensor.element_size()
    return low, low + length * tensor.element_size()


def extent_of(tensor: Tensor) -> Extent:
    """Return the bytes of a tensor's elements."""
    low, high = span(tensor)
    itemsize, sizes = tensor.element_size(), zip(tensor.shape, tensor.stride(), strict=True)
    steps = tuple((int(n), int(stride) * itemsize) for n, stride in sizes if n > 1 and stride)
    has_gaps = math.prod(n for n, _ in steps) * itemsize < high - low
    return Extent(low, high, steps if has_gaps else (), itemsize)


class Simulation:
    """The simulated device, operator by operator."""

    def __init__(self, report: Report) -> None:
        self.timeline = Timeline()
        self.timeline.record_stream = self.record_stream
        self.memory, self.host = Memory(report), Memory(report)  # the latter: what copies read or write
        self.late: Any = None  # `values.Late`, which runs every operation again in another order
        self.functional: Callable[[Any, Any, dict[str, Any]], Any]  # of `collectives`
        self.refused: ShardwiseError | None = None  # the first error, which code or a thread may lose
        self.looks_away = False  # while shapes are computed
        self._thread = threading.get_ident()
        self._storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], Block | None]] = {}
        self._pinned: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self.mode = _Mode(self)

    def in_other_thread(self) -> bool:
        """Return whether the current thread is not the simulation's."""
        return threading.get_ident() != self._thread

    def refuse(self, reason: str) -> ShardwiseError:
        """Return an error to raise, which is raised again when the simulation ends."""
        error = ShardwiseError(reason)
        self.refused = self.refused or error
        return error

    def refuse_thread(self, func: Any) -> ShardwiseError:
        return self.refuse(
            f"{func} was called on the simulated device in another thread, but the simulation follows only"
            " the thread that started it. Call it there"
        )

    # Memory

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        """Delay reuse of a tensor's freed memory until `stream` has run what was issued before the free."""
        local = _compat.local_of(tensor)
        if isinstance(local, SimTensor) and (block := self.memory.at(span(local)[0])) is not None:
            block.guarded.add(stream.line.number)

    def record_allocation(self, storage: torch.UntypedStorage, origin: str, *, blank: bool = False) -> None:
        """Record a storage's allocation on the current stream; `blank` if it has no values yet."""
        block = None
        if storage.nbytes():
            owner = self.timeline.current().line.number
            block = self.memory.allocate(storage.data_ptr(), storage.nbytes(), owner=owner, origin=origin)
            if self.late is not None:
                self.late.record_allocation(block, storage, blank=blank)
        key = id(storage)
        ended = weakref.ref(storage, lambda _: self._free(self._storages.pop(key, (None, None))[1]))
        self._storages[key] = ended, block

    def _free(self, block: Block | None) -> None:
        if block is None:
            return
        self.memory.free(block, self.timeline.lines)
        if self.late is not None:
            self.late.record_free(block)

    def resize(self, resize: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `UntypedStorage.resize_` to free and allocate memory on the current stream."""

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            entry = self._storages.get(id(storage))
            if entry is None:
                return resize(storage, size)
            old, kept = entry[1], min(size, storage.nbytes())
            moves = old is not None and kept
            if moves:  # even to the same size: the device copies the contents
                operation = self.timeline.issue(self.timeline.current().line, "resize_")
                self._access(storage.data_ptr(), kept, operation, writes=False)
            result = resize(storage, size)
            self.record_allocation(storage, f"resized to {size} bytes at {place_in_code()}", blank=not kept)
            self._free(old)
            if moves:
                self._access(storage.data_ptr(), kept, operation, writes=True)
                if self.late is not None:
                    self.late.record_move(operation, old, self.memory.at(storage.data_ptr()), storage, kept)
            return result

        return resize_

    def _access(self, low: int, nbytes: int, operation: Operation, *, writes: bool) -> None:
        clock = self.timeline.lines[operation.line].clock
        self.memory.access(Extent(low, low + nbytes), operation, clock, writes=writes)

    def pin(self, tensor: Tensor) -> Tensor:
        pinned = tensor.clone()
        self._pinned.add(pinned.untyped_storage())
        return pinned

    def is_pinned(self, tensor: Tensor) -> bool:
        return self.pinned_storage(tensor) is not None

    def pinned_storage(self, tensor: Tensor) -> torch.UntypedStorage | None:
        """Return the pinned memory that a tensor lies in, of which its own storage may be a part."""
        own = tensor.untyped_storage()
        if own in self._pinned or _compat.is_fake(tensor) or isinstance(tensor, SimTensor):
            return own if own in self._pinned else None
        at = own.data_ptr()
        return next((s for s in self._pinned if s.data_ptr() <= at < s.data_ptr() + s.nbytes()), None)

    def _is_on_host(self, tensor: Tensor) -> bool:
        return not isinstance(tensor, SimTensor) and self.memory.at(span(tensor)[0]) is None

    # Operators

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator with a tensor or result on the device."""
        if self.in_other_thread():
            raise self.refuse_thread(func)
        if torch.is_inference_mode_enabled():  # inference mode could not make views of ordinary tensors again
            with torch.inference_mode(mode=False), torch.no_grad():
                result = func.decompose(*args, **kwargs)
                return self.run(func, args, kwargs) if result is NotImplemented else result
        op = operators.of(func)
        if op.communicates:
            return self.functional(func, args, kwargs)
        if op.reshapes:
            _compat.take_over(
                args[0], on_device(func(*on_tensors(args, bare_of), **on_tensors(kwargs, bare_of)))
            )
            return args[0]
        return self._compute(op, func, args, kwargs)

    def _compute(self, op: operators.Operator, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        device = kwargs.get("device")
        leaves = device is not None and torch.device(device).type != NAME
        # During a copy to the host, `to` pins the host memory.
        pins = leaves and (kwargs.get("pin_memory") or kwargs.get("non_blocking"))
        kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
        if device is not None and not leaves:
            kwargs["device"] = torch.device("cpu")
        bare_args, bare_kwargs = on_tensors(args, bare_of), on_tensors(kwargs, bare_of)
        draws = self.late is not None and torch.Tag.nondeterministic_seeded in func.tags
        rng_state = torch.get_rng_state() if draws else None
        reads, writes = op.accesses(args, kwargs)
        # To operators other than copies, a 0-dim host tensor is a number, read at launch.
        numbers = [] if op.crosses else [t for t in reads if not t.ndim and self._is_on_host(t)]
        if numbers and self.late is not None:
            self.late.host_reads(numbers, op.name)
        result = func(*bare_args, **bare_kwargs)
        if not op.crosses and any(isinstance(t, SimTensor) for t in (*reads, *writes)):
            for tensor in (*reads, *writes):
                if tensor.ndim and self._is_on_host(tensor):
                    raise RuntimeError(
                        f"{op.name} got tensors on two devices: one of shape {tuple(tensor.shape)} on the"
                        f" CPU, others on {NAME}:0. Move them to one device"
                    )
        input_ids = {_compat.storage_id(t) for t in tensors_in((bare_args, bare_kwargs))}
        created = [t for t in tensors_in(result) if _compat.storage_id(t) not in input_ids]
        if op.only_views and not created:
            return on_tensors(result, on_device)
        if pins:
            self._pinned.update(t.untyped_storage() for t in created)
        blocking = not kwargs.get("non_blocking", False) and not (len(args) > 2 and args[2] is True)
        # A copy to pageable memory is complete when it returns.
        targets = (*writes, *(created if leaves else ()))
        blocking |= any(self._is_on_host(t) and not self.is_pinned(t) for t in targets)
        if numbers:
            self._host_uses(op.name, (numbers, []))
        copies = leaves or any(
            not isinstance(t, SimTensor) and (t.ndim or op.crosses) for t in (*reads, *writes)
        )
        stream = self.timeline.current()
        for tensor in created if not leaves else ():
            origin = f"{tuple(tensor.shape)} of {op.name} at {place_in_code()}"
            self.record_allocation(tensor.untyped_storage(), origin, blank=op.only_allocates)
        operation = None
        if not op.only_allocates:
            operation = self.timeline.issue(stream.line, op.name)
            self.touch((reads, [*writes, *created]), operation, stream.line, copies=copies and not blocking)
        outcome = op.wrap_result(args, kwargs, result, (lambda t: t) if leaves else on_device)
        if self.late is not None and operation is not None:
            self.late.operator(operation, func, args, kwargs, outcome, rng_state)
        if operation is not None and (op.waits(args, kwargs) or (copies and blocking)):
            self.timeline.host_waits(dict(stream.line.clock))
        return outcome

    def touch(self, touched: Touched, operation: Operation, line: Line, *, copies: bool = False) -> None:
        """Record that an operation of `line` reads and writes; `copies`: while the host continues."""
        for tensor, writes in _each(touched):
            extent = extent_of(tensor)
            on_host = self._is_on_host(tensor)
            if on_host:
                storage = self.pinned_storage(tensor)
                if not copies or storage is None:
                    continue  # the host waits for the copy, or copies what it reads before it continues
                address, size = storage.data_ptr(), storage.nbytes()
                if size and self.host.at(address) is None:
                    block = self.host.allocate(address, size, owner=0, origin="memory of the host")
                    # Torch reuses pinned memory only after copies from it have ended: no free is too early.
                    weakref.finalize(storage, self.host.forget, block)
            elif extent.low < extent.high and self.memory.at(extent.low) is None:
                storage = tensor.untyped_storage()
                self.record_allocation(storage, "memory from before the simulation")
                adopted = self.memory.at(storage.data_ptr())
                if adopted is not None and adopted.shadow is not None:
                    adopted.shadow.memory.copy_(storage)
            memory = self.host if on_host else self.memory
            memory.access(extent, operation, line.clock, writes=writes)

    def on_host(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a host operator, and track memory that copies read or write."""
        pins = kwargs.get("pin_memory")
        if pins:
            kwargs = kwargs | {"pin_memory": False}
        op = operators.of(func)
        touched = op.accesses(args, kwargs)
        if self.late is not None:
            self.late.host_reads(touched[0], op.name)
        result = func(*args, **kwargs)
        if self.late is not None:
            self.late.record_host_write(touched[1])
        if pins:
            self._pinned.add(result.untyped_storage())
        if not op.only_views and not op.reshapes:
            self._host_uses(op.name, touched)
        return result

    def _host_uses(self, name: str, touched: Touched) -> None:
        operation, host = None, self.timeline.host
        for tensor, writes in _each(touched):
            if self.host.at(span(tensor)[0]) is not None:
                operation = operation or self.timeline.issue(host, name)
                self.host.access(extent_of(tensor), operation, host.clock, writes=writes)

    def wrap_read(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a tensor method that reads host memory without an operator, or exposes it to such reads."""

        def method(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if (
                not self.looks_away
                and type(tensor) in (Tensor, torch.nn.Parameter)
                and tensor.device.type == "cpu"
            ):
                if self.late is not None:
                    self.late.host_reads([tensor], name)
                self._host_uses(name, ([tensor], []))
            if name == "__reduce_ex__" and isinstance(tensor, SimTensor):  # which copies it to the host
                line = self.timeline.current().line
                self.touch(([tensor], []), self.timeline.issue(line, "save"), line)
                self.timeline.host_waits(dict(line.clock))
            return original(tensor, *args, **kwargs)

        return method


class _Mode(TorchDispatchMode):
    """Mode that sees operators without device inputs: factories of device tensors, and host operators."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.simulation = simulation

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE_OF:
            return args[0].device if not isinstance(args[0], SimTensor) else torch.device(NAME, 0)
        if self.simulation.looks_away:
            return func(*args, **(kwargs or {}))
        other_thread = self.simulation.in_other_thread()
        if not other_thread and not torch.is_inference_mode_enabled():
            for tensor in tensors_in((args, kwargs)):
                if tensor.requires_grad and tensor.is_leaf and tensor.device.type == NAME:
                    self.simulation.timeline.note_leaf(tensor)
        if any(kind is not SimTensor and operators.runs_its_own(kind) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        # Inference mode passes composite operators undecomposed.
        if torch.is_inference_mode_enabled() and not other_thread:
            with self, torch.inference_mode(mode=False), torch.no_grad():
                if (result := func.decompose(*args, **kwargs)) is not NotImplemented:
                    return result
        device = kwargs.get("device")
        simulated = device is not None and torch.device(device).type == NAME
        for tensor in tensors_in((args, kwargs)):
            if isinstance(tensor, SimTensor):
                simulated = True
            elif tensor.device.type == NAME:
                # Made by a thread that ran before the simulation began.
                raise self.simulation.refuse_thread(func)
        if simulated:
            return self.simulation.run(func, args, kwargs)
        return func(*args, **kwargs) if other_thread else self.simulation.on_host(func, args, kwargs)


def _each(touched: Touched) -> Iterator[tuple[Tensor, bool]]:
    """Yield each tensor, and whether it is written."""
    for tensors, writes in zip(touched, (False, True), strict=True):
        yield from ((tensor, writes) for tensor in tensors)


def bare_of(tensor: Tensor) -> Tensor:
    return memory_of(tensor) if isinstance(tensor, SimTensor) else tensor


_latest: list[Simulation] = []


def running() -> Simulation:
    """Return the current simulation, or the last one, whose tensors may outlive it."""
    return _latest[-1]


@contextmanager
def running_in(simulation: Simulation) -> Iterator[None]:
    """Run operators on the device in this simulation."""
    _latest[:] = [simulation]
    with simulation.timeline.activate():
        yield
