"""Memory that the allocator gets back late: the device is not past the collective that uses it.

Of what a collective uses on a stream of its own, the allocator may keep a record, and give it out again only
when the device is past that. The host runs ahead of the device, so that what many blocks freed is kept at a
time. How far ahead is bounded by the queue of commands between the two.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from shardwise.planner.devices import Hardware
from shardwise.planner.events import Allocate, Compute, Free, Mark, Record, Recording, Segment, Send, Wait
from shardwise.planner.timing import seconds_of

QUEUED = 1024  # commands that CUDA takes ahead of the device, as often measured; it is not documented


def freed_late(recording: Recording, hardware: Hardware) -> Recording:
    """Return the recording with each `Free` that has a mark where an allocation finds the device past it.

    Commands are operators, collectives, marks and waits, and the mark that such a free makes.
    """
    host, ends = 0.0, dict[str, float]()  # now; when the last command of each stream ends
    marks = dict[Mark, float]()
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
                queue.append(_end(event, host, ends, marks, hardware))
                if isinstance(event, Free) and (waiting or queue[-1] > host):
                    waiting.append((queue[-1], event))
                    continue
            late.events.append(event)
    segments[-1].events += [free for _, free in waiting]
    return replace(recording, segments=segments)


def _end(
    event: Compute | Send | Record | Wait | Free,
    host: float,
    ends: dict[str, float],
    marks: dict[Mark, float],
    hardware: Hardware,
) -> float:
    """Return when the device is done with a command that the host issues now."""
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
