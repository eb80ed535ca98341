"""Memory that the allocator gets back late, since the device has not passed the collective that uses it.

The allocator may record the memory that a collective uses on its own stream, and reuse it only when the
device has passed the collective. The host runs ahead of the device, so freed memory of many blocks is kept at
the same time. The queue of commands between the two limits how far the host runs ahead.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from shardwise.planner.devices import Hardware
from shardwise.planner.events import Allocate, Compute, Free, Mark, Record, Recording, Segment, Send, Wait
from shardwise.planner.timing import seconds_of

QUEUED = 1024  # commands that CUDA queues ahead of the device, as often measured; not documented


def delay_frees(recording: Recording, hardware: Hardware) -> Recording:
    """Return the recording with each marked `Free` moved to the first allocation after the device passes it.

    Commands are operators, collectives, marks (including those of these frees) and waits.
    """
    host, ends = 0.0, dict[str, float]()  # the host's time; the end of the last command of each stream
    marks = dict[Mark, float]()

    def end_of(event: Compute | Send | Record | Wait | Free) -> float:
        """Return when the device finishes a command that the host issues now."""
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
