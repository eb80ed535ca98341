"""Groups in the interleaved layout: every parameter cut evenly, gathered, then copied out.

Changing form costs one storage resize per buffer, one collective, one batched copy and one assignment
per parameter. See `layout/group_layout.py` for where parameters lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from shardwise import _compat
from shardwise.comm import AllGatherResult, CommStreams, foreach_all_gather, foreach_all_gather_copy_out
from shardwise.comm.foreach import current_stream, follow_stream
from shardwise.comm.streams import WITHOUT_STREAMS, record_event
from shardwise.errors import LifecycleError, ShardingError, here
from shardwise.fsdp.extension import ExtendedParam, is_gathered_separately
from shardwise.fsdp.group import Form, ParamGroup
from shardwise.fsdp.parameter import EvenParam, ShardedParam
from shardwise.fsdp.traced import Cut, Placed
from shardwise.layout import InterleavedLayout
from shardwise.mesh import FSDPMeshInfo, HSDPMeshInfo


@dataclass
class Exchange:
    """The plan that fills the unsharded buffers from the shards of some ranks."""

    layout: InterleavedLayout
    group: dist.ProcessGroup | None  # None: a single rank
    dtypes: list[torch.dtype]  # of each shard buffer after the gather
    sizes: list[int]  # of each `outs`, within one rank's shard
    outs: list[Tensor]  # [ranks, size]
    strided: list[tuple[int, Tensor, tuple[int, ...], int]]  # index in outs, target, piece shape, dim


class InterleavedGroup(ParamGroup):
    """Parameters gathered in one all-gather and reduced in one reduce-scatter."""

    params: list[EvenParam]
    members: list[list[EvenParam]]
    layout: InterleavedLayout

    def __init__(self, params: list[EvenParam], **options: Any) -> None:
        super().__init__(params, **options)
        self.rank = self.info.shard_mesh_rank if isinstance(self.info, FSDPMeshInfo) else 0
        self.main: Exchange | None = None
        self.smaller: Exchange | None = None  # over the post-forward mesh
        for param in params:
            if is_gathered_separately(param):
                # Packing skips it: its sharded form is made here.
                self._assign_own_layout(param)
                param.move(param.local)
        self.extended = self._extend()
        self.pack()

    def _extend(self) -> dict[ShardedParam, ExtendedParam]:
        return {p: ExtendedParam(p, device=self.device) for p in self.params if is_gathered_separately(p)}

    def check_ready(self) -> None:
        self.check_params()
        for param in self.params:
            param.follow_replacement()
        # Before packing, which moves local tensors. What was gathered before the first forward stays.
        made, self.extended = self.extended, self._extend()
        self.extended.update({p: made[p] for p in self.extended if p.unsharded is not None})
        super().check_ready()

    def check_params(self) -> None:
        super().check_params()
        for param in self.packed_params() if self._has_unsharded else ():
            if is_gathered_separately(cast(EvenParam, param)):
                raise ShardingError(
                    f"{here()}: the local tensor of '{param.name}' was given hooks for the all-gather after"
                    " parameters were first gathered; set them before the first forward"
                )

    def describe(self) -> str:
        extended = [f"{param.name}: {type(param.local).__name__}" for param in self.extended]
        return "\n".join([super().describe(), *extended])

    def untraceable(self) -> str | None:
        return "a tensor subclass with hooks around the all-gather" if self.extended else None

    # Buffers

    def _lay_out(self, params: Sequence[ShardedParam]) -> None:
        self.layout = InterleavedLayout(
            [param.layout_spec() for param in params],
            ranks=self.ranks,
            rank=self.rank,
            align_bytes=self.align_bytes,
        )
        packed = cast(list[EvenParam], params)
        self.members = [[packed[slot.index] for slot in segment.slots] for segment in self.layout.segments]
        for segment, members in zip(self.layout.segments, self.members, strict=True):
            for slot, param in zip(segment.slots, members, strict=True):
                param.assign_slot(slot)
        for param in self.params if self.extended else ():
            if param in self.extended:
                self._assign_own_layout(param)
        # Their targets are views of the old buffers, which nothing reads any longer.
        self.main = self.smaller = None

    def _assign_own_layout(self, param: EvenParam) -> None:
        """Give a parameter that is gathered apart its own layout; it is reduced with the others."""
        layout = InterleavedLayout([param.layout_spec()], ranks=self.ranks, rank=self.rank)
        param.assign_slot(layout.segments[0].slots[0])

    def _whole_memory(self, index: int) -> list[tuple[Tensor, Sequence[ShardedParam]]]:
        """Return memory for each large parameter, and one for each run of parameters between them."""
        # Gradients and activations fit where a large parameter was freed; where a group was, holes are left.
        segment, limit, large = self.layout.segments[index], self.settings.separate_memory_min_bytes, False
        runs: list[list[EvenParam]] = []
        for param in self.members[index]:
            nbytes = segment.ranks * param.slot.padded_shard_numel * segment.gather_dtype.itemsize
            if not runs or large or nbytes >= limit:
                runs.append([])
            runs[-1].append(param)
            large = nbytes >= limit
        memories: list[tuple[Tensor, Sequence[ShardedParam]]] = []
        for run in runs:
            begin, last = run[0].slot.unsharded_offset, run[-1].slot
            for param in run:
                param.memory_begin = begin
            numel = last.unsharded_offset + segment.ranks * last.padded_shard_numel - begin
            memories.append((torch.empty(numel, dtype=segment.gather_dtype, device=self.device), run))
        return memories

    def _make_unsharded(self, streams: CommStreams | None) -> None:
        super()._make_unsharded(streams)
        # Targets are aliases of the unsharded buffers, made once: each gather writes through them.
        with torch.inference_mode(False), torch.no_grad():
            self.main = self._exchange(self.layout, self.shard_group)
            info = self.post_forward_mesh
            if info is not None and info is not self.info:
                layout = InterleavedLayout(
                    self.layout.specs, ranks=info.shard_mesh_size, rank=info.shard_mesh_rank
                )
                self.smaller = self._exchange(layout, info.shard_process_group)
        if streams is not None:  # a module on another stream writes padding to what was allocated on this one
            streams.wait(record_event(current_stream(self.device)))

    def _exchange(self, layout: InterleavedLayout, group: dist.ProcessGroup | None) -> Exchange:
        """Plan how the unsharded buffers are filled from shards cut as `layout` says."""
        ranks = layout.ranks
        plan = Exchange(layout, group, [s.gather_dtype for s in layout.segments], [], [], [])
        memory = {param: buffer.full for buffer in self.buffers for param in buffer.params}
        for segment, members in zip(layout.segments, self.members, strict=True):
            for slot, param in zip(segment.slots, members, strict=True):
                numel = slot.padded_shard_numel
                full = memory[param]
                target = full.narrow(0, param.slot.unsharded_offset - param.memory_begin, ranks * numel)
                dim = param.placement.dim
                # Pieces of another dim do not lie end to end in the whole parameter.
                if dim != 0 and ranks > 1:
                    piece = slot.padded_shard_shape
                    whole = (*piece[:dim], ranks * piece[dim], *piece[dim + 1 :])
                    plan.strided.append((len(plan.outs), target.view(whole), piece, dim))
                plan.sizes.append(numel)
                plan.outs.append(target.view(ranks, numel))
            if segment.padding:
                plan.sizes.append(segment.padding)
                # torch's kernel needs a target for all that was received.
                plan.outs.append(memory[members[0]].new_empty(ranks, segment.padding))
        return plan

    # Changing form

    def _start_gather(self, async_op: bool, streams: CommStreams | None) -> AllGatherResult:
        plan = self.main
        if self.form is Form.POST_FORWARD:
            plan = self.smaller
        assert plan is not None
        inputs, dtypes = self.smaller_shards or self.shards, plan.dtypes
        if self.extended:
            # Copies: the group's own lists must not grow.
            inputs, dtypes = list(inputs), list(dtypes)
            # Hooks make their inputs on the stream that copies them in, which then need not wait for them.
            context = nullcontext() if streams is None or async_op else streams.copy_in
            for extended in self.extended.values():
                with torch.no_grad(), context:
                    pieces = extended.inputs()
                inputs += pieces
                dtypes += [t.dtype for t in pieces]
        return foreach_all_gather(
            inputs,
            dtypes=dtypes,
            group=plan.group,
            comm=self.settings.all_gather,
            device=self.device,
            async_op=async_op,
            streams=streams,
        )

    def _finish_gather(self, result: AllGatherResult) -> AllGatherResult:
        """Copy the gathered parameters out."""
        plan = self.smaller if self.form is Form.POST_FORWARD else self.main
        assert plan is not None
        if self.ready is not None:  # another stream may still read or write what is written now
            follow_stream(self.ready, self.device)
        # Allocated on the stream that copies out and computes, no earlier than needed.
        if not self.holds_memory:
            for buffer in self.buffers:
                # The same storage: unsharded parameters and the plan's targets are views of it.
                buffer.storage.resize_(buffer.full.nbytes)
            if self.device.type not in WITHOUT_STREAMS:
                self.owner = current_stream(self.device)
        self._copy_out(result, plan)
        if self.extended:
            for extended in self.extended.values():
                with torch.no_grad():
                    extended.finish()
        # Its buffer is separate: the caller keeps it until the stream has copied it out.
        return result

    def _copy_out(self, result: AllGatherResult, plan: Exchange) -> None:
        sizes, outs = plan.sizes, plan.outs
        if self.extended:
            # The plan's own lists stay as they are.
            sizes, outs = list(sizes), list(outs)
            received = result.inputs[len(plan.dtypes) :]
            for extended in self.extended.values():
                count = len(extended.shapes)
                part, received = received[:count], received[count:]
                sizes += [t.numel() for t in part]
                outs += [t.view(plan.layout.ranks, -1) for t in extended.allocate(part, plan.layout.ranks)]
        if plan.strided:
            outs = list(outs)
            for index, target, _, _ in plan.strided:
                # Pieces go to separate memory first, and are concatenated along their dim below.
                outs[index] = torch.empty_like(target).view(plan.layout.ranks, -1)
        typed = outs
        # Several dtypes were sent as bytes.
        if result.output.dtype == torch.uint8:
            sizes = [size * out.element_size() for size, out in zip(sizes, outs, strict=True)]
            outs = [out.view(torch.uint8) for out in outs]
        foreach_all_gather_copy_out(result, sizes, outs, ranks=plan.layout.ranks)
        for index, target, piece, dim in plan.strided:
            torch.cat(typed[index].view(plan.layout.ranks, *piece).unbind(0), dim=dim, out=target)

    @torch.no_grad()
    def _smaller(self, info: FSDPMeshInfo) -> list[Tensor]:
        plan = self.smaller
        if plan is None or self.extended or any(p.tp_spec is not None for p in self.params):
            raise LifecycleError(
                f"{here()}: group '{self.name}' cannot be resharded to a smaller mesh after forward: that"
                " needs plain parameters, no tensor-parallel ones nor tensor subclasses. Use"
                " reshard_after_forward=True or False"
            )
        outer, shards = [Replicate()] if isinstance(info, HSDPMeshInfo) else [], []
        for segment, members in zip(plan.layout.segments, self.members, strict=True):
            # Copies, as the unsharded memory is freed next.
            shard = torch.zeros(segment.shard_numel, dtype=segment.gather_dtype, device=self.device)
            targets = [slot.of(shard) for slot in segment.slots]
            pieces: list[Tensor] = []
            for param, slot in zip(members, segment.slots, strict=True):
                dim = param.placement.dim
                pieces.append(cast(Tensor, param.unsharded).narrow(dim, slot.begin, slot.shard_shape[dim]))
            _compat.foreach_copy(targets, pieces)
            for param, local in zip(members, targets, strict=True):
                placements = [*outer, Shard(param.placement.dim)]
                spec = _compat.dtensor_spec(info.mesh, placements, shape=param.shape, dtype=local.dtype)
                trains = param.sharded.requires_grad
                param.register_smaller(_compat.dtensor_parameter(local, spec, requires_grad=trains))
            shards.append(shard)
        return shards

    def traced_cut(self, index: int) -> Cut:
        segment, params = self.layout.segments[index], self.members[index]
        sizes = [slot.padded_shard_numel for slot in segment.slots]
        trains = [param.sharded.requires_grad for param in params]
        reduced = [i for i, trained in enumerate(trains) if trained and sizes[i]]
        if segment.padding:
            sizes.append(segment.padding)
        placed: list[Placed] = [
            (i, param.placement.dim, param.slot.padded_shard_shape, param.shape)
            for i, param in enumerate(params)
        ]
        return Cut.of(segment.ranks, sizes, placed, trains, reduced)
