"""Records a training step event by event, with the block that each event belongs to.

In forward and backward that is the running block (`watch` says which). Elsewhere, as in the optimizer, it is
the block whose memory an operator uses: one operator on the tensors of many blocks becomes an event for each.
The results of an operator without such memory belong to the block of the next operator.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise import _compat
from shardwise._compat import FakeTensor, resolve_process_group
from shardwise.comm.count import Collective, collectives, tensors_in
from shardwise.comm.kinds import NAMESPACES, WAIT
from shardwise.errors import ShardingError
from shardwise.planner import events
from shardwise.planner.cost import Count, check_lookup, cost_of, count_of, dtype_name
from shardwise.planner.events import Allocate, Compute, Free, Mark, Memory, Place, Record, Segment, Send, Wait
from shardwise.planner.storages import Life, Storages

_NOBODY = object()
_UNKNOWN = (events.TEMPORARY, events.ACTIVATIONS)  # categories that what is made later may tell apart
# Operators of a model for a micro-batch: some 10 s of recording; 66 blocks of a mixture have fewer than half.
MOST = 100_000
DEVICE, _COPY = torch.ops.prim.device.default, torch.ops.aten.copy_.default


def refuse_loop(counts: Counter[tuple[str, str, int | None]]) -> NoReturn:
    """Raise ShardingError of a model of more than `MOST` operators, given by name, phase and block."""
    ((name, phase, layer), number), *_ = counts.most_common(1)
    block = "outside of blocks" if layer is None else f"of block {layer}"
    raise ShardingError(
        f"forward and backward of the model run more than {MOST:,} operators, {number:,} of them {name} in"
        f" {phase} {block}: a Python loop, perhaps over tokens, would take minutes to plan. Give a shorter"
        " sequence, which shortens the loop, or vectorize it"
    )


class Recorder(Storages):
    def __init__(
        self, blocks: list[nn.Module], lanes: dict[str, str], *, touches: bool, record_streams: bool
    ) -> None:
        super().__init__()
        self.record_streams = record_streams
        self._last_uses: dict[int, Mark] = {}  # by life: the end of the last collective that uses it
        self.lanes = lanes  # by name of groups for whose collectives computation waits at once
        self._strides: dict[str, int] = {}  # of groups, by name
        self.looks_away = False  # while only shapes are computed
        self.touches: events.Touches | None = {} if touches else None  # what a compiler would see
        self.in_library = 0  # running calls of the library
        self.in_graphs = False  # a compiler's
        self.operators = Counter[tuple[int, int]]()  # of the model's own, by step and micro-batch
        self.segments = [Segment(Place(0, 0, "start", None))]
        self.blocks = blocks
        self.layer_of = {id(block): i for i, block in enumerate(blocks)}
        self.last = len(blocks) - 1
        self.group: int | str = ""  # the group for which something is sent
        self.streams = [events.COMPUTATION]  # the current one is the last
        self._memory: dict[int, Memory] = {}  # by life
        self._layers: dict[int, int | None] = {}  # of memory, by life
        self._staged: list[Memory] = []
        self._freed: set[int] = set()  # lives that were emptied: gathered memory
        self._counts: dict[int, Count] = {}  # by life
        self._memory_of_life: dict[int, list[Memory]] = {}  # all memory of a life
        self._in_block = False
        self._defers_allocations = False  # whether allocations belong to the next operator's block
        self._deferred: list[tuple[int, events.Event]] = []
        self._frees: list[tuple[int | None, Free]] = []
        self.owner: Any = _NOBODY  # of what an operator around forward and backward makes
        self._recomputed: list[Memory] | None = None
        self._forward: list[Memory] = []

    @property
    def place(self) -> Place:
        return self.segments[-1].place

    def go(self, **changes: Any) -> None:
        """Move to another place, to which later events belong."""
        self._write_frees()
        place = self.place._replace(**changes)
        if place != self.place:
            self.segments.append(Segment(place))

    def write(self, event: events.Event) -> None:
        if self._frees:
            self._write_frees()
        if isinstance(event, Wait) and self._outside_blocks:
            self.by_layer(event.mark.layer)
        self.segments[-1].events.append(event)

    @property
    def _outside_blocks(self) -> bool:
        """Whether outside forward and backward; there, events belong to the block whose memory they use."""
        return self.place.phase in ("start", "end of backward", "optimizer") and not self._in_block

    @contextmanager
    def in_block(self, layer: int | None) -> Iterator[None]:
        """Assign events to this block: its reduction, which may also run at the end of backward."""
        if layer is None or not self._outside_blocks:
            yield
            return
        self._write_frees()
        self.by_layer(layer)
        self._in_block = True
        yield
        self._in_block = False

    def by_layer(self, layer: int | None) -> None:
        """Move to this block, for later events and for memory made for the next operator."""
        deferred, self._deferred = self._deferred, []
        if layer != self.place.layer:
            self.go(layer=layer, after=layer is None and self.place.layer is not None)
        for key, event in deferred:
            self._layers[key] = layer
            self.write(event)

    def _write_frees(self) -> None:
        """Write frees: as each block's own if many blocks free together, else maybe as an operator's."""
        frees, self._frees = self._frees, []
        if len({layer for layer, _ in frees}) > 1:
            self.go(layer=None, after=True)
            for layer, event in frees:
                self.by_layer(layer)
                self.segments[-1].events.append(event)
            self.go(layer=None, after=True)
            return
        if len(frees) == 1 and self.place.layer == self.last and frees[0][0] not in (None, self.last):
            self.go(layer=None, after=True)  # memory used by an operator on all blocks
        self.segments[-1].events += [event for _, event in frees]

    def _note_size(self, life: Life, size: int) -> None:
        previous = life.sizes[-1] if life.sizes else None
        super()._note_size(life, size)
        if size == previous or (previous is None and not size):
            return
        key = id(life)
        if previous:
            free = Free(self._memory.pop(key), self._last_uses.pop(key, None))
            if any(deferred == key for deferred, _ in self._deferred):
                self._deferred.append((key, free))
            elif self._outside_blocks:
                self._frees.append((self._layers.get(key, self.place.layer), free))
            else:
                self.write(free)
        if size:
            memory = Memory(size, self.streams[-1])
            self._memory[key] = memory
            self._memory_of_life.setdefault(key, []).append(memory)
            if not self._outside_blocks:
                self._layers[key] = self.place.layer
            elif self.owner is not _NOBODY:
                self._layers[key] = self.owner
            if self.place.phase == "forward":
                self._forward.append(memory)
            if self._recomputed is not None:
                self._recomputed.append(memory)
            if self._defers_allocations:
                self._deferred.append((key, Allocate(memory)))
            else:
                self.write(Allocate(memory))

    def note_resize(self, storage: torch.UntypedStorage) -> None:
        super().note_resize(storage)
        if not storage.nbytes():
            self._freed.add(id(self._alive[id(storage)][1]))

    def memory_of(self, tensor: Tensor) -> Memory | None:
        local = _compat.local_of(tensor)
        entry = self._alive.get(id(local.untyped_storage()))
        return self._memory.get(id(entry[1])) if entry else None

    def categorize(self, tensors: Any, category: str) -> None:
        for tensor in tensors:
            if isinstance(tensor, Tensor) and (memory := self.memory_of(tensor)) is not None:
                memory.category = category

    def record_collective(self, call: Collective, tensors: list[Tensor], group: dist.ProcessGroup) -> None:
        self.see(tensors)
        self._touch(self._send(call, group)[0], tensors, tensors)
        self._staged += [memory for tensor in tensors if (memory := self.memory_of(tensor)) is not None]

    def _send(self, call: Collective, group: dist.ProcessGroup) -> tuple[Send, Mark | None]:
        """Send on the current stream, or on the group's lane; this stream then waits for it by the mark."""
        self._write_frees()  # maybe another block's, and marks would count as its own
        name, current = group.group_name, self.streams[-1]
        if name not in self._strides:
            first, *rest = dist.get_process_group_ranks(group)[:2]
            self._strides[name] = rest[0] - first if rest else 1
        stride = self._strides[name]
        lane = self.lanes.get(name)
        if lane is None:
            event = Send(call, self.group, current, stride)
            self.write(event)
            return event, None
        before, after = Mark(self.place.layer), Mark(self.place.layer)
        self.write(Record(before, current))
        self.write(Wait(before, lane))
        event = Send(call, lane, lane, stride)
        self.write(event)
        self.write(Record(after, lane))
        self.write(Wait(after, current))
        return event, after

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device  # read twice per operator: avoids another dispatch
        if self.looks_away or func is DEVICE:
            return func(*args, **(kwargs or {}))
        mark = None
        namespace, _, name = func.name().partition("::")
        if namespace in NAMESPACES:
            if name == WAIT:
                return args[0]  # without memory it would be a copy
            for call in collectives(namespace, name.partition(".")[0], args):
                event, mark = self._send(call, resolve_process_group(args[-1]))
                self._touch(event, args, ())
        self._follow_recomputation()
        if func is _COPY:  # only values are new
            self.record_operator(func, args, kwargs or {}, args[0])
            return args[0]
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.record_streams and mark is not None:
            self._last_uses |= {id(self.life(tensor)): mark for tensor in tensors_in((args, result))}
        return result

    def record_operator(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        check_lookup(func, args, self._count_of)
        if not self.in_library:
            self.operators[self.place[:2]] += 1
            if self.operators[self.place[:2]] > MOST:
                names = (
                    (event.name, segment.place.phase, segment.place.layer)
                    for segment in self.segments
                    for event in segment.events
                    if isinstance(event, Compute)
                )
                refuse_loop(Counter(names))
        if self._outside_blocks:
            self._record_by_layer(func, args, kwargs, result)
            return
        tensors = list(tensors_in((args, kwargs, result)))
        event = self._compute(func, args, kwargs, result, tensors)
        for tensor in tensors:  # as `see`, which takes anything, and longer
            self._see(tensor.untyped_storage())
        count = count_of(func, args, self._count_of)
        if count is not None:
            self._counts[id(self.life(result))] = count
        if event is not None:
            self._touch(event, (args, kwargs), result)

    def _count_of(self, tensor: Tensor) -> Count | None:
        return self._counts.get(id(self.life(tensor))) if self._counts else None

    def _compute(self, func: Any, args: Any, kwargs: Any, result: Any, tensors: Any) -> Compute | None:
        cost = cost_of(func, args, kwargs, result, tensors)
        if cost is None:
            return None
        event = Compute(str(func.overloadpacket), *cost, self.streams[-1], self._recomputed is not None)
        self.write(event)
        return event

    def _touch(self, event: events.Event, inputs: Any, outputs: Any) -> None:
        if self.touches is None:
            return
        reads, writes = (
            [
                (memory, min(tensor.nbytes, memory.nbytes))
                for tensor in tensors_in(value)
                if (memory := self.memory_of(tensor)) is not None
            ]
            for value in (inputs, outputs)
        )
        inside = self.in_graphs or not (self.in_library or self._outside_blocks or self.place.layer is None)
        in_block = bool(inside) and isinstance(event, Compute) and event.stream == events.COMPUTATION
        self.touches[id(event)] = events.Touch(reads, writes, in_block)

    def _record_by_layer(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record an operator on many blocks' tensors at once as one event for each block."""
        lists = [arg for arg in args if isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], Tensor)]
        event: Compute | None = None
        tensors = list(tensors_in((args, kwargs, result)))
        if not lists:
            inputs = [tensor for tensor in args if isinstance(tensor, Tensor) and not self._is_new(tensor)]
            self.owner = self.owner_of(inputs)
            if self.owner is not _NOBODY:
                self.by_layer(self.owner)
            if inputs:
                event = self._compute(func, args, kwargs, result, tensors)
            self._defers_allocations = not inputs
            self.see(tensors)
        else:
            results = result if isinstance(result, (list, tuple)) else ()
            for i, first in enumerate(lists[0]):
                row = [column[i] for column in lists if len(column) == len(lists[0])]
                self.owner = self.owner_of(row)
                if self.owner is not _NOBODY:
                    self.by_layer(self.owner)
                out = results[i] if len(results) == len(lists[0]) else None
                nbytes = sum(tensor.nbytes for tensor in row) + (first if out is None else out).nbytes
                event = Compute(
                    str(func.overloadpacket), 0, nbytes, dtype_name(first.dtype), self.streams[-1]
                )
                self.write(event)
                self.see((row, out))
            self.see(tensors)
        if event is not None:  # the last represents all: its inputs are used
            self._touch(event, (args, kwargs, result), ())
        self.owner, self._defers_allocations = _NOBODY, False

    def _is_new(self, tensor: Tensor) -> bool:
        entry = self._alive.get(id(tensor.untyped_storage()))
        return entry is None or any(key == id(entry[1]) for key, _ in self._deferred)

    def owner_of(self, tensors: list[Tensor]) -> Any:
        """Return the block of the first tensor that has one; None means around the blocks, or nobody."""
        for tensor in tensors:
            entry = self._alive.get(id(tensor.untyped_storage()))
            if entry is not None and id(entry[1]) in self._layers:
                return self._layers[id(entry[1])]
        return _NOBODY

    def share(self, tensors: list[Tensor]) -> None:
        """Share tensors that belong to no block, such as an optimizer's tables for all blocks."""
        self.by_layer(None)
        self.see(tensors)
        self.categorize(tensors, events.OPTIMIZER)
        for tensor in tensors:
            self._layers.pop(id(self.life(tensor)), None)

    def _follow_recomputation(self) -> None:
        """Find recomputation: operators in backward that autograd records; their results are kept."""
        recomputes = self.place.phase == "backward" and torch.is_grad_enabled()
        if recomputes and self._recomputed is None:
            self._recomputed = []
        elif not recomputes and self._recomputed is not None:
            self._keep(self._recomputed)
            self._recomputed = None

    def _keep(self, memories: list[Memory]) -> None:
        alive = {id(memory) for memory in self._memory.values()}
        for memory in memories:
            if id(memory) in alive and memory.category == events.TEMPORARY:
                memory.category = events.ACTIVATIONS

    def end_forward(self) -> None:
        self._keep(self._forward)
        self._forward = []

    def finish(self) -> list[Segment]:
        """Return the recorded segments, with final categories."""
        self.by_layer(None)
        for memory in itertools.chain.from_iterable(self._memory_of_life.get(key, ()) for key in self._freed):
            memory.category = events.GATHERED
        lasting = {id(memory) for memory in self._memory.values()}
        for memory in self._staged:
            if memory.category in _UNKNOWN and id(memory) not in lasting:
                memory.category = events.STAGING
        for segment in self.segments:
            place = segment.place
            for event in segment.events:
                if not isinstance(event, Allocate) or event.memory.category not in _UNKNOWN:
                    continue
                if place.phase == "optimizer" and id(event.memory) in lasting:
                    event.memory.category = events.OPTIMIZER
                elif place.phase == "forward" and id(event.memory) in lasting:
                    event.memory.category = events.PARAMETERS  # gathered once and for all
                elif place.after and place.phase in ("forward", "backward"):
                    event.memory.category = events.LOGITS
        _order_frees(self.segments)
        segments, self.segments = self.segments, self.segments[-1:]
        return segments


def _order_frees(segments: list[Segment]) -> None:
    """Sort memory that is freed at the same time in order of allocation."""
    numbers: dict[int, int] = {}
    for segment in segments:
        ordered: list[events.Event] = []
        for frees, run in itertools.groupby(segment.events, lambda event: isinstance(event, Free)):
            members = list(run)
            numbers |= {
                id(e.memory): len(numbers) + i for i, e in enumerate(members) if isinstance(e, Allocate)
            }
            ordered += sorted(members, key=lambda event: numbers[id(event[0])]) if frees else members
        segment.events = ordered
