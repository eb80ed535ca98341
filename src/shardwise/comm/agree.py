"""Agreement: the one way in which ranks compare what they are about to do, and raise the same error.

    agree             all describe the same thing: 8 bytes to each rank, the texts only where they differ
    Agreement         one posted before other work and completed after it
    together          all do what one alone may fail at; what goes wrong on any raises on all
    merge_or_raise    what ranks described by name, as one; local
    gather_text       every rank's text

A rank that raised alone would leave the others waiting in their next collective. So ranks exchange
descriptions, find the same in all of them, and all raise the same error. What they exchange is text and
integers of fixed size: nothing that a peer sends is ever unpickled.

Agreement on the order of collectives, which costs nothing while it repeats, is in `comm.order`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise import _compat
from shardwise.comm.api import backend_of, backends
from shardwise.comm.differences import by_ranks, differences
from shardwise.comm.gloo import issued
from shardwise.comm.watch import announced, explaining
from shardwise.errors import CheckpointError, RankMismatchError, ShardwiseError, here

_GROUP_TIMEOUT = timedelta(0)  # what torch takes for "as long as the group says"
_WORD_TAG = 0x7B000001
# Of messages under an agreement: 8 bits of its number in the group and 20 of what is agreed on, so that
# neither another meaning nor what is left of an agreement that failed is met.
_AGREED_TAGS = 0x60000000
_DIRECT_RANKS = 32  # up to so many ranks tell each other directly over gloo
_NEXT = "\0"  # between what is described and what ranks have heard of it in other groups

_T = TypeVar("_T")


def fingerprint(text: str, *tensors: Tensor) -> int:
    """Return 63 bits of a hash of `text` and the values of tensors, the same in every process."""
    digest = hashlib.sha256(text.encode())
    for tensor in tensors:
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    # Words travel as int64, which has a sign.
    return int.from_bytes(digest.digest()[:8], "big") >> 1


def agree(
    description: str,
    *,
    group: dist.ProcessGroup | Sequence[dist.ProcessGroup],
    what: str,
    device: torch.device | None = None,
    advice: str = "Make the same call with the same arguments on every rank.",
) -> None:
    """Raise unless all ranks of `group` describe equally what they are about to do. Collective over `group`.

    Nothing is sent in a group of one rank, nor on fake tensors, which have no values to compare.

    Args:
        description: in words, equal on ranks that will communicate the same way.
        group: the ranks to compare. Of several groups, one after the other, such as the axes of a mesh, a
            rank hears of what differs in any: what one group found is reported in the next.
        what: is described, for the error: "the boxes of w".
        device: as for `gather_text`.
        advice: what to do about a difference.

    Raises:
        RankMismatchError: on every rank of the groups, if any two descriptions differ.
    """
    heard: dict[str, None] = {}
    for one in [group] if isinstance(group, dist.ProcessGroup) else group:
        # With what was heard: ranks of this group that did not hear it differ then, and all tell texts.
        agreement = Agreement(_NEXT.join((description, *heard)), group=one, what=what, device=device)
        said = {rank: text.split(_NEXT) for rank, text in agreement.differing().items()}
        described = {rank: words[0] for rank, words in said.items()}
        if len(set(described.values())) > 1:
            heard[differences(described)] = None
        heard |= {found: None for words in said.values() for found in words[1:]}
    # Not before the last group, where ranks of others wait for this one's word.
    if heard:
        raise _mismatch(what, "\n".join(heard), advice)


class Agreement:
    """Ranks tell each other what they are about to do, in 8 bytes each.

    Collective over `group`, to make one and to `confirm` it. Between the two a rank may post what it is about
    to do, if messages that mean something else do not meet it: so agreeing costs no round of its own. Over
    gloo up to 32 ranks send each other their words directly; elsewhere it is one all-gather.

    Attributes:
        tag: for point-to-point messages of ranks that mean the same, over gloo; other meanings have another.
    """

    def __init__(
        self, description: str, *, group: dist.ProcessGroup, what: str, device: torch.device | None = None
    ) -> None:
        """Send this rank's word. Arguments as of `agree`."""
        self._description, self._group, self._own = description, group, fingerprint(description)
        self._what = what
        self.tag = _AGREED_TAGS + (next(issued(group)) % 256 << 20) + self._own % (1 << 20)
        self._words: dict[int, tuple[dist.Work | None, Tensor]] = {}
        self._sends: list[dist.Work] = []
        if group.size() == 1 or _compat.is_fake(torch.empty(0)):
            return
        self._device = device or device_of(group)
        # An attribute, as gloo sends from this memory until `differing` has waited.
        self._word = torch.tensor([self._own], dtype=torch.int64, device=self._device)
        with explaining(group, f"agree about {what}"):
            self._tell(group)

    def _tell(self, group: dist.ProcessGroup) -> None:
        rank, ranks = group.rank(), group.size()
        if ranks <= _DIRECT_RANKS and self._word.is_cpu and backend_of(group, self._device) == "gloo":
            wire = self._word.view(torch.uint8)
            # Only posted: the caller posts its own messages meanwhile, and nobody waits for a late rank.
            self._sends += [group.send([wire], peer, _WORD_TAG) for peer in range(rank + 1, ranks)]
            for peer in (*range(rank + 1, ranks), *range(rank)):
                word = torch.empty_like(self._word)
                self._words[peer] = (group.recv([word.view(torch.uint8)], peer, _WORD_TAG), word)
            self._sends += [group.send([wire], peer, _WORD_TAG) for peer in range(rank - 1, -1, -1)]
        else:
            words = _all_gather(self._word, group)
            self._words = {peer: (None, words[peer]) for peer in range(ranks) if peer != rank}

    def confirm(self) -> None:
        """Wait for everyone's word.

        Raises:
            RankMismatchError: on every rank of the group, if any two descriptions differ.
        """
        texts = self.differing()
        if texts:
            raise _mismatch(self._what, differences(texts))

    def differing(self) -> dict[int, str]:
        """Return every rank's description if any two differ, else nothing; equal on every rank."""
        with explaining(self._group, f"agree about {self._what}"):
            said = {peer: self._said(peer) for peer in self._words}
            # A peer whose word has come may not have made room for this one's yet; gloo reads it until then.
            for work in self._sends:
                work.wait(_GROUP_TIMEOUT)
        self._sends.clear()
        if all(word == self._own for word in said.values()):
            return {}
        # All ranks have the same words, so all come here or none.
        texts = gather_text(self._description, group=self._group, device=self._device)
        return dict(zip(dist.get_process_group_ranks(self._group), texts, strict=True))

    def _said(self, peer: int) -> int:
        work, word = self._words[peer]
        if work is not None:
            work.wait(_GROUP_TIMEOUT)
            # gloo completes a receive once: a second wait would last until the timeout.
            self._words[peer] = (None, word)
        return int(word.item())


def _mismatch(
    what: str, found: str, advice: str = "Make the same call with the same arguments on every rank."
) -> RankMismatchError:
    return RankMismatchError(
        f"{here()}: ranks disagree about {what}, so their messages would not match.\n{found}\n{advice}"
    )


# What one rank alone may fail at


def together(
    what: str,
    action: Callable[[], _T],
    *,
    group: dist.ProcessGroup | None = None,
    kind: type[ShardwiseError] = CheckpointError,
) -> list[_T]:
    """Run `action` on every rank; every rank's result, by rank in the group.

    Collective over `group`, by default all ranks; without a process group this process is alone.

    Args:
        what: is being done, for the error: "loading x". Ranks whose first words differ are told so, where the
            order of collectives is compared; so each call that users make has its own.
        action: returns what JSON can hold (tuples come back as lists).
        group: the ranks that take part.
        kind: of the error.

    Raises:
        ShardwiseError: of `kind`, on every rank, with the problems of all, if `action` raised on any.
    """
    result: Any = None
    own: Exception | None = None
    try:
        result = action()
        # Within: a result that JSON cannot hold fails on all ranks too.
        text = json.dumps([result, None])
    except Exception as error:
        # Kept, not raised: the other ranks wait for this one's text below.
        own = error
        text = json.dumps([None, _said_by(error)])
    group = group or (dist.group.WORLD if dist.is_initialized() else None)
    # Announced, so that where a rank never comes the others' error says where it stands.
    with announced(group, f"tell how {what.partition(' ')[0]} went"):
        every = [json.loads(each) for each in (gather_text(text, group=group) if group else [text])]
    ranks = dist.get_process_group_ranks(group) if group else [0]
    raise_all(
        what, {rank: found for rank, (_, found) in zip(ranks, every, strict=True)}, kind=kind, cause=own
    )
    return [result for result, _ in every]


def raise_all(
    what: str,
    problems: Mapping[int, str | None],
    *,
    kind: type[ShardwiseError] = CheckpointError,
    cause: Exception | None = None,
) -> None:
    """Raise if any rank has a problem; for problems that every rank knows. Local."""
    found = {rank: problem for rank, problem in problems.items() if problem is not None}
    if found:
        raise kind(f"{what} failed\n{by_ranks(found)}") from cause


def merge_or_raise(
    what: str, described: Sequence[Mapping[str, Any]], kinds: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Merge what ranks described by name, of each of `kinds`; for descriptions that every rank knows. Local.

    Args:
        what: is being done, for the error.
        described: by rank, for each kind what it has by name, as JSON; equal on every rank.
        kinds: and how to fix a difference.

    Raises:
        CheckpointError: on every rank, naming the higher of two ranks whose entries differ.
    """
    found: dict[str, dict[str, Any]] = {kind: {} for kind in kinds}
    problems: dict[int, str | None] = {}
    for rank, own in enumerate(described):
        wrong = []
        for kind, fix in kinds.items():
            for name, entry in own[kind].items():
                expected = found[kind].setdefault(name, entry)
                if json.dumps(expected) != json.dumps(entry):
                    wrong.append(
                        f"{name}: expected {expected!r:.200} as on a lower rank, found {entry!r:.200}. {fix}"
                    )
        problems[rank] = "\n".join(wrong) or None
    raise_all(what, problems)
    return found


def _said_by(error: Exception) -> str:
    """Return an error's text without the rank, so that ranks which fail the same way say the same."""
    text = str(error).removeprefix(f"{here()}: ")
    return text if isinstance(error, ShardwiseError) else f"{type(error).__name__}: {text}"


# Texts


def gather_text(text: str, *, group: dist.ProcessGroup, device: torch.device | None = None) -> list[str]:
    """Return every rank's `text`, by rank in `group`.

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
    device = device or device_of(group)
    # Names of files that are no UTF-8 have lone surrogates.
    encoded = text.encode("utf-8", "surrogatepass")
    lengths = _all_gather(torch.tensor([len(encoded)], dtype=torch.int64, device=device), group).tolist()
    longest = max(lengths)
    # Lengths are the same everywhere, so all ranks leave here or none does.
    if longest == 0:
        return [""] * ranks
    # A bytearray, as torch warns of memory that must not be written.
    padded = torch.frombuffer(bytearray(encoded.ljust(longest, b"\0")), dtype=torch.uint8)
    rows = _all_gather(padded.to(device), group).cpu().view(ranks, longest)
    return [
        row[:length].numpy().tobytes().decode("utf-8", "surrogatepass")
        for row, length in zip(rows, lengths, strict=True)
    ]


def _all_gather(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    gathered = mine.new_empty(group.size() * mine.numel())
    _compat.all_gather_single(gathered, mine, group, async_op=False)
    return gathered


# Which backend moves what


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Return a device whose tensors `group` moves: the CPU where it can."""
    kinds = list(backends(group))
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())
