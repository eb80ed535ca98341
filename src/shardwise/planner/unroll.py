"""The step of a deep model, exactly, from the steps of two shallow ones.

A recording's segments come in loops: block after block, up in forward, down in backward. In a loop, equal
blocks in the middle do the same, except with the memory of other blocks, which are at the same distance from
each of them. So the loop of a deeper model has more repetitions in its middle, and the same ends:

    recorded     0  1  2  3  4  5  6  7
    unrolled     0  1  2  3  3' 3' 3'  4  5  6  7

If kinds of blocks alternate (for example one with global attention after every five with local attention),
they repeat with a period: the blocks of one period are the middle, and the second recording has one more.

Tensors around the blocks may have, for example, an element per parameter; their sizes grow by the same amount
with each block. `unroll` reads that growth from the second recording, and compares it, event by event, with
the unrolled first recording. If they differ it raises `NotRegular`: that model must be recorded whole.
"""

from __future__ import annotations

import functools
import gc
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise._compat import FakeTensor, FastFakeTensorMode
from shardwise.comm.count import tensors_in
from shardwise.errors import ShardwiseError
from shardwise.planner import events
from shardwise.planner.events import Allocate, Compute, Free, Memory, Record, Recording, Segment, Send, Wait
from shardwise.planner.kernels import kernels
from shardwise.planner.models import Model, chunked, no_packed_sequences, quiet_fakes
from shardwise.planner.recorder import DEVICE, MOST, refuse_loop
from shardwise.planner.setup import Setup
from shardwise.planner.sharding import build_module
from shardwise.planner.tensor import words_by_module

RECORDED = 8  # blocks: at either end, as many as prefetches and late frees reach
FEW = 4  # blocks that suffice in most settings
LEADING = 3  # the most blocks at the beginning that may differ from all after them
LONGEST = 8  # the longest period, in blocks
# The key of memory or a mark: its loop, its block, its kind, its number in the segment.
Birth = tuple[int, int | None, type, int]


class NotRegular(Exception):  # noqa: N818
    """Raised if a model does not do the same for each further block."""


class Pattern(NamedTuple):
    """How blocks repeat: each does the same as the block one period before, except some at the beginning."""

    leading: int = 0
    period: int = 1


def numbers_of_blocks(setup: Setup, pattern: Pattern, layers: int) -> list[int]:
    """Return the numbers of `layers` blocks to run, in order of trial; none if all cost less."""
    reshard = setup.reshard_after_forward
    reaches_far = setup.layout == "contiguous" and reshard is not False
    reaches_far |= reshard is not None and not isinstance(reshard, bool)
    numbers = (RECORDED,) if reaches_far else (FEW, RECORDED)
    leading, period = pattern
    least = leading + FEW if leading else 0  # so that the block before the middle one does the same
    counts = [max(number, least) + period - 1 for number in numbers]
    counts = [number + (layers - number) % period for number in counts]  # so that they end like all blocks
    return list(dict.fromkeys(count for count in counts if period == 1 or 2 * count + period < layers))


@contextmanager
def collector_paused() -> Iterator[None]:
    """Leave cyclic garbage uncollected: a collection walks a recording's hundreds of thousands of objects."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@collector_paused()
def unroll(
    small: Recording, large: Recording, layers: int, *, leading: int = 0, variant: Recording | None = None
) -> Recording:
    """Return the recording of the same model with `layers` blocks.

    Args:
        small: a recording of a few blocks, `RECORDED` if nothing is known about the model.
        large: a recording of one more period.
        leading: the number of blocks at the beginning that differ.
        variant: a recording to unroll instead of `small`, with other sizes, such as a larger micro-batch.

    Raises:
        NotRegular: the two recordings do not determine it.
    """
    loops, larger = list(_loops(small)), list(_loops(large))
    if len(loops) != len(larger):
        raise NotRegular(
            f"forward and backward pass over the blocks {len(loops)} times with {small.layers} blocks, and"
            f" {len(larger)} times with {large.layers}"
        )
    growths: dict[int, list[Any]] = {}
    # Middle blocks of `small`, which `large` has once more; the one before them does the same.
    period = large.layers - small.layers
    begin = max((small.layers - period) // 2, leading + 1 if leading else 0)
    window = range(begin, begin + period)
    for loop, large_loop in zip(loops, larger, strict=True):
        by_layer = {segment.place.layer: segment for segment in large_loop}
        for segment in loop:
            layer = segment.place.layer
            if layer is not None and layer >= window.stop:
                layer += len(window)
            if layer not in by_layer or len(by_layer[layer].events) != len(segment.events):
                raise NotRegular(f"{segment.place}: something else with {large.layers} blocks")
            growths[id(segment)] = list(map(_growth, segment.events, by_layer[layer].events))
    unrolled = _unroll_loops(small, growths, large, window, large.layers)
    for words, expected in zip(_words(unrolled), _words(large), strict=False):
        if words != expected:
            place = (words if expected == "the end" else expected)[0]
            place_name = events.name_of_place(place.phase, place.layer)
            raise NotRegular(f"with {large.layers} blocks, {place_name} does something else than with fewer")
    if variant is not None:
        kinds = [
            [[type(event) for event in segment.events] for segment in r.segments] for r in (small, variant)
        ]
        if kinds[0] != kinds[1]:
            raise NotRegular("other things happen with other sizes")
        segments = zip(small.segments, variant.segments, strict=True)
        growths |= {id(other): growths[id(segment)] for segment, other in segments}
        return _unroll_loops(variant, growths, large, window, layers)
    return unrolled if layers == large.layers else _unroll_loops(small, growths, large, window, layers)


def _loops(recording: Recording) -> Iterator[list[Segment]]:
    """Yield consecutive segments: one for each block, up or down; or a single one that does not repeat."""
    run: list[Segment] = []
    for segment in [*recording.segments, None]:
        if run and (segment is None or not _follows(run, segment)):
            if len(run) == recording.layers:
                yield run
            else:
                yield from ([single] for single in run)
            run = []
        if segment is not None:
            run.append(segment)


def _follows(run: list[Segment], segment: Segment) -> bool:
    last, place = run[-1].place, segment.place
    if last.layer is None or place.layer is None or last[:3] != place[:3]:
        return False
    step = place.layer - last.layer
    return abs(step) == 1 and (len(run) == 1 or step == last.layer - (run[-2].place.layer or 0))


def _growth(small: events.Event, large: events.Event) -> Any:
    if isinstance(small, Allocate) and isinstance(large, Allocate):
        return large.memory.nbytes - small.memory.nbytes
    if isinstance(small, Compute) and isinstance(large, Compute):
        growth = large.flops - small.flops, large.nbytes - small.nbytes
        return growth if any(growth) else 0
    if isinstance(small, Send) and isinstance(large, Send):
        return large.collective.bytes - small.collective.bytes
    return 0


def _grow(event: events.Event, growth: Any, times: int) -> events.Event:
    if isinstance(event, Compute):
        flops, nbytes = (number + change * times for number, change in zip(event[1:3], growth, strict=True))
        return event._replace(flops=flops, nbytes=nbytes)
    if isinstance(event, Allocate):
        event.memory.nbytes += growth * times
    elif isinstance(event, Send):
        call = event.collective
        return event._replace(collective=replace(call, bytes=call.bytes + growth * times))
    return event


@collector_paused()
def extrapolate(small: Recording, large: Recording, times: int) -> Recording:
    """Return `small` with its change to `large` applied `times` times, as for larger micro-batches.

    Raises:
        NotRegular: the two have different events.
    """
    if [segment.place for segment in small.segments] != [segment.place for segment in large.segments]:
        raise NotRegular("other segments with other sizes")
    for words, expected in zip(_words(small, sizes=False), _words(large, sizes=False), strict=False):
        if words != expected:
            raise NotRegular("other things happen with other sizes")
    pairs = zip(small.segments, large.segments, strict=True)
    growths = {id(segment): list(map(_growth, segment.events, other.events)) for segment, other in pairs}
    copier = _Copier(range(0), times, _births([[segment] for segment in small.segments]), growths)
    copies = [copier.copy(segment, i, segment.place.layer) for i, segment in enumerate(small.segments)]
    return replace(small, segments=copies)


def _unroll_loops(
    small: Recording, growths: dict[int, list[Any]], large: Recording, window: range, layers: int
) -> Recording:
    loops = list(_loops(small))
    times, rest = divmod(layers - small.layers, len(window))
    assert not rest, (small.layers, large.layers, layers)
    copier = _Copier(window, times, _births(loops), growths)
    segments = []
    for number, loop in enumerate(loops):
        if len(loop) == 1:
            layer = loop[0].place.layer
            layer = None if layer is None else layer + copier.shift(layer)
            segments.append(copier.copy(loop[0], number, layer))
            continue
        ordered = sorted(loop, key=lambda segment: segment.place.layer or 0)
        copies = list(zip(ordered[: window.stop], range(window.stop), strict=True))
        copies += [(ordered[i], i + n * len(window)) for n in range(1, times + 1) for i in window]
        copies += [(ordered[i], i + copier.added) for i in range(window.stop, small.layers)]
        if loop[0] is not ordered[0]:
            copies.reverse()
        segments += [copier.copy(segment, number, layer) for segment, layer in copies]
    totals: dict[str, Any] = {
        name: getattr(small, name) + times * (getattr(large, name) - getattr(small, name))
        for name in ("parameters", "sharded_parameters", "held_parameters")
    }
    sizes = small.gathered_parameters
    sizes = sizes[: window.stop] + sizes[window.start : window.stop] * times + sizes[window.stop :]
    return replace(small, layers=layers, segments=segments, gathered_parameters=sizes, **totals)


def _births(loops: list[list[Segment]]) -> dict[int, Birth]:
    births: dict[int, Birth] = {}
    for number, loop in enumerate(loops):
        for segment in loop:
            for kind in (Allocate, Record):
                new = [e for e in segment.events if isinstance(e, kind)]
                births |= {id(e[0]): (number, segment.place.layer, kind, i) for i, e in enumerate(new)}
    return births


class _Copier:
    """Copies segments with the memory and marks of the deeper model."""

    def __init__(
        self, window: range, times: int, births: dict[int, Birth], growths: dict[int, list[Any]]
    ) -> None:
        self.window, self.times, self.births, self.growths = window, times, births, growths
        self.added = times * len(window)
        self.copies: dict[Birth, Any] = {}

    def shift(self, layer: int) -> int:
        """Return the shift of a block as seen from around the blocks: the first stay, the last move."""
        return self.added if layer >= self.window.stop else 0

    def _copy_value(self, value: Any, offset: int | None, segment: Segment) -> Any:
        """Return the deeper model's memory or mark for `value`; anything else unchanged."""
        if not isinstance(value, (Memory, events.Mark)):
            return value
        loop, layer, kind, nth = self.births[id(value)]
        if layer is not None:
            layer += self.shift(layer) if offset is None else offset
        if (loop, layer, kind, nth) not in self.copies:
            raise NotRegular(f"{segment.place}: something is used before it is made")
        return self.copies[loop, layer, kind, nth]

    def copy(self, segment: Segment, number: int, layer: int | None) -> Segment:
        """Return `segment` as that of block `layer` of the deeper model, with all distances unchanged."""
        old_layer = segment.place.layer
        offset = None if layer is None or old_layer is None else layer - old_layer
        counts = {Allocate: itertools.count(), Record: itertools.count()}
        copied: list[events.Event] = []
        for event in segment.events:
            if isinstance(event, (Allocate, Record)):
                old: Any = event[0]
                kind = type(event)
                new: Any = events.Mark(layer)
                if kind is Allocate:
                    new = Memory(old.nbytes, old.stream, old.category)
                self.copies[number, layer, kind, next(counts[kind])] = new
                copied.append(type(event)(new, *event[1:]))
            elif isinstance(event, (Free, Wait)):
                values: list[Any] = [self._copy_value(value, offset, segment) for value in event]
                copied.append(type(event)(*values))
            elif isinstance(event, Send) and isinstance(event.group, int):
                shift = self.shift(event.group) if offset is None else offset
                copied.append(event._replace(group=event.group + shift))
            else:
                copied.append(event)
        growths = self.growths[id(segment)]
        copied = [_grow(e, g, self.times) if g else e for e, g in zip(copied, growths, strict=True)]
        return Segment(segment.place._replace(layer=layer), copied)


def _words(recording: Recording, *, sizes: bool = True) -> Iterator[Any]:
    """Yield a recording in words that are equal for equal recordings: memory and marks by number."""
    numbers: dict[int, int] = {}
    for segment in recording.segments:
        for event in segment.events:
            if isinstance(event, (Allocate, Record)):
                numbers[id(event[0])] = len(numbers)
            values = (numbers.get(id(value), sizes and value) for value in event)
            words: list[Any] = [segment.place, type(event).__name__, *values]
            if sizes and isinstance(event, Allocate):
                words += [event.memory.nbytes, event.memory.category, event.memory.stream]
            yield words
    yield "the end"


def pattern_of(model: Model, setup: Setup, *, cut: bool) -> Pattern:
    """Return how blocks repeat, by their contents, and their operators in one forward and backward.

    Args:
        cut: whether blocks must also be cut alike by tensor parallelism.

    Raises:
        NotRegular: blocks do not repeat; names the first that differs.
    """
    relevant = ("micro_batch", "sequence", "param_dtype", "loss", "device", "fused_norms")
    return _pattern(model, Setup(**{name: getattr(setup, name) for name in relevant}), cut)


@functools.lru_cache(maxsize=4)
def _pattern(model: Model, setup: Setup, cut: bool) -> Pattern:
    model = chunked(model) if setup.loss == "chunked" else model
    with quiet_fakes(), collector_paused(), _Watch(allow_non_fake_inputs=True) as watch:
        try:
            module, _ = build_module(model, model.layers, setup.param_dtype)
        except ShardwiseError:
            raise
        except Exception as error:  # of the user's model
            raise NotRegular(f"the model cannot be made: {error}") from error
        blocks = model.blocks(module)
        holders = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
        patterns = [_compare("has", [list(_describe_block(block, holders)) for block in blocks])]
        words = words_by_module(module) if cut else {}
        cuts = [[words.get(id(child)) for child in block.modules()] for block in blocks]
        patterns.append(_compare("is cut by", cuts))
        tokens = torch.zeros(setup.micro_batch, setup.length, dtype=torch.int64)
        watch.follow(blocks)
        try:
            with no_packed_sequences(), kernels(setup):  # by now the model's code is imported
                loss = model.loss(module, tokens, tokens)
                patterns.append(_compare("does", watch.inside))
                watch.in_backward = True
                loss.backward()
        except (NotRegular, ShardwiseError):
            raise
        except Exception as error:  # of the user's model
            phase = "backward" if watch.in_backward else "forward"
            raise NotRegular(f"one {phase} of the model cannot be looked at: {error}") from error
    patterns.append(_compare("is followed by", watch.after[:-1]))
    # In backward, what precedes the blocks in forward follows block 0.
    patterns.append(_compare("does in backward", watch.backward, first=1))
    firsts = list(dict.fromkeys(watch.order))
    if firsts != sorted(firsts):
        raise NotRegular(f"blocks run in the order {firsts}")
    return Pattern(max(p.leading for p in patterns), math.lcm(*[p.period for p in patterns]))


def _compare(verb: str, items: list[list[Any]], first: int = 0) -> Pattern:
    """Return how `items` repeat, with the shortest period."""
    for period in range(1, LONGEST + 1):
        unlike = (i for i in range(len(items) - period, first, -1) if items[i - 1] != items[i - 1 + period])
        leading = next(unlike, 0)
        if leading <= LEADING and (period == 1 or leading + 2 * period <= len(items)):
            return Pattern(leading, period)
    index = next(i for i in range(first, len(items)) if items[i] != items[first])
    raise NotRegular(f"block {index} {verb} something else than block {first}")


def _describe_block(block: nn.Module, holders: Counter[int]) -> Iterator[Any]:
    for name, module in block.named_modules():
        flags = sorted((key, value) for key, value in vars(module).items() if isinstance(value, bool))
        hooks = sorted((key, len(value)) for key, value in vars(module).items() if key.endswith("_hooks"))
        yield name, type(module), flags, hooks
    for name, p in block.named_parameters():
        yield name, p.shape, p.dtype, p.requires_grad, holders[id(p)]
    for name, buffer in block.named_buffers():
        yield name, buffer.shape, buffer.dtype


class _Watch(FastFakeTensorMode):
    """Records operators on fake tensors with their shapes, by the block that they are in, or come after.

    In backward, a block begins with the gradient of what it returned, and ends where the next one begins.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.order: list[int] = []
        self.in_backward = False
        self._current: list[Any] | None = None

    def follow(self, blocks: list[nn.Module]) -> None:
        self.inside, self.after, self.backward = ([list[Any]() for _ in blocks] for _ in range(3))
        for number, block in enumerate(blocks):
            block.register_forward_pre_hook(lambda *_, number=number: self._enter(number), prepend=True)
            block.register_forward_hook(lambda *call, number=number: self._leave(number, call[-1]))

    def _enter(self, number: int) -> None:
        if self.in_backward:  # which recomputes it
            return
        self.order.append(number)
        self._current = self.inside[number]
        self._current.append("call")

    def _leave(self, number: int, output: Any) -> None:
        if self.in_backward:
            return
        self._current = self.after[number]
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: setattr(self, "_current", self.backward[number]))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device  # read twice per operator: avoids another dispatch
        current, self._current = self._current, None  # without what torch computes a new result by
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._current = current
        if current is not None:
            tensors = [tensor for tensor in (*args, result) if isinstance(tensor, torch.Tensor)]
            words = [(tensor.shape, tensor.dtype) for tensor in tensors]
            current.append((func, torch.is_grad_enabled(), words))
            # A recording has `FEW` blocks at least.
            if len(current) > MOST // FEW and current is self.inside[self.order[-1]]:
                names = (str(tensor[0].overloadpacket) for tensor in current if tensor != "call")
                refuse_loop(Counter((name, "forward", self.order[-1]) for name in names))
        return result
