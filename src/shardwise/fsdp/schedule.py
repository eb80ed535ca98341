"""The schedule that sharded modules under one root share during an iteration.

The first module to run forward is the root. Its schedule records the order in which modules ran, so that
backward can prefetch the next module; the module whose release is deferred, because it may be the last of
forward and so the first of backward; and the memory that accelerator streams still use.

References to modules' states are weak: they own the schedule.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.comm import AllGatherResult, CommStreams, ReduceResult
from shardwise.comm.foreach import Input, current_stream
from shardwise.comm.order import Event, Order
from shardwise.comm.streams import record_event, wait_for
from shardwise.fsdp.fast import process

State = Any  # a `ModuleState`, which has a schedule


@dataclass
class Schedule:
    """The bookkeeping of one iteration, shared by all states under a root."""

    device: torch.device
    streams: CommStreams | None
    root: weakref.ref[State]
    forward_root: weakref.ref[State] | None = None  # first to enter forward in this pass; None outside
    order: list[weakref.ref[State]] = field(default_factory=list)  # in which forwards ended, once per call
    order_before: int = 0  # length of `order` when this pass began
    hooked: bool = False  # an output of this pass is hooked for backward
    pending_release: weakref.ref[State] | None = None  # last to end forward, not released yet
    release_stream: torch.Stream | None = None  # the current stream when it ended
    # The latest module's output, if that is one tensor, and the states whose backward the hook on it ends
    # first, each with the stream it ran on (None on CPU).
    latest_output: tuple[weakref.ref[torch.Tensor], list[tuple[State, torch.Stream | None]]] | None = None
    callback_queued: bool = False  # autograd will call the end of this backward
    had_backward: bool = False  # since forward last began
    goes_again: bool = False  # backward through what an earlier backward may have gone through
    unfinished: bool = False  # a backward has begun since the iteration last ended
    manual: bool = False  # the user ends backward, by `finalize_backward`
    reducing: Any = None  # the handle of `finalize_backward`, until it is waited for
    is_last_backward: bool = True  # before the optimizer step
    post_optim_event: torch.Event | None = None  # the next gathers wait for it, not for the current stream
    # A gather whose buffer the copy-out may still read, kept until the next copy-out, so that the next
    # gather can run meanwhile.
    copy_out_pending: tuple[AllGatherResult, torch.Event] | None = None
    # In flight, some with the shard; each with the stream that has its memory.
    reduce_inputs: list[tuple[Input, torch.Stream]] = field(default_factory=list)
    max_reduce_inputs: int = 1
    # Reduced shards that a stream may still use, though another one allocated them.
    reduce_shards: list[torch.Tensor] = field(default_factory=list)
    reduced: dict[torch.Stream, torch.Event] = field(default_factory=dict)  # the end of its latest reduction
    reducing_from: set[torch.Stream] = field(default_factory=set)  # streams whose memory reductions use
    orders: list[Order] = field(default_factory=list)  # of all groups' process groups, each once
    pass_events: list[Event] = field(default_factory=list)  # announces a pass, one per order
    profiled: bool = False  # passes are recorded in profiles
    transformed: bool = False  # passes have run within transforms of torch.func, and may again

    def __del__(self) -> None:
        # A model may be deleted while reductions run, which use the memory of these streams.
        for stream in self.reducing_from:
            for event in self.reduced.values():
                stream.wait_event(event)

    def release_pending(self, *, unless: State | None = None) -> None:
        """Release the state whose release was deferred, unless it runs next, on the same stream."""
        pending = None if self.pending_release is None else self.pending_release()
        self.pending_release = None
        if pending is None:
            return
        stream = self.release_stream
        if stream is not None and stream != current_stream(self.device):
            # Smaller shards may get memory of `stream` that is still read here.
            stream.wait_stream(current_stream(self.device))
            with stream:  # it reads what was gathered, and is not ordered with what runs next
                pending.release()
        elif pending is not unless:
            pending.release()

    # Accelerator streams only

    def follow_optimizer(self) -> None:
        """Make gathers start only after the previous optimizer step."""
        if self.streams is None:
            return
        event = self.post_optim_event
        if event is None:
            self.streams.wait(record_event(current_stream(self.device)))
            return
        wait_for(event, self.streams.copy_in)
        wait_for(event, self.streams.all_gather)
        root = self.root()
        groups = [] if root is None else [group for group, _ in root.all_groups]
        # Some are refreshed, or gathered asynchronously, on this stream.
        if not all(group.gathers and not group.settings.unshard_async_op for group in groups):
            wait_for(event, current_stream(self.device))

    def finish_gather(self, result: AllGatherResult, *, forward: bool) -> None:
        """Keep a gather's buffer from being reused before it was copied out."""
        if self.streams is None:
            return
        # Directly after the copy-out, before the module's computation is issued to the same stream.
        copied_out = record_event(current_stream(self.device))
        if result.stream is not None and result.stream is not self.streams.copy_in:
            result.stream.wait_event(copied_out)  # the user's, to which the buffer goes back
        if forward and result.work is None:
            # Two buffers: the next gather may fill one while the other is copied out.
            self.end_copy_out()
            self.copy_out_pending = (result, copied_out)
        else:
            # Backward prefetches a module: its next gather may wait, and one buffer is enough.
            self.streams.wait(copied_out)

    def end_copy_out(self) -> None:
        if self.copy_out_pending is not None and self.streams is not None:
            # The next gather may reuse its buffer, and must not write there before it was copied out.
            self.streams.wait(self.copy_out_pending[1])
        self.copy_out_pending = None

    def free_gathered(self) -> None:
        """Free all gathered memory of resharded groups, which no later gather would free."""
        if self.streams is not None:
            self.streams.reclaim(keep=0)

    def make_room_for_reduction(self) -> None:
        """Wait for the oldest reduce-scatter inputs until one more may be in flight."""
        while len(self.reduce_inputs) >= self.max_reduce_inputs:
            (_, event), stream = self.reduce_inputs.pop(0)
            stream.wait_event(event)  # it has the input's memory: reuse comes after the last read

    def track_reductions(self, results: list[ReduceResult]) -> None:
        """Keep the buffers of running reductions from being reused."""
        assert self.streams is not None
        stream = current_stream(self.device)
        self.reducing_from.add(stream)
        process.computing.add(stream)  # gradients are its memory: steps on others keep them
        for result in results:
            self.reduce_inputs += [(used, stream) for used in result.inputs]
            # Computation's memory: a shard that stays, or one that is the input (a shard axis of one rank).
            of_computation = any(tensor is result.staged for used, _ in result.inputs for tensor in used)
            if of_computation or result.stream is not self.streams.reduce_scatter:
                self.reduce_shards.append(result.staged)
            if of_computation and result.added is not None:
                self.reduce_shards.append(result.added)
            if result.stream is not None:
                # After all uses of the result there: gradients added, hooks, an optimizer's step.
                self.reduced[result.stream] = record_event(result.stream)

    def wait_for_reductions(self) -> None:
        """Make the current stream wait for every reduction, and free their buffers.

        The streams whose memory they use wait, too.
        """
        if self.streams is None:
            return
        # Another root may share the stream of reduce-scatters, whose memory is freed below.
        streams = current_stream(self.device), self.streams.reduce_scatter, *self.reducing_from
        for stream in dict.fromkeys(streams):
            for event in self.reduced.values():
                stream.wait_event(event)
        self.reducing_from.clear()
        self.reduced.clear()
        self.reduce_inputs.clear()  # reductions have read them
        self.reduce_shards.clear()
