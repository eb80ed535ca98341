"""Totals of a recording's last step: bytes alive and reserved, bytes sent, operations."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.planner.allocator import Allocator, Piece
from shardwise.planner.events import EXPERTS, Allocate, Compute, Event, Free, Place, Recording, Send

_MULTIPLIES = re.compile(
    r"mm\b|mm_|matmul|conv|attention|linear|lstm|gru|rnn|_euclidean_dist|cholesky|triangular_solve"
    r"|linalg_(?!vector_norm|check_errors|cross)"
)
NEAR = 0.2  # of a device's memory: more than twice the memory error
RECORDED_MICRO_BATCHES = 3  # the first, one that represents all in the middle, the last


@dataclass(frozen=True)
class Moment:
    """The most bytes alive while one block is in one phase, by category."""

    phase: str
    layer: int | None
    alive: dict[str, int]

    @property
    def alive_bytes(self) -> int:
        return sum(self.alive.values())


@dataclass(frozen=True)
class Sent:
    """Equal collectives: `nbytes` is the full buffer of one, `wire_bytes` a rank's messages for all."""

    kind: str
    nbytes: int
    dtype: str
    ranks: int
    count: int
    wire_bytes: int


@dataclass(frozen=True)
class GroupSent:
    """The bytes that each of some equal groups of parameters sends in a step."""

    name: str  # "blocks 0 to 30", or a module's name
    groups: int  # the number of groups
    gathered_bytes: int  # of one gather's full buffer; 0 if the group is never gathered
    shard_bytes: int  # of one rank's part of it
    gathers: int
    reductions: int
    wire_bytes: int
    padding: float | None  # fraction of the buffer that is padding; None if it is not known


def groups(recording: Recording, accumulation: int) -> list[GroupSent]:
    """List the last step's groups, in order of first appearance; equal blocks are one entry."""
    gathers: dict[int | str, Counter[tuple[int, int, int]]] = {}
    reductions, wire_bytes = Counter[int | str](), Counter[int | str]()
    for _, event, times in last_step(recording, accumulation):
        if isinstance(event, Send):
            call = event.collective
            sizes = gathers.setdefault(event.group, Counter())
            wire_bytes[event.group] += call.wire_bytes * times
            if call.kind == "all_gather" and call.dtype is not None:
                sizes[call.bytes, call.group_size, call.dtype.itemsize] += times
            elif call.kind in ("reduce_scatter", "all_reduce"):
                reductions[event.group] += times
    equal: dict[tuple[Any, ...], list[int | str]] = {}
    for group, calls in gathers.items():
        largest = max(calls, default=(0, 1, 1))
        is_block = isinstance(group, int)
        key = (is_block, *largest, sum(calls.values()), reductions[group], wire_bytes[group])
        equal.setdefault(key if is_block else (*key, group), []).append(group)
    result = []
    for (is_block, nbytes, ranks, itemsize, gathered, reduced, wire, *_), names in equal.items():
        numel = recording.gathered_parameters[int(names[0])] if is_block else 0
        padding = 1 - numel * itemsize / nbytes if is_block and nbytes else None
        shard = nbytes // ranks
        label = str(names[0]) or "the root"
        if is_block:
            first, last = min(names), max(names)  # numbers
            label = f"block {first}" if first == last else f"blocks {first} to {last}"
        result.append(GroupSent(label, len(names), nbytes, shard, gathered, reduced, wire, padding))
    return result


def moments(recording: Recording) -> list[Moment]:
    """Return the last step's memory, segment by segment."""
    alive: Counter[str] = Counter()
    result = []
    last = recording.segments[-1].place.step
    for segment in recording.segments:
        alive_bytes, peak_bytes = sum(alive.values()), -1
        highest: dict[str, int] = {}
        for event in [None, *segment.events]:
            if isinstance(event, (Allocate, Free)):
                change = event.memory.nbytes if isinstance(event, Allocate) else -event.memory.nbytes
                alive[event.memory.category] += change
                alive_bytes += change
            if alive_bytes > peak_bytes:
                peak_bytes, highest = alive_bytes, dict(alive)
        if segment.place.step == last:
            sizes = {category: size for category, size in highest.items() if size}
            result.append(Moment(segment.place.phase, segment.place.layer, sizes))
    return result


def replay(recording: Recording, *, expandable: bool, limit: int | None = None) -> Allocator:
    """Return a caching allocator after it has processed the whole recording."""
    allocator = Allocator(expandable=expandable, limit=limit)
    pieces: dict[int, Piece] = {}
    for segment in recording.segments:
        for event in segment.events:
            if isinstance(event, Allocate):
                memory = event.memory
                pieces[id(memory)] = allocator.allocate(memory.nbytes, memory.stream)
            elif isinstance(event, Free):
                allocator.free(pieces.pop(id(event.memory)))
    return allocator


def least_memory(recording: Recording, *, expandable: bool, limit: int) -> int:
    """Return the least memory with which the allocator can serve all requests, giving back free memory.

    The result is exact to 0.5% of `limit` near it (`NEAR`), and to 2% above that. Far below `limit` it is
    what the allocator reserves without a limit.
    """
    low = max(moment.alive_bytes for moment in moments(recording))
    high = replay(recording, expandable=expandable).peak
    near = limit * (1 - NEAR), limit * (1 + NEAR)
    while high > near[0] and high - low > (limit // 200 if low < near[1] else high // 50):
        middle = (low + high) // 2
        fits = replay(recording, expandable=expandable, limit=middle).peak <= middle
        low, high = (low, middle) if fits else (middle, high)
    return high


def last_step(recording: Recording, accumulation: int) -> Iterator[tuple[Place, Event, int]]:
    """Yield the events of the last step, each with its number of occurrences."""
    last = recording.segments[-1].place.step
    repeats = max(1, accumulation - RECORDED_MICRO_BATCHES + 1)
    for segment in recording.segments:
        if segment.place.step == last:
            times = repeats if segment.place.micro == 1 else 1
            for event in segment.events:
                yield segment.place, event, times


def sent(recording: Recording, accumulation: int) -> list[Sent]:
    counts: Counter[tuple[str, int, str, int, int]] = Counter()
    for _, event, times in last_step(recording, accumulation):
        if isinstance(event, Send):
            call = event.collective
            dtype = str(call.dtype).removeprefix("torch.")
            counts[call.kind, call.bytes, dtype, call.group_size, call.wire_bytes] += times
    return [Sent(*key[:4], count=count, wire_bytes=key[4] * count) for key, count in counts.items()]


def unknown_operators(recording: Recording) -> list[str]:
    """List operators without a formula: those of other libraries, and any that look like matmuls."""
    events = (event for segment in recording.segments for event in segment.events)
    silent = {event.name for event in events if isinstance(event, Compute) and not event.flops}
    names = {name for name in silent if not name.startswith("shardwise.")}
    builtin = ("aten.", "prims.", "prim.")
    return sorted(name for name in names if not name.startswith(builtin) or _MULTIPLIES.search(name))


def flops(recording: Recording, accumulation: int, *, expert_load: float = 1) -> tuple[int, int]:
    """Count a rank's operations in a step: the model's (three times forward's, or all if fewer), and all.

    With frozen parameters, backward computes less than twice as much as forward. The model's have an even
    share of the experts' operations, of which this rank computes `expert_load` times as many.
    """
    forward = once = computed = 0
    inside, before = False, None  # experts: between two exchanges of tokens, not counts
    for place, event, times in last_step(recording, accumulation):
        inside, before = inside and place == before, place
        if isinstance(event, Send) and event.group == EXPERTS and event.collective.dtype != torch.int64:
            inside = not inside
        if isinstance(event, Compute):
            operations = event.flops * times
            computed += operations
            if inside and expert_load != 1:
                operations = round(operations / expert_load)
            forward += operations if place.phase == "forward" else 0
            once += 0 if event.recomputes else operations
    return min(3 * forward, once), computed
