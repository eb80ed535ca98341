"""How long a recorded step takes: operators by a roofline, collectives by latency and rate, streams as
events.

The host issues one event after another, in the library's own order, and takes time for each. An operator
begins when its stream is free and the host has issued it. It takes the longer of its operations at the rate
of its kind and its bytes at the memory's. A stream that waits for a mark goes on when the stream that made
it got there.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from shardwise.comm.count import Collective
from shardwise.errors import ShardingError
from shardwise.planner.events import (
    COMPUTATION,
    TENSOR_PARALLEL,
    Compute,
    Mark,
    Place,
    Record,
    Recording,
    Send,
    Wait,
)
from shardwise.planner.measure import last_step

_MAY_BE_ZERO = (
    "host_latency_s",
    "network_latency_s",
    "matmul_half_flops",
    "host_seconds",
    "context_bytes",
    "attention_half",
)


@dataclass(frozen=True)
class Hardware:
    """A device and how devices are connected; rates are of one device, in one direction.

    Attributes:
        matmul_efficiency: share of the peak that a large matmul reaches.
        matmul_half_flops: operations of a matmul that reaches half of that.
        attention_efficiency: share of the peak that attention of long sequences reaches, all of it counted.
        attention_half: operations for each byte of an attention that reaches half of that: half its length.
        bandwidth_efficiency: share of the memory's bandwidth that an elementwise operator reaches.
        host_seconds: of the host, to issue one operator.
        host_link_bytes_per_s: between devices of one host, as collectives reach it.
        network_bytes_per_s: of a host's connection to others, over its devices, likewise.
    """

    name: str
    source: str
    memory_bytes: int
    peak_flops: dict[str, float]
    memory_bytes_per_s: float
    devices_per_host: int
    host_link_bytes_per_s: float
    network_bytes_per_s: float
    host_latency_s: float
    network_latency_s: float
    matmul_efficiency: float
    matmul_half_flops: float
    attention_efficiency: float
    bandwidth_efficiency: float
    host_seconds: float
    context_bytes: int  # of the driver and of communicators, outside the allocator
    attention_half: float = 0.0

    @property
    def usable_bytes(self) -> int:
        """Bytes that the allocator can use."""
        return self.memory_bytes - self.context_bytes


@dataclass(frozen=True)
class Span:
    """The work of a stream for one block in one phase; seconds from the step's beginning.

    Attributes:
        busy: seconds of it in which the stream does not wait.
        host: seconds that the host takes to issue it.
    """

    stream: str
    phase: str
    layer: int | None
    begin: float
    end: float
    busy: float
    host: float = 0.0


@dataclass(frozen=True)
class Times:
    """Times of a step, in seconds. Exposed communication is what computation waits for."""

    step: float
    computation: float
    communication: float
    exposed: float
    host: float
    spans: list[Span]


def hardware_of(name: str) -> Hardware:
    """Return the profile of that name, or of that file (TOML)."""
    folder = resources.files("shardwise.planner") / "hardware"
    known = sorted(one.name.removesuffix(".toml") for one in folder.iterdir() if one.name.endswith(".toml"))
    if name in known:
        text = (folder / f"{name}.toml").read_text()
    elif name.endswith(".toml") and Path(name).exists():
        text = Path(name).read_text()
    else:
        raise ShardingError(f"unknown hardware {name!r}: give one of {', '.join(known)}, or a file (.toml)")
    try:
        made = Hardware(**tomllib.loads(text))
    except (ValueError, TypeError) as error:
        raise ShardingError(f"{name} is no profile of hardware: {error}") from error
    if not isinstance(made.peak_flops, dict) or not made.peak_flops:
        raise ShardingError(f"{name}: peak_flops must be a table of dtypes, got {made.peak_flops!r}")
    numbers = {key: value for key, value in vars(made).items() if key not in ("name", "source", "peak_flops")}
    for key, value in (numbers | {f"peak_flops.{key}": one for key, one in made.peak_flops.items()}).items():
        _check_number(f"{name}: {key}", value, may_be_zero=key in _MAY_BE_ZERO)
        if key.endswith("_efficiency") and value > 1:
            raise ShardingError(f"{name}: {key} is a share of the peak, at most 1, got {value!r}")
    if not isinstance(made.devices_per_host, int):
        raise ShardingError(f"{name}: devices_per_host must be a whole number, got {made.devices_per_host!r}")
    if made.usable_bytes <= 0:
        raise ShardingError(
            f"{name}: context_bytes must be less than memory_bytes, {made.memory_bytes!r},"
            f" got {made.context_bytes!r}"
        )
    return made


def _check_number(name: str, value: Any, *, may_be_zero: bool) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (value == 0 and not may_be_zero):
        least = "of at least 0" if may_be_zero else "above 0"
        raise ShardingError(f"{name} must be a number {least}, got {value!r}")


class _Pieces:
    """Tensor parallelism's collectives in pieces, each beside the matmul of another: asynchronous.

    A matmul begins with the first piece that is gathered, and has its own last piece to do after the last.
    What is reduced goes likewise: after the first piece of the matmul that makes it, until after the last;
    then a kernel adds up what came from all ranks, which a collective does on its way. With one piece, each
    waits for the other.
    """

    def __init__(self, count: int, hardware: Hardware) -> None:
        self.count = count
        self.bytes_per_s = hardware.memory_bytes_per_s * hardware.bandwidth_efficiency
        self.first = self.last = 0.0  # of the matmul before: its first piece; of a gather: its last
        self.gathered: float | None = None  # when the first piece was

    def sent(self, call: Collective, begin: float, takes: float, *, whole: bool) -> float:
        """Return when this collective, which begins when all that it needs is there, ends.

        Args:
            whole: not in pieces, as around the blocks, which alone are compiled.
        """
        self.gathered = None
        if self.count == 1 or whole:
            return begin + takes
        if call.kind == "all_gather":
            self.gathered, self.last = begin + takes / self.count, begin + takes
            return self.last
        adds = (call.bytes + call.bytes / call.group_size) / self.bytes_per_s
        return max(self.first + takes, begin + takes / self.count) + adds

    def multiplied(self, begin: float, takes: float) -> float:
        """Return when this matmul ends."""
        self.first = begin + takes / self.count
        end, self.last = max(begin + takes, self.last + takes / self.count), 0.0
        return end


def time_of(recording: Recording, hardware: Hardware, accumulation: int, *, pieces: int = 1) -> Times:
    """Compute times of the last step; tensor parallelism's collectives are in so many `pieces`."""
    tensor = _Pieces(pieces, hardware)
    clocks: dict[str, float] = {}
    marks: dict[Mark, float] = {}
    spans: dict[tuple[str, Place], Span] = {}
    host = computation = communication = exposed = 0.0
    for place, event, times in last_step(recording, accumulation):
        if isinstance(event, Compute | Send):
            issues = hardware.host_seconds * times
            host += issues
            begin = max(clocks.get(event.stream, 0.0), host)
            if isinstance(event, Send):
                takes = times * send_seconds(event.collective, hardware, stride=event.stride)
                communication += takes
            else:
                takes = times * compute_seconds(event, hardware)
                computation += takes if event.stream == COMPUTATION else 0.0
            end = begin + takes
            if event.stream == TENSOR_PARALLEL and isinstance(event, Send):
                end = tensor.sent(event.collective, begin, takes, whole=place.layer is None)
            elif event.stream == COMPUTATION and isinstance(event, Compute) and event.flops:
                end = tensor.multiplied(begin, takes)
            clocks[event.stream] = end
            known = spans.get(
                (event.stream, place), Span(event.stream, place.phase, place.layer, begin, 0, 0)
            )
            busy, issued = known.busy + takes, known.host + issues
            spans[event.stream, place] = replace(known, end=end, busy=busy, host=issued)
        elif isinstance(event, Record):
            now = clocks.get(event.stream, 0.0)
            early = tensor.gathered if event.stream == TENSOR_PARALLEL else None
            marks[event.mark] = now if early is None else early
        elif isinstance(event, Wait):
            until, now = marks.get(event.mark, 0.0), max(clocks.get(event.stream, 0.0), host)
            if until > now:
                exposed += until - now if event.stream == COMPUTATION else 0.0
                clocks[event.stream] = until
    step = max([host, *clocks.values()])
    return Times(step, computation, communication, exposed, host, list(spans.values()))


def host_bound(times: Times) -> Iterator[str]:
    """Yield what takes the host longer to issue than the device to do: phases of groups, with both times."""
    found: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    for (phase, layer), of in _by_group(times).items():
        host, busy = sum(span.host for span in of), max(span.busy for span in of)
        if host > busy and phase in ("forward", "backward"):
            found.setdefault((phase, layer is None), []).append((host, busy))
    for (phase, around), both in found.items():
        host, busy = (sum(times) / len(both) for times in zip(*both, strict=True))
        what = "the first and last modules" if around else f"{len(both)} blocks"
        yield f"{phase} of {what}: the host takes {1e3 * host:.2f} ms to issue {1e3 * busy:.2f} ms of work"


def _by_group(times: Times) -> dict[tuple[str, int | None], list[Span]]:
    groups: dict[tuple[str, int | None], list[Span]] = {}
    for span in times.spans:
        groups.setdefault((span.phase, span.layer), []).append(span)
    return groups


def compute_seconds(event: Compute, hardware: Hardware) -> float:
    seconds = event.nbytes / (hardware.memory_bytes_per_s * hardware.bandwidth_efficiency)
    if not event.flops:
        return seconds
    peak = hardware.peak_flops.get(event.dtype, min(hardware.peak_flops.values()))
    if "attention" in event.name:
        efficiency = hardware.attention_efficiency / (
            1 + hardware.attention_half * event.nbytes / event.flops
        )
    else:
        efficiency = hardware.matmul_efficiency * event.flops / (event.flops + hardware.matmul_half_flops)
    return max(seconds, event.flops / (peak * efficiency))


def send_seconds(call: Collective, hardware: Hardware, *, stride: int = 1) -> float:
    """Time a ring over hosts, within which devices are neighbours; for small messages, a tree of hosts.

    Args:
        stride: ranks from one member to the next. Those between do the same over the same connection.
    """
    ranks = call.group_size
    if ranks == 1 or not call.bytes:
        return 0.0
    inside = max(1, min(ranks, hardware.devices_per_host // stride))
    hosts = math.ceil(ranks / inside)
    rate = hardware.host_link_bytes_per_s
    if hosts > 1:
        rate = min(rate, hardware.network_bytes_per_s * inside / hardware.devices_per_host)
    hops = min(hosts - 1, 2 * math.ceil(math.log2(hosts))) if hosts > 1 else 0
    latency = (inside - 1) * hardware.host_latency_s + hops * hardware.network_latency_s
    return latency + call.wire_bytes / rate
