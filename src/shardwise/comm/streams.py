"""The accelerator streams on which a model's communication runs beside its computation.

    copy_in          casts and copies shards into the all-gather's buffer (interleaved layout)
    all_gather       the all-gather itself, so that the next copy-in need not wait for it; contiguous: casts
                     before it too
    reduce_scatter   gradient reduce-scatters, and what is done with shards after them; contiguous: copies of
                     gradients before them too
    all_reduce       all-reduces over replicas, and hooks after reductions, so that the next reduce-scatter
                     need not wait for them

One set per root, shared by all its groups (`share_comm_ctx` shares it over several roots): buffers
then come from few streams, which keeps the caching allocator from fragmenting. CPU devices have no
streams; there the set is None and every collective completes before the call returns.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class CommStreams:
    copy_in: torch.Stream
    all_gather: torch.Stream
    reduce_scatter: torch.Stream
    all_reduce: torch.Stream
    # Gathered memory that no module shows any more, oldest first: owner, memory, event after its last use.
    _freed: list[tuple[Any, list[torch.UntypedStorage], torch.Event]] = field(default_factory=list)

    @staticmethod
    def create(device: torch.device) -> CommStreams | None:
        """Return new streams on `device`; None on devices without streams."""
        if device.type in ("cpu", "meta"):
            return None

        # Communication runs first where both are ready, as the next module's computation waits for it.
        def high() -> torch.Stream:
            return torch.Stream(device=device, priority=-1)

        # All-reduces have no priority: nothing waits for them before backward ends.
        return CommStreams(high(), high(), high(), torch.Stream(device=device))

    def wait(self, event: torch.Event) -> None:
        """Let coming all-gathers (their copy-ins too) start after `event`."""
        self.copy_in.wait_event(event)
        # Contiguous gathers begin here: without a copy-in, which interleaved ones wait for.
        self.all_gather.wait_event(event)

    def free_later(self, owner: Any, storages: list[torch.UntypedStorage], current: torch.Stream) -> None:
        """Give back memory of the all-gather stream once `current` has done what it is asked to so far.

        Not at once: the next gather would then wait for this computation, instead of running beside it.
        """
        # An event of now: one of the time of freeing would also stand for computation issued since.
        self._freed.append((owner, storages, record_event(current)))

    def reclaim(self, owner: Any = None, *, keep: int) -> bool:
        """Free what waits, but for the `keep` latest; and let `owner`, who gathers again, have its own back.

        What the all-gather stream does next runs after the computation that used that memory.

        Returns:
            Does `owner` have its memory still?
        """
        waiting, has_memory = self._freed, False
        # From the end, as what is taken out moves those behind it.
        for place in reversed(range(len(waiting))):
            if waiting[place][0] is owner:  # never by ==, which would compare tensors
                # The gather that follows on this stream overwrites what computation may still read.
                self.all_gather.wait_event(waiting.pop(place)[2])
                has_memory = True
        while len(waiting) > keep:
            # The oldest first: computation is done with it the soonest, so the gather waits least.
            _, storages, event = waiting.pop(0)
            # Before it is freed, as the allocator may give it to this stream's next gather at once.
            self.all_gather.wait_event(event)
            for storage in storages:
                storage.resize_(0)
        return has_memory


def record_event(stream: torch.Stream) -> torch.Event:
    """Return an event that marks the work issued to `stream` so far."""
    event: torch.Event = stream.record_event()
    return event


def wait_for(event: torch.Event, stream: torch.Stream) -> None:
    """Let `stream` wait for a user's event: torch's, or a device's own, such as `torch.cuda.Event`."""
    if type(event) is torch.Event:
        stream.wait_event(event)
        return
    # A torch.Stream takes a device's own event for one that was never recorded, and goes on.
    event.wait(_as(torch.get_device_module(stream.device).Stream, stream))


def plain(stream: torch.Stream) -> torch.Stream:
    """Return a stream of the user's as a `torch.Stream`, whose events every `torch.Stream` can wait for."""
    return stream if type(stream) is torch.Stream else _as(torch.Stream, stream)


def _as(kind: Any, stream: torch.Stream) -> torch.Stream:
    made: torch.Stream = kind(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )
    return made
