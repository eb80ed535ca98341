"""Move boxes of logical tensors between ranks at exactly the least bytes, and agree on them first.

A list of `Message`s says which box goes from whom to whom. All that one rank has for another travels as
one point-to-point message of its bytes, one box after the other in the order of the list, each row by row:

    one box that lies so in memory      sent from, or received into, the tensor itself
    several, or a strided one           through one flat buffer of this message's size

Both sides choose for themselves, since the bytes are the same. No rank gets a byte that it does not need
and none passes through a third rank, as in an all-gather or an all-to-all of padded parts it would.
Bytes travel as uint8, which every backend moves. Over gloo ranks meet message by message in the order of
`comm.gloo`; other backends get all messages in one batch.

What ranks must mean alike is compared by `agree`, without pickle: peers' bytes are only ever text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise import _compat
from shardwise.comm.fingerprint import fingerprint
from shardwise.comm.gloo import issued
from shardwise.errors import RankMismatchError, ShardingError, here
from shardwise.layout.box import Box
from shardwise.layout.messages import Message

# Far from the tags of comm.gloo and of users' sends and receives; gloo's tags are 31 bits wide.
_TAG = 0x7B000000
_GROUP_TIMEOUT = timedelta(0)  # what torch takes for "as long as the group says"

_WORD_TAG = _TAG + 1
# Of exchanges under an agreement: 8 bits of its number in the group and 20 of what is agreed on, so that
# neither another meaning nor what is left of an agreement that failed is met.
_AGREED_TAGS = 0x60000000
_DIRECT_RANKS = 32  # up to so many ranks tell each other directly over gloo

_SHOWN = 1000  # characters of each side of a mismatch
_BEFORE = 200  # of which so many lie before the first difference

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
    if _backend(group, device) == "gloo":
        _exchange_over_gloo(local, sends, receives, group, agreement)
    else:
        if agreement is not None:
            agreement.settle()
        _exchange_in_batch(local, sends, receives, group)


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


def gather_text(text: str, *, group: dist.ProcessGroup, device: torch.device | None = None) -> list[str]:
    """Every rank's `text`, by rank in `group`.

    Collective over `group`: two all-gathers, of lengths and of bytes padded to the longest; the second is
    left out where all texts are empty, both in a group of one rank.

    Args:
        text: any text, of any length on each rank.
        group: the ranks to gather from.
        device: where `group`'s backend wants its tensors; None asks the group, and takes the current
            device if that is an accelerator.
    """
    ranks = group.size()
    if ranks == 1:
        return [text]
    device = device or _device(group)
    encoded = text.encode("utf-8", "surrogatepass")
    lengths = _all_gather(torch.tensor([len(encoded)], dtype=torch.int64, device=device), group).tolist()
    longest = max(lengths)
    if longest == 0:
        return [""] * ranks
    padded = torch.frombuffer(bytearray(encoded.ljust(longest, b"\0")), dtype=torch.uint8)
    rows = _all_gather(padded.to(device), group).cpu().view(ranks, longest)
    return [
        row[:length].numpy().tobytes().decode("utf-8", "surrogatepass")
        for row, length in zip(rows, lengths, strict=True)
    ]


class Agreement:
    """Ranks tell each other what they are about to do, in 8 bytes each.

    Collective over `group`, to make one and to `settle` it. Between the two a rank may post what it is about
    to do, if messages that mean something else do not meet it: so agreeing costs no round of its own. Over
    gloo up to 32 ranks send each other their words directly; elsewhere it is one all-gather.

    Attributes:
        tag: for point-to-point messages of ranks that mean the same, over gloo; other meanings have another.
    """

    def __init__(
        self, description: str, *, group: dist.ProcessGroup, device: torch.device | None = None, what: str
    ) -> None:
        """Send this rank's word.

        Args:
            description: in words, equal on ranks that will communicate alike.
            group: the ranks to compare.
            device: as for `gather_text`.
            what: is described, for the error: "the boxes of w".
        """
        self._description, self._group, self._own = description, group, fingerprint(description)
        self._what = what
        self.tag = _AGREED_TAGS + (next(issued(group)) % 256 << 20) + self._own % (1 << 20)
        self._words: dict[int, tuple[dist.Work | None, Tensor]] = {}
        self._sends: list[dist.Work] = []
        if group.size() == 1 or _compat.is_fake(torch.empty(0)):
            return
        self._device = device or _device(group)
        self._word = torch.tensor([self._own], dtype=torch.int64, device=self._device)
        rank, ranks = group.rank(), group.size()
        if ranks <= _DIRECT_RANKS and self._word.is_cpu and _backend(group, self._device) == "gloo":
            wire = self._word.view(torch.uint8)
            self._sends += [group.send([wire], peer, _WORD_TAG) for peer in range(rank + 1, ranks)]
            for peer in (*range(rank + 1, ranks), *range(rank)):
                word = torch.empty_like(self._word)
                self._words[peer] = (group.recv([word.view(torch.uint8)], peer, _WORD_TAG), word)
            self._sends += [group.send([wire], peer, _WORD_TAG) for peer in range(rank - 1, -1, -1)]
        else:
            words = _all_gather(self._word, group)
            self._words = {peer: (None, words[peer]) for peer in range(ranks) if peer != rank}

    def settle(self) -> None:
        """Wait for everyone's word.

        Raises:
            RankMismatchError: on every rank of the group, if any two descriptions differ.
        """
        said = {peer: self._said(peer) for peer in self._words}
        for work in self._sends:
            work.wait(_GROUP_TIMEOUT)
        self._sends.clear()
        other = next((peer for peer in sorted(said) if said[peer] != self._own), None)
        if other is None:
            return
        texts = gather_text(self._description, group=self._group, device=self._device)
        mine, names = self._group.rank(), dist.get_process_group_ranks(self._group)
        at = _first_difference(texts[mine], texts[other])
        raise RankMismatchError(
            f"{here()}: ranks disagree about {self._what}, so their messages would not match.\n"
            f"Rank {names[mine]}: {_excerpt(texts[mine], at)}\n"
            f"Rank {names[other]}: {_excerpt(texts[other], at)}\n"
            "Make the same call with the same arguments on every rank."
        )

    def _said(self, peer: int) -> int:
        work, word = self._words[peer]
        if work is not None:
            work.wait(_GROUP_TIMEOUT)
            self._words[peer] = (None, word)
        return int(word.item())


def agree(
    description: str, *, group: dist.ProcessGroup, device: torch.device | None = None, what: str
) -> None:
    """Make sure that all ranks of `group` describe alike what they are about to do. Collective over `group`.

    One message of 8 bytes to each rank if they agree, the texts beside if they do not; nothing in a group of
    one rank. On fake tensors, which have no values to compare, it does nothing. See `Agreement`.

    Raises:
        RankMismatchError: on every rank of `group`, if any two descriptions differ.
    """
    Agreement(description, group=group, device=device, what=what).settle()


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


def _all_gather(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    gathered = mine.new_empty(group.size() * mine.numel())
    _compat.all_gather_single(gathered, mine, group, async_op=False)
    return gathered


# Which backend moves what


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Backends of `group` by type of device."""
    return dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))


def _backend(group: dist.ProcessGroup, device: torch.device) -> str:
    backends = _backends(group)
    if device.type not in backends:
        raise ShardingError(
            f"{here()}: expected tensors on a device that the process group serves ({', '.join(backends)}),"
            f" got {device}; move them there, or make the group with a backend for {device.type}"
        )
    return backends[device.type]


def _device(group: dist.ProcessGroup) -> torch.device:
    """A device whose tensors `group` moves: the CPU where it can."""
    kinds = list(_backends(group))
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())


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


def _first_difference(mine: str, theirs: str) -> int:
    same = min(len(mine), len(theirs))
    return next((at for at in range(same) if mine[at] != theirs[at]), same)


def _excerpt(text: str, at: int) -> str:
    """`text`, or what stands around `at` if it is long."""
    if len(text) <= _SHOWN:
        return text
    begin = max(0, at - _BEFORE)
    end = begin + _SHOWN
    return ("..." if begin else "") + text[begin:end] + ("..." if end < len(text) else "")
