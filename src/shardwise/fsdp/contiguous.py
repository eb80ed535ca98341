"""Groups in the contiguous layout: the gathered buffer *is* the unsharded parameters.

    shard      this rank's rows end to end, cut as optimizer state is; sharded parameters are views of it
    resident   what is kept between steps in the gathered dtype: the shard itself unless the strategy keeps
               more (ZeRO, DDP with low precision, hierarchical FSDP); refreshed after optimizer steps.
               If it has the shard's dtype and device, the shard is a slice of it
    full       the whole parameters; unsharded parameters are views of it; its storage is resized to zero
               between uses unless it is resident

A gather in the stored dtype sends the shard into `full` from its own memory. A gather that casts writes the
cast into this rank's slice of `full` and gathers in place. There is no copy-in and no copy-out.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import AllGather, AllGatherResult, CommStreams
from shardwise.comm.foreach import Reached, current_stream, follow_stream, reached
from shardwise.comm.order import event_for
from shardwise.comm.streams import WITHOUT_STREAMS, record_event
from shardwise.errors import LifecycleError, ShardingError, here
from shardwise.fsdp.fast import allocates_plain, process
from shardwise.fsdp.group import DONE, Buffer, Form, ParamGroup
from shardwise.fsdp.parameter import ShardedParam
from shardwise.fsdp.rows import RowsParam
from shardwise.fsdp.traced import Cut
from shardwise.layout import Box, ContiguousLayout, ContiguousSegment, Gathered, ParamSpec, rows_between
from shardwise.mesh import FSDPMeshInfo
from shardwise.sharded_tensor.rows import Piece, ShardedParameter, ShardedRows
from shardwise.sharded_tensor.rows.piece import place_over

PADDING_TO_WARN_OF = 0.1
_RANKS_LEAST = 512 << 10  # bytes of a rank in a slice: with less, latency takes longer than sending
_POST_FORWARD = Form.POST_FORWARD


class _CombinedWork:
    """A set of asynchronous gathers, waited for as one."""

    def __init__(self, *works: Any) -> None:
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            if work is not None:
                work.wait()


@dataclass
class _Buffer(Buffer):
    shard: Tensor
    resident: Tensor  # the shard, or more in the gathered dtype
    own_slice: Tensor  # this rank's slice of `full`
    casts: bool  # whether the gather converts the resident memory's dtype or device


class ContiguousGroup(ParamGroup):
    """Parameters whose rows travel in one all-gather per segment, straight to where they are used."""

    params: list[RowsParam]
    members: list[list[RowsParam]]
    layout: ContiguousLayout
    buffers: list[_Buffer]

    def __init__(self, params: list[RowsParam], **options: Any) -> None:
        super().__init__(params, **options)
        strategy = self.strategy
        shard_group, replicate_group = self.info.process_groups
        axes = ((replicate_group, strategy.replicate_axis), (shard_group, strategy.shard_axis))
        # The axes over which optimizer state is cut, the fastest-varying first. Parameters are gathered once
        # per step over `refresh_group`, and at each use over `gather_group`.
        cut = [(g, row) for g, row in axes if g is not None and row is not None and row.optimizer]
        self.cut_groups = tuple(group for group, _ in cut)
        self.refresh_group = next((g for g, row in cut if not row.parameter), None)
        self.gather_group = next((g for g, row in cut if row.parameter), None)
        self.gathers = self.gather_group is not None
        self.gather_ranks = 1 if self.gather_group is None else self.gather_group.size()
        if self.gather_group is None:
            self.post_forward_mesh = None  # never freed, so never resharded
        self.resident: list[Tensor] = []  # the resident memory, by segment
        self.refreshed_at: Any = None
        self.refreshed: Reached | None = None
        self._comm: AllGather | None = None  # the one used last, and whether it can write in place
        self._in_place = False
        self.settings.staging_bytes = max(self.settings.staging_bytes, self.ranks * _RANKS_LEAST)
        self.pack()

    def untraceable(self) -> str | None:
        traced = self.refresh_group is None and self.gather_group is not None
        return None if traced else f"strategy {self.strategy}"

    # Shard buffers

    def pack(self, device: torch.device | None = None) -> None:
        # Packing may replace the shards: refresh the resident memory from them.
        self.refreshed_at = None
        super().pack(device)

    def _lay_out(self, params: Sequence[ShardedParam]) -> None:
        """Lay parameters out in the buffers; done once, since optimizer state follows the rows."""
        specs = [param.layout_spec() for param in params]
        self.resident, self._changes = [], -1
        # A later call only changes dtypes: a converted model keeps its rows.
        if not self.shards:
            rank, ranks = place_over(self.cut_groups)
            self.layout = ContiguousLayout(specs, ranks=ranks, rank=rank)
            self.members = [[self.params[p.index] for p in s.places] for s in self.layout.segments]
            for segment in self.layout.segments:
                self._warn_of_padding(segment)
                for place in segment.places:
                    self.params[place.index].assign_rows(self.layout, place, self.cut_groups)
            return
        segments = []
        for segment, dtypes in zip(self.layout.segments, self._dtypes(specs), strict=True):
            if len(dtypes) > 1:
                names = {specs[place.index].dtype: specs[place.index].name for place in segment.places}
                found = ", ".join([f"'{name}' is {dtype}" for dtype, name in names.items()])
                raise ShardingError(
                    f"{here()}: parameters of group '{self.name}' were converted to different dtypes"
                    f" ({found}); convert them together, or before fully_shard. Modules removed from"
                    " the model since must be converted first: their group still holds their parameters"
                )
            dtype, gather_dtype = dtypes.pop()
            segments.append(replace(segment, dtype=dtype, gather_dtype=gather_dtype))
        self.layout.segments = tuple(segments)
        self.layout.specs = tuple(specs)

    def _dtypes(self, specs: Sequence[ParamSpec]) -> list[set[tuple[torch.dtype, torch.dtype]]]:
        """Return the stored and gathered dtypes in each segment: one pair, if all of it has the same."""
        by_segment = [[specs[place.index] for place in segment.places] for segment in self.layout.segments]
        return [{(spec.dtype, spec.gather_dtype) for spec in specs} for specs in by_segment]

    def is_half_converted(self) -> bool:
        for param in self.params:
            param.follow_replacement()
        return any(len(dtypes) > 1 for dtypes in self._dtypes([param.layout_spec() for param in self.params]))

    def _warn_of_padding(self, segment: ContiguousSegment) -> None:
        used = segment.unsharded_numel - segment.padding
        if segment.padding > PADDING_TO_WARN_OF * used and used * segment.gather_dtype.itemsize > 1 << 24:
            warnings.warn(
                f"rank {self.layout.rank}: the group of '{self.params[0].name}' is padded by"
                f" {segment.padding / used:.0%} so that its rows or blocks of rows stay whole on"
                f" {segment.ranks} ranks, which adds as much communication; shard several modules in one"
                " call, use smaller blocks, or shard over fewer ranks (HSDP)",
                stacklevel=2,
            )

    def _shard_memory(self, segment: Gathered, device: torch.device) -> Tensor:
        group = self.refresh_group
        if group is None or segment.dtype != segment.gather_dtype or device != self.device:
            shard = super()._shard_memory(segment, device)
            self.resident.append(shard)
            return shard
        size = segment.shard_numel
        # The shard is a slice of it: a refresh gathers in place, without a copy of this rank's rows.
        self.resident.append(torch.zeros(group.size() * size, dtype=segment.dtype, device=device))
        return self.resident[-1].narrow(0, group.rank() * size, size)

    # Unsharded buffers

    def _make_unsharded(self, streams: CommStreams | None) -> None:
        """Make them on the all-gather stream, the first to write the memory that gathers do not allocate."""
        if streams is None:
            super()._make_unsharded(None)
        else:
            with streams.all_gather:
                # Memory belongs to the stream that allocates it, and is reused in that stream's order.
                super()._make_unsharded(streams)

    def _whole_memory(self, index: int) -> list[tuple[Tensor, Sequence[ShardedParam]]]:
        segment, shard, group = self.layout.segments[index], self.shards[index], self.refresh_group
        options: Any = {"dtype": segment.gather_dtype, "device": self.device}
        is_same_memory = shard.dtype == segment.gather_dtype and shard.device == self.device
        # The shard itself cannot be used: it has another dtype or lies on another device.
        if not is_same_memory and (group is not None or self.gather_group is None):
            times = 1 if group is None else group.size()
            self.resident[index] = torch.empty(times * segment.shard_numel, **options)
        if self.gather_group is None:
            # Never freed: the unsharded parameters are views of the resident memory.
            return [(self.resident[index], self.members[index])]
        return [(torch.empty(segment.unsharded_numel, **options), self.members[index])]

    def _buffer(self, index: int, full: Tensor, params: Sequence[ShardedParam]) -> _Buffer:
        resident, group = self.resident[index], self.gather_group
        size = resident.numel()
        return _Buffer(
            full,
            None if group is None else full.untyped_storage(),
            params,
            shard=self.shards[index],
            resident=resident,
            # An alias: a cast writes here, and the all-gather sends from here in place.
            own_slice=full if group is None else full.narrow(0, group.rank() * size, size),
            casts=resident.dtype != full.dtype or resident.device != full.device,
        )

    # Changing form

    def _make_room(self, streams: CommStreams) -> None:
        # Keep the latest freed: this gather is to run beside the computation that reads it.
        if streams.reclaim(self.buffers, keep=1):
            # This group's memory was not given back, so do not allocate it again.
            self.holds_memory = True

    def _start_gather(self, async_op: bool, streams: CommStreams | None) -> AllGatherResult:
        previous, self.streams = self.streams, streams
        comm, group = self.settings.all_gather, self.gather_group
        if streams is not None and group is not None:
            if self.holds_memory and previous is None:  # a user gathered into it, outside these streams
                streams.all_gather.wait_stream(current_stream(self.device))
            # None during the call below: it runs on its current stream, which is the all-gather's.
            self.streams = None
            with streams.all_gather:
                result = self._start_gather(async_op, None)
                # After the last segment: one event covers all casts and gathers of the group.
                self.streams, result = streams, replace(result, event=record_event(streams.all_gather))
            return result
        if previous is not None and streams is None:
            previous.reclaim(keep=0)  # else the next gather frees the memory that this one is to fill
        # Refresh on the stream that reads next: the all-gather's, or computation's if nothing is gathered.
        if self.refresh_group is not None or group is None:
            self._refresh(comm)
        if group is None:
            return DONE
        if comm is not self._comm:
            # Checked only after the user set another, which saves a call per gather.
            self._comm, self._in_place = comm, allocates_plain(comm)
        if self.form is _POST_FORWARD:
            assert self.post_forward_mesh is not None
            group = self.post_forward_mesh.shard_process_group
        running: Any = None
        # In the order of the layout, which ranks have compared: each segment is a collective.
        for index, buffer in enumerate(self.buffers):
            if buffer.storage is not None and not self.holds_memory:
                # Allocated on the stream that writes it, to which it is also given back.
                buffer.storage.resize_(buffer.full.nbytes)
                if self.device.type not in WITHOUT_STREAMS:
                    self.owner = current_stream(self.device)
            if self.smaller_shards:
                source = self.smaller_shards[index]
            elif buffer.casts:
                # Sent from its place in the result, so that the all-gather need not copy it there.
                source = buffer.own_slice.copy_(buffer.resident, non_blocking=True)
            else:
                source = buffer.resident
            if self.gather_ranks == 1:
                if source is not buffer.own_slice:
                    buffer.full.copy_(source)
            elif self._in_place:
                work = comm(buffer.full, source, group, async_op)
                running = work if running is None else _CombinedWork(running, work)
            else:  # parameters cannot be views of what a user's communication allocates each time
                full, size = buffer.full, source.numel()
                output = comm.allocate((full.numel(),), dtype=full.dtype, device=self.device)
                shard = output.narrow(0, group.rank() * size, size).copy_(source)
                comm(output_tensor=output, input_tensor=shard, group=group, async_op=False)
                full.copy_(output)
        # No output to keep: it was gathered to where parameters are.
        return DONE if running is None else AllGatherResult(DONE.output, (), None, running)

    @torch.no_grad()
    def _refresh(self, comm: AllGather) -> None:
        """Refresh the resident memory from the optimizer's shards, if it is out of date.

        Collective over the axis that replicates parameters but cuts optimizer state.
        """
        # Versions count changes other than optimizer steps: loading, initialisation, also of local tensors.
        versions = [value._version for value in (*self.shards, *(param.sharded for param in self.params))]
        state = (process.steps, versions)
        if self.refreshed_at == state:
            if self.refreshed is not None:  # perhaps on a user's stream
                follow_stream(self.refreshed, self.device)
            return
        if self.orders and self.refresh_group is not None:
            self.announce(event_for(f"gather what the optimizer changed of '{self.name or 'the root'}'"))
        for buffer in self.buffers:
            if buffer.resident is buffer.shard:
                continue
            # It may be the whole parameters; autograd must not see refilling them as a modification.
            resident = buffer.resident.data
            group = self.refresh_group
            if group is None or group.size() == 1:
                resident.copy_(buffer.shard)
                continue
            size = buffer.shard.numel()
            source = buffer.shard
            if source.dtype != resident.dtype or source.device != resident.device:
                source = resident.narrow(0, group.rank() * size, size).copy_(source)
            comm(output_tensor=resident, input_tensor=source, group=group, async_op=False)
        self.refreshed_at = state  # not set if a gather failed: the next pass gathers again
        if self.device.type not in WITHOUT_STREAMS:
            self.refreshed = reached(self.device)

    def _finish_gather(self, result: AllGatherResult) -> None:
        if result.event is not None:
            # Computation waits, not the host. Nothing is copied out: parameters are views of the result.
            current_stream(self.device).wait_event(result.event)
        if result.work is not None:
            result.work.wait()

    def follow_changes(self) -> None:
        # One counter covers all rows, so these and memory are checked only if some changed.
        if self._changes != ShardedRows.changes:
            self._check_memory()
        else:
            for param in self.params:
                if param.unsharded is not None and param.unsharded.requires_grad is not param.trainable:
                    break
            else:
                return
        super().follow_changes()
        self._changes = ShardedRows.changes

    @torch.no_grad()
    def _smaller(self, info: FSDPMeshInfo) -> list[Tensor]:
        shards = []
        for buffer, members in zip(self.buffers, self.members, strict=True):
            width = buffer.full.numel() // info.shard_mesh_size
            begin = info.shard_mesh_rank * width
            # A copy: the buffer is freed next.
            shards.append(buffer.full.narrow(0, begin, width).clone())
            for param in members:
                start = param.place.start
                rows = rows_between(param.shape, start, begin, begin + width)
                offset = max(start - begin, 0) if rows.numel else 0
                local = shards[-1].narrow(0, offset, rows.numel).view(rows.sizes)
                param.register_smaller(self._smaller_param(param, start, width, local, info))
        return shards

    def _smaller_param(
        self, param: RowsParam, start: int, width: int, local: Tensor, info: FSDPMeshInfo
    ) -> ShardedParameter:
        shape = param.shape

        def box_of(rank: int) -> Box:
            return rows_between(shape, start, rank * width, (rank + 1) * width)

        if param.tp_spec is not None:
            raise LifecycleError(
                f"{here()}: '{param.name}' cannot be resharded to a smaller mesh after forward: it is"
                " tensor-parallel. Use reshard_after_forward=True or False"
            )
        groups = (info.shard_process_group,)
        piece = Piece(param.global_shape, groups, box_of, param.piece.even_cuts, param.name, info.mesh)
        return ShardedParameter.wrap(local, piece, requires_grad=param.sharded.requires_grad)

    def traced_cut(self, index: int) -> Cut:
        segment, params = self.layout.segments[index], self.members[index]
        spans = [(place.start, place.numel, i) for i, place in enumerate(segment.places)]
        spans += [(begin, size, -1) for begin, size in segment.gaps]
        trains = [param.sharded.requires_grad for param in params]
        parts = [0] * len(params)
        sizes: list[int] = []
        reduced: list[int] = []
        for _, numel, i in sorted(spans, key=lambda span: span[:2]):
            if i >= 0:
                parts[i] = len(sizes)
            sizes.append(numel)
            if numel:
                # A frozen parameter has no gradient: zeros stand for it, as for padding.
                reduced.append(i if i >= 0 and trains[i] else -numel)
        placed = [(part, 0, param.shape, param.shape) for part, param in zip(parts, params, strict=True)]
        return Cut.of(1, sizes, placed, trains, reduced)
