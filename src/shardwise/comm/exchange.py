"""Move boxes of logical tensors between ranks with the minimum number of bytes.

A list of `Message`s says which box goes from which rank to which (`layout.transfer`). All boxes that one rank
sends to another go together, in the order of the list, each row by row:

    exchange    a point-to-point message for each pair of ranks, from and into the tensors that hold the boxes
    AllToAll    one collective of the whole group, from and into its own buffers; optionally back again
    gather      every rank's rows to every rank: one all-gather, or a broadcast by each rank that has any

The messages of `exchange`:

    one box, contiguous in memory       sent from, or received into, the tensor itself
    several boxes, or a strided one     through one flat buffer of the message's size

Each side chooses for itself, since the bytes are the same. Except for the padding of an all-gather, no rank
receives a byte that it does not need, and none passes through a third rank. Bytes are sent as uint8, which
every backend moves. Over gloo, messages follow the order of `comm.gloo`; other backends get all messages in
one batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise import _compat
from shardwise.comm.agree import Agreement
from shardwise.comm.api import backend_of
from shardwise.comm.gloo import sources, targets
from shardwise.comm.watch import explaining
from shardwise.errors import ShardingError, here
from shardwise.layout.box import Box
from shardwise.layout.messages import Message

# Far from the tags of comm.gloo and of users' sends and receives; gloo's tags are 31 bits wide.
_TAG = 0x7B000000
_GROUP_TIMEOUT = timedelta(0)  # to torch, this means the group's own timeout

_Held = Sequence[tuple[Box, Tensor]]


@torch.no_grad()
def exchange(
    messages: Sequence[Message],
    *,
    source: _Held,
    target: _Held,
    group: dist.ProcessGroup,
    agreement: Agreement | None = None,
) -> None:
    """Move this rank's part of `messages`: copy what stays here, send and receive the rest.

    Every rank of `group` that sends or receives a message must call it, with repeated calls in the same
    order; other ranks may. (In an NCCL group that has never communicated, call `agree` first: the first
    communication needs all ranks.) Returns when this rank's targets are complete and its sources may be
    overwritten. A group runs one exchange at a time: two threads need two groups.

    Args:
        messages: those that name this rank, and any others; between two ranks, in the same order on both.
        source: this rank's boxes and the tensors that hold them, of the boxes' sizes. Only read.
        target: the boxes and tensors to fill in place, where messages say so. Tensors may have any strides
            that do not overlap; all have one dtype, the same on all ranks, and one device. A target shares no
            memory with a source, except at the same place of the logical tensor.
        group: messages name ranks within it. It may serve the tensors' device by gloo, through the CPU.
        agreement: an agreement among all ranks of `group` about these messages, in progress. It is completed
            here, after messages are posted and before waiting for them. Messages of ranks that mean different
            ones never match.

    Raises:
        RankMismatchError: on every rank, if the agreement fails.
        ShardingError: tensors that do not fit their boxes or each other, messages that leave the boxes, or
            a device that `group` cannot serve. This rank has then sent nothing.
    """
    # First, so that tensors that do not fit raise before anything is sent.
    _check(source, target)
    rank = group.rank()
    sends, receives = defaultdict[int, list[Tensor]](list), defaultdict[int, list[Tensor]](list)
    for message in messages:
        if message.sender == rank:
            sends[message.receiver].append(part(*source[message.source], message.box))
        if message.receiver == rank:
            receives[message.sender].append(part(*target[message.target], message.box))
    # Both are in the order of messages, so sources and targets match.
    local = list(zip(receives.pop(rank, []), sends.pop(rank, []), strict=True))
    if not sends and not receives:
        _copy(local)
        if agreement is not None:
            # A rank that moves nothing must raise when the others do.
            agreement.confirm()
        return
    device = (source or target)[0][1].device
    with explaining(group, "move parts of a tensor"):
        if backend_of(group, device) == "gloo":
            _exchange_over_gloo(local, sends, receives, group, agreement)
        else:
            if agreement is not None:
                # Before any message: these backends have no tags to separate messages of other meanings.
                agreement.confirm()
            _exchange_in_batch(local, sends, receives, group)


class AllToAll:
    """Messages between all ranks of a group in one collective, from and into its own buffers.

    For boxes that are made only to be sent, such as work for another rank: write them into `outgoing` and
    read them from `incoming`; they may be sent back the same way.

    Attributes:
        outgoing: this rank's messages to others, each with the memory to fill before `send`.
        incoming: others' messages to this rank, each with the memory that `send` fills.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        *,
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Lay out buffers for messages that name this rank, in equal order and `dtype` on all. Local."""
        rank, self._group = group.rank(), group
        outbound = [m for m in messages if m.sender == rank != m.receiver]
        inbound = [m for m in messages if m.receiver == rank != m.sender]
        like = torch.empty(0, dtype=dtype, device=device)
        self._sent, self.outgoing = _end_to_end(outbound, [m.receiver for m in outbound], group.size(), like)
        self._received, self.incoming = _end_to_end(inbound, [m.sender for m in inbound], group.size(), like)

    def send(self, *, back: bool = False) -> dist.Work:
        """Send `outgoing` to `incoming`, or `back`; wait for the returned work. Collective."""
        there = (self._received, self._sent)
        (dst, dst_bytes), (src, src_bytes) = there[::-1] if back else there
        # Asynchronous, so that the caller can work meanwhile; `self` keeps both buffers until it has waited.
        work = dist.all_to_all_single(dst, src, dst_bytes, src_bytes, group=self._group, async_op=True)
        return cast(dist.Work, work)


def _end_to_end(
    messages: Sequence[Message], peers: Sequence[int], ranks: int, like: Tensor
) -> tuple[tuple[Tensor, list[int]], list[tuple[Message, Tensor]]]:
    """Return a buffer of bytes, the number for each peer, and each message with its view, by peer."""
    # A stable sort: messages between two ranks keep their order, which is equal on both.
    ordered = sorted(zip(peers, messages, strict=True), key=lambda pair: pair[0])
    sizes = [message.box.numel for _, message in ordered]
    buffer, counts = like.new_empty(sum(sizes)), [0] * ranks
    for (peer, _), size in zip(ordered, sizes, strict=True):
        counts[peer] += size * like.itemsize
    views = zip(ordered, buffer.split(sizes), strict=True)
    return (buffer.view(torch.uint8), counts), [(m, view.view(m.box.sizes)) for (_, m), view in views]


def gather(held: Sequence[Sequence[Box]], whole: Tensor, *, group: dist.ProcessGroup) -> None:
    """Fill in the boxes of all ranks in `whole`, which holds this rank's own. Collective over `group`.

    Uses one all-gather, padded to the rank that holds most. If only one rank holds any, or padding would more
    than double the bytes, each rank that holds any broadcasts instead. `held` has the boxes of each rank. If
    `whole` represents values in a graph, the all-gather becomes part of the graph.
    """
    all_of_it, ranks = Box.whole(whole.shape), len(held)
    parts = [[part(all_of_it, whole, box) for box in boxes if not box.is_empty] for boxes in held]
    numels = [sum(piece.numel() for piece in pieces) for pieces in parts]
    holders = [rank for rank, numel in enumerate(numels) if numel]
    if not holders or ranks == 1:
        return
    largest, traced = max(numels), _compat.is_functional(whole)
    if not traced and (len(holders) == 1 or largest * ranks > 2 * sum(numels)):
        # In one order on all ranks: each is a collective.
        for rank in holders:
            wire, staged = _buffer(parts[rank], whole.device)
            # Needed only on the sender: on receivers the broadcast overwrites it.
            _copy((view, piece) for piece, view in staged)
            dist.broadcast(wire, group=group, group_src=rank)
            _copy(staged)
        return
    flat = [piece.reshape(-1) for piece in parts[group.rank()]]
    if padding := largest - numels[group.rank()]:
        flat.append(whole.new_zeros(padding))
    # Sent from its own memory, if that is contiguous.
    local = flat[0] if len(flat) == 1 and flat[0].stride(0) == 1 else torch.cat(flat)
    if traced:
        gathered = _compat.traced_all_gather(local, ranks, group.group_name)
    else:
        gathered = local.new_empty(ranks * largest)
        sent, received = local.view(torch.uint8), gathered.view(torch.uint8)
        _compat.all_gather_single(received, sent, group, async_op=False)
    for rank, pieces in enumerate(parts):
        begin = rank * largest
        for piece in pieces:
            piece.copy_(gathered[begin : begin + piece.numel()].view(piece.shape))
            begin += piece.numel()


def part(box: Box, tensor: Tensor, inner: Box) -> Tensor:
    """Return the view of the part `inner` in `tensor`, which holds `box`."""
    if inner == box:
        return tensor
    begins = [begin - offset for begin, offset in zip(inner.offsets, box.offsets, strict=True)]
    ends = [begin + size for begin, size in zip(begins, inner.sizes, strict=True)]
    if min(begins, default=0) < 0 or any(end > size for end, size in zip(ends, box.sizes, strict=True)):
        raise ShardingError(
            f"{here()}: expected a part of {box}, got {inner}, which leaves it; take their intersection"
        )
    return tensor[tuple(map(slice, begins, ends))]


# Moving bytes


def _exchange_over_gloo(
    local: list[tuple[Tensor, Tensor]],
    sends: dict[int, list[Tensor]],
    receives: dict[int, list[Tensor]],
    group: dist.ProcessGroup,
    agreement: Agreement | None,
) -> None:
    # `comm.gloo` explains the order. A message without a match writes nowhere: an agreement may fail later.
    rank, ranks, cpu = group.rank(), group.size(), torch.device("cpu")
    # With one tag for all, ranks that disagree would fill each other's targets before `confirm` raises.
    tag = _TAG if agreement is None else agreement.tag
    sending: list[dist.Work] = []  # works keep what they send and receive
    for peer in targets(rank, ranks):
        if peer in sends:
            wire, staged = _buffer(sends[peer], cpu)
            _copy((view, piece) for piece, view in staged)
            sending.append(group.send([wire], peer, tag))
    # Post all before waiting for any: gloo sends nothing until the receiver has posted its receive, so ranks
    # that waited for their sends first would wait for each other.
    receiving = []
    for peer in sources(rank, ranks):
        if peer in receives:
            wire, staged = _buffer(receives[peer], cpu)
            receiving.append((group.recv([wire], peer, tag), staged))
    # While messages are in flight.
    _copy(local)
    if agreement is not None:
        # Before waiting: messages of ranks that mean something else never come.
        agreement.confirm()
    for work, staged in receiving:
        work.wait(_GROUP_TIMEOUT)
        _copy(staged)
    # Only then may sources be written again.
    for work in sending:
        work.wait(_GROUP_TIMEOUT)


def _exchange_in_batch(
    local: list[tuple[Tensor, Tensor]],
    sends: dict[int, list[Tensor]],
    receives: dict[int, list[Tensor]],
    group: dist.ProcessGroup,
) -> None:
    operations, arriving = [], []
    for peer, pieces in sorted(sends.items()):
        wire, staged = _buffer(pieces, pieces[0].device)
        _copy((view, piece) for piece, view in staged)
        operations.append(dist.P2POp(dist.isend, wire, group=group, tag=_TAG, group_peer=peer))
    for peer, pieces in sorted(receives.items()):
        wire, staged = _buffer(pieces, pieces[0].device)
        arriving += staged
        operations.append(dist.P2POp(dist.irecv, wire, group=group, tag=_TAG, group_peer=peer))
    # In one batch: else two ranks that both send first may each wait for a receive that comes later.
    works = dist.batch_isend_irecv(operations)
    _copy(local)
    # The current stream waits for sends as well: received data is copied out next, and after the return the
    # caller may overwrite its sources on that stream.
    for work in works:
        work.wait()
    _copy(arriving)


def _buffer(pieces: list[Tensor], device: torch.device) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Return flat uint8 memory to send or receive `pieces`, and (piece, its view there) for staged ones."""
    first = pieces[0]
    # The memory of such tensors holds other values than they show.
    lazy = first.is_conj() or first.is_neg() or _compat.is_lazily_zero(first)
    as_it_lies = first.is_contiguous() and not lazy
    if len(pieces) == 1 and as_it_lies and first.device == device:
        # Not view(-1), which keeps the stride of a single element, whatever it is.
        return first.as_strided((first.numel(),), (1,)).view(torch.uint8), []
    numels = [piece.numel() for piece in pieces]
    buffer = torch.empty(sum(numels), dtype=first.dtype, device=device)
    views = zip(pieces, buffer.split(numels), strict=True)
    return buffer.view(torch.uint8), [(piece, view.view(piece.shape)) for piece, view in views]


def _copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    for target, source in pairs:
        target.copy_(source)


# Errors


def _check(source: _Held, target: _Held) -> None:
    if not source and not target:
        return
    like = (source or target)[0][1]
    for side, held in (("source", source), ("target", target)):
        for index, (box, tensor) in enumerate(held):
            fits = tuple(tensor.shape) == box.sizes and tensor.dtype == like.dtype
            if not fits or tensor.device != like.device:
                raise ShardingError(
                    f"{here()}: expected {side} {index} as {box}, of {like.dtype} on {like.device}, got shape"
                    f" {tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}; convert it before or after"
                    " the exchange"
                )
