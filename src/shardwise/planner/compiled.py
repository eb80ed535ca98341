"""The changes that compiling the blocks makes to a recording: `shardwise.compile(mode="regional")`.

A compiler sees a block between its gather and its reductions, forward and backward. The reads and writes of
each operator there determine what is

    dead      results that nothing reads are neither computed nor kept for backward
    fused     consecutive operators without matmuls are one kernel, which reads each input once and writes
              what is read after it; intermediate results are never in memory
    freed     memory is free after its last reader

Operators on complex numbers are not fused: inductor calls torch's own for them. `partition` has already
removed cheap results that, without checkpointing, are recomputed instead of kept. It traces a block, forward
and backward together, on the fake tensors of its first call; torch's own min-cut splits that graph in two,
which then run instead of the block: a recording sees what is kept between them, and what is recomputed.

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

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from functorch import compile as functorch  # type: ignore[import-untyped]
from torch import nn

from shardwise.planner.devices import FLOAT8, NVFP4
from shardwise.planner.events import GATHERED, Allocate, Compute, Event, Free, Memory, Segment, Send, Touches
from shardwise.planner.recorder import Recorder

_MATMULS = ("aten.mm", "aten.addmm")
_TRANSPOSED = 5  # times the duration of a copy of the same bytes


def compile_segments(segments: list[Segment], touches: Touches, *, narrow: str | None) -> list[Segment]:
    """Return the step with compiled blocks, in float8 with scales of a "tensor" or a "row", or in "nvfp4"."""
    compiler = _Compiler(segments, touches)
    step = [Segment(segment.place, list(compiler.rewrite(segment))) for segment in segments]
    if narrow == "tensor":
        return [Segment(segment.place, list(_in_float8(segment, touches))) for segment in step]
    if narrow is not None:
        return [Segment(segment.place, list(_cast_each(segment, touches, narrow))) for segment in step]
    return step


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
        self.eliminated: set[int] = set()  # memory that is not made
        self.early_frees: dict[int, list[Event]] = {}  # frees, by the event that they now come after
        self.moved: set[int] = set()  # memory whose free is not where it was, including `eliminated`
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
                if touched is not None and touched.in_block and fuses:
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
            if touched.in_block and all(
                self._in_block(memory) and memory in freed and memory not in self.last for memory in written
            ):
                continue
            self.live.add(id(event))
            for memory in [*written, *(id(memory) for memory, _ in touched.reads)]:
                self.last.setdefault(memory, id(event))

    def _in_block(self, memory: int) -> bool:
        return memory in self.maker and self.touches[self.maker[memory]].in_block

    def _place_free(self, event: Free) -> None:
        memory = id(event.memory)
        if not self._in_block(memory):
            return
        last = self.last.get(memory)
        if last is None or self.kernel.get(self.maker[memory], -1) == self.kernel.get(last):
            self.eliminated.add(memory)
            self.moved.add(memory)
        elif self.touches[last].in_block and last != self.maker[memory]:
            self.early_frees.setdefault(last, []).append(event)
            self.moved.add(memory)

    def rewrite(self, segment: Segment) -> Iterator[Event]:
        group: list[Compute] = []
        for event in segment.events:
            if isinstance(event, (Allocate, Free)):
                if id(event.memory) not in (self.eliminated if isinstance(event, Allocate) else self.moved):
                    yield event
            elif isinstance(event, Compute) and id(event) in self.kernel:
                group += [event] if id(event) in self.live else []
            else:
                yield from self._fuse(group)
                group = []
                if id(event) in self.live or id(event) not in self.touches:
                    yield event
                    yield from self.early_frees.get(id(event), ())
        yield from self._fuse(group)

    def _fuse(self, group: list[Compute]) -> Iterator[Event]:
        reads, writes, written = dict[int, int](), dict[int, int](), set[int]()
        for event in group:
            touched = self.touches[id(event)]
            for memory, nbytes in touched.reads:
                if id(memory) not in written:
                    reads[id(memory)] = max(nbytes, reads.get(id(memory), 0))
            for memory, nbytes in touched.writes:
                written.add(id(memory))
                if id(memory) not in self.eliminated:
                    writes[id(memory)] = max(nbytes, writes.get(id(memory), 0))
        if group:
            nbytes = sum(reads.values()) + sum(writes.values())
            yield group[0]._replace(name="prims.fused", nbytes=nbytes)
        for event in group:
            yield from self.early_frees.get(id(event), ())


def _in_float8(segment: Segment, touches: Touches) -> Iterator[Event]:
    cast: set[int] = set()  # memory, once in forward and once in backward
    for event in segment.events:
        touched = touches.get(id(event))
        if isinstance(event, Send) and isinstance(event.group, int) and event.collective.kind == "all_gather":
            half = event.collective.bytes // 2
            yield event._replace(collective=replace(event.collective, bytes=half))
        elif isinstance(event, Compute) and touched and touched.in_block and event.name in _MATMULS:
            factors = touched.reads[-2:]
            for memory, nbytes in factors:
                if memory.category != GATHERED and id(memory) not in cast:
                    cast.add(id(memory))
                    yield event._replace(name="prims.cast", flops=0, nbytes=nbytes + nbytes // 2)
            saved_bytes = sum(nbytes // 2 for _, nbytes in factors)
            yield event._replace(nbytes=event.nbytes - saved_bytes, dtype=FLOAT8)
        else:
            yield event


def _cast_each(segment: Segment, touches: Touches, narrow: str) -> Iterator[Event]:
    dtype = FLOAT8 if narrow == "row" else NVFP4
    uses: list[dict[tuple[int, int, int], int]] = []  # by event: bytes of each factor, by its rows
    columns: list[bool] = []  # by event: whether it sums along the columns of both
    for number, event in enumerate(segment.events):
        touched = touches.get(id(event))
        uses.append({})
        columns.append(False)
        if isinstance(event, Compute) and touched and touched.in_block and event.name in _MATMULS:
            (left, left_bytes), (right, right_bytes) = touched.reads[-2:]
            columns[-1] = GATHERED not in (left.category, right.category)
            products = event.flops // 2  # m k n, of factors of 2 m k and 2 k n bytes
            for memory, rows, nbytes in (
                (left, products * 2 // right_bytes, left_bytes),
                (right, products * 2 // left_bytes, right_bytes),
            ):
                use = number if memory.category == GATHERED else -1  # which may hold several weights
                uses[-1][id(memory), rows, use] = nbytes
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
                moved_bytes = nbytes + copies[key].nbytes
                if columns[number] and narrow == "row":
                    moved_bytes = _TRANSPOSED * (nbytes + moved_bytes)
                yield event._replace(name="prims.cast", flops=0, nbytes=moved_bytes)
        saved_bytes = sum(nbytes - copies[key].nbytes for key, nbytes in factors.items())
        yield event._replace(nbytes=event.nbytes - saved_bytes, dtype=dtype)
        yield from (Free(copies[key]) for key in factors if last[key] == number)


def partition_function(function: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Return `function` as its forward and backward graphs, which are all that the recorder sees of it."""

    patched = functools.partial(mock.patch.multiple, recorder)

    def compile_graph(graph: Any, inputs: Any) -> Any:
        def call(*args: Any) -> Any:
            with patched(looks_away=False, in_graphs=True):
                return graph(*args)

        return functorch.make_boxed_func(call)  # else AOTAutograd warns

    joint: Any = functorch.aot_function(
        function,
        fw_compiler=compile_graph,
        bw_compiler=compile_graph,
        partition_fn=functorch.min_cut_rematerialization_partition,
        decompositions=functorch.default_decompositions,
    )

    def call(*args: Any) -> Any:
        with patched(looks_away=True):
            return joint(*args)

    return call


class _Plain(nn.Module):
    """A block's own forward, without the library's hooks around it."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.original = block, block.forward

    def forward(self, args: Any, kwargs: Any) -> Any:
        return self.original(*args, **kwargs)


def partition(blocks: list[nn.Module], recorder: Recorder) -> None:
    """Make each block run its graphs, which blocks of equal code share."""
    graphs_by_code: dict[str, Callable[..., Any]] = {}
    for block in blocks:
        plain, key = _Plain(block), str(block)
        if key not in graphs_by_code:

            def run_block(params: Any, args: Any, kwargs: Any, plain: _Plain = plain) -> Any:
                return torch.func.functional_call(plain, params, (args, kwargs))

            graphs_by_code[key] = partition_function(run_block, recorder)
        graphs = graphs_by_code[key]

        def forward(*args: Any, plain: _Plain = plain, graphs: Any = graphs, **kwargs: Any) -> Any:
            return graphs(dict(plain.named_parameters()), args, kwargs)

        block.forward = forward
