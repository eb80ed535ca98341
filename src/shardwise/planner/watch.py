"""Follows the library from block to block while it runs: what computes or gathers, and on which stream."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from shardwise import _compat
from shardwise.comm.streams import CommStreams
from shardwise.fsdp.fast import process
from shardwise.fsdp.group import ParamGroup
from shardwise.fsdp.state import FSDPState
from shardwise.optim import adamw8bit, norm
from shardwise.planner.events import COMPUTATION, STREAMS, Mark, Record, Wait
from shardwise.planner.noop_group import listening
from shardwise.planner.recorder import Recorder
from shardwise.planner.storages import Storages

Method = Callable[..., Any]


@contextmanager
def watching(recorder: Recorder, streams: bool) -> Iterator[None]:
    """Tell `recorder` where the library is, for every state and group of the process.

    With `streams`, the library has streams as on an accelerator.
    """
    watcher = _Watcher(recorder)
    with ExitStack() as stack:
        forward, backward = ("pre_forward", "post_forward"), ("pre_backward", "post_backward")
        kinds: dict[str, Any] = dict.fromkeys((*forward, *backward, "reduce", "end_of_backward"), FSDPState)
        kinds |= {"reshard": ParamGroup, "unshard": ParamGroup, "_initial_state": adamw8bit}
        for name, kind in kinds.items():
            around = getattr(watcher, name, operator.call)
            method = _inside(recorder, partial(around, getattr(kind, name)))
            stack.enter_context(mock.patch.object(kind, name, method))
        stack.enter_context(hearing(recorder, streams))
        yield


def _inside(recorder: Recorder, method: Method) -> Method:
    def call(*args: Any, **kwargs: Any) -> Any:
        recorder.in_library += 1
        try:
            return method(*args, **kwargs)
        finally:
            recorder.in_library -= 1

    return call


class _Watcher:
    """Each method but `layer` is called for one of the same name of the library, its first argument."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.names: dict[int, int | str] = {}  # of groups: their block's number, or their module's name

    def layer(self, state: FSDPState) -> int | None:
        return self.recorder.layer_of.get(id(state.modules[0]()))

    def pre_forward(self, original: Method, state: FSDPState, *args: Any) -> Any:
        layer = self.layer(state)
        if layer is not None:
            self.names |= {id(group): layer for group in state.groups}
            if self.recorder.place.phase == "forward":
                self.recorder.go(layer=layer, after=False)  # blocks may run again
        return original(state, *args)

    def post_forward(self, original: Method, state: FSDPState, *args: Any) -> Any:
        result = original(state, *args)
        if self.recorder.place.phase == "forward" and self.layer(state) == self.recorder.last:
            self.recorder.go(layer=None, after=True)
        return result

    def pre_backward(self, original: Method, state: FSDPState, previous: Any, grad: Any) -> Any:
        for previous_state, _ in previous:  # still in its own block
            previous_state.post_backward()
        recorder, layer = self.recorder, self.layer(state)
        # If a root returns its last block's output, this is the block's backward.
        is_last_output = layer is None and bool(state.below) and recorder.place.layer == recorder.last
        if not is_last_output and (layer is not None or recorder.place.layer is not None):
            recorder.go(layer=layer, after=False)
        return original(state, (), grad)

    def end_of_backward(self, original: Method, state: FSDPState) -> None:
        self.recorder.go(phase="end of backward", layer=None, after=False)
        original(state)

    def reshard(self, original: Method, group: ParamGroup) -> None:
        if self.recorder.place.phase == "end of backward":
            layer = self.names.get(id(group))
            self.recorder.by_layer(layer if isinstance(layer, int) else None)
        original(group)

    def reduce(self, original: Method, state: FSDPState, *args: Any, **kwargs: Any) -> Any:
        if state.groups:
            self.recorder.group = self.names.get(id(state.groups[0]), state.groups[0].name)
        with self.recorder.in_block(self.layer(state)):
            return original(state, *args, **kwargs)

    def _initial_state(self, original: Method, param: Tensor, **options: Any) -> Any:
        """Make state that counts for its parameter's block."""
        layer = self.recorder.owner_of([_compat.local_of(param)])
        self.recorder.by_layer(layer)
        state = original(param, **options)
        self.recorder.by_layer(layer)
        return state

    def unshard(self, original: Method, group: ParamGroup, **kwargs: Any) -> None:
        self.recorder.group = self.names.get(id(group), group.name)
        original(group, **kwargs)


class Stream:
    """Stand-in for an accelerator's stream: operations are issued to it while it is entered."""

    def __init__(self, name: str, recorder: Recorder) -> None:
        self.name, self.recorder = name, recorder

    def __enter__(self) -> None:
        self.recorder.streams.append(self.name)

    def __exit__(self, *error: object) -> None:
        self.recorder.streams.pop()

    def record_event(self) -> Mark:
        mark = Mark(self.recorder.place.layer)
        self.recorder.write(Record(mark, self.name))
        return mark

    def wait_event(self, mark: Mark) -> None:
        self.recorder.write(Wait(mark, self.name))

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


@contextmanager
def seeing_random_states(storages: Storages) -> Iterator[None]:
    """Show `storages` the CPU's random states that checkpoints keep, which no operator makes."""
    generator = torch.default_generator

    def state() -> Tensor:
        storages.see(made := generator.get_state())
        return made

    patched = partial(mock.patch.object, attribute="get_rng_state", new=state)
    with patched(torch), patched(torch.random):
        yield


@contextmanager
def hearing(recorder: Recorder, streams: bool) -> Iterator[dict[str, Stream]]:
    """Tell `recorder` of collectives and, with `streams`, of stand-in streams, which are yielded by name."""
    stand_ins = {name: Stream(name, recorder) for name in (COMPUTATION, *STREAMS)}
    with ExitStack() as stack:
        stack.enter_context(listening(recorder.record_collective))
        stack.enter_context(_compat.shapes_of_dtensors_unseen(recorder))
        if streams:
            create = staticmethod(lambda device: CommStreams(*(stand_ins[name] for name in STREAMS)))  # type: ignore
            stack.enter_context(mock.patch.object(CommStreams, "create", create))
            current: Any = lambda device=None: stand_ins[recorder.streams[-1]]  # noqa: E731
            stack.enter_context(mock.patch.object(torch.accelerator, "current_stream", current))
            stack.enter_context(mock.patch.object(process, "computing", set()))  # put back when this ends
            stack.enter_context(mock.patch.dict(adamw8bit.ELEMENTS_AT_ONCE))
            del adamw8bit.ELEMENTS_AT_ONCE["cpu"]
            stack.enter_context(mock.patch.object(norm, "PART", 1 << 62))  # in parts on CPUs alone
        else:
            stack.enter_context(seeing_random_states(recorder))
        yield stand_ins
