"""A rank of a pipeline: its stage, its order of micro-batches, and their memory and time.

Torch's stages run forward and backward of micro-batches one by one, and reduce gradients once, at the end.
Before 2.15 they make receive buffers for all micro-batches of a step in advance, and keep what they have
sent; since then, they make buffers as they receive. `Pipe` does as the installed torch, on fake tensors, for
a few micro-batches; `fill_pipeline` adds what the others keep. A schedule of p ranks with v stages each waits
(p - 1) / (v m + p - 1) of its m micro-batches' time, while filling and draining (Narayanan et al., 2021).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.torch_version import TorchVersion

from shardwise.adapters.pipelining import StateOfStage
from shardwise.comm.count import Collective
from shardwise.errors import ShardingError
from shardwise.fsdp import FSDPModule
from shardwise.fsdp.module_state import state_of
from shardwise.planner.devices import Hardware
from shardwise.planner.events import ACTIVATIONS, LOGITS, Allocate, Free, Memory, Recording, Segment, Send
from shardwise.planner.models import Model, Stage
from shardwise.planner.setup import Setup, check_filled, check_stages
from shardwise.planner.tensor import cuts
from shardwise.planner.timing import Times, send_seconds, time_of

BUFFERS_STAY = TorchVersion(torch.__version__) < "2.15"


def stage_of(model: Model, setup: Setup, number: int) -> Model:
    """Return the model that rank `number` of a pipeline has: an even share of the blocks.

    Raises:
        ShardingError: nothing makes the model's stages, or blocks or micro-batches do not fill the pipeline.
    """
    if model.stage is None:
        raise ShardingError(
            f"{model.name} does not say how to make a stage of it: give a factory that takes layers, first"
            " and last, or a shardwise.planner.Model with stage, or plan with pipeline=1"
        )
    ranks, make = setup.pipeline, model.stage
    check_stages(model.name, model.layers, setup)
    check_filled(setup)
    at = Stage(number, ranks, setup.accumulation, setup.stages)
    begin, end = (model.layers * i // ranks for i in (number, number + 1))
    return replace(model, layers=end - begin, build=lambda layers: make(layers, at.first, at.last), at=at)


def in_flight(setup: Setup, number: int) -> int:
    """Return for how many micro-batches rank `number` keeps backward's inputs at most, in all its stages."""
    ranks, count = setup.pipeline, setup.accumulation
    if setup.schedule == "GPipe":
        return count
    if setup.stages == 1:
        return min(count, ranks - number)
    of_a_round = count // max(1, count // ranks)
    forwards = (setup.stages - 1) * of_a_round + 2 * (ranks - 1 - number) + 1
    return min(count, math.ceil(forwards / setup.stages))


def order(setup: Setup, number: int) -> Iterator[tuple[bool, int]]:
    """Yield a rank's actions: whether each is a forward, and its micro-batch."""
    ahead = in_flight(setup, number)
    yield from ((True, micro) for micro in range(ahead))
    for micro in range(setup.accumulation):
        yield False, micro
        if micro + ahead < setup.accumulation:
            yield True, micro + ahead


def bubble(setup: Setup) -> float:
    """Return the fraction of a step in which a rank waits for the pipeline to fill and drain."""
    waits = setup.pipeline - 1
    return waits / (setup.stages * setup.accumulation + waits)


def hidden_of(model: Model, setup: Setup, tokens: Tensor) -> Tensor:
    assert model.stage is not None
    first = model.stage(1, True, False).to("cpu")
    with torch.no_grad():
        hidden: Any = first(tokens)
    if not isinstance(hidden, Tensor):
        raise ShardingError(
            f"a stage of {model.name} must return one tensor of hidden states, it returned a"
            f" {type(hidden).__name__}"
        )
    pieces = setup.tensor if setup.tensor > 1 and cuts(first, setup)[0] else 1
    return hidden.chunk(pieces, dim=1)[0].to(getattr(torch, setup.param_dtype))


def buffer_count(at: Stage) -> int:
    """Count the micro-batches for which a rank makes receive buffers in advance: in torch, all or none."""
    return at.micro_batches if BUFFERS_STAY else 0


class Pipe:
    """A rank's micro-batches, kept as torch's stages keep them.

    Several stages of a rank are one module here, with the blocks of all. Tensors that they pass to each other
    through other ranks are sent, received and kept as in torch.
    """

    def __init__(self, model: Model, module: nn.Module, hidden: Tensor, group: dist.ProcessGroup) -> None:
        self.model, self.module, self.group, self.at = model, module, group, model.at
        self.new_buffer = partial(torch.empty, hidden.shape, dtype=hidden.dtype)

        def buffers(stages: int) -> list[list[Tensor]]:
            return [[self.new_buffer() for _ in range(buffer_count(self.at))] for _ in range(stages)]

        # By stage, then micro-batch; the model's first stage receives no input, its last no gradient.
        self.received = buffers(self.at.stages - self.at.first)
        self.gradients = buffers(self.at.stages - self.at.last)
        self.cache: dict[int, tuple[Tensor | GradientEdge, Tensor, list[Tensor]]] = {}
        self.losses: dict[int, Tensor] = {}
        self.held: dict[str, Tensor] = {}  # by a schedule: the last output, the last that was sent

    def _send(self, tensor: Tensor) -> None:
        dist.send(tensor, group=self.group, group_dst=1)

    def _receive(self, buffers: list[Tensor], micro: int) -> Tensor:
        buffer = buffers[micro] if buffers else self.new_buffer()
        dist.recv(buffer, group=self.group, group_src=1)
        return buffer

    def forward(self, micro: int, tokens: Tensor) -> None:
        x = tokens
        if not self.at.first:
            x = self._receive(self.received[0], micro).requires_grad_()
        output = self.module(x)
        between = []
        for buffers in self.received[1 - self.at.first :]:
            sent = self.new_buffer()
            self._send(sent)
            received = self._receive(buffers, micro)
            between.append(sent if BUFFERS_STAY else received)
        keeps_output = BUFFERS_STAY or self.at.last
        self.cache[micro] = output if keeps_output else get_gradient_edge(output), x, between
        self.held["output"] = output
        if self.at.last:
            self.losses[micro] = self.model.loss(cast(nn.Module, lambda _: output), x, tokens)
        else:
            self._send(output.detach())

    def backward(self, micro: int) -> None:
        output, x, between = self.cache.pop(micro)
        self._end_backward(False)
        if not BUFFERS_STAY:
            self.held.pop("output", None)
        if self.at.last:
            self.losses[micro].backward()
        else:
            grad = self._receive(self.gradients[0], micro)
            torch.autograd.backward(output, grad)
            del grad
        for buffers in self.gradients[1 - self.at.last :]:
            self._send(self.new_buffer())
            self._receive(buffers, micro)
        del between
        if not self.at.first:
            assert x.grad is not None
            self.held["sent"], x.grad = x.grad, None
            self._send(self.held["sent"])

    def _end_backward(self, is_last: bool) -> None:
        module = cast(FSDPModule, self.module)
        module.set_is_last_backward(is_last)
        module.set_reshard_after_backward(is_last)
        module.set_requires_gradient_sync(is_last)

    def reduce(self) -> None:
        self._end_backward(True)
        state = state_of(self.module)
        assert state is not None
        StateOfStage(state)._root_post_backward_final_callback()

    def average(self) -> None:
        """Average gradients, and drop what was kept for backward."""
        if self.at.micro_batches > 1:
            for p in self.module.parameters():
                if p.grad is not None:
                    p.grad.div_(self.at.micro_batches)
        self.losses.clear()
        self.held.clear()


def kept_memory(recording: Recording, step: int) -> list[Memory]:
    """List the memory that the second micro-batch of a step keeps from forward to backward."""
    alive: dict[int, Memory] = {}
    for segment in recording.segments:
        if segment.place[:3] == (step, 1, "forward"):
            for event in segment.events:
                if isinstance(event, Allocate):
                    alive[id(event.memory)] = event.memory
                elif isinstance(event, Free):
                    alive.pop(id(event.memory), None)
    return [memory for memory in alive.values() if memory.category in (ACTIVATIONS, LOGITS)]


def fill_pipeline(recording: Recording, micro_batches: int) -> Recording:
    """Return the recording with more micro-batches in flight: the second's memory, `micro_batches` times."""
    if micro_batches < 1:
        return recording
    segments: list[Segment] = []
    copies: list[Memory] = []
    step = -1
    for segment in recording.segments:
        place = segment.place
        if place.phase == "backward" and place.micro == 0 and place.step != step:
            step = place.step
            copies = [replace(memory) for memory in kept_memory(recording, step) * micro_batches]
            segments.append(Segment(place._replace(layer=None), [Allocate(memory) for memory in copies]))
        elif place.phase == "backward" and place.micro == 2 and copies:
            segments.append(Segment(place._replace(layer=None), [Free(memory) for memory in copies]))
            copies = []
        segments.append(segment)
    return replace(recording, segments=segments)


@dataclass(frozen=True)
class StageFigures:
    """Memory and messages of a rank of a pipeline."""

    rank: int
    blocks: int
    micro_batches: int  # the most for which it keeps backward's inputs at a time
    activations_bytes: int  # kept for them; before torch 2.15, including all receive buffers
    sent_bytes: int  # to the previous and next rank in a step


def figures(recordings: list[Recording], model: Model, setup: Setup) -> list[StageFigures]:
    """Return the figures of all ranks, from recordings of the first and the last."""
    first, last = recordings
    sizes = [sum(memory.nbytes for memory in kept_memory(r, r.segments[-1].place.step)) for r in recordings]
    output_bytes = _handed_bytes(first)
    stages = []
    for rank in range(setup.pipeline):
        begin, end = (model.layers * i // setup.pipeline for i in (rank, rank + 1))
        recording, size = (last, sizes[1]) if rank == setup.pipeline - 1 else (first, sizes[0])
        ways = 2 * setup.stages - (rank in (0, setup.pipeline - 1))
        sent_bytes = output_bytes * ways * setup.accumulation
        count = in_flight(setup, rank)
        kept_bytes = count * size * (end - begin) // recording.layers + sent_bytes * BUFFERS_STAY
        stages.append(StageFigures(rank, end - begin, count, kept_bytes, sent_bytes))
    return stages


def _handed_bytes(first: Recording) -> int:
    """Return the bytes of a stage's output for one micro-batch."""
    events = (event for segment in first.segments for event in segment.events)
    return next(e.collective.bytes for e in events if isinstance(e, Send) and e.collective.kind == "send")


def pipe_times(recordings: list[Recording], setup: Setup, device: Hardware) -> Times:
    """Return the times of the slowest rank, including waits while the pipeline fills and drains.

    Ranks between the two recorded ones send in both directions.
    """
    rank_times = []
    hop = Collective("send", _handed_bytes(recordings[0]), None, setup.pipeline)
    sends = send_seconds(hop, device, stride=setup.ranks // setup.pipeline)
    extra = sends * (setup.pipeline > 2)
    count = setup.accumulation
    for recording in recordings:
        times, longer = (time_of(recording, device, n) for n in (count, max(count, 3) + 1))
        steady = (longer.step - time_of(recording, device, max(count, 3)).step) + extra
        total = times.step + count * extra + (setup.pipeline - 1) / setup.stages * steady
        rank_times.append(replace(times, step=total))
    return max(rank_times, key=lambda times: times.step)


def lines(stages: list[StageFigures], setup: Setup, planned: int) -> Iterator[str]:
    if not stages:
        return
    yield (
        f"Pipeline: {setup.schedule} of {setup.accumulation} micro-batches over {setup.pipeline} ranks of"
        f" {setup.stages}: {bubble(setup):.1%} of a step waits for it to fill and drain. Memory is of rank"
        f" {planned}, which needs most"
    )
    rows = [*stages[:3], *stages[-1:]] if len(stages) > 5 else stages
    for stage in rows:
        yield (
            f"  rank {stage.rank}: {stage.blocks} blocks, activations of {stage.micro_batches} micro-batches"
            f" {stage.activations_bytes / 2**30:,.2f} GiB, {stage.sent_bytes / 2**30:,.2f} GiB sent to others"
        )
