"""Move boxes of logical tensors between ranks at exactly the least bytes.

A list of `Message`s says which box goes from whom to whom. All that one rank has for another travels
together, one box after the other in the order of the list, each row by row:

    exchange    a point-to-point message for each pair of ranks, from and into the tensors that hold the boxes
    AllToAll    one collective of the whole group, from and into memory of its own; and maybe back again

The messages of `exchange`:

    one box that lies so in memory      sent from, or received into, the tensor itself
    several, or a strided one           through one flat buffer of this message's size

Both sides choose for themselves, since the bytes are the same. No rank gets a byte that it does not need
and none passes through a third rank, as in an all-gather or an all-to-all of padded parts it would.
Bytes travel as uint8, which every backend moves. Over gloo ranks meet message by message in the order of
`comm.gloo`; other backends get all messages in one batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise import _compat
from shardwise.comm.agree import Agreement, backend_of
from shardwise.errors import ShardingError, here
from shardwise.layout.box import Box
from shardwise.layout.messages import Message

# Far from the tags of comm.gloo and of users' sends and receives; gloo's tags are 31 bits wide.
_TAG = 0x7B000000
_GROUP_TIMEOUT = timedelta(0)  # what torch takes for "as long as the group says"

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

    Must be called by every rank of `group` that is a sender or receiver of a message between two ranks,
    by all of them in one order if they exchange several times; other ranks may leave it out or call it
    for their own local copies. (Only if this is the first communication at all in a group of NCCL, every
    rank of the group must call it with a message; call `agree` first.) Returns when this rank's targets
    are complete and its sources may be written again. Groups exchange one thing at a time: two threads
    need two groups.

    Args:
        messages: as `layout.transfer` lists them, for all ranks or at least those that name this rank;
            those between two ranks in the same order on both.
        source: this rank's boxes and the tensors holding them, of the box's sizes. Only read.
        target: the boxes and tensors to fill, in place, where messages say so; nothing else in them
            changes. Any strides that do not overlap, as for `source`. All sources and targets have one
            dtype, whichever, and one device; the dtype is the same on all ranks. A target shares no
            memory with a source, unless at the same place of the logical tensor.
        group: messages name ranks within it. Tensors on a device that `group` serves by gloo but that
            is not the CPU pass through a buffer on the CPU.
        agreement: under way among all ranks of `group`, about these messages; settled here, between posting
            messages and waiting for them. Messages of ranks that mean different ones never meet.

    Raises:
        RankMismatchError: on every rank, where the agreement fails.
        ShardingError: tensors that do not fit their boxes or each other, messages that leave the boxes, or
            a device that `group` cannot serve; this rank has sent nothing then.
    """
    _check(source, target)
    rank = group.rank()
    local: list[tuple[Tensor, Tensor]] = []
    sends: dict[int, list[Tensor]] = {}
    receives: dict[int, list[Tensor]] = {}
    for message in messages:
        if message.sender == rank == message.receiver:
            taken = _part(source, message.source, message.box, "source")
            local.append((_part(target, message.target, message.box, "target"), taken))
        elif message.sender == rank:
            sends.setdefault(message.receiver, []).append(
                _part(source, message.source, message.box, "source")
            )
        elif message.receiver == rank:
            receives.setdefault(message.sender, []).append(
                _part(target, message.target, message.box, "target")
            )
    if not sends and not receives:
        _copy(local)
        if agreement is not None:
            agreement.settle()
        return
    device = (source or target)[0][1].device
    if backend_of(group, device) == "gloo":
        _exchange_over_gloo(local, sends, receives, group, agreement)
    else:
        if agreement is not None:
            agreement.settle()
        _exchange_in_batch(local, sends, receives, group)


class AllToAll:
    """Messages between all ranks of a group in one collective, from and into memory of its own.

    For boxes that are made to be sent and used up once they came, such as those that another rank is to work
    on: they are written into `outgoing`, read from `incoming`, and may go back the same way.

    Attributes:
        outgoing: this rank's messages to others, each with the memory to fill before `send`.
        incoming: others' messages to this rank, each with the memory that is filled after it.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        *,
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Lay out buffers; every rank of `group` makes one, of the same `dtype`. Local.

        Args:
            messages: those that name this rank; between two ranks in the same order on both.
        """
        rank, self._group = group.rank(), group
        out = [one for one in messages if one.sender == rank != one.receiver]
        out.sort(key=lambda one: one.receiver)
        come = [one for one in messages if one.receiver == rank != one.sender]
        come.sort(key=lambda one: one.sender)
        self._sent, self.outgoing = _end_to_end(out, dtype, device)
        self._received, self.incoming = _end_to_end(come, dtype, device)
        self._sent_numel, self._received_numel = [0] * group.size(), [0] * group.size()
        for one in out:
            self._sent_numel[one.receiver] += one.box.numel
        for one in come:
            self._received_numel[one.sender] += one.box.numel

    def send(self) -> dist.Work:
        """Send what is in `outgoing`; `incoming` is there after the work's wait. Collective."""
        work = dist.all_to_all_single(
            self._received,
            self._sent,
            self._received_numel,
            self._sent_numel,
            group=self._group,
            async_op=True,
        )
        return cast(dist.Work, work)

    def send_back(self) -> None:
        """Send what is in `incoming` back to where it came from, into `outgoing` there. Collective."""
        dist.all_to_all_single(
            self._sent, self._received, self._sent_numel, self._received_numel, group=self._group
        )


def _end_to_end(
    messages: Sequence[Message], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, list[tuple[Message, Tensor]]]:
    """A flat buffer, and the box of each message in it."""
    sizes = [one.box.numel for one in messages]
    buffer = torch.empty(sum(sizes), dtype=dtype, device=device)
    views = zip(messages, buffer.split(sizes), strict=True)
    return buffer, [(one, view.view(one.box.sizes)) for one, view in views]


def part(box: Box, tensor: Tensor, of: Box) -> Tensor:
    """The view of `tensor`, which holds `box`, that holds the part `of` it.

    Raises:
        ShardingError: `of` leaves `box`.
    """
    if of == box:
        return tensor
    begins = [begin - offset for begin, offset in zip(of.offsets, box.offsets, strict=True)]
    ends = [begin + size for begin, size in zip(begins, of.sizes, strict=True)]
    if min(begins, default=0) < 0 or any(end > size for end, size in zip(ends, box.sizes, strict=True)):
        raise ShardingError(
            f"{here()}: expected a part of {box}, got {of}, which leaves it; take their intersection"
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
    """Sends to ranks above, then receives, then sends to ranks below; comm.gloo says why.

    A message that is not met writes nowhere, so an agreement may fail after messages are posted.
    """
    rank, ranks, cpu = group.rank(), group.size(), torch.device("cpu")
    tag = _TAG if agreement is None else agreement.tag
    sending: list[tuple[dist.Work, Tensor]] = []

    def send(peer: int) -> None:
        wire, staged = _buffer(sends[peer], cpu)
        _copy((view, piece) for piece, view in staged)
        sending.append((group.send([wire], peer, tag), wire))

    for peer in sorted(peer for peer in sends if peer > rank):
        send(peer)
    receiving = []
    for peer in sorted(receives, key=lambda peer: (peer - rank) % ranks):
        wire, staged = _buffer(receives[peer], cpu)
        receiving.append((group.recv([wire], peer, tag), wire, staged))
    for peer in sorted((peer for peer in sends if peer < rank), reverse=True):
        send(peer)
    _copy(local)
    if agreement is not None:
        agreement.settle()
    for work, _, staged in receiving:
        work.wait(_GROUP_TIMEOUT)
        _copy(staged)
    for work, _ in sending:
        work.wait(_GROUP_TIMEOUT)


def _exchange_in_batch(
    local: list[tuple[Tensor, Tensor]],
    sends: dict[int, list[Tensor]],
    receives: dict[int, list[Tensor]],
    group: dist.ProcessGroup,
) -> None:
    """All messages at once, as backends want them whose sends and receives wait for each other."""
    operations, arriving = [], []
    for peer in sorted(sends):
        device = sends[peer][0].device
        wire, staged = _buffer(sends[peer], device)
        _copy((view, piece) for piece, view in staged)
        operations.append(dist.P2POp(dist.isend, wire, group=group, tag=_TAG, group_peer=peer))
    for peer in sorted(receives):
        device = receives[peer][0].device
        wire, staged = _buffer(receives[peer], device)
        arriving += staged
        operations.append(dist.P2POp(dist.irecv, wire, group=group, tag=_TAG, group_peer=peer))
    works = dist.batch_isend_irecv(operations)
    _copy(local)
    for work in works:
        work.wait()
    _copy(arriving)


def _buffer(pieces: list[Tensor], device: torch.device) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """The memory, as flat uint8, that `pieces` travel in, and (piece, its view there) for what is staged."""
    first = pieces[0]
    lazy = first.is_conj() or first.is_neg() or _compat.is_lazily_zero(first)
    as_it_lies = first.is_contiguous() and not lazy
    if len(pieces) == 1 and as_it_lies and first.device == device:
        # Not view(-1), which leaves a single element with whatever stride it has.
        return first.as_strided((first.numel(),), (1,)).view(torch.uint8), []
    numels = [piece.numel() for piece in pieces]
    buffer = torch.empty(sum(numels), dtype=first.dtype, device=device)
    views = zip(pieces, buffer.split(numels), strict=True)
    return buffer.view(torch.uint8), [(piece, view.view(piece.shape)) for piece, view in views]


def _copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    for to, taken in pairs:
        to.copy_(taken)


# Errors


def _part(held: _Held, index: int, of: Box, side: str) -> Tensor:
    if not 0 <= index < len(held):
        raise ShardingError(
            f"{here()}: a message of {of} names {side} box {index}, but this rank has {len(held)}; list"
            f" messages from the boxes that ranks have"
        )
    return part(*held[index], of)


def _check(source: _Held, target: _Held) -> None:
    """Do tensors fit their boxes, and each other?"""
    first: Tensor | None = None
    for side, held in (("source", source), ("target", target)):
        for index, (box, tensor) in enumerate(held):
            if tuple(tensor.shape) != box.sizes:
                raise ShardingError(
                    f"{here()}: expected the tensor of {side} {box} (number {index}) to have its sizes, got"
                    f" shape {tuple(tensor.shape)}"
                )
            first = tensor if first is None else first
            if tensor.dtype != first.dtype or tensor.device != first.device:
                raise ShardingError(
                    f"{here()}: expected sources and targets of one dtype and device,"
                    f" {first.dtype} on {first.device}, got {side} {index} of {tensor.dtype} on"
                    f" {tensor.device}; convert it before or after the exchange"
                )
