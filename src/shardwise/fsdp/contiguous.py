"""Groups in the contiguous layout: the gathered buffer *is* the unsharded parameters.

    shard      this rank's rows, end to end; the sharded parameters are views; the optimizer's placement
    resident   what lies between steps in the gathered dtype; the shard itself unless the strategy keeps
               more (ZeRO, DDP with low precision, hierarchical FSDP); refreshed after optimizer steps.
               Where dtype and device are the shard's, the shard is a slice of it
    full       the whole parameters; the unsharded parameters are views; resized to nothing between uses
               unless it is resident

A gather of stored dtype sends the shard from where it lies into `full`; one that casts writes the cast into
this rank's slice of `full` and gathers in place. There is no copy-in and no copy-out.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise import _compat
from shardwise.comm import AllGather, AllGatherResult, CommStreams, DefaultAllGather
from shardwise.comm.foreach import current_stream
from shardwise.comm.order import event_for
from shardwise.comm.streams import record_event
from shardwise.errors import ShardingError, here
from shardwise.fsdp import optimizer_watch
from shardwise.fsdp.group import Form, ParamGroup
from shardwise.fsdp.parameter import ShardedParam
from shardwise.fsdp.policy import CPUOffloadPolicy
from shardwise.fsdp.rows import RowsParam
from shardwise.fsdp.strategy import StatePlacement
from shardwise.fsdp.traced import Cut
from shardwise.layout import Box, ContiguousLayout, ContiguousSegment, rows_between
from shardwise.mesh import FSDPMeshInfo
from shardwise.sharded_tensor.rows import Piece, ShardedParameter, ShardedRows
from shardwise.sharded_tensor.rows.piece import place_over

PADDING_TO_WARN_OF = 0.1
_NOTHING = torch.empty(0)
_DONE = AllGatherResult(_NOTHING, (), None, None)


class _Works:
    """Several asynchronous gathers, waited for as one."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()


@dataclass
class _Buffer:
    """One segment's memory."""

    segment: ContiguousSegment
    shard: Tensor
    resident: Tensor  # the shard, or more in the gathered dtype
    full: Tensor
    storage: torch.UntypedStorage | None  # of `full`; None if it is never freed
    nbytes: int
    mine: Tensor  # this rank's slice of `full`
    casts: bool  # does the gather convert the held memory's dtype or device?
    post_forward_shard: Tensor | None = None  # POST_FORWARD: this rank's slice over the smaller mesh


class ContiguousGroup(ParamGroup):
    """Parameters whose rows travel in one all-gather per segment, straight to where they are used."""

    params: list[RowsParam]
    layout: ContiguousLayout

    def __init__(self, params: list[RowsParam], **how: Any) -> None:
        super().__init__(params, **how)
        strategy = self.strategy
        shard_group, replicate_group = self.info.process_groups
        axes = ((replicate_group, strategy.replicate_axis), (shard_group, strategy.shard_axis))
        # The axes over which optimizer state is cut, the fastest-varying first, and those of them over which
        # parameters are gathered once a step and in each use.
        cut = [
            (g, row)
            for g, row in axes
            if g is not None and row is not None and row.optimizer is StatePlacement.SHARD
        ]
        self.cut_groups = tuple(group for group, _ in cut)
        self.refresh_group = next((g for g, row in cut if row.parameter is StatePlacement.REPLICATE), None)
        self.gather_group = next((g for g, row in cut if row.parameter is StatePlacement.SHARD), None)
        self.gather_ranks = 1 if self.gather_group is None else self.gather_group.size()
        if self.gather_group is None:
            self.post_forward_mesh = None  # what is never freed is not resharded
        self.buffers: list[_Buffer] = []
        self.shards: list[Tensor] = []
        self.resident: list[Tensor] = []  # by segment: the shard, or what it is a slice of
        self.streams: CommStreams | None = None
        self.refreshed_at: Any = None
        self.offloads = isinstance(self.offload, CPUOffloadPolicy)
        self.pack()

    def untraceable(self) -> str | None:
        traced = self.refresh_group is None and self.gather_group is not None
        return None if traced else f"strategy {self.strategy}"

    def cuts(self) -> list[tuple[Sequence[ShardedParam], Cut]]:
        members = [[self.params[place.index] for place in one.places] for one in self.layout.segments]
        return [
            (params, _cut(segment, params))
            for segment, params in zip(self.layout.segments, members, strict=True)
        ]

    def set_reshard_after_forward(self, reshard: bool) -> None:
        if self.gather_group is not None:
            super().set_reshard_after_forward(reshard)

    # Shard buffers

    @torch.no_grad()
    def pack(self) -> None:
        if self.form is Form.POST_FORWARD:
            self.reshard()
        for param in self.params:
            param.adopt()
        self.refreshed_at = None
        if self._lies_in_buffers() or len({param.local.device for param in self.params}) > 1:
            return  # the latter: half-way through materialisation, which the first forward checks
        self.abandon_gather()
        self.reshard()
        self._settle()
        self.buffers, self.shards, self.resident = [], [], []
        self.traced = self.gather_event = self.layout_words = None
        for param in self.params:
            param.unsharded = None
        for segment in self.layout.segments:
            self.shards.append(self._make_shard(segment))
        self.form = Form.SHARDED

    def _lies_in_buffers(self) -> bool:
        return bool(self.shards) and all(param.local is mine for param, mine in self._placed)

    def _settle(self) -> None:
        """Choose which rows lie where; once, since optimizer state follows the rows."""
        specs = [param.layout_spec() for param in self.params]
        if not self.shards:
            rank, ranks = place_over(self.cut_groups)
            self.layout = ContiguousLayout(specs, ranks=ranks, rank=rank)
            for segment in self.layout.segments:
                self._warn_of_padding(segment)
                for place in segment.places:
                    self.params[place.index].settle(self.layout, place, self.cut_groups)
            return
        segments = []
        for segment in self.layout.segments:
            members = [specs[place.index] for place in segment.places]
            dtypes = {(spec.dtype, spec.gather_dtype) for spec in members}
            if len(dtypes) > 1:
                raise ShardingError(
                    f"{here()}: parameters of group '{self.name}' were converted to different dtypes"
                    f" {dtypes}; convert them before fully_shard"
                )
            dtype, gather_dtype = dtypes.pop()
            segments.append(replace(segment, dtype=dtype, gather_dtype=gather_dtype))
        self.layout.segments = tuple(segments)
        self.layout.specs = tuple(specs)

    def _warn_of_padding(self, segment: ContiguousSegment) -> None:
        used = segment.unsharded_numel - segment.padding
        if segment.padding > PADDING_TO_WARN_OF * used and used * segment.gather_dtype.itemsize > 1 << 24:
            warnings.warn(
                f"rank {self.layout.rank}: the group of '{self.params[0].name}' is padded by"
                f" {segment.padding / used:.0%} so that its rows or blocks of rows stay whole on"
                f" {segment.ranks} ranks, and sends as much more; shard several modules in one call, with"
                " smaller blocks, or over fewer ranks (HSDP)",
                stacklevel=2,
            )

    def _make_shard(self, segment: ContiguousSegment) -> Tensor:
        members = [self.params[place.index] for place in segment.places]
        device = self._home(members[0].local.device)
        group = self.refresh_group
        if group is not None and segment.dtype == segment.gather_dtype and device == self.device:
            size = segment.shard_numel
            resident = torch.zeros(group.size() * size, dtype=segment.dtype, device=device)
            shard = resident.narrow(0, group.rank() * size, size)
        else:
            resident = shard = torch.zeros(segment.shard_numel, dtype=segment.dtype, device=device)
        if self._pins and not shard.is_meta:
            resident = shard = shard.pin_memory()
        self.resident.append(resident)
        for param in members:
            rows = param.place.box
            local = shard.narrow(0, param.place.shard_offset, rows.numel).view(rows.sizes)
            if not param.is_packed:
                source = param.whole.narrow(0, rows.offsets[0], rows.sizes[0])
                del param.whole
                param.is_packed = True
            else:
                source = param.local
            if not shard.is_meta:
                local.copy_(source)
            param.move_to(local)
        self._placed = [(param, param.local) for param in self.params if param.is_packed]
        return shard

    def check_ready(self) -> None:
        super().check_ready()
        self.pack()
        named = zip(self.layout.specs, self.params, strict=True)
        self.layout.specs = tuple([replace(spec, name=param.name) for spec, param in named])

    # Unsharded buffers

    def _make_unsharded(self) -> None:
        """Make the unsharded parameters, over memory that the first gather allocates.

        Gathers write through `data` aliases, which share memory but not version counters: refilling a
        buffer is no modification to autograd, whose saved tensors see the same values again.
        """
        memory: list[Tensor] = []
        with torch.inference_mode(False), torch.no_grad():
            for segment, shard, resident in zip(
                self.layout.segments, self.shards, self.resident, strict=True
            ):
                alike = shard.dtype == segment.gather_dtype and shard.device == self.device
                if not alike and (self.refresh_group is not None or self.gather_group is None):
                    times = 1 if self.refresh_group is None else self.refresh_group.size()
                    resident = torch.empty(
                        times * segment.shard_numel, dtype=segment.gather_dtype, device=self.device
                    )
                full = resident
                if self.gather_group is not None:
                    full = torch.empty(
                        segment.unsharded_numel, dtype=segment.gather_dtype, device=self.device
                    )
                for place in segment.places:
                    param = self.params[place.index]
                    whole = full.narrow(0, place.start, place.numel).view(param.shape)
                    param.unsharded = param.wrap_unsharded(whole)
                    optimizer_watch.watch_gathered(param.name, param.unsharded)
                memory.append(full)
                full = full.data
                group = self.gather_group
                size = resident.numel()
                mine = full if group is None else full.narrow(0, group.rank() * size, size)
                casts = resident.dtype != full.dtype or resident.device != full.device
                storage = None if group is None else full.untyped_storage()
                self.buffers.append(
                    _Buffer(segment, shard, resident, full, storage, full.nbytes, mine, casts)
                )
        at = [(owner.parameters, owner.name, param) for param in self.params for owner in param.owners]
        self._whole = [
            (parameters, name, cast(nn.Parameter, param.unsharded)) for parameters, name, param in at
        ]
        self._cut = [(parameters, name, param.sharded) for parameters, name, param in at]
        if self.gather_group is not None:
            self.read_guard = self._make_read_guard(memory)
        self._changes = -1

    # Changing form

    def unshard(self, *, async_op: bool = False, streams: CommStreams | None = None) -> None:
        if self.gather is not None or self.form is Form.UNSHARDED:
            return
        if self.orders and self.gather_group is not None:
            self.announce_gather()
        if not self.buffers:
            self._make_unsharded()
        self.gathered_at = optimizer_watch.Steps.count
        self.streams = streams
        comm = self.settings.all_gather
        if self.refresh_group is not None or self.gather_group is None:
            self._refresh(comm)
        group = self.gather_group
        if group is None:
            self.gather = _DONE
            return
        if self.form is Form.POST_FORWARD:
            assert self.post_forward_mesh is not None
            group = self.post_forward_mesh.shard_process_group
        gathered = None
        if streams is None:
            if len(self.buffers) == 1:
                work = self._gather_one(self.buffers[0], group, comm, async_op)
                self.gather = _DONE if work is None else AllGatherResult(_NOTHING, (), None, work)
                return
            works = [self._gather_one(buffer, group, comm, async_op) for buffer in self.buffers]
        else:
            streams.reclaim(self.buffers, keep=1)
            with streams.all_gather:
                works = [self._gather_one(buffer, group, comm, async_op) for buffer in self.buffers]
                gathered = record_event(streams.all_gather)
        running = [work for work in works if work is not None]
        if not running and gathered is None:
            self.gather = _DONE
        else:
            self.gather = AllGatherResult(_NOTHING, (), gathered, cast(dist.Work, _Works(running)))

    def _gather_one(
        self, buffer: _Buffer, group: dist.ProcessGroup, comm: AllGather, async_op: bool
    ) -> dist.Work | None:
        assert buffer.storage is not None
        if not self.holds_memory:
            buffer.storage.resize_(buffer.nbytes)
        source = buffer.post_forward_shard
        if source is None:
            source = buffer.resident
            if buffer.casts:
                source = buffer.mine.copy_(source, non_blocking=True)
        if self.gather_ranks == 1:
            if source is not buffer.mine:
                buffer.full.copy_(source)
            return None
        if type(comm).allocate is DefaultAllGather.allocate:
            return comm(buffer.full, source, group, async_op)
        # Parameters cannot be views of what a user's communication allocates anew each time.
        output = comm.allocate((buffer.full.numel(),), dtype=buffer.full.dtype, device=self.device)
        mine = output.narrow(0, group.rank() * source.numel(), source.numel()).copy_(source)
        comm(output_tensor=output, input_tensor=mine, group=group, async_op=False)
        buffer.full.copy_(output)
        return None

    @torch.no_grad()
    def _refresh(self, comm: AllGather) -> None:
        """Bring what is resident between steps up to date with the optimizer's shards, if it is not.

        Collective over the axis that replicates parameters but cuts optimizer state.
        """
        state = (optimizer_watch.Steps.count, sum(param.sharded._version for param in self.params))
        if self.refreshed_at == state:
            return
        self.refreshed_at = state
        if self.orders and self.refresh_group is not None:
            self.announce(event_for(f"gather what the optimizer changed of '{self.name}'"))
        for buffer in self.buffers:
            if buffer.resident is buffer.shard:
                continue
            # It may be the whole parameters; autograd must not see a modification where they are refilled.
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

    def wait_for_unshard(self) -> AllGatherResult | None:
        result = self.gather
        if result is None:
            return None
        if result.event is not None:
            current_stream(self.device).wait_event(result.event)
        if result.work is not None:
            result.work.wait()
        self.gather = None
        self._register_unsharded()
        return None

    def _register_unsharded(self) -> None:
        if self._changes != ShardedRows.changes:
            self._check_memory()
            self._changes = ShardedRows.changes
            for (_, _, unsharded), (_, _, sharded) in zip(self._whole, self._cut, strict=True):
                if unsharded.requires_grad is not sharded.trains:
                    unsharded.requires_grad_(sharded.trains)
                    self.gather_event = None
        for parameters, name, unsharded in self._whole:
            parameters[name] = unsharded
        if self.form is Form.POST_FORWARD:
            self._drop_kept()
        if self.read_guard is not None:
            self.read_guard.open()
        self.form = Form.UNSHARDED

    def _check_memory(self) -> None:
        for param, mine in self._placed:
            if param.local is not mine:
                raise ShardingError(
                    f"{here()}: '{param.name}' was given other memory ({param.local.dtype} on"
                    f" {param.local.device}) than its group gathers ({mine.dtype} on {mine.device}). Convert"
                    " whole sharded modules with .to(), and change values in place"
                )

    def reshard(self) -> None:
        if self.form is Form.SHARDED:
            return
        for parameters, name, sharded in self._cut:
            parameters[name] = sharded
        if self.form is Form.POST_FORWARD:
            self._drop_kept()
        self._free_unsharded()
        self.form = Form.SHARDED

    def _drop_kept(self) -> None:
        for buffer in self.buffers:
            buffer.post_forward_shard = None

    def abandon_gather(self) -> None:
        abandoned = self.gather is not None
        super().abandon_gather()
        if abandoned and self.form is not Form.UNSHARDED:
            self._free_unsharded()

    def _free_unsharded(self) -> None:
        if self.read_guard is not None:
            self.read_guard.close()
        if self.settings.keep_unsharded_storage:
            if self.streams is not None:  # the next gather overwrites what computation may still read
                self.streams.all_gather.wait_stream(current_stream(self.device))
            self.holds_memory = all(buffer.full.untyped_storage().nbytes() for buffer in self.buffers)
            return
        self.holds_memory = False
        if self.streams is not None:
            storages = [buffer.storage for buffer in self.buffers if buffer.storage is not None]
            self.streams.free_later(self.buffers, storages, current_stream(self.device))
            return
        for buffer in self.buffers:
            if buffer.storage is not None:
                buffer.storage.resize_(0)

    @torch.no_grad()
    def _reshard_to_smaller(self, info: FSDPMeshInfo) -> None:
        ranks, rank = info.shard_mesh_size, info.shard_mesh_rank
        for buffer in self.buffers:
            width = buffer.full.numel() // ranks
            begin = rank * width
            buffer.post_forward_shard = buffer.full.narrow(0, begin, width).clone()
            for place in buffer.segment.places:
                param = self.params[place.index]
                rows = rows_between(param.shape, place.start, begin, begin + width)
                offset = max(place.start - begin, 0) if rows.numel else 0
                local = buffer.post_forward_shard.narrow(0, offset, rows.numel).view(rows.sizes)
                param.register(self._smaller_param(param, place.start, width, local, info))
        self._free_unsharded()
        self.form = Form.POST_FORWARD

    def _smaller_param(
        self, param: RowsParam, start: int, width: int, local: Tensor, info: FSDPMeshInfo
    ) -> ShardedParameter:
        shape = param.shape

        def box_of(rank: int) -> Box:
            return rows_between(shape, start, rank * width, (rank + 1) * width)

        groups, tp_spec = (info.shard_process_group,), param.tp_spec
        mesh = info.mesh if tp_spec is None else _compat.concatenate_meshes([info.mesh, tp_spec.mesh])
        piece = Piece(param.global_shape, groups, box_of, param.piece.even_cuts, param.name, mesh)
        return ShardedParameter.wrap(local, piece, requires_grad=param.sharded.requires_grad)


def _cut(segment: ContiguousSegment, params: Sequence[ShardedParam]) -> Cut:
    sizes: list[int] = []
    parts: list[int] = []
    reduced: list[int] = []
    end = 0
    for i, (place, param) in enumerate(zip(segment.places, params, strict=True)):
        if place.start > end:
            sizes.append(place.start - end)
            reduced.append(end - place.start)
        parts.append(len(sizes))
        sizes.append(place.numel)
        if place.numel:
            reduced.append(i if param.sharded.requires_grad else -place.numel)
        end = place.start + place.numel
    if end < segment.unsharded_numel:
        sizes.append(segment.unsharded_numel - end)
        reduced.append(end - segment.unsharded_numel)
    shapes = tuple(tuple(param.shape) for param in params)
    trains = tuple(param.sharded.requires_grad for param in params)
    return Cut(1, tuple(sizes), tuple(parts), shapes, shapes, (0,) * len(params), trains, tuple(reduced))
