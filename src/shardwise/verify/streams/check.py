"""Run code on a simulated device, and say which of its operations race.

with simulated() as found:
    ...                     # any code, on torch.device("sim")
found.findings
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor

from shardwise import _compat
from shardwise.verify.streams import collectives
from shardwise.verify.streams.clocks import Operation
from shardwise.verify.streams.device import NAME, SimTensor, Simulation, _running
from shardwise.verify.streams.memory import Block
from shardwise.verify.streams.streams import Event, Stream, active


@dataclass(frozen=True)
class Finding:
    """Two operations on the same memory, one of them a write, without an order between them.

    Attributes:
        again: the memory was freed after `earlier`, and given out again before `later`.
    """

    earlier: Operation
    later: Operation
    what: str
    again: bool

    def __str__(self) -> str:
        how = (
            "is still used, after it was freed and may have been given out again, by" if self.again else "by"
        )
        missing = f"let {self.later.stream} wait for {self.earlier.stream} in between"
        if self.again:
            missing = (
                f"keep it, or let {self.later.stream} wait for {self.earlier.stream} before it allocates"
            )
        return f"{self.what} {how} {self.earlier}; then {self.later} does not wait for that: {missing}"


@dataclass
class Findings:
    """What a simulation found."""

    simulation: Any = None
    findings: list[Finding] = field(default_factory=list)
    names: list[Callable[[int], str]] = field(default_factory=list)  # what lies at an address, in words

    def report(self, earlier: Operation, later: Operation, block: Block, again: bool) -> None:
        found = next(filter(None, (name(block.low) for name in self.names)), "") or block.made
        finding = Finding(earlier, later, found, again)
        if str(finding) not in {str(one) for one in self.findings}:
            self.findings.append(finding)


@contextmanager
def simulated() -> Iterator[Findings]:
    """Simulate a device: inside, `torch.device("sim")` is there, and everything on it is looked at."""
    _compat.register_device(_module)
    found = Findings()
    found.simulation = simulation = Simulation(found.report)
    _running.append(simulation)
    simulation.timeline.start()
    resize = torch.UntypedStorage.resize_

    def is_pinned_here(tensor: Tensor, device: Any = None) -> bool:
        return simulation.is_pinned(tensor)

    def record_stream(tensor: Tensor, stream: Stream) -> None:
        if (block := simulation.block_of(tensor)) is not None:
            block.guarded.add(stream.line.number)

    patches = [
        mock.patch.object(torch.UntypedStorage, "resize_", simulation.resize(resize)),
        mock.patch.object(Tensor, "pin_memory", lambda tensor, device=None: simulation.pin(tensor)),
        mock.patch.object(Tensor, "is_pinned", is_pinned_here),
        mock.patch.object(Tensor, "record_stream", record_stream),
        mock.patch.object(torch, "Stream", Stream),
        mock.patch.object(torch, "Event", Event),
        mock.patch.object(torch.accelerator, "current_stream", lambda device=None: active().current()),
        mock.patch.object(torch.accelerator, "set_stream", lambda stream: active().set(stream)),
        mock.patch.object(torch.accelerator, "synchronize", lambda device=None: active().synchronize()),
    ]
    kind, name = _compat.SHAPES_OF_DTENSORS
    patches.append(mock.patch.object(kind, name, simulation.unseen(getattr(kind, name))))
    try:
        with ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            stack.enter_context(_compat.device_is_known())
            stack.enter_context(collectives.told_to(simulation))
            stack.enter_context(simulation.mode)
            yield found
    finally:
        simulation.timeline.stop()


def _module() -> types.ModuleType:
    """What torch asks of a device's module."""
    module: Any = types.ModuleType(f"torch.{NAME}")

    @contextmanager
    def on_stream(stream: Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        with stream:
            yield

    @contextmanager
    def device(index: Any = None) -> Iterator[None]:
        yield

    def number(value: int) -> Callable[..., int]:
        return lambda *args: value

    module.is_available = module.is_initialized = lambda: bool(_running_now())
    module.is_bf16_supported = lambda *args: True
    module._is_in_bad_fork = lambda: False
    module.current_device, module.device_count = number(0), number(1)
    module.memory_allocated = module.memory_reserved = module.max_memory_allocated = number(0)
    module.set_device = module.manual_seed = module.manual_seed_all = module.empty_cache = lambda *args: None
    module.get_rng_state = lambda *args: torch.get_rng_state()
    module.set_rng_state = lambda state, *args: torch.set_rng_state(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.current_stream = lambda *args: active().current()
    module.default_stream = lambda *args: active().computation
    module.synchronize = lambda *args: active().synchronize()
    module.set_stream = lambda stream: active().set(stream)
    module.stream, module.device = on_stream, device
    module.Stream, module.Event = Stream, Event
    return cast(types.ModuleType, module)


def _running_now() -> bool:
    from shardwise.verify.streams.streams import _active

    return bool(_active)


__all__ = ["Finding", "Findings", "SimTensor", "simulated"]
