"""Run code on a simulated device, and report which of its operations race.

with simulated() as found:
    ...                     # any code, with tensors on torch.device(DEVICE)
found.findings
"""

from __future__ import annotations

import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardwise import _compat
from shardwise.comm import order as agreement
from shardwise.comm.streams import CommStreams
from shardwise.fsdp.interrupted import watch_backward
from shardwise.fsdp.module_state import live_states
from shardwise.verify.streams import collectives
from shardwise.verify.streams.clocks import Operation, Order
from shardwise.verify.streams.device import NAME, SimTensor, Simulation, running_in, span
from shardwise.verify.streams.memory import Block
from shardwise.verify.streams.streams import Event, OwnEvent, OwnStream, Stream, active, is_active
from shardwise.verify.streams.values import Difference, Late

_SECONDS = 0.5  # for threads at the end, to reach an operation that is refused


@dataclass(frozen=True)
class Finding:
    """Two unordered operations on the same memory, at least one of them a write."""

    earlier: Operation
    later: Operation
    what: str  # a parameter, a gradient, a group's buffer, or the place where the memory was allocated
    again: bool  # whether the memory was freed after `earlier` and allocated again before `later`

    def __str__(self) -> str:
        first, second = self.earlier, self.later
        if not self.again:
            return (
                f"{self.what}: {first} and then {second} are not ordered. Make {second.stream} wait for"
                f" {first.stream} between them"
            )
        return (
            f"{self.what}: this memory was freed while {first} may still use it, and {second} may reuse it."
            f" Free it only after {second.stream} has waited for {first.stream}"
        )


@dataclass
class Findings:
    """The races and differences that a simulation found."""

    simulation: Simulation = field(init=False)
    findings: list[Finding] = field(default_factory=list)  # races, each pair of places once
    differences: list[Difference] = field(default_factory=list)  # in numbers, by another order, if given
    models: list[nn.Module] = field(default_factory=list)  # named in findings, beside sharded modules
    _known: set[tuple[str, str, str, str, bool]] = field(default_factory=set)

    @property
    def operations(self) -> int:
        """The number of device operations that were checked."""
        streams = self.simulation.timeline.lines[1:]
        return sum(line.clock.get(line.number, 0) for line in streams)

    def _report(self, earlier: Operation, later: Operation, block: Block, address: int, reused: bool) -> None:
        if (key := (earlier.name, earlier.place, later.name, later.place, reused)) not in self._known:
            self._known.add(key)
            self.findings.append(Finding(earlier, later, self.name_of(block, address), reused))

    def name_of(self, block: Block, address: int) -> str:
        """Describe the parameter, gradient or group buffer at this address, else the block's allocation."""
        for words, tensor in _named_tensors(self.models):
            local = _compat.local_of(tensor)
            if isinstance(local, SimTensor):
                low, high = span(local)
                if low <= address < high:
                    return words
        return block.origin


@contextmanager
def simulated(order: Order | None = None) -> Iterator[Findings]:
    """Simulate a device: in the context, `torch.device(DEVICE)` has streams, and its operations are checked.

    Streams, events, pinned memory and `torch.accelerator.current_stream` belong to the device. Compiled
    functions run uncompiled. The device type stays registered with torch for the rest of the process.

    Args:
        order: order in which everything also runs a second time, which yields `differences`.

    Raises:
        LifecycleError: if a simulation is already running.
        ShardwiseError: at once and again at the end, for what the simulation cannot follow: work of other
            threads on the device, `DistributedDataParallel`.
        TypeError: if `order` is not an `Order`.
    """
    if not isinstance(order, Order | None):
        raise TypeError(f"order must be an Order or None, got {order!r}; pass one such as Order.of(1)")
    _compat.register_device(_module)
    findings = Findings()
    findings.simulation = simulation = Simulation(findings._report)
    threads_before = set(threading.enumerate())
    # This wraps autograd's engine permanently, so it must come before the temporary wrapper.
    watch_backward()
    with ExitStack() as stack:
        stack.enter_context(running_in(simulation))
        for patch in _patches(simulation):
            stack.enter_context(patch)
        stack.enter_context(_compat.device_is_known())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(collectives.reporting_to(simulation))
        stack.enter_context(simulation.mode)
        late = None if order is None else Late(simulation, order, findings.differences)
        if late is not None:
            stack.enter_context(mock.patch.object(agreement.Order, "pause", late.pause))
        yield findings
        end = time.monotonic() + _SECONDS
        for thread in threading.enumerate():
            if thread not in threads_before and not thread.daemon:  # a pool's thread never ends
                thread.join(timeout=max(0.0, end - time.monotonic()))
        if simulation.refused is not None:
            raise simulation.refused
        if late is not None:
            late.finish(findings.name_of)


def _patches(simulation: Simulation) -> list[Any]:
    """Return patches that give torch's names their meaning while a simulation runs."""

    def current_stream(device: Any = None) -> Stream:
        if device is not None and torch.device(device).type != NAME:
            raise ValueError(f"{device} doesn't match the current accelerator {NAME}.")  # as torch does
        current = active().current()
        return Stream(stream_id=current.stream_id) if isinstance(current, OwnStream) else current

    to, run_thread, load, module_of = Tensor.to, threading.Thread.run, torch.load, torch.get_device_module
    replicate, create, engine = DistributedDataParallel.__init__, CommStreams.create, _compat.ENGINE

    def run_in_mode(thread: threading.Thread) -> None:
        with _compat.shared_with_thread(simulation.mode):  # the mode refuses tensors made in that thread
            run_thread(thread)

    def add_index(value: Any) -> Any:  # so that torch sees that a tensor is already there
        return torch.device(NAME, 0) if value in (NAME, torch.device(NAME)) else value

    def to_indexed(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return to(tensor, *map(add_index, args), **{key: add_index(value) for key, value in kwargs.items()})

    def load_simulated(file: Any, map_location: Any = None, *args: Any, **options: Any) -> Any:
        if isinstance(map_location, dict) and any(map(_is_simulated, map_location.values())):
            raise simulation.refuse(
                f"map_location={map_location!r}: a dict cannot map to the simulated device. Pass the device"
                " itself, or load to the CPU and move tensors afterwards"
            )
        is_simulated = _is_simulated(map_location)
        loaded = load(file, "cpu" if is_simulated else map_location, *args, **options)
        return _move(loaded, {}) if is_simulated else loaded

    def refuse_replicas(self: DistributedDataParallel, module: nn.Module, *args: Any, **options: Any) -> None:
        if any(isinstance(_compat.local_of(param), SimTensor) for param in module.parameters()):
            raise simulation.refuse(
                "cannot simulate DistributedDataParallel (or replicate, which creates one) of a"
                f" {type(module).__name__}: it waits in C++, where the simulation cannot see it. Use"
                ' shardwise.fully_shard(model, layout="contiguous", strategy="ddp") instead'
            )
        replicate(self, module, *args, **options)

    def named_streams(device: torch.device) -> CommStreams | None:
        streams = create(device)
        for name in ("copy_in", "all_gather", "reduce_scatter", "all_reduce") if streams is not None else ():
            stream: Any = getattr(streams, name)
            stream.call(f"the {name.replace('_', '-')} stream")
        return streams

    reads = ("numpy", "tolist", "__repr__", "__reduce_ex__")
    fakes: dict[Any, dict[str, Any]] = {
        Tensor: {
            **{name: simulation.wrap_read(name, getattr(Tensor, name)) for name in reads},
            "to": to_indexed,
            "pin_memory": lambda tensor, device=None: simulation.pin(tensor),
            "is_pinned": lambda tensor, device=None: simulation.is_pinned(tensor),
            "record_stream": lambda tensor, stream: simulation.record_stream(tensor, stream),
        },
        torch.UntypedStorage: {"resize_": simulation.resize(torch.UntypedStorage.resize_)},
        threading.Thread: {"run": run_in_mode},
        DistributedDataParallel: {"__init__": refuse_replicas},
        torch: {
            "Stream": Stream,
            "Event": Event,
            "load": load_simulated,
            "Generator": _Generator,
            # None means the only accelerator.
            "get_device_module": lambda device=None: module_of(NAME if device is None else device),
        },
        torch.accelerator: {
            "is_available": lambda: True,
            "current_accelerator": lambda check_available=False: torch.device(NAME),
            "current_device_index": lambda: 0,
            "current_stream": current_stream,
            "set_device_index": _nothing,
            "device_index": _on_device,
            **{name: answer for name, answer in _COMMON.items() if hasattr(torch.accelerator, name)},
        },
        torch.autograd: {engine: simulation.timeline.backward(getattr(torch.autograd, engine))},
        CommStreams: {"create": staticmethod(named_streams)},
    }
    patches = [mock.patch.object(obj, name, new) for obj, fake in fakes.items() for name, new in fake.items()]
    return [*patches, _compat.shapes_of_dtensors_unseen(simulation)]


def _is_simulated(device: Any) -> bool:
    return isinstance(device, (str, torch.device)) and torch.device(device).type == NAME


def _move(value: Any, moved: dict[Any, Tensor]) -> Any:
    """Move loaded values to the device; tensors of one storage share one there, recorded in `moved`."""
    if isinstance(value, nn.Module):
        return value.to(NAME)
    if isinstance(value, Tensor):
        if id(value) not in moved:
            storage = value.untyped_storage()
            key = storage.data_ptr(), value.dtype
            if key not in moved:
                moved[key] = torch.empty(0, dtype=value.dtype).set_(storage).to(NAME)
            tensor = moved[key].as_strided(value.shape, value.stride(), int(value.storage_offset()))
            tensor = nn.Parameter(tensor) if isinstance(value, nn.Parameter) else tensor
            moved[id(value)] = tensor.requires_grad_(value.requires_grad)
        return moved[id(value)]
    if isinstance(value, dict):  # in place: a state dict has attributes too
        value.update({key: _move(item, moved) for key, item in value.items()})
    if isinstance(value, list):
        value[:] = [_move(item, moved) for item in value]
    if isinstance(value, tuple):
        items = [_move(item, moved) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


_GENERATOR = torch.Generator


class _AnyGenerator(type(torch.Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _GENERATOR)


class _Generator(torch.Generator, metaclass=_AnyGenerator):
    """Stand-in for `torch.Generator` that draws the device's random numbers on the CPU."""

    _device: torch.device

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._device

    def __new__(cls, device: Any = "cpu") -> _Generator:
        device = torch.device(device)
        make: Any = super().__new__
        generator: _Generator = make(cls, "cpu" if device.type == NAME else device)
        generator._device = device
        return generator


def _nothing(*args: Any) -> None:
    pass


def _on_device(index: Any = None) -> AbstractContextManager[None]:
    return nullcontext()


# What torch.accelerator, as far as this torch has it, and the device's module do alike.
_COMMON: dict[str, Callable[..., Any]] = {
    "device_count": lambda: 1,
    "set_stream": lambda stream: active().set(stream),
    "synchronize": lambda device=None: active().synchronize(),
    "memory_stats": lambda *args: {},
    **dict.fromkeys(
        ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"),
        lambda *args: 0,
    ),
    **dict.fromkeys(("reset_accumulated_memory_stats", "reset_peak_memory_stats", "empty_cache"), _nothing),
}


def _module() -> types.ModuleType:
    """Make the module that torch expects for a device type."""
    module: Any = types.ModuleType("torch.lazy")
    module.is_available = module.is_initialized = is_active
    module.is_bf16_supported = lambda *args: True
    module._is_in_bad_fork = lambda: False
    module.current_device = lambda: 0
    vars(module).update(_COMMON)
    module.set_device = module.manual_seed = module.manual_seed_all = _nothing
    module.get_rng_state = lambda *args: torch.get_rng_state()
    module.set_rng_state = lambda state, *args: torch.set_rng_state(state)
    module.current_stream = lambda *args: OwnStream(stream_id=active().current().stream_id)
    module.default_stream = lambda *args: OwnStream(stream_id=active().computation.stream_id)
    module.stream = lambda stream: nullcontext() if stream is None else stream
    module.device = _on_device
    module.Stream, module.Event = OwnStream, OwnEvent
    return cast(types.ModuleType, module)


def _named_tensors(models: list[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    for model in models:
        for name, param in model.named_parameters():
            yield f"parameter '{name}'", param
            if param.grad is not None:
                yield f"the gradient of '{name}'", param.grad
    for state in live_states():
        for group in state.groups:
            title = group.title
            for member in group.params:
                yield f"parameter '{member.name}'", member.local
                if member.sharded.grad is not None:
                    yield f"the gradient of '{member.name}'", member.sharded.grad
                if member.unsharded is not None and member.unsharded.grad is not None:
                    yield f"the unsharded gradient of '{member.name}'", member.unsharded.grad
            yield from ((f"the shard of {title}", shard) for shard in group.shards)
            yield from ((f"the gathered memory of {title}", buffer.full) for buffer in group.buffers)
