"""The duration of a recorded step: operators by a roofline, collectives by latency and rate.

The host issues one event after another, in the library's own order, and takes time for each. An operator
begins when its stream is free and the host has issued it. It takes the time of its operations at the rate of
its kind, or of its bytes at the memory's rate, whichever is longer. A stream that waits for a mark continues
when the stream that made it has reached it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardwise.comm.count import Collective
from shardwise.planner import events
from shardwise.planner.devices import Hardware
from shardwise.planner.events import Allocate, Compute, Free, Mark, Record, Recording, Segment, Send, Wait
from shardwise.planner.measure import last_step

QUEUED = 1024  # commands that CUDA queues ahead of the device, as often measured; not documented


@dataclass(frozen=True)
class Span:
    """The work of a stream for one block in one phase; seconds from the step's beginning."""

    stream: str
    phase: str
    layer: int | None
    begin: float
    end: float
    busy: float  # seconds in which the stream does not wait
    host: float = 0.0  # seconds in which the host issues the work


@dataclass(frozen=True)
class Times:
    """Times of a step, in seconds. Exposed communication is communication for which computation waits."""

    step: float
    computation: float
    communication: float
    exposed: float
    host: float
    spans: list[Span]


class _Pieces:
    """Collectives of asynchronous tensor parallelism, in pieces that overlap the matmuls of other pieces.

    A matmul begins with the first gathered piece, and computes its last piece after the last one is gathered.
    Likewise, a reduction begins after the first piece of the matmul that makes its input, and ends after the
    last; then a kernel sums the pieces of all ranks, which a plain collective does itself. With one piece,
    collectives and matmuls wait for each other.
    """

    def __init__(self, count: int, hardware: Hardware) -> None:
        self.count = count
        self.bytes_per_s = hardware.memory_bytes_per_s * hardware.bandwidth_efficiency
        self.first = self.last = 0.0  # ends of the previous matmul's first piece, and a gather's last piece
        self.gathered: float | None = None  # when the first piece was gathered

    def end_of_collective(self, call: Collective, begin: float, takes: float, *, whole: bool) -> float:
        """Return when this collective ends, whose inputs are ready at `begin`; `whole`: not in pieces."""
        self.gathered = None
        if self.count == 1 or whole:
            return begin + takes
        if call.kind == "all_gather":
            self.gathered, self.last = begin + takes / self.count, begin + takes
            return self.last
        adds = (call.bytes + call.bytes / call.group_size) / self.bytes_per_s
        return max(self.first + takes, begin + takes / self.count) + adds

    def end_of_matmul(self, begin: float, takes: float) -> float:
        self.first = begin + takes / self.count
        end, self.last = max(begin + takes, self.last + takes / self.count), 0.0
        return end


def time_of(recording: Recording, hardware: Hardware, accumulation: int, *, pieces: int = 1) -> Times:
    """Compute the times of the last step, with tensor parallelism's collectives in `pieces` pieces."""
    tensor = _Pieces(pieces, hardware)
    clocks: dict[str, float] = {}
    marks: dict[Mark, float] = {}
    spans: dict[tuple[str, events.Place], Span] = {}
    host = computation = communication = exposed = 0.0
    for place, event, times in last_step(recording, accumulation):
        if isinstance(event, Compute | Send):
            issues = hardware.host_seconds * times
            host += issues
            begin = max(clocks.get(event.stream, 0.0), host)
            takes = times * seconds_of(event, hardware)
            if isinstance(event, Send):
                communication += takes
            elif event.stream == events.COMPUTATION:
                computation += takes
            end = begin + takes
            if event.stream == events.TENSOR_PARALLEL and isinstance(event, Send):
                whole = place.layer is None  # only blocks are compiled
                end = tensor.end_of_collective(event.collective, begin, takes, whole=whole)
            elif event.stream == events.COMPUTATION and isinstance(event, Compute) and event.flops:
                end = tensor.end_of_matmul(begin, takes)
            clocks[event.stream] = end
            new = Span(event.stream, place.phase, place.layer, begin, 0, 0)
            span = spans.get((event.stream, place), new)
            busy, issuing = span.busy + takes, span.host + issues
            spans[event.stream, place] = replace(span, end=end, busy=busy, host=issuing)
        elif isinstance(event, Record):
            reached = clocks.get(event.stream, 0.0)
            early = tensor.gathered if event.stream == events.TENSOR_PARALLEL else None
            marks[event.mark] = reached if early is None else early
        elif isinstance(event, Wait):
            until, reached = marks.get(event.mark, 0.0), max(clocks.get(event.stream, 0.0), host)
            if until > reached:
                exposed += until - reached if event.stream == events.COMPUTATION else 0.0
                clocks[event.stream] = until
    step = max([host, *clocks.values()])
    return Times(step, computation, communication, exposed, host, list(spans.values()))


def host_bound(times: Times) -> Iterator[str]:
    """Yield phases of groups that take the host longer to issue than the device to run, with both times."""
    groups: dict[tuple[str, int | None], list[Span]] = {}
    for span in times.spans:
        groups.setdefault((span.phase, span.layer), []).append(span)
    bound: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    for (phase, layer), members in groups.items():
        host, busy = sum(span.host for span in members), max(span.busy for span in members)
        if host > busy and phase in ("forward", "backward"):
            bound.setdefault((phase, layer is None), []).append((host, busy))
    for (phase, around), pairs in bound.items():
        host, busy = (sum(times) / len(pairs) for times in zip(*pairs, strict=True))
        subject = "the first and last modules" if around else f"{len(pairs)} blocks"
        yield f"{phase} of {subject}: the host takes {1e3 * host:.2f} ms to issue {1e3 * busy:.2f} ms of work"


def seconds_of(event: Compute | Send, hardware: Hardware) -> float:
    if isinstance(event, Send):
        return send_seconds(event.collective, hardware, stride=event.stride)
    return compute_seconds(event, hardware)


def compute_seconds(event: Compute, hardware: Hardware) -> float:
    seconds = event.nbytes / (hardware.memory_bytes_per_s * hardware.bandwidth_efficiency)
    if not event.flops:
        return seconds
    peak = hardware.peak_flops.get(event.dtype, min(hardware.peak_flops.values()))
    if "attention" in event.name:
        shorter = 1 + hardware.attention_half * event.nbytes / event.flops
        efficiency = hardware.attention_efficiency / shorter
    else:
        efficiency = hardware.matmul_efficiency * event.flops / (event.flops + hardware.matmul_half_flops)
    return max(seconds, event.flops / (peak * efficiency))


def send_seconds(call: Collective, hardware: Hardware, *, stride: int = 1) -> float:
    """Return the time of a ring over hosts with adjacent devices; for small messages, a tree of hosts.

    Args:
        stride: ranks from one member to the next. Ranks in between do the same over the same connection.
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


def delay_frees(recording: Recording, hardware: Hardware) -> Recording:
    """Return the recording with each marked `Free` moved to the first allocation after the device passes it.

    The allocator may record the memory that a collective uses on its own stream, and reuse it only when the
    device has passed the collective. The host runs ahead of the device, so freed memory of many blocks is
    kept at the same time, as far as the queue of commands between the two reaches: operators, collectives,
    marks (including those of these frees) and waits.
    """
    host, ends = 0.0, dict[str, float]()  # the host's time; the end of the last command of each stream
    marks = dict[Mark, float]()

    def end_of(event: Compute | Send | Record | Wait | Free) -> float:
        if isinstance(event, Free):
            assert event.mark is not None
            return marks[event.mark]
        end = ends.get(event.stream, 0.0)
        if isinstance(event, Record):
            marks[event.mark] = end
        elif isinstance(event, Wait):
            end = max(end, marks.get(event.mark, 0.0))
        else:
            end = max(end, host) + seconds_of(event, hardware)
        ends[event.stream] = end
        return end

    queue, waiting = deque[float](maxlen=QUEUED), deque[tuple[float, Free]]()
    segments = [Segment(segment.place) for segment in recording.segments]
    for segment, late in zip(recording.segments, segments, strict=True):
        for event in segment.events:
            if isinstance(event, Allocate):
                while waiting and waiting[0][0] <= host:
                    late.events.append(waiting.popleft()[1])
            elif not isinstance(event, Free) or event.mark is not None:
                host = max(host, queue[0]) if len(queue) == queue.maxlen else host
                host += hardware.host_seconds if isinstance(event, Compute | Send) else 0.0
                queue.append(end_of(event))
                if isinstance(event, Free) and (waiting or queue[-1] > host):
                    waiting.append((queue[-1], event))
                    continue
            late.events.append(event)
    segments[-1].events += [free for _, free in waiting]
    return replace(recording, segments=segments)
