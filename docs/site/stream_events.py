"""What a small model gives to the streams of a simulated accelerator: operations, and what each waits for.

    recorded(train, layout="contiguous")    a recording of whatever `train` does with the model
    boxes(recording.steps)                  operations of one purpose together, with the waits between

An operation is told with how many of each stream it comes after; where that says more than the stream's
operation before did, a wait lies between. What follows from another wait is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise import MixedPrecisionPolicy, _compat, fully_shard
from shardwise.fsdp import ranges
from shardwise.fsdp.state import FSDPState
from shardwise.planner.noop_group import noop_world
from shardwise.verify.streams import DEVICE, simulated
from shardwise.verify.streams.clocks import Clock, Operation

RANKS, BLOCKS = 4, 3


@dataclass
class Step:
    """One operation as it was told.

    Attributes:
        purpose: what it is for, such as "gather 1".
        phase: what the training was at.
        after: how many of each stream come before it.
    """

    operation: Operation
    purpose: str
    phase: str
    after: Clock


@dataclass
class Recording:
    steps: list[Step] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    phase: str = ""
    _purposes: list[str] = field(default_factory=list)
    _backward: str = ""

    def heard(self, operation: Operation, after: Clock) -> None:
        """The simulation tells an operation."""
        purpose = self._purposes[-1] if self._purposes else self._backward or self.phase
        self.steps.append(Step(operation, purpose, self.phase, after))

    @contextmanager
    def purpose(self, title: str) -> Iterator[None]:
        """In the place of a profile's range: what is done inside is for this."""
        self._purposes.append(title.removeprefix("shardwise: ").replace("the root module", "root"))
        try:
            yield
        finally:
            self._purposes.pop()

    @contextmanager
    def at(self, phase: str) -> Iterator[None]:
        self.phase = phase
        yield
        self.phase = ""

    def follow_backward(self, before: Callable[..., Any]) -> Callable[..., Any]:
        """`FSDPState.pre_backward`, after which that module's backward runs."""

        def pre_backward(state: FSDPState, ending: Any, grad: Tensor) -> Tensor:
            result = before(state, ending, grad)
            self._backward = f"backward {state.name}" if state.groups else self._backward
            return result

        return pre_backward

    def leave_backward(self, before: Callable[..., Any]) -> Callable[..., Any]:
        def end_of_backward(state: FSDPState) -> None:
            self._backward = ""
            before(state)

        return end_of_backward


def model(layout: str, *, hsdp: bool) -> nn.Module:
    shape, names = ((2, 2), ("replicate", "shard")) if hsdp else ((RANKS,), ("shard",))
    mesh = init_device_mesh(DEVICE, shape, mesh_dim_names=names)
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(BLOCKS))).to(DEVICE)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in blocks:
        fully_shard(block, mesh=mesh, layout=layout, mp_policy=policy)
    return fully_shard(blocks, mesh=mesh, layout=layout)


def recorded(
    train: Callable[[nn.Module, Recording], None], *, layout: str = "interleaved", hsdp: bool = False
) -> Recording:
    """What `train` does with a model of three blocks on 4 ranks."""
    recording = Recording()
    with simulated() as found, noop_world(RANKS), ExitStack() as patches:
        for owner, name, wrap in (
            (FSDPState, "pre_backward", recording.follow_backward),
            (FSDPState, "end_of_backward", recording.leave_backward),
        ):
            patches.enter_context(mock.patch.object(owner, name, wrap(getattr(owner, name))))
        patches.enter_context(mock.patch.object(ranges, "record_function", recording.purpose))
        patches.enter_context(mock.patch.object(_compat, "profiler_runs", return_value=True))
        found.simulation.timeline.listener = recording.heard
        train(model(layout, hsdp=hsdp), recording)
        recording.findings += map(str, found.findings)
    return recording


# ---------------------------------------------------------------- drawn together


@dataclass(eq=False)
class Box:
    """Operations of one purpose, one after the other on a stream.

    Attributes:
        after: boxes of other streams that end before this one begins, without those that follow from these.
    """

    stream: str
    words: str
    steps: list[Step]
    after: list[Box] = field(default_factory=list)


def boxes(steps: list[Step]) -> list[Box]:
    """In the order in which the host issued them."""
    waits = dict(_waits(steps))
    ends = {id(one) for found in waits.values() for one in found}  # what somebody waits for ends its box
    made: list[Box] = []
    latest: dict[str, Box] = {}  # of each stream
    box_of: dict[int, Box] = {}
    for step in steps:
        stream, words = step.operation.stream, words_for(step)
        known, begins = latest.get(stream), waits.get(id(step), [])
        if known is None or known.words != words or begins or id(known.steps[-1]) in ends:
            known = latest[stream] = Box(stream, words, [])
            made.append(known)
        known.steps.append(step)
        known.after += [box for box in map(box_of.get, map(id, begins)) if box and box not in known.after]
        box_of[id(step)] = known
    return made


def _waits(steps: list[Step]) -> Iterator[tuple[int, list[Step]]]:
    """By step, the last of each other stream that it, and none before it on its own stream, comes after."""
    known: dict[int, Clock] = {}
    before: dict[int, list[Step]] = {}  # of each line
    for step in steps:
        own = step.operation.line
        new = []
        for line, others in before.items():
            seen = known.get(own, {}).get(line, 0)
            found = [one for one in others if seen < one.operation.tick <= step.after.get(line, 0)]
            new += found[-1:] if line != own else []
        direct = [one for one in new if not any(_comes_after(two, one) for two in new)]
        if direct:
            yield id(step), direct
        known[own] = step.after
        before.setdefault(own, []).append(step)


def _comes_after(later: Step, one: Step) -> bool:
    return later is not one and later.after.get(one.operation.line, 0) >= one.operation.tick


def words_for(step: Step) -> str:
    """What is written on an operation's box."""
    stream, name = step.operation.stream, step.operation.name
    kind, _, block = step.purpose.rpartition(" ")
    if kind == "gather":
        if "copy-in" in stream:
            return f"copy in {block}"
        return f"gather {block}" if "gather" in name else f"cast {block}"
    if kind == "wait for":
        return f"copy out {block}"
    if kind == "reduce":
        if "computing" in stream or name in ("_foreach_copy_", "zero_"):
            return f"stage {block}"
        if "scatter" in name or "reduce" in name:
            return f"{'reduce' if 'scatter' in name else 'all-reduce'} {block}"
        return f"{'add' if 'add' in name else 'cast'} {block}"
    others = {"forward root": "input", "forward": "loss", "backward": "loss"}
    return others.get(step.purpose, step.purpose)
