"""The changes that compiling the blocks makes to a recording: `shardwise.compile(mode="regional")`.

A compiler sees a block between its gather and its reductions, forward and backward. The reads and writes of
each operator there determine what is

    dead      results that nothing reads are neither computed nor kept for backward
    fused     consecutive operators without matmuls are one kernel, which reads each input once and writes
              what is read after it; intermediate results are never in memory
    freed     memory is free after its last reader

Operators on complex numbers are not fused: inductor calls torch's own for them. `partition` has already
removed cheap results that, without checkpointing, are recomputed instead of kept.

With float8 the matmuls of blocks run at that rate. Their activations are cast first: read, and written at one
byte per element; the kernel that made them finds their largest magnitude. Weights are cast before they are
gathered. With one scale per row, along the dim that a matmul sums, both factors are cast after the gather,
once for each direction in which they are multiplied, with 4 bytes per row. Copies are freed after their last
matmul in the block. The two factors of a weight's gradient are summed along their columns. That cast reads
them twice, for the largest magnitude and for the values, and writes them transposed, at a fifth of the memory
rate; this fits published runs of Llama 3 8B, and those of 70B agree.

With NVFP4, all three matmuls of a linear layer take both factors in 4 bits, with a one-byte scale per 16
values (arXiv 2509.25149). They are cast as with one scale per row, but read once in either direction.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from shardwise.planner.devices import FLOAT8, NVFP4
from shardwise.planner.events import GATHERED, Allocate, Compute, Event, Free, Memory, Segment, Send

_MATMULS = ("aten.mm", "aten.addmm")
_TRANSPOSED = 5  # times the duration of a copy of the same bytes


class Touched(NamedTuple):
    """Memory that an event reads and writes, each with the number of bytes."""

    reads: list[tuple[Memory, int]]
    writes: list[tuple[Memory, int]]
    own: bool  # whether it belongs to a block's forward or backward, not to the library


Touches = dict[int, Touched]  # by the event's id


def compiled(segments: list[Segment], touches: Touches, *, narrow: str | None) -> list[Segment]:
    """Return the step with compiled blocks, in float8 with scales of a "tensor" or a "row", or in "nvfp4"."""
    compiler = _Compiler(segments, touches)
    made = [Segment(one.place, list(compiler.rewritten(one))) for one in segments]
    if narrow == "tensor":
        return [Segment(one.place, list(_in_float8(one, touches))) for one in made]
    if narrow is not None:
        return [Segment(one.place, list(_cast_for_each(one, touches, narrow))) for one in made]
    return made


class _Compiler:
    """Rewrites segments; events and memory are identified by their ids."""

    def __init__(self, segments: list[Segment], touches: Touches) -> None:
        self.touches = touches
        self.kernel: dict[int, int] = {}  # by fused event: its kernel's number
        self.maker: dict[int, int] = {}  # by memory: the event that writes it first
        self.last: dict[int, int] = {}  # by memory: the last event that uses it
        self.live: set[int] = set()  # events whose results are used
        events = [event for segment in segments for event in segment.events]
        self._number_kernels(segments)
        self._find_uses(events)
        self.never: set[int] = set()  # memory that is not made
        self.early: dict[int, list[Event]] = {}  # frees, by the event that they now come after
        self.moved: set[int] = set()  # memory whose free is not where it was, including that of `never`
        for event in events:
            if isinstance(event, Free):
                self._place_free(event)

    def _number_kernels(self, segments: list[Segment]) -> None:
        number = 0
        for segment in segments:
            number += 1
            for event in segment.events:
                touched = self.touches.get(id(event))
                for memory, _ in touched.writes if touched else ():
                    self.maker.setdefault(id(memory), id(event))
                fuses = isinstance(event, Compute) and not event.flops and "complex" not in event.dtype
                if touched is not None and touched.own and fuses:
                    self.kernel[id(event)] = number
                elif not isinstance(event, (Allocate, Free)):
                    number += 1

    def _find_uses(self, events: list[Event]) -> None:
        freed = {id(event.memory) for event in events if isinstance(event, Free)}
        for event in reversed(events):
            touched = self.touches.get(id(event))
            if touched is None:
                continue
            written = [id(memory) for memory, _ in touched.writes]
            if touched.own and all(
                self._is_own(one) and one in freed and one not in self.last for one in written
            ):
                continue
            self.live.add(id(event))
            for one in [*written, *(id(memory) for memory, _ in touched.reads)]:
                self.last.setdefault(one, id(event))

    def _is_own(self, memory: int) -> bool:
        return memory in self.maker and self.touches[self.maker[memory]].own

    def _place_free(self, event: Free) -> None:
        memory = id(event.memory)
        if not self._is_own(memory):
            return
        last = self.last.get(memory)
        if last is None or self.kernel.get(self.maker[memory], -1) == self.kernel.get(last):
            self.never.add(memory)
            self.moved.add(memory)
        elif self.touches[last].own and last != self.maker[memory]:
            self.early.setdefault(last, []).append(event)
            self.moved.add(memory)

    def rewritten(self, segment: Segment) -> Iterator[Event]:
        together: list[Compute] = []
        for event in segment.events:
            if isinstance(event, (Allocate, Free)):
                if id(event.memory) not in (self.never if isinstance(event, Allocate) else self.moved):
                    yield event
            elif isinstance(event, Compute) and id(event) in self.kernel:
                together += [event] if id(event) in self.live else []
            else:
                yield from self._fused(together)
                together = []
                if id(event) in self.live or id(event) not in self.touches:
                    yield event
                    yield from self.early.get(id(event), ())
        yield from self._fused(together)

    def _fused(self, together: list[Compute]) -> Iterator[Event]:
        reads, writes, made = dict[int, int](), dict[int, int](), set[int]()
        for event in together:
            touched = self.touches[id(event)]
            for memory, nbytes in touched.reads:
                if id(memory) not in made:
                    reads[id(memory)] = max(nbytes, reads.get(id(memory), 0))
            for memory, nbytes in touched.writes:
                made.add(id(memory))
                if id(memory) not in self.never:
                    writes[id(memory)] = max(nbytes, writes.get(id(memory), 0))
        if together:
            nbytes = sum(reads.values()) + sum(writes.values())
            yield together[0]._replace(name="prims.fused", nbytes=nbytes)
        for event in together:
            yield from self.early.get(id(event), ())


def _in_float8(segment: Segment, touches: Touches) -> Iterator[Event]:
    cast: set[int] = set()  # memory, once in forward and once in backward
    for event in segment.events:
        touched = touches.get(id(event))
        if isinstance(event, Send) and isinstance(event.group, int) and event.collective.kind == "all_gather":
            half = event.collective.bytes // 2
            yield event._replace(collective=replace(event.collective, bytes=half))
        elif isinstance(event, Compute) and touched and touched.own and event.name in _MATMULS:
            factors = touched.reads[-2:]
            for memory, nbytes in factors:
                if memory.category != GATHERED and id(memory) not in cast:
                    cast.add(id(memory))
                    yield event._replace(name="prims.cast", flops=0, nbytes=nbytes + nbytes // 2)
            saved = sum(nbytes // 2 for _, nbytes in factors)
            yield event._replace(nbytes=event.nbytes - saved, dtype=FLOAT8)
        else:
            yield event


def _cast_for_each(segment: Segment, touches: Touches, narrow: str) -> Iterator[Event]:
    dtype = FLOAT8 if narrow == "row" else NVFP4
    uses: list[dict[tuple[int, int, int], int]] = []  # by event: bytes of each factor, by its rows
    columns: list[bool] = []  # by event: whether it sums along the columns of both
    for number, event in enumerate(segment.events):
        touched = touches.get(id(event))
        uses.append({})
        columns.append(False)
        if isinstance(event, Compute) and touched and touched.own and event.name in _MATMULS:
            (left, one), (right, other) = touched.reads[-2:]
            columns[-1] = GATHERED not in (left.category, right.category)
            products = event.flops // 2  # m k n, of factors of 2 m k and 2 k n bytes
            for memory, rows, nbytes in (
                (left, products * 2 // other, one),
                (right, products * 2 // one, other),
            ):
                alone = number if memory.category == GATHERED else -1  # which may hold several weights
                uses[-1][id(memory), rows, alone] = nbytes
    last = {key: number for number, keys in enumerate(uses) for key in keys}
    copies: dict[tuple[int, int, int], Memory] = {}
    for number, (event, factors) in enumerate(zip(segment.events, uses, strict=True)):
        if not factors or not isinstance(event, Compute):
            yield event
            continue
        for key, nbytes in factors.items():
            if key not in copies:
                values = nbytes // 2
                cast = values + 4 * key[1] if narrow == "row" else values // 2 + values // 16
                copies[key] = Memory(cast, event.stream)
                yield Allocate(copies[key])
                moved = nbytes + copies[key].nbytes
                if columns[number] and narrow == "row":
                    moved = _TRANSPOSED * (nbytes + moved)
                yield event._replace(name="prims.cast", flops=0, nbytes=moved)
        saved = sum(nbytes - copies[key].nbytes for key, nbytes in factors.items())
        yield event._replace(nbytes=event.nbytes - saved, dtype=dtype)
        yield from (Free(copies[key]) for key in factors if last[key] == number)
