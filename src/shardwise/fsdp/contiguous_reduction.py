"""Reducing the gradients of a contiguous group: one batched copy, one reduce-scatter, views.

The reduce-scatter's input is laid out as the gathered parameters are, so each gradient goes to where its
parameter lies, in one batched copy that casts on the way. Large segments go in slices of bounded size, so
that backward's peak is not set by the staging of an embedding's gradient.

What happens over which axis follows from `strategy.py`: where gradients are cut a reduce-scatter, else an
all-reduce, of which the rank keeps its part if optimizer state is cut.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise import _compat
from shardwise.comm import CommStreams, ReduceResult
from shardwise.comm.foreach import Reduction, current_stream, finish_reduction, reduce_scatter
from shardwise.fsdp.contiguous import ContiguousGroup
from shardwise.fsdp.reduction import GradReducer, Taken
from shardwise.fsdp.rows import RowsParam
from shardwise.fsdp.strategy import Held
from shardwise.layout import ContiguousSegment

Placed = list[tuple[RowsParam, Tensor]]


@dataclass
class ContiguousReducer(GradReducer):
    """The reductions of a `ContiguousGroup`."""

    _gaps: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    @property
    def _contiguous(self) -> ContiguousGroup:
        return cast(ContiguousGroup, self.group)

    def _groups(self) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
        shard_group, replicate_group = self.group.info.process_groups
        row = self._contiguous.strategy.shard_axis
        if row is not None and row.gradient is Held.REPLICATE:
            return None, shard_group
        return shard_group, replicate_group

    def reduce(self, taken: Taken, *, streams: CommStreams | None) -> list[ReduceResult]:
        """One reduction for each segment with a gradient."""
        segments = self._contiguous.layout.segments
        if len(segments) == 1:
            batches = {0: cast(Placed, list(taken))}
        else:
            batches = {}
            where = {place.index: i for i, segment in enumerate(segments) for place in segment.places}
            for param, grad in cast(Placed, taken):
                batches.setdefault(where[param.place.index], []).append((param, grad))
        taken.clear()
        results: list[ReduceResult] = []
        for index in sorted(batches):
            self._reduce_segment(index, segments[index], batches[index], streams, results)
        return results

    def _reduce_segment(
        self,
        index: int,
        segment: ContiguousSegment,
        batch: Placed,
        streams: CommStreams | None,
        results: list[ReduceResult],
    ) -> None:
        key = (segment.dtype, segment.gather_dtype)
        plan = self._plans.get(key) or self._plan(*key, streams)
        params = [param for param, _ in batch]
        total = segment.unsharded_numel
        limit = max(1, self.group.settings.staging_bytes // plan.dtype.itemsize)
        if total <= limit or plan.shard_group is None:
            reduce_input = plan.comm.allocate((total,), dtype=plan.dtype, device=plan.device)
            self._copy_in(index, segment, batch, reduce_input)
            shard, event = reduce_scatter(reduce_input, plan)
        else:
            reduce_input, shard, event = self._reduce_in_slices(segment, batch, plan, limit, results)
        result = finish_reduction(
            shard,
            plan,
            reduce_input=reduce_input,
            input_event=event,
            partial=self.partials.pop(index, None),
        )
        if result.partial is not None:
            self.partials[index] = result.partial
        if result.shard is not None:
            self._give(params, self._own_part(result.shard), result.stream)
        results.append(result)

    def _give(self, params: list[RowsParam], shard: Tensor, stream: torch.Stream | None) -> None:
        if stream is None:
            shard = self._to_home(params, shard)
            for param in params:
                param.set_sharded_grad(shard)
            return
        with stream:
            shard = self._to_home(params, shard)
            for param in params:
                param.set_sharded_grad(shard)

    def _own_part(self, shard: Tensor) -> Tensor:
        """This rank's part of a gradient that is replicated though optimizer state is cut."""
        group = self._contiguous.refresh_group
        if group is None or shard.numel() == self._contiguous.shards[0].numel():
            return shard
        size = shard.numel() // group.size()
        return shard.narrow(0, group.rank() * size, size)

    def _copy_in(self, index: int, segment: ContiguousSegment, batch: Placed, out: Tensor) -> None:
        targets, grads = [], []
        for param, grad in batch:
            targets.append(out.as_strided(param.shape, param.whole_stride, param.place.start))
            grads.append(grad)
        if len(batch) == len(segment.places):
            gaps = self._gaps.get(index)
            if gaps is None:
                gaps = self._gaps[index] = _gaps(segment)
            for start, size in gaps:
                out.narrow(0, start, size).zero_()
        else:
            out.zero_()
        batch.clear()
        with torch.no_grad():
            _compat.foreach_copy(targets, grads)

    def _reduce_in_slices(
        self,
        segment: ContiguousSegment,
        batch: Placed,
        plan: Reduction,
        limit: int,
        results: list[ReduceResult],
    ) -> tuple[Tensor, Tensor, torch.Event | None]:
        """Reduce-scatter the same range of every rank's shard at a time."""
        assert plan.shard_group is not None
        ranks = plan.shard_group.size()
        width = segment.unsharded_numel // ranks
        step = max(1, limit // ranks)
        shard = torch.empty(width, dtype=plan.dtype, device=plan.device)
        sources = {param.place.start: grad.reshape(-1) for param, grad in batch}
        batch.clear()
        event: torch.Event | None = None
        reduce_input = shard
        pending: list[tuple[Tensor, torch.Event]] = []
        for begin in range(0, width, step):
            size = min(step, width - begin)
            while len(pending) > 1:  # accelerators: at most two slices in flight
                current_stream(plan.device).wait_event(pending.pop(0)[1])
            reduce_input = plan.comm.allocate((ranks * size,), dtype=plan.dtype, device=plan.device)
            _fill_slice(reduce_input, sources, ranks=ranks, width=width, begin=begin, size=size)
            _, event = reduce_scatter(reduce_input, plan, out=shard.narrow(0, begin, size))
            if event is not None:
                pending.append((reduce_input, event))
        return reduce_input, shard, event


@torch.no_grad()
def _fill_slice(
    out: Tensor, sources: dict[int, Tensor], *, ranks: int, width: int, begin: int, size: int
) -> None:
    """Elements [begin, begin + size) of every rank's range of the gradients, one after another."""
    targets, grads = [], []
    for rank in range(ranks):
        low = rank * width + begin
        for start, grad in sources.items():
            first, last = max(low, start), min(low + size, start + grad.numel())
            if first < last:
                targets.append(out.narrow(0, rank * size + first - low, last - first))
                grads.append(grad.narrow(0, first - start, last - first))
    if sum(grad.numel() for grad in grads) < out.numel():
        out.zero_()
    _compat.foreach_copy(targets, grads)


def _gaps(segment: ContiguousSegment) -> list[tuple[int, int]]:
    """The padding of a segment: (begin, size) in elements."""
    found, end = [], 0
    for place in segment.places:
        if place.start > end:
            found.append((end, place.start - end))
        end = max(end, place.start + place.numel)
    if end < segment.unsharded_numel:
        found.append((end, segment.unsharded_numel - end))
    return found
