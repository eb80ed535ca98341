"""All-gather and reduce-scatter over gloo with the minimum number of bytes, as direct exchanges of slices.

gloo's own reduce-scatter sends as much as an all-reduce, twice the minimum; its own all-gather costs about
three times the CPU time of plain messages (benchmarks/gloo_transport.py).
Here every rank sends each other rank exactly the slice that it needs, straight from the caller's buffer, and
receives straight into the caller's buffer:

    all-gather       shard  --> slice r of every rank's output
    reduce-scatter   slice j of the input --> rank j, which adds

In either, each rank sends (n-1) slices, the least that any algorithm can, and none passes through a third
rank. A ring sends the same bytes but waits for its neighbour n-1 times in a row: reducing 33.6 MB on 4 ranks
took 18.1 ms of CPU and 39 ms of wall time as a ring, 15.5 and 35 as here; on 2 ranks the two are the same.

Ranks synchronize per message: gloo sends nothing before the receiver has posted its receive, so an early
rank buffers no one's data. Messages have their own tags, far from those of users' sends and receives. If a
rank does not come, the others raise when the group's timeout has passed, as in a c10d collective.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cache, lru_cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from shardwise.comm.api import DefaultAllGather, DefaultReduceScatter
from shardwise.errors import ShardingError, here

STAGED_SLICES = 2  # slices that a reduce-scatter receives beside its output

# gloo's tags are 31 bits wide. All of a gather's messages are posted when it is issued, so gathers match by
# order of issue under one tag. A reduce-scatter posts some receives later, maybe after those of the next.
_GATHER_TAG = 0x7A000000
_REDUCE_TAGS = range(_GATHER_TAG + 1, _GATHER_TAG + 1 + (1 << 16))

_INPUT_THREAD = "gloo_tcp_loop"  # its name since torch 2.13
_SEGMENT_BYTES = 1 << 20  # of gloo's ring, at most
_GROUP_TIMEOUT = timedelta(0)  # to torch, this means the group's own timeout

_Combine = Callable[..., Tensor]
_COMBINE: dict[Any, _Combine] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.PRODUCT: torch.mul,
}
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


class GlooAllGather(DefaultAllGather):
    """All-gather of CPU buffers of any dtype by point-to-point messages; for groups of backend gloo."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather every rank's `input_tensor` [shard] into `output_tensor` [ranks * shard].

        Collective over `group`. The input may be this rank's slice of the output, which is then not
        copied. Several gathers and reduce-scatters may be in flight if all ranks issue them in one order.

        Raises:
            ShardingError: buffers that do not fit each other; nothing has been sent.
        """
        ranks = group.size()
        _check("all-gather", whole=output_tensor, shard=input_tensor, ranks=ranks)
        works: list[dist.Work] = []
        # Sizes are equal on all ranks, so all exchange messages or none does.
        if input_tensor.numel():
            rank, slices = group.rank(), output_tensor.chunk(ranks)
            own = slices[rank]
            # Else it is gathered in place: the input is this rank's slice already.
            separate = own.data_ptr() != input_tensor.data_ptr()
            if separate:
                _check_apart("all-gather", output_tensor, input_tensor)
            sent = [input_tensor]
            # Sends before receives, in an order that `targets` explains.
            for peer in targets(rank, ranks):
                works.append(group.send(sent, peer, _GATHER_TAG))
            # Now, not in `wait`: others' sends need receives here to end, however late this rank waits.
            for peer in sources(rank, ranks):
                works.append(group.recv([slices[peer]], peer, _GATHER_TAG))
            if separate:
                # While messages are in flight.
                own.copy_(input_tensor)
        work = _AllGatherWork(works)
        if async_op:
            return work
        work.wait()
        return None


class GlooReduceScatter(DefaultReduceScatter):
    """Reduce-scatter of CPU buffers by point-to-point messages; for groups of backend gloo.

    Rank r's slice is x[r-1] + x[r-2] + ... + x[0] + x[n-1] + ... + x[r], added from left to right in the
    buffers' dtype, where x[i] is rank i's addend; the order of arrival does not matter. gloo's ring, which
    c10d's reduce-scatter uses, adds in the same order, so results are equal bit for bit, also where the ring
    cuts the buffer at other places than between slices. AVG then divides by n.

    The first slice arrives in the output and at most `STAGED_SLICES` more beside it; a staged slice's
    memory is reused for the next. So on up to 4 ranks all receives are posted at once. On more ranks, an
    asynchronous reduce-scatter receives the rest in `wait`, and ranks must wait for it before they wait for
    anything that another rank does only after its own `wait`.
    """

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce every rank's `input_tensor` [ranks * shard] and leave slice r in rank r's `output_tensor`.

        Collective over `group`. The input is only read. `op` is SUM, AVG (floating point only), MIN, MAX
        or PRODUCT; dtypes are fp32, fp64, fp16, bf16 and integers of 8 to 64 bits. An asynchronous call
        sends at once and adds in `wait`.

        Raises:
            ShardingError: buffers that do not fit each other, or another op or dtype; nothing has been
                sent.
        """
        ranks = group.size()
        _check("reduce-scatter", whole=input_tensor, shard=output_tensor, ranks=ranks)
        combine = combination(input_tensor.dtype, op)
        if combine is None:
            raise ShardingError(
                f"{here()}: a reduce-scatter of {input_tensor.dtype} by {op} over gloo is not supported; use"
                " SUM, AVG (floating point only), MIN, MAX or PRODUCT, or DefaultReduceScatter"
            )
        _check_apart("reduce-scatter", input_tensor, output_tensor)
        divisor = ranks if op == ReduceOp.AVG else 1
        work = _ReduceScatterWork(output_tensor, input_tensor, group, combine, divisor)
        if async_op:
            return work
        work.wait()
        return None


@lru_cache(64)
def combination(dtype: torch.dtype, op: Any) -> _Combine | None:
    """Return the function that combines two addends of a dtype; None if `GlooReduceScatter` has none."""
    supported = op in _COMBINE and (dtype in _FLOATS or (dtype in _INTEGERS and op != ReduceOp.AVG))
    return _COMBINE[op] if supported else None


class _AllGatherWork(dist.Work):
    def __init__(self, works: list[dist.Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = _GROUP_TIMEOUT) -> bool:
        # Sends too: the caller may change the shard next, which gloo reads until sends have ended.
        _finish(self._works, timeout)
        return True

    def is_completed(self) -> bool:
        # Whether `wait` has returned; before that, gloo's point-to-point works do not say.
        return not self._works


class _ReduceScatterWork(dist.Work):
    def __init__(
        self, output: Tensor, input: Tensor, group: dist.ProcessGroup, combine: _Combine, divisor: int
    ) -> None:
        super().__init__()
        ranks, rank, numel = group.size(), group.rank(), output.numel()
        self._output, self._group, self._combine, self._divisor = output, group, combine, divisor
        self._receives: deque[tuple[dist.Work, Tensor]] = deque()
        self._sends: list[dist.Work] = []
        self._tag = _REDUCE_TAGS[next(operation_counter(group)) % len(_REDUCE_TAGS)]
        if ranks == 1 or not numel:
            output.copy_(input)
            return
        # Views: each is sent from its own memory.
        slices = input.chunk(ranks)
        # Read last, in `wait`: the view keeps the input's memory until then.
        self._own = slices[rank]
        self._sums: list[tuple[slice, int, list[Tensor]]] = [
            (part, later, []) for part, later in _started_elsewhere(rank, ranks, numel, output.itemsize)
        ]
        self._added = 0
        for peer in targets(rank, ranks):
            self._sends.append(group.send([slices[peer]], peer, self._tag))
        # In the order of addition: a slice is added when it arrives, and its memory receives a later one.
        self._sources = deque(sources(rank, ranks))
        self._receive(output)
        for _ in range(min(STAGED_SLICES, len(self._sources))):
            self._receive(torch.empty_like(output))

    def _receive(self, buffer: Tensor) -> None:
        work = self._group.recv([buffer], self._sources.popleft(), self._tag)
        self._receives.append((work, buffer))

    def _add(self, addend: Tensor) -> None:
        output = self._output
        if addend is not output:
            # From left to right, as gloo's ring adds: the sums are equal bit for bit.
            self._combine(output, addend, out=output)
        for part, later, saved in self._sums:
            if self._added < later:
                # A copy: the addend's memory receives the next one.
                saved.append(addend[part].clone())
            elif self._added == later:
                # The ring starts this part here. The addends so far come last, and were kept.
                output[part].copy_(addend[part])
        self._added += 1

    def wait(self, timeout: timedelta = _GROUP_TIMEOUT) -> bool:
        if torch.is_grad_enabled():
            # Gradients may require grad (`create_graph=True`), and torch then refuses `out=`.
            with torch.no_grad():
                return self.wait(timeout)
        while self._receives:
            work, arrived = self._receives[0]
            # Removed only after it arrived: if this raises, the work is not complete.
            work.wait(timeout)
            self._receives.popleft()
            self._add(arrived)
            # Only after it was added, since the next slice overwrites it; never the output, with the sum.
            if self._sources and arrived is not self._output:
                self._receive(arrived)
            elif not self._receives:
                # Inside the loop, so once: a second `wait` has nothing left to receive, and must not add.
                self._end()
        # After this the caller may write or free the input, which gloo reads until sends have ended.
        _finish(self._sends, timeout)
        return True

    def _end(self) -> None:
        output = self._output
        self._add(self._own)
        for part, _, saved in self._sums:
            for addend in saved:
                self._combine(output[part], addend, out=output[part])
        if self._divisor > 1:
            output.div_(self._divisor)

    def is_completed(self) -> bool:
        return not self._receives and not self._sends  # the sum is not complete before `wait` has returned


@lru_cache(256)
def _started_elsewhere(rank: int, ranks: int, numel: int, itemsize: int) -> list[tuple[slice, int]]:
    """Return parts of slice `rank` whose sum gloo's ring starts elsewhere, and how many addends come last."""
    # The ring cuts the whole buffer into equal segments of at most `_SEGMENT_BYTES`, at least two and equally
    # many for each rank. So a run that starts at one rank can be a few elements longer than a slice.
    segments = max(math.ceil(ranks * numel / (_SEGMENT_BYTES // itemsize)), 2 * ranks)
    per_rank = math.ceil(segments / ranks)
    length = per_rank * math.ceil(ranks * numel / (per_rank * ranks))
    parts, begin = [], 0
    for later in range(rank, 0, -1):
        end = min((rank - later + 1) * length - rank * numel, numel)
        if end > begin:
            parts.append((slice(begin, end), later))
            begin = end
    return parts


def _finish(works: list[dist.Work], timeout: timedelta) -> None:
    while works:
        # Removed only after it ended: if this raises, the work is not complete.
        works[-1].wait(timeout)
        works.pop()


@cache
def sources(rank: int, ranks: int) -> tuple[int, ...]:
    """Return the other ranks in the order of receives from them: backwards round the ring."""
    return tuple((rank - step) % ranks for step in range(1, ranks))


@cache
def targets(rank: int, ranks: int) -> tuple[int, ...]:
    """Return the other ranks in the order of sends to them, which come before receives: round the ring."""
    # A late rank then writes at once to the ranks that are already there, which write nothing to it until it
    # receives: while a caller writes, gloo's input thread can only spin.
    return tuple((rank + step) % ranks for step in range(1, ranks))


def set_batch_scheduling() -> None:
    """Make gloo's input threads in this process wait for an idle or yielded core. Local."""
    # A send or receive locks the connection for some microseconds, and wakes the other rank's input thread.
    # If that thread preempts the caller while cores are busy, the caller holds the lock for milliseconds, in
    # which this rank's own input thread spins. A thread under SCHED_BATCH keeps its share of time, but
    # preempts no other thread when it wakes.
    if sys.platform != "linux":
        return
    for comm in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # the thread has just ended, or the system does not allow this
            thread = int(comm.parent.name)
            if comm.read_text().strip() == _INPUT_THREAD and os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


# Weakly, by object: a new group starts at 0 on all its ranks. A count that an old group left on some ranks
# would give equal operations different tags, and their messages would never match.
_counters: WeakKeyDictionary[dist.ProcessGroup, itertools.count[int]] = WeakKeyDictionary()


def operation_counter(group: dist.ProcessGroup) -> itertools.count[int]:
    """Return the counter of operations in `group`, equal on all ranks, which issue them in one order."""
    return _counters.setdefault(group, itertools.count())


def _check(kind: str, *, whole: Tensor, shard: Tensor, ranks: int) -> None:
    if whole.numel() != ranks * shard.numel() or whole.dtype is not shard.dtype:
        raise ShardingError(
            f"{here()}: the {kind} over {ranks} ranks of a shard of {shard.numel()} elements of {shard.dtype}"
            f" needs a whole buffer of {ranks * shard.numel()} elements of the same dtype, got"
            f" {whole.numel()} of {whole.dtype}"
        )
    for buffer in (whole, shard):
        if not buffer.is_cpu or buffer.dim() != 1 or not buffer.is_contiguous():
            raise ShardingError(
                f"{here()}: the {kind} over gloo needs 1-D contiguous buffers on CPU, got one of shape"
                f" {tuple(buffer.shape)} and stride {buffer.stride()} on {buffer.device}"
            )


def _check_apart(kind: str, whole: Tensor, shard: Tensor) -> None:
    begin, shard_begin = whole.data_ptr(), shard.data_ptr()
    # Slices are received into one while gloo still sends from the other.
    if begin < shard_begin + shard.nbytes and shard_begin < begin + whole.nbytes:
        raise ShardingError(
            f"{here()}: the {kind}'s input and output overlap in memory (only an all-gather's input may, as"
            " this rank's slice of the output); use separate buffers"
        )
