"""Reducing the gradients of a contiguous group: one batched copy, one reduce-scatter, views.

The reduce-scatter's input is laid out as the gathered parameters are: one batched copy, which also casts,
puts each gradient where its parameter lies. Large segments are reduced in slices of bounded size, so that
staging an embedding's gradient does not set backward's peak memory.

`strategy.py` decides the collective of each axis: a reduce-scatter if gradients are cut over it, else an
all-reduce, of which the rank keeps its part if optimizer state is cut. The shard axis comes first.
"""

from __future__ import annotations

import functools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import compress, pairwise, repeat
from operator import attrgetter, is_
from typing import Any, cast

import torch
from torch import Tensor, is_grad_enabled, nn

from shardwise import _compat
from shardwise.comm import CommStreams, ReduceResult
from shardwise.comm.foreach import (
    Input,
    Reduction,
    current_stream,
    finish_reduction,
    reduce_scatter,
    shard_memory,
)
from shardwise.comm.streams import record_event
from shardwise.errors import ShardingError, here
from shardwise.fsdp.contiguous import ContiguousGroup
from shardwise.fsdp.fast import allocates_plain
from shardwise.fsdp.parameter import ShardedParam
from shardwise.fsdp.reduction import GradReducer, kind_of
from shardwise.fsdp.rows import RowsParam
from shardwise.layout import ContiguousSegment
from shardwise.sharded_tensor.rows import ShardedRows

_MANY = 8  # from this many ranks on, one copy per rank costs the host more than one strided copy


class _SegmentParams:
    """The parameters of one segment, in the order in which they lie in its buffers."""

    staging: _Staging | None = None

    def __init__(self, segment: ContiguousSegment, params: list[RowsParam]) -> None:
        self.segment, self.params, self.count, self.kind = segment, params, len(params), kind_of(params)
        self.plain = all(param.tp_spec is None for param in params)
        self.used = sum([place.box.numel for place in segment.places])  # of this rank's elements, no padding
        self.filled = [param for param in params if param.no_rows is None]  # with rows on this rank
        self.empty = [param for param in params if param.no_rows is not None]
        self.unsharded = [cast(nn.Parameter, param.unsharded) for param in params]


@dataclass
class _Staging:
    """The input of a segment's reduction, or memory for its slices, used one after another."""

    plan: Reduction  # the one for which it may be reused
    buffer: Tensor
    targets: list[Tensor]  # where each gradient goes; empty for slices
    gaps: list[Tensor]  # padding
    storage: torch.UntypedStorage | None = None  # freed after use, if the buffer is reused


# A segment's index; its gradients by parameter, None where one is missing; whether every parameter has one,
# of the gathered dtype.
_Collected = tuple[int, list[Tensor | None], bool]
_grad_of: Callable[[Tensor], Tensor | None] = attrgetter("grad")


@dataclass
class ContiguousReducer(GradReducer):
    """The reductions of a `ContiguousGroup`."""

    group: ContiguousGroup
    _members: list[_SegmentParams] = field(default_factory=list)
    _buffers: list[Any] | None = None  # the group's, when `_members` were found
    _unused: set[frozenset[str]] = field(default_factory=set)
    _params_in_partials: dict[int, list[RowsParam]] = field(default_factory=dict)  # whose gradients are there

    def assigner(self, segment: int, params: Sequence[ShardedParam]) -> Callable[[Tensor], None]:
        members = _SegmentParams(self.group.layout.segments[segment], self.group.members[segment])
        trained = members.params if len(params) == len(members.params) else cast(list[RowsParam], params)
        return functools.partial(self._assign, members, trained)

    def collect(self) -> list[_Collected]:
        if not self.group.buffers:
            return []  # never gathered
        # Packing makes a new list, so another identity means that the group was packed since.
        if self._buffers is not self.group.buffers:
            self._buffers, segments = self.group.buffers, self.group.layout.segments
            self._members = list(map(_SegmentParams, segments, self.group.members))
        collected: list[_Collected] = []
        for index, members in enumerate(self._members):
            if self.has_separate_sums or not members.plain or self.group.settings.reduce_unused:
                grads = [self.collect_from(param) for param in members.params]
                missing, complete = sum(map(is_, grads, repeat(None))), False
            else:
                # The usual case runs in C, without Python code per parameter.
                grads = list(map(_grad_of, members.unsharded))
                # `None in grads` would call `==` of each tensor.
                missing = sum(map(is_, grads, repeat(None)))
                complete = not missing
                if missing < members.count:
                    # From here on only `grads` holds them; it is emptied as soon as they are copied.
                    for unsharded in members.unsharded:
                        unsharded.grad = None
            if missing < members.count:
                collected += ((index, grads, complete),)
        self.has_separate_sums = False
        return collected

    def reduce(self, collected: list[_Collected], *, streams: CommStreams | None) -> list[ReduceResult]:
        """Reduce gradients, with one reduction for each segment that has any."""
        if is_grad_enabled():
            # The context costs calls, so it is entered only where autograd records (`create_graph=True`).
            with torch.no_grad():
                return self.reduce(collected, streams=streams)
        results: list[ReduceResult] = []
        for index, grads, complete in collected:
            result = self._reduce_segment(index, grads, complete, streams)
            if result is not None:
                results.append(result)
        return results

    def _reduce_segment(
        self, index: int, grads: list[Tensor | None], complete: bool, streams: CommStreams | None
    ) -> ReduceResult | None:
        members = self._members[index]
        kind = members.kind
        plan = self._plans[kind] if kind in self._plans else self._plan(kind, streams)
        params = members.params
        if not complete:
            pairs = zip(params, grads, strict=True)
            params = [param for param, grad in pairs if grad is not None]
        # Announce before anything is sent: it raises where ranks differ.
        if self.group.orders:
            self.announce(plan, params, batch=index)
        staging = members.staging
        if staging is None or staging.plan is not plan:
            staging = self._staging(members, plan)
        if staging.storage is not None:
            # Kept from the last step, without its memory.
            staging.storage.resize_(staging.buffer.nbytes)
        inputs: Sequence[Input] = ()
        streams = plan.streams
        if streams is None:
            shard = self._reduce_scatter(members, grads, complete, staging)
        else:  # beside computation, including copies
            # Memory of computation's stream, which may reuse it unless something holds it.
            used = [staging.buffer, *(grad for grad in grads if grad is not None)]
            out = None
            if self.shard_becomes_grads(params, plan):
                out = shard_memory(plan, members.segment.shard_numel)
                used.append(out)
            # The reduce-scatter stream waits, not the host: gradients are ready when computation gets here.
            streams.reduce_scatter.wait_stream(current_stream(plan.device))
            with streams.reduce_scatter:
                shard = self._reduce_scatter(members, grads, complete, staging, out)
                # After the last slice's collective; what follows reads only the shard.
                inputs = ((used, record_event(streams.reduce_scatter)),)
        del staging  # `inputs` keeps its memory for streams
        # The usual case on CPU: the shard is the gradient, and no stream still uses anything.
        if plan.ends_with_scatter and not self.partials:
            self._assign(members, params, shard)
            return None
        partial = self.partials.pop(index, None) if self.partials else None
        if partial is not None:
            earlier = self._params_in_partials.pop(index)
            # The sum holds gradients of both backwards.
            params = [param for param in members.params if param in earlier or param in params]
        result = finish_reduction(shard, plan, inputs=inputs, partial=partial)
        if result.shard is None:
            assert result.partial is not None
            self.partials[index] = result.partial
            self._params_in_partials[index] = params
        elif result.stream is None:
            self._assign(members, params, result.shard)
        else:
            # Additions, hooks and optimizers run on the shard's stream: computation need not wait for it.
            with result.stream:
                self._assign(members, params, result.shard)
        return result

    def _assign(self, members: _SegmentParams, params: list[RowsParam], shard: Tensor) -> None:
        """Assign views of the reduced shard as gradients, or add them to existing gradients."""
        # ZeRO-1: gradients were all-reduced whole, and this rank's optimizer updates its part.
        own, group = members.segment.shard_numel, self.group.refresh_group
        if group is not None and shard.numel() != own:
            # A copy: a view would keep the whole gradient alive.
            shard = shard.narrow(0, group.rank() * own, own).clone()
        if self.group.offload.on_host:
            shard = self._to_offload_device(params, shard)
        if self.group.settings.all_reduce_hook is None:  # a hook may write to padding
            # Views cover `used` of its elements, and the rest is zero: see `merge_views`.
            shard.used = members.used  # type: ignore[attr-defined]
        begin, dtype, device = shard.storage_offset(), shard.dtype, shard.device
        # Usually every parameter has a gradient: use the lists that were made once.
        filled, empty = members.filled, members.empty
        if params is not members.params:
            filled, empty = [p for p in filled if p in params], [p for p in empty if p in params]
            if len(filled) < len(members.filled) and self.group.settings.all_reduce_hook is None:
                self._check_unused([p for p in members.filled if p not in params], shard)
        hooked = ShardedRows.any_hooked and any(param.sharded.hooked for param in params)
        if hooked or members.kind[1] is None:  # hooks may communicate: in order of registration
            for param in sorted(params, key=lambda param: param.place.index):
                param.assign_grad(param.rows_in(shard))
            return
        # As `assign_grad` does, without its calls and without torch's `__torch_function__` look-ups.
        with _compat.plain_attributes():
            for param in empty:
                param.sharded.grad = param.no_rows
        for param in filled:
            place = param.place
            local = shard.as_strided(place.box.sizes, place.rows_stride, begin + place.shard_offset)
            sharded = param.sharded
            if sharded.grad is None:
                grad = _compat.make_wrapper(ShardedRows, param.global_shape, dtype=dtype, device=device)
                grad._local_tensor, grad.piece = local, param.piece
                sharded.grad = grad
            else:
                sharded.grad._local_tensor.add_(local)  # type: ignore[attr-defined]

    def _check_unused(self, unused: list[RowsParam], shard: Tensor) -> None:
        """Raise if other ranks have gradients of parameters that this one did not use."""
        # This rank owns rows of them, and would leave these out of its step. Each set of parameters is
        # checked once, since the check waits for the reduction on an accelerator.
        names = frozenset(param.name for param in unused)
        if names in self._unused or _compat.is_fake(shard):  # a fake one has no values
            return
        self._unused.add(names)
        self.wait_for_offload()
        for param in unused:
            if bool(param.rows_in(shard).any()):
                raise ShardingError(
                    f"{here()}: '{param.name}' got no gradient on this rank, which holds some of its rows,"
                    " but got one on other ranks. If ranks use different parameters, call"
                    " set_reduce_scatter_unused_params(True) on the root module"
                )

    def _reduce_scatter(
        self,
        members: _SegmentParams,
        grads: list[Tensor | None],
        complete: bool,
        staging: _Staging,
        out: Tensor | None = None,
    ) -> Tensor:
        """Copy gradients to where their parameters lie, in the reduction's dtype, and reduce them to a shard.

        Runs on the current stream. Consumes `grads`. The shard is `out`, or allocated if that is None.
        """
        # The caller has entered the stream that reduces.
        plan = staging.plan.on_current_stream
        if not staging.targets:
            return self._reduce_in_slices(members, grads, staging.buffer, plan, out)
        sources: Any = grads
        targets = staging.targets
        if complete:
            # A shard marked as `used` promises that padding is zero.
            for gap in staging.gaps:
                gap.zero_()
        else:
            # A parameter without a gradient here adds nothing to other ranks' gradients.
            staging.buffer.zero_()
            targets = [t for t, grad in zip(targets, grads, strict=True) if grad is not None]
            sources[:] = [grad for grad in grads if grad is not None]
        _compat.foreach_copy(targets, sources)
        # Free gradients before the collective runs; with streams the caller still holds them.
        del grads[:]
        shard, _ = reduce_scatter(staging.buffer, plan, out=out)
        if staging.storage is not None:
            # The collective has ended: `storage` is set only where collectives end within the call.
            staging.storage.resize_(0)
        return shard

    def _staging(self, members: _SegmentParams, plan: Reduction) -> _Staging:
        """Return the reduction's input with each gradient's place in it; if large, memory for a slice."""
        # It is kept from step to step, without its memory, if the reduction ends within the call and returns
        # another buffer.
        limit, ranks = self.group.settings.staging_bytes // plan.dtype.itemsize, plan.shard_ranks
        if members.segment.unsharded_numel > max(1, limit) and plan.shard_group is not None:
            size = (max(1, limit // ranks) * ranks,)
            return _Staging(plan, plan.comm.allocate(size, dtype=plan.dtype, device=plan.device), [], [])
        buffer = plan.comm.allocate((members.segment.unsharded_numel,), dtype=plan.dtype, device=plan.device)
        targets = [param.whole_in(buffer) for param in members.params]
        staging = _Staging(plan, buffer, targets, [buffer.narrow(0, *gap) for gap in members.segment.gaps])
        # On one rank the shard is the buffer itself; memory from a user's communication may be for one use.
        if plan.streams is None and ranks > 1 and allocates_plain(plan.comm):
            staging.storage = buffer.untyped_storage()
            members.staging = staging
        return staging

    def _reduce_in_slices(
        self,
        members: _SegmentParams,
        grads: list[Tensor | None],
        staging: Tensor,
        plan: Reduction,
        out: Tensor | None,
    ) -> Tensor:
        """Reduce-scatter in slices, each the same range of every rank's shard."""
        ranks = plan.shard_ranks
        width, step = members.segment.unsharded_numel // ranks, staging.numel() // ranks
        shard = torch.empty(width, dtype=plan.dtype, device=plan.device) if out is None else out
        pairs = zip(members.params, grads, strict=True)
        sources = {param.place.start: grad.reshape(-1) for param, grad in pairs if grad is not None}
        del grads[:]
        slices = _split(sources, ranks=ranks, width=width, step=step)
        for parts, out_slice in zip(slices, shard.split(step), strict=True):
            # All slices use the same memory: one stream reads a slice before it writes the next.
            reduce_input = staging.narrow(0, 0, ranks * out_slice.numel())
            _fill(reduce_input, parts)
            reduce_scatter(reduce_input, plan, out=out_slice)
        return shard


# The parts of gradients in a slice: offset in the slice, and elements. A slice has a row for each rank, so
# ranges at a distance of `width` in a gradient are adjacent in it: together they are a two-dimensional part.
_Parts = list[tuple[int, Tensor]]


def _split(sources: dict[int, Tensor], *, ranks: int, width: int, step: int) -> list[_Parts]:
    """Split gradients, keyed by their offsets, over the slices of `step` of a rank's `width` elements."""
    # One operation splits a gradient for all slices.
    slices: list[_Parts] = [[] for _ in range(0, width, step)]
    cuts = [rank * width + begin for rank in range(ranks) for begin in range(0, width, step)]
    for start, grad in sources.items():
        end = start + grad.numel()
        first, last = -(-start // width), end // width  # the ranks whose range it fills
        runs = [(start, grad)]
        if last - first >= _MANY:
            head, whole, tail = _split_at(grad, [start, first * width, last * width, end])
            runs = [(start, head), (last * width, tail)]
            for parts, part in zip(slices, whole.view(-1, width).split(step, dim=1), strict=True):
                parts.append((first * part.shape[1], part))
        for low, run in runs:
            high = low + run.numel()
            bounds = [low, *cuts[bisect_right(cuts, low) : bisect_left(cuts, high)], high]
            for cut, part in zip(bounds, _split_at(run, bounds), strict=False):
                if part.numel():
                    rank, offset = divmod(cut, width)
                    begin = offset - offset % step
                    place = rank * min(step, width - begin) + offset - begin
                    slices[offset // step].append((place, part))
    return slices


def _split_at(tensor: Tensor, bounds: Sequence[int]) -> Sequence[Tensor]:
    return torch.split(tensor, [end - begin for begin, end in pairwise(bounds)])


def _fill(out: Tensor, parts: _Parts) -> None:
    """Copy a slice's parts to their places, and zero its gaps: padding, or parameters without a gradient."""
    if sum(part.numel() for _, part in parts) < out.numel():
        out.zero_()
    bounds = sorted({0, out.numel(), *(at for at, _ in parts), *(at + part.numel() for at, part in parts)})
    targets = dict(zip(bounds, _split_at(out, bounds), strict=False))
    for at, part in parts:
        if part.dim() == 2:
            targets[at].view(part.shape).copy_(part)
    flat = [(targets[at], part) for at, part in parts if part.dim() == 1]
    if flat:
        _compat.foreach_copy(*zip(*flat, strict=True))


# Gradients that lie end to end in one reduced shard can be replaced by that shard. An elementwise operation,
# or a sum over all, then costs one operation instead of one per gradient:
#
#     reduced shard    A A A A B B C C C -     gradients A, B and C are views; padding is zero


def merge_views(locals_: Sequence[Tensor]) -> list[Tensor]:
    """Replace views of a marked shard by the shard, if all are there, and drop tensors without elements."""
    # At least one tensor of each dtype stays: ranks without rows of a dtype join its reductions too.
    tensors: list[Tensor] = []
    views: dict[int, tuple[Tensor, list[Tensor]]] = {}
    latest, members = None, tensors
    for local in locals_:
        base = _compat.base_of(local)
        if base is None:
            if local.numel():
                tensors.append(local)
            continue
        # Gradients of one shard mostly follow each other, so most need no look-up.
        if base is not latest:
            latest = base
            members = views.setdefault(id(base), (base, []))[1]
        members.append(local)
    for base, members in views.values():
        tensors.extend([base] if _are_all_of(base, members) else members)
    dtypes = {local.dtype for local in tensors}
    tensors.extend({local.dtype: local for local in locals_ if local.dtype not in dtypes}.values())
    return tensors


def _are_all_of(base: Tensor, members: Sequence[Tensor]) -> bool:
    used = getattr(base, "used", None)
    sizes = list(map(Tensor.numel, members))
    if used is None or sum(sizes) != used:
        return False
    begins = list(compress(map(Tensor.storage_offset, members), sizes))
    return begins == list(dict.fromkeys(begins))  # each once
