"""Groups in the interleaved layout: every parameter cut evenly, gathered, then copied out.

Changing form costs one storage resize per buffer, one collective, one batched copy and one assignment
per parameter. See `layout/group_layout.py` for where things lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard

from shardwise import _compat
from shardwise.comm import AllGatherResult, CommStreams, foreach_all_gather, foreach_all_gather_copy_out
from shardwise.comm.foreach import current_stream
from shardwise.comm.streams import record_event
from shardwise.errors import LifecycleError, ShardingError, here
from shardwise.fsdp import optimizer_watch
from shardwise.fsdp.extension import ExtendedParam, stays_out_of_buffer
from shardwise.fsdp.group import Form, ParamGroup
from shardwise.fsdp.parameter import EvenParam, ShardedParam, own_storage
from shardwise.fsdp.traced import Cut
from shardwise.layout import InterleavedLayout, Segment
from shardwise.mesh import FSDPMeshInfo, HSDPMeshInfo


@dataclass
class Exchange:
    """How the unsharded buffers are filled from the shards of some ranks."""

    layout: InterleavedLayout
    group: dist.ProcessGroup | None  # None: a rank alone
    dtypes: list[torch.dtype]  # of each shard buffer after the gather
    sizes: list[int]  # of each `outs`, within one rank's shard
    outs: list[Tensor]  # [ranks, size]
    strided: list[tuple[int, Tensor, tuple[int, ...], int]]  # index in outs, target, piece shape, dim
    shards: list[Tensor]

    @property
    def ranks(self) -> int:
        return self.layout.ranks


class InterleavedGroup(ParamGroup):
    """Parameters gathered in one all-gather and reduced in one reduce-scatter."""

    params: list[EvenParam]
    layout: InterleavedLayout

    def __init__(self, params: list[EvenParam], **how: Any) -> None:
        super().__init__(params, **how)
        self.shards: list[Tensor] = []
        self.full: list[Tensor] = []  # unsharded buffers, empty until the first gather
        self.main: Exchange | None = None
        self.smaller: Exchange | None = None  # over the post-forward mesh
        self.smaller_ready: torch.Event | None = None  # accelerators: its shards have been written
        self.packed: list[EvenParam] = []
        for param in params:
            param.register(param.sharded)
        self.extended = self._extend()
        self.pack()

    def _extend(self) -> dict[int, ExtendedParam]:
        """The parameters that keep memory of their own, by index."""
        return {
            i: ExtendedParam(p, device=self.device)
            for i, p in enumerate(self.params)
            if stays_out_of_buffer(p)
        }

    def check_ready(self) -> None:
        self.check_params()
        for param in self.params:
            param.adopt()
        self.extended = self._extend()  # before packing, which moves local tensors
        super().check_ready()

    def check_params(self) -> None:
        super().check_params()
        for param in self.packed if self.full else ():
            if param.was_swapped:
                raise ShardingError(
                    f"{here()}: '{param.name}' was converted or swapped alone after parameters were"
                    " first gathered; call .to() on the whole sharded module, and change values in place"
                )
            if stays_out_of_buffer(param):
                raise ShardingError(
                    f"{here()}: the local tensor of '{param.name}' was given hooks for the all-gather after"
                    " parameters were first gathered; set them before the first forward"
                )

    def describe(self) -> str:
        extended = [f"{self.params[i].name}: {type(self.params[i].local).__name__}" for i in self.extended]
        return "\n".join([super().describe(), *extended])

    def untraceable(self) -> str | None:
        return "a tensor subclass with hooks around the all-gather" if self.extended else None

    def cuts(self) -> list[tuple[Sequence[ShardedParam], Cut]]:
        members = [[self.packed[slot.index] for slot in one.slots] for one in self.layout.segments]
        return [
            (params, _cut(segment, params))
            for segment, params in zip(self.layout.segments, members, strict=True)
        ]

    # Shard buffers

    @torch.no_grad()
    def pack(self) -> None:
        """Lay the sharded parameters end to end in the shard buffers, unless they lie there already.

        Called when sharding, and again whenever a user may have replaced parameters: after
        `Module.to` and its like, `to_empty`, `load_state_dict(assign=True)`, before the first forward.
        """
        if self.form is Form.POST_FORWARD:
            self.reshard()
        for param in self.params:
            param.adopt()
        packed = [p for i, p in enumerate(self.params) if i not in self.extended]
        layout = InterleavedLayout(
            [p.layout_spec() for p in packed],
            ranks=self.ranks,
            rank=self.params[0].rank,
            align_bytes=self.align_bytes,
        )
        if len({p.local.device for p in packed}) > 1:
            return  # half-way through materialisation; the first forward checks that it was finished
        if self._lies_in_buffers(layout, packed):
            return
        self.abandon_gather()
        self.reshard()
        self.layout = layout
        self.packed = packed
        self.traced = self.gather_event = self.layout_words = None
        self.shards = []
        for segment in layout.segments:
            first = packed[segment.slots[0].index].local
            shard = torch.zeros(segment.shard_numel, dtype=segment.dtype, device=self._home(first.device))
            if self._pins and not shard.is_meta:
                shard = shard.pin_memory()
            for slot in segment.slots:
                param = packed[slot.index]
                padded = shard.narrow(0, slot.shard_offset, slot.padded_shard_numel)
                dim = param.placement.dim
                piece = padded.view(slot.padded_shard_shape).narrow(dim, 0, slot.shard_shape[dim])
                if not shard.is_meta:
                    piece.copy_(param.local)
                param.move(own_storage(piece))
            self.shards.append(shard)
        self._forget_unsharded()

    def _lies_in_buffers(self, layout: InterleavedLayout, packed: list[EvenParam]) -> bool:
        if not self.shards or layout.describe() != self.layout.describe():
            return False
        for segment, shard in zip(layout.segments, self.shards, strict=True):
            for slot in segment.slots:
                local = packed[slot.index].local
                if local.is_meta or local.device != shard.device:
                    return False
                if _compat.is_fake(local):
                    continue
                if local.numel() and local.data_ptr() != shard[slot.shard_offset :].data_ptr():
                    return False
        return True

    def _forget_unsharded(self) -> None:
        self.full, self.main, self.smaller = [], None, None
        for param in self.packed:
            param.unsharded = None
        self.form = Form.SHARDED

    # Unsharded buffers

    def _make_unsharded(self) -> None:
        """Allocate the unsharded buffers and, over them, the unsharded parameters.

        Gathers write through `data` aliases, which share memory but not version counters: refilling
        a buffer is no modification to autograd, whose saved tensors see the same values again.
        """
        with torch.inference_mode(False), torch.no_grad():
            memory = []
            for segment in self.layout.segments:
                full = torch.empty(segment.unsharded_numel, dtype=segment.gather_dtype, device=self.device)
                self.full.append(full.data)
                memory.append(full)
                for slot in segment.slots:
                    param = self.packed[slot.index]
                    whole = full.narrow(0, slot.unsharded_offset, param.numel).view(param.shape)
                    param.unsharded = param.wrap_unsharded(whole)
                    optimizer_watch.watch_gathered(param.name, param.unsharded)
            self.read_guard = self._make_read_guard(memory)
            self.main = self._exchange(self.layout, self.shard_group, self.shards)
            info = self.post_forward_mesh
            if info is not None and info is not self.info:
                layout = InterleavedLayout(
                    self.layout.specs, ranks=info.shard_mesh_size, rank=info.shard_mesh_rank
                )
                self.smaller = self._exchange(layout, info.shard_process_group, [])

    def _exchange(
        self, layout: InterleavedLayout, group: dist.ProcessGroup | None, shards: list[Tensor]
    ) -> Exchange:
        """How the unsharded buffers are filled from shards cut as `layout` says."""
        ranks = layout.ranks
        plan = Exchange(layout, group, [s.gather_dtype for s in layout.segments], [], [], [], shards)
        for segment, full, home in zip(layout.segments, self.full, self.layout.segments, strict=True):
            for slot, at in zip(segment.slots, home.slots, strict=True):
                numel = slot.padded_shard_numel
                target = full.narrow(0, at.unsharded_offset, ranks * numel)
                dim = self.packed[slot.index].placement.dim
                if dim != 0 and ranks > 1:
                    piece = slot.padded_shard_shape
                    whole = (*piece[:dim], ranks * piece[dim], *piece[dim + 1 :])
                    plan.strided.append((len(plan.outs), target.view(whole), piece, dim))
                plan.sizes.append(numel)
                plan.outs.append(target.view(ranks, numel))
            if segment.padding:
                plan.sizes.append(segment.padding)
                plan.outs.append(full.new_empty(ranks, segment.padding))
        return plan

    # Changing form

    def unshard(self, *, async_op: bool = False, streams: CommStreams | None = None) -> None:
        """Start gathering, unless the group is gathered or already on its way.

        Collective over the shard group (or the smaller one, after a partial reshard).
        """
        if self.gather is not None or self.form is Form.UNSHARDED:
            return
        if self.orders:
            self.announce_gather()
        if self.main is None:
            self._make_unsharded()
        plan = self.smaller if self.form is Form.POST_FORWARD else self.main
        assert plan is not None
        self.gathered_at = optimizer_watch.Steps.count
        if streams is not None and self.form is Form.POST_FORWARD and self.smaller_ready is not None:
            streams.wait(self.smaller_ready)
        inputs, dtypes = plan.shards, plan.dtypes
        if self.extended:
            inputs, dtypes = list(inputs), list(dtypes)
            for extended in self.extended.values():
                with torch.no_grad():
                    pieces = extended.inputs()
                inputs += pieces
                dtypes += [t.dtype for t in pieces]
        self.gather = foreach_all_gather(
            inputs,
            dtypes=dtypes,
            group=plan.group,
            comm=self.settings.all_gather,
            device=self.device,
            async_op=async_op,
            streams=streams,
        )

    def wait_for_unshard(self) -> AllGatherResult | None:
        """Finish a gather: copy out and register the unsharded parameters.

        Returns the gather, whose buffer streams may still read, or None if there was nothing to do.
        """
        result = self.gather
        if result is None:
            return None
        plan = self.smaller if self.form is Form.POST_FORWARD else self.main
        assert plan is not None
        if not self.holds_memory:
            for full in self.full:
                full.untyped_storage().resize_(full.nbytes)
        self._copy_out(result, plan)
        for extended in self.extended.values():
            with torch.no_grad():
                extended.finish()
        self.gather = None
        self._register_unsharded()
        return result

    def _copy_out(self, result: AllGatherResult, plan: Exchange) -> None:
        sizes, outs = plan.sizes, plan.outs
        if self.extended:
            sizes, outs = list(sizes), list(outs)
            received = result.inputs[len(plan.shards) :]
            for extended in self.extended.values():
                count = len(extended.shapes)
                mine, received = received[:count], received[count:]
                sizes += [t.numel() for t in mine]
                outs += [t.view(plan.ranks, -1) for t in extended.allocate(mine, plan.ranks)]
        if plan.strided:
            outs = list(outs)
            for index, target, _, _ in plan.strided:
                outs[index] = torch.empty_like(target).view(plan.ranks, -1)
        typed = outs
        if result.output.dtype == torch.uint8:
            sizes = [size * out.element_size() for size, out in zip(sizes, outs, strict=True)]
            outs = [out.view(torch.uint8) for out in outs]
        foreach_all_gather_copy_out(result, sizes, outs, ranks=plan.ranks)
        for index, target, piece, dim in plan.strided:
            torch.cat(typed[index].view(plan.ranks, *piece).unbind(0), dim=dim, out=target)

    def _register_unsharded(self) -> None:
        super()._register_unsharded()
        if self.smaller is not None:
            self.smaller.shards = []

    @torch.no_grad()
    def _reshard_to_smaller(self, info: FSDPMeshInfo) -> None:
        plan = self.smaller
        if plan is None or self.extended or any(p.tp_spec is not None for p in self.params):
            raise LifecycleError(
                f"{here()}: group '{self.name}' cannot be resharded to a smaller mesh after forward: that"
                " needs plain parameters, no tensor-parallel ones nor tensor subclasses. Use"
                " reshard_after_forward=True or False"
            )
        plan.shards = []
        rank, outs = info.shard_mesh_rank, iter(enumerate(plan.outs))
        strided = {index: (target, piece, dim) for index, target, piece, dim in plan.strided}
        for segment in plan.layout.segments:
            pieces: list[Tensor] = []
            for _, (index, out) in zip(segment.slots, outs, strict=False):  # takes no more outs than slots
                if index in strided:
                    target, piece, dim = strided[index]
                    pieces.append(target.narrow(dim, rank * piece[dim], piece[dim]).reshape(-1))
                else:
                    pieces.append(out[rank])
            shard = torch.cat(pieces)
            plan.shards.append(shard)
            for slot in segment.slots:
                param = self.packed[slot.index]
                local = shard.narrow(0, slot.shard_offset, slot.padded_shard_numel)
                dim = param.placement.dim
                local = local.view(slot.padded_shard_shape).narrow(dim, 0, slot.shard_shape[dim])
                param.register(self._smaller_param(param, local, info))
        self._free_unsharded()
        if self.device.type != "cpu":
            self.smaller_ready = record_event(current_stream(self.device))
        self.form = Form.POST_FORWARD

    def _smaller_param(self, param: EvenParam, local: Tensor, info: FSDPMeshInfo) -> nn.Parameter:
        placements: list[Placement] = [Replicate()] if isinstance(info, HSDPMeshInfo) else []
        placements.append(Shard(param.placement.dim))
        spec = _compat.dtensor_spec(info.mesh, placements, shape=param.shape, dtype=local.dtype)
        return _compat.dtensor_parameter(local, spec, requires_grad=param.sharded.requires_grad)

    def _free_unsharded(self) -> None:
        if self.read_guard is not None:
            self.read_guard.close()
        if self.settings.keep_unsharded_storage:
            self.holds_memory = all(full.untyped_storage().nbytes() for full in self.full)
            return
        self.holds_memory = False
        for full in self.full:
            full.untyped_storage().resize_(0)
        for extended in self.extended.values():
            extended.free()


def _cut(segment: Segment, params: Sequence[EvenParam]) -> Cut:
    sizes = [slot.padded_shard_numel for slot in segment.slots]
    trains = tuple(param.sharded.requires_grad for param in params)
    reduced = tuple(i for i, trained in enumerate(trains) if trained and sizes[i])
    if segment.padding:
        sizes.append(segment.padding)
    return Cut(
        segment.ranks,
        tuple(sizes),
        tuple(range(len(params))),
        tuple(tuple(slot.padded_shard_shape) for slot in segment.slots),
        tuple(tuple(param.shape) for param in params),
        tuple(param.placement.dim for param in params),
        trains,
        reduced,
    )
