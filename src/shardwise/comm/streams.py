"""The accelerator streams on which a model's communication runs beside its computation.

    copy_in          casts and copies shards into the all-gather's buffer (interleaved layout)
    all_gather       the all-gather itself, so that the next copy-in need not wait for it; contiguous: also
                     the casts before it
    reduce_scatter   gradient reduce-scatters, and work on shards after them; contiguous: also the copies of
                     gradients before them
    all_reduce       all-reduces over replicas, and hooks after reductions, so that the next reduce-scatter
                     need not wait for them

There is one set per root, shared by all its groups (`share_comm_ctx` shares it between several roots), so
buffers come from few streams, which keeps the caching allocator from fragmenting. CPU devices have no
streams; there the set is None and every collective completes before the call returns.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

WITHOUT_STREAMS = ("cpu", "meta")  # types of devices


@dataclass(frozen=True)
class CommStreams:
    copy_in: torch.Stream
    all_gather: torch.Stream
    reduce_scatter: torch.Stream
    all_reduce: torch.Stream
    # Gathered memory of resharded groups, oldest first: owner, memory, event after its last use.
    _freed: list[tuple[Any, list[torch.UntypedStorage], torch.Event]] = field(default_factory=list)

    @staticmethod
    def create(device: torch.device) -> CommStreams | None:
        if device.type in WITHOUT_STREAMS:
            return None

        # If both are ready, communication runs first: the next module's computation waits for it.
        def high() -> torch.Stream:
            return torch.Stream(device=device, priority=-1)

        # All-reduces have no priority: nothing waits for them before backward ends.
        return CommStreams(high(), high(), high(), torch.Stream(device=device))

    def wait(self, event: torch.Event) -> None:
        """Make later all-gathers, and their copy-ins, start after `event`."""
        self.copy_in.wait_event(event)
        # Contiguous gathers begin on this stream; interleaved ones wait for their copy-in.
        self.all_gather.wait_event(event)

    def free_later(self, owner: Any, storages: list[torch.UntypedStorage], current: torch.Stream) -> None:
        """Free memory of the all-gather stream later, once `current` has finished its work so far."""
        # If it was freed at once, the next gather would wait for this computation instead of overlapping it.
        # Recorded now: an event at the time of freeing would also cover computation issued since.
        self._freed.append((owner, storages, record_event(current)))

    def reclaim(self, owner: Any = None, *, keep: int) -> bool:
        """Free waiting memory except the `keep` latest; return whether `owner` still has its own.

        Later work on the all-gather stream runs after the computation that used that memory.
        """
        waiting, has_memory = self._freed, False
        # From the end, since removing an entry moves those behind it.
        for place in reversed(range(len(waiting))):
            if waiting[place][0] is owner:  # never by ==, which would compare tensors
                # The gather that follows on this stream overwrites what computation may still read.
                self.all_gather.wait_event(waiting.pop(place)[2])
                has_memory = True
        while len(waiting) > keep:
            # The oldest first: computation finishes with it first, so the gather waits least.
            _, storages, event = waiting.pop(0)
            # Before it is freed: the allocator may give it to this stream's next gather at once.
            self.all_gather.wait_event(event)
            for storage in storages:
                storage.resize_(0)
        return has_memory


def record_event(stream: torch.Stream) -> torch.Event:
    event: torch.Event = stream.record_event()
    return event


def wait_for(event: torch.Event, stream: torch.Stream) -> None:
    """Make `stream` wait for a user's event: torch's, or a device's own, such as `torch.cuda.Event`."""
    if type(event) is torch.Event:
        stream.wait_event(event)
        return
    # A torch.Stream treats a device's own event as never recorded, and does not wait.
    event.wait(_as(torch.get_device_module(stream.device).Stream, stream))


def as_torch_stream(stream: torch.Stream) -> torch.Stream:
    """Return a user's stream as a `torch.Stream`, for whose events every `torch.Stream` can wait."""
    return stream if type(stream) is torch.Stream else _as(torch.Stream, stream)


def _as(kind: Any, stream: torch.Stream) -> torch.Stream:
    converted: torch.Stream = kind(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )
    return converted
