"""One collective for a whole group of parameters: gather their shards, reduce their gradients.

    foreach_all_gather            shards --copy-in--> slice --all-gather--> gathered buffer
    foreach_all_gather_copy_out   gathered buffer --one batched copy--> unsharded parameters
    foreach_reduce                gradients --copy-in--> reduce-scatter [--> all-reduce] --> shard

On accelerators each step runs on its own stream (`CommStreams`), ordered by events. Buffers that those
streams still read or write must outlive the call, so results hold them. On CPU there are no streams, and
everything has completed on return, unless `async_op`.

Functions that take a group or a `Reduction` are collective over its ranks, and issue at most one operation of
each kind. Shards require no gradient, so gathering needs no `no_grad`; gradients may (`create_graph`), so
reductions disable recording.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise import _compat
from shardwise.comm.api import AllGather, ReduceScatter
from shardwise.comm.arithmetic import DivideFactors
from shardwise.comm.streams import CommStreams, record_event
from shardwise.errors import ShardingError, here


@dataclass(slots=True)
class AllGatherResult:
    """A gather in flight, with the tensors it must keep alive."""

    output: Tensor  # 1-D, all ranks' shards one after another
    # A hook may have made them on the copy-in stream. If they were freed while the all-gather still sends
    # them, the next copy-in would reuse their memory.
    inputs: Sequence[Tensor]
    event: torch.Event | None  # accelerator: recorded after the gather
    work: dist.Work | None  # async_op: wait for it
    stream: torch.Stream | None = None  # has the memory of `output`, if others write or read it


def gather_dtype(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """Return the dtype in which to send shards of `dtypes` together: their own if they agree, else bytes."""
    return dtypes[0] if all(dtype == dtypes[0] for dtype in dtypes) else torch.uint8


def foreach_all_gather(
    inputs: Sequence[Tensor],
    *,
    dtypes: Sequence[torch.dtype],
    group: dist.ProcessGroup | None,
    comm: AllGather,
    device: torch.device,
    async_op: bool = False,
    streams: CommStreams | None = None,
) -> AllGatherResult:
    """Start gathering every rank's `inputs` in one all-gather.

    Collective over `group`. A single input that already has the right dtype and device is sent from its
    own memory; otherwise all are copied, and cast, into this rank's slice of the output.

    Args:
        inputs: this rank's 1-D shards, equal in number and size on all ranks. They may be on CPU while
            `device` is an accelerator (offloading).
        dtypes: the dtype of each input after the gather.
        group: the ranks that exchange shards; None for a single rank.
        comm: allocates the output and gathers.
        device: of the output.
        async_op: return before the gather has finished; `result.work` waits for it.
        streams: where to run on an accelerator.
    """
    dtype, numel = dtypes[0], inputs[0].numel()
    if len(inputs) > 1:
        dtype = gather_dtype(dtypes)
        # Shards that are sent as bytes are counted in bytes.
        scale = [target.itemsize if dtype == torch.uint8 else 1 for target in dtypes]
        numel = sum(t.numel() * s for t, s in zip(inputs, scale, strict=True))
    ranks = 1 if group is None else group.size()
    # An asynchronous gather allocates and copies on the current stream: its caller prefetches on
    # purpose and wants no memory that belongs to another stream.
    side = None if async_op else streams
    single = inputs[0]
    in_place = len(inputs) == 1 and single.dtype == dtype and single.device == device
    if in_place and ranks == 1:  # a hook may have made it on `copy_in`
        return AllGatherResult(single, inputs, None if side is None else record_event(side.copy_in), None)
    if group is not None and in_place and side is None:
        output = comm.allocate((numel * ranks,), dtype=dtype, device=device)
        work = comm(output_tensor=output, input_tensor=single, group=group, async_op=async_op)
        return AllGatherResult(output, inputs, None, work)
    # Allocated on the stream that writes it first; the result keeps it until other streams have used it.
    with nullcontext() if side is None else side.copy_in:
        output = comm.allocate((numel * ranks,), dtype=dtype, device=device)
        if in_place:
            shard = single
        else:
            # This rank's slice of the output, so that the all-gather sends in place.
            shard = output.narrow(0, numel * (0 if group is None else group.rank()), numel)
            if dtype == torch.uint8:
                # Cast before viewing as bytes.
                inputs = [t.to(device, target) for t, target in zip(inputs, dtypes, strict=True)]
            if len(inputs) == 1:
                shard.copy_(single, non_blocking=True)
            else:
                copy_in(inputs, out=shard)
    # No gather follows: the copy-out waits for the copy-in itself.
    if group is None or ranks == 1:
        return AllGatherResult(output, inputs, None if side is None else record_event(side.copy_in), None)
    if side is None:
        work = comm(output_tensor=output, input_tensor=shard, group=group, async_op=async_op)
        return AllGatherResult(output, inputs, None, work)
    # A separate stream, so that the next copy-in need not wait for this gather.
    side.all_gather.wait_stream(side.copy_in)
    with side.all_gather:
        comm(output_tensor=output, input_tensor=shard, group=group, async_op=False)
        # Directly after this gather: the copy-out waits for no later one.
        return AllGatherResult(output, inputs, record_event(side.all_gather), None, side.copy_in)


def copy_in(inputs: Sequence[Tensor], *, out: Tensor) -> None:
    """Copy 1-D tensors end to end into `out`, with casts; as bytes if `out` holds bytes."""
    if out.dtype == torch.uint8:
        inputs = [t.view(torch.uint8) for t in inputs]
    sizes = [t.numel() for t in inputs]
    if sum(sizes) != out.numel():
        _raise_total("inputs", sum(sizes), out.numel())
    _compat.foreach_copy(out.split(sizes), inputs)


def foreach_all_gather_copy_out(
    result: AllGatherResult, sizes: Sequence[int], out: Sequence[Tensor], *, ranks: int
) -> None:
    """Wait for a gather and copy it out, in one batched copy.

    Args:
        result: the result of `foreach_all_gather`.
        sizes: the number of elements (bytes, if the gather was sent as bytes) of each rank's shard that
            belong to each tensor of `out`.
        out: tensors of shape [ranks, size], of the dtype of the gather.
        ranks: the number of shards in the gather.
    """
    if result.event is not None or result.work is not None:
        wait_for_gather(result, result.output.device)
    gathered = result.output.view(ranks, -1)
    if sum(sizes) != gathered.size(1):
        _raise_total("sizes", sum(sizes), gathered.size(1))
    torch.split_with_sizes_copy(gathered, sizes, 1, out=list(out))


def wait_for_gather(result: AllGatherResult, device: torch.device) -> None:
    """Make the current stream of `device` (on CPU: the caller) wait until a gather has finished."""
    if result.event is not None:
        # The host does not block; work issued to this stream from here on waits.
        current_stream(device).wait_event(result.event)
    if result.work is not None:
        result.work.wait()


def on_current_stream(result: AllGatherResult, device: torch.device) -> AllGatherResult:
    """Return a gather that was issued to the current stream, with what other streams must wait for."""
    stream = current_stream(device)
    event = record_event(stream) if result.work is None else None
    return replace(result, event=event, stream=stream)


def current_stream(device: torch.device) -> torch.Stream:
    return torch.accelerator.current_stream(device)


Reached = tuple[torch.Stream, torch.Event]  # a stream, and an event after its work at some time


def reached(device: torch.device) -> Reached:
    """Return the current stream, with an event after its work so far."""
    stream = current_stream(device)
    return stream, record_event(stream)


def follow_stream(earlier: Reached, device: torch.device) -> None:
    """Make the current stream wait for what another had reached."""
    stream, event = earlier
    if stream != (current := current_stream(device)):
        current.wait_event(event)


@dataclass(frozen=True)
class Reduction:
    """The reduction of a group's gradients."""

    shard_group: dist.ProcessGroup | None  # ranks of the reduce-scatter; None without a shard axis
    replicate_group: dist.ProcessGroup | None  # ranks of the all-reduce; None without a replicate axis
    dtype: torch.dtype
    result_dtype: torch.dtype  # of the sharded gradient
    factors: DivideFactors
    comm: ReduceScatter  # allocates buffers and reduce-scatters
    device: torch.device  # of the buffers
    align_bytes: int = 1  # each rank's slice is padded to a multiple of it
    all_reduce: bool = True  # False leaves the all-reduce for a later backward and accumulates until then
    # Reduce-scatters over the replicate axis, if each rank keeps only its part; None all-reduces.
    replicate_scatter: ReduceScatter | None = None
    hook: Callable[[Tensor], None] | None = None  # gets the shard, instead of or after the all-reduce
    streams: CommStreams | None = None  # where to run on an accelerator
    hook_stream: torch.Stream | None = None  # of `hook` if there is no replicate axis

    @cached_property
    def shard_ranks(self) -> int:
        """Ranks of the reduce-scatter; cached, since asking a process group is slow."""
        return 1 if self.shard_group is None else self.shard_group.size()

    @cached_property
    def on_current_stream(self) -> Reduction:
        # Cached: each reduction that enters a stream needs it.
        return replace(self, streams=None)

    @cached_property
    def ends_with_scatter(self) -> bool:
        """Whether the reduce-scattered tensor is already the final result, on the current stream."""
        # If so, the shard needs no further step, and no result that keeps buffers.
        steps = (self.streams, self.replicate_group, self.hook)
        return steps == (None,) * 3 and self.factors.after in (None, 1) and self.dtype == self.result_dtype


Input = tuple[Sequence[Tensor], torch.Event]  # tensors that a reduction uses, and the event after that


@dataclass(slots=True)
class ReduceResult:
    """A reduction's result, with the tensors that running streams still use."""

    shard: Tensor | None  # 1-D sharded gradient in result_dtype; None if only accumulated
    partial: Tensor | None  # reduce-scattered but not yet all-reduced, for the next backward
    inputs: Sequence[Input]  # accelerator: the memory of computation's stream that it uses
    staged: Tensor  # the shard in the reduction's dtype
    added: Tensor | None  # the partial result of an earlier reduction, which was added to it
    # The stream on which `shard` was made. Later work on it runs there too, and records an event afterwards.
    stream: torch.Stream | None


def foreach_reduce_scatter_copy_in(grads: Sequence[Tensor], out: Tensor, ranks: int) -> None:
    """Cut every gradient on dim 0 into `ranks` rows, padded, side by side in `out` [ranks, shard]."""
    filled = list(compress(grads, map(Tensor.numel, grads)))  # torch's kernel refuses empty tensors
    rows, numel = out.view(ranks, -1), out.numel()
    if filled:
        _compat.chunk_cat(filled, 0, ranks, out=rows)
    if numel != (rows.numel() if filled else 0):  # torch's kernel resizes
        _raise_total("padded gradients", rows.numel() if filled else 0, numel)


def _raise_total(subject: str, total: int, expected: int) -> NoReturn:
    raise ShardingError(f"{here()}: the {subject} hold {total} elements, the buffer {expected}")


def foreach_reduce(
    grads: list[Tensor],
    dims: Sequence[int],
    plan: Reduction,
    *,
    shard_numel: int | None = None,
    partial: Tensor | None = None,
    keeps_shard: bool = False,
) -> ReduceResult:
    """Reduce whole gradients to this rank's shard.

    Collective over `plan.shard_group`, then over `plan.replicate_group` unless `plan.all_reduce` is
    false. Empties `grads`, so that gradients are freed as soon as they are copied.

    Args:
        grads: this rank's unsharded gradients; consumed.
        dims: the dim on which each is cut; a dim other than 0 must divide evenly.
        shard_numel: total elements of one rank's padded pieces, if the caller knows it.
        partial: the partial result of an earlier call without all-reduce.
        keeps_shard: the caller keeps the shard until computation has waited for it: it may be computation's
            memory.

    Raises:
        ShardingError: a dim that does not divide.
    """
    if torch.is_grad_enabled():
        # The context costs calls, so it is entered only where autograd records (`create_graph=True`).
        with torch.no_grad():
            return foreach_reduce(
                grads, dims, plan, shard_numel=shard_numel, partial=partial, keeps_shard=keeps_shard
            )
    ranks = plan.shard_ranks
    if len({grad.dtype for grad in grads}) > 1:
        # torch's kernel takes one dtype only, and casts it.
        grads[:] = [grad.to(plan.dtype) for grad in grads]
    rows = _rows_first(grads, dims, ranks)
    # Gradients that `_rows_first` copied are freed here, the rest with `rows`.
    grads.clear()
    if shard_numel is None:
        shard_numel = sum(-(-row.size(0) // ranks) * row.shape[1:].numel() for row in rows)
    numel = shard_numel
    padding = -numel % max(1, plan.align_bytes // plan.dtype.itemsize)
    if padding:
        # Zeros: padding is reduced with the rest.
        rows.append(rows[0].new_zeros(ranks, padding))
        numel += padding
    # Memory of the current stream, which copies gradients in; `used` keeps it until it is reduced.
    reduce_input = plan.comm.allocate((numel * ranks,), dtype=plan.dtype, device=plan.device)
    foreach_reduce_scatter_copy_in(rows, reduce_input, ranks)
    # Free gradients before the collective runs, which reads only their copies.
    rows.clear()
    # Here, not on the stream that reduces: gradients that are kept reuse the memory that activations free.
    out = shard_memory(plan, numel) if keeps_shard else None
    shard, event = reduce_scatter(reduce_input, plan, out=out)
    used = (reduce_input,) if out is None else (reduce_input, out)
    inputs = () if event is None else ((used, event),)
    return finish_reduction(shard, plan, inputs=inputs, partial=partial)


def reduce_scatter(
    reduce_input: Tensor, plan: Reduction, *, out: Tensor | None = None
) -> tuple[Tensor, torch.Event | None]:
    """Reduce-scatter `reduce_input` (1-D; consumed), which the current stream has written.

    Collective over `plan.shard_group`; without one the input itself is the shard.

    Args:
        out: receives the shard; allocated if None.

    Returns:
        The shard and, on an accelerator, an event after which the input may be freed.
    """
    streams = plan.streams
    if streams is not None:
        # At this point of the current stream the copies are complete; the host does not block.
        streams.reduce_scatter.wait_stream(current_stream(plan.device))
        with streams.reduce_scatter:
            # Without `out` the shard is memory of this stream, on which all later steps run.
            shard, _ = reduce_scatter(reduce_input, plan.on_current_stream, out=out)
            # Here, not after later steps: the input may be freed once it was read.
            return shard, record_event(streams.reduce_scatter)
    if plan.factors.before is not None and plan.factors.before != 1:
        # Before the sum, which would otherwise overflow fp16 on many ranks.
        reduce_input.div_(plan.factors.before)
    group = plan.shard_group
    if group is None or plan.shard_ranks == 1:
        # No copy: the input is the shard; code that keeps inputs for streams must take account of that.
        return (reduce_input if out is None else out.copy_(reduce_input)), None
    if out is None:  # `shard_memory`, without its call
        size = (reduce_input.shape[0] // plan.shard_ranks,)
        out = plan.comm.allocate(size, dtype=plan.dtype, device=plan.device)
    plan.comm(output_tensor=out, input_tensor=reduce_input, group=group, op=plan.factors.reduce_scatter_op)
    return out, None


def shard_memory(plan: Reduction, numel: int) -> Tensor:
    """Allocate a reduced shard, as memory of the current stream."""
    return plan.comm.allocate((numel,), dtype=plan.dtype, device=plan.device)


def finish_reduction(
    shard: Tensor, plan: Reduction, *, inputs: Sequence[Input], partial: Tensor | None
) -> ReduceResult:
    """Reduce a reduce-scattered shard over the replicate axis, divide it and cast it.

    Collective over `plan.replicate_group` unless `plan.all_reduce` is false.
    """
    streams = plan.streams
    # On the stream that reduces; undivided, since the sum of all backwards is divided once.
    if partial is not None or (plan.replicate_group is not None and not plan.all_reduce):
        with nullcontext() if streams is None else streams.reduce_scatter:
            if partial is not None:
                # `ReduceResult.added` keeps it: this stream may read memory of computation's stream.
                shard += partial
        if plan.replicate_group is not None and not plan.all_reduce:
            stream = None if streams is None else streams.reduce_scatter
            return ReduceResult(None, shard, inputs, shard, partial, stream)
    stream, reduced = None, shard
    if streams is not None or plan.replicate_group is not None or plan.hook is not None:
        reduced, stream = _reduce_over_replicas(shard, plan)
    if stream is None:
        return ReduceResult(_divide(reduced, plan), None, inputs, shard, partial, None)
    # After its last reduction, without an event: the caller that tracks the result records one after this.
    with stream:
        return ReduceResult(_divide(reduced, plan), None, inputs, shard, partial, stream)


def _divide(shard: Tensor, plan: Reduction) -> Tensor:
    if plan.factors.after is not None and plan.factors.after != 1:
        # In place and after the hook, as in FSDP2.
        shard.div_(plan.factors.after)
    return shard if shard.dtype == plan.result_dtype else shard.to(plan.result_dtype)


def _rows_first(grads: Sequence[Tensor], dims: Sequence[int], ranks: int) -> list[Tensor]:
    """Return the gradients with the sharded dim moved, piece by piece, to the front."""
    rows = list(grads)
    if not any(dims) or ranks == 1:
        return rows
    for i, (grad, dim) in enumerate(zip(grads, dims, strict=True)):
        if dim == 0:
            continue
        if grad.size(dim) % ranks:
            raise ShardingError(
                f"{here()}: a gradient of shape {tuple(grad.shape)} does not divide over {ranks} ranks"
                f" on dim {dim}"
            )
        rows[i] = torch.cat(grad.chunk(ranks, dim=dim), dim=0)
    return rows


def _reduce_over_replicas(shard: Tensor, plan: Reduction) -> tuple[Tensor, torch.Stream | None]:
    """Reduce over the replicate axis and run the user's hook; return the result and the stream it is on."""
    streams = plan.streams
    stream = None if streams is None else streams.reduce_scatter
    if plan.replicate_group is not None:
        if streams is not None:
            # A separate stream, so that the next reduce-scatter need not wait for this all-reduce.
            streams.all_reduce.wait_stream(streams.reduce_scatter)
            stream = streams.all_reduce
        with nullcontext() if stream is None else stream:
            op = plan.factors.all_reduce_op
            if plan.replicate_scatter is None:
                # In place, in memory of another stream, which `ReduceResult.staged` keeps.
                dist.all_reduce(shard, group=plan.replicate_group, op=op)
            elif plan.replicate_group.size() > 1:
                whole, size = shard, (shard.numel() // plan.replicate_group.size(),)
                # Allocated on the stream that writes it, the current one here.
                shard = plan.replicate_scatter.allocate(size, dtype=plan.dtype, device=plan.device)
                plan.replicate_scatter(
                    output_tensor=shard, input_tensor=whole, group=plan.replicate_group, op=op
                )
    if plan.hook is not None:
        producer = stream
        if streams is not None and producer is not None:
            stream = plan.hook_stream or streams.all_reduce
            # The hook reads what the reduction, or all-reduce, has written.
            stream.wait_stream(producer)
        with nullcontext() if stream is None else stream:
            plan.hook(shard)
    return shard, stream
