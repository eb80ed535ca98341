"""Agreement: how ranks compare what they are about to do, and raise the same error.

    agree             check that all describe the same thing: 8 bytes to each rank, texts only on a difference
    Agreement         an agreement that is posted before other work and completed after it
    together          run an action that may fail on one rank; a failure on any rank raises on all
    each_its_own      the same, for results that stay on their rank
    merge_or_raise    merge what ranks described by name; local
    gather_text       gather every rank's text

If only one rank raised, the others would wait for it in their next collective. So ranks exchange
descriptions, compare them in the same way, and all raise the same error. They exchange text and integers of
fixed size: nothing that a peer sends is ever unpickled.

`comm.order` compares the order of collectives, which costs nothing while it repeats.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise import _compat
from shardwise.comm.api import backend_of, backends
from shardwise.comm.differences import by_ranks, differences
from shardwise.comm.gloo import operation_counter
from shardwise.comm.watch import announced, explaining
from shardwise.errors import CheckpointError, RankMismatchError, ShardwiseError, here

_GROUP_TIMEOUT = timedelta(0)  # to torch, this means the group's own timeout
_WORD_TAG = 0x7B000001
# Tags of messages under an agreement: 8 bits of its number in the group and 20 of its description, so that no
# message matches one with another meaning, or one left over from an agreement that failed.
_AGREED_TAGS = 0x60000000
_DIRECT_RANKS = 32  # up to this many ranks send each other words directly over gloo
_NEXT = "\0"  # separates a description from the differences found in other groups

_ADVICE = "Make the same call with the same arguments on every rank."

_T = TypeVar("_T")


def fingerprint(text: str, *tensors: Tensor) -> int:
    """Return 63 bits of a hash of `text` and the values of tensors, the same in every process."""
    digest = hashlib.sha256(text.encode())
    for tensor in tensors:
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    # Words are sent as int64, which has a sign.
    return int.from_bytes(digest.digest()[:8], "big") >> 1


def agree(
    description: str,
    *,
    group: dist.ProcessGroup | Sequence[dist.ProcessGroup],
    subject: str,
    device: torch.device | None = None,
    advice: str = _ADVICE,
) -> None:
    """Raise unless all ranks of `group` give the same description of their next operation.

    Collective over `group`. Nothing is sent in a group of one rank, nor on fake tensors, which have no values
    to compare.

    Args:
        description: in words, equal on ranks that will communicate the same way.
        group: the ranks to compare. Several groups, such as the axes of a mesh, are compared one after the
            other; a rank learns of differences in any of them, since each group reports what earlier ones
            found.
        subject: the thing described, for the error: "the boxes of w".
        device: as for `gather_text`.
        advice: what to do about a difference.

    Raises:
        RankMismatchError: on every rank of the groups, if any two descriptions differ.
    """
    reports: dict[str, None] = {}
    for subgroup in [group] if isinstance(group, dist.ProcessGroup) else group:
        # Includes earlier reports: ranks without them then differ, and all exchange texts.
        text = _NEXT.join((description, *reports))
        agreement = Agreement(text, group=subgroup, subject=subject, device=device)
        replies = {rank: text.split(_NEXT) for rank, text in agreement.differing().items()}
        described = {rank: words[0] for rank, words in replies.items()}
        if len(set(described.values())) > 1:
            reports[differences(described)] = None
        reports |= {report: None for words in replies.values() for report in words[1:]}
    # Raise only after the last group: until then ranks of other groups wait for this one's word.
    if reports:
        raise _mismatch(subject, "\n".join(reports), advice)


_differences: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()  # a mark each time
_have_differed: list[bool] = []  # [True] once any ranks have: it costs no call to ask


class Agreement:
    """A comparison of what ranks are about to do, in 8 bytes per rank.

    Making one and calling `confirm` are collective over `group`. In between, a rank may post messages that
    cannot match messages of another meaning, so agreeing costs no round of its own. Over gloo, up to 32 ranks
    send each other their words directly; otherwise words are exchanged in one all-gather.

    The end of a `with` statement confirms, also after an error: a word that nobody waited for would be taken
    for that of the next agreement.

    Attributes:
        tag: for point-to-point messages over gloo; equal on ranks that mean the same, and else different.
    """

    def __init__(
        self, description: str, *, group: dist.ProcessGroup, subject: str, device: torch.device | None = None
    ) -> None:
        """Send this rank's word. Arguments are those of `agree`."""
        # With the subject, so that ranks that mean different operations on equal things differ.
        self._description, self._group, self._subject = f"{subject}\n{description}", group, subject
        # Messages posted before a difference was found match no later ones, whose tags repeat.
        found = _differences.get(group, "") if _have_differed else ""
        self._fingerprint = fingerprint(f"{found}{self._description}")
        self.tag = _AGREED_TAGS + (next(operation_counter(group)) % 256 << 20) + self._fingerprint % (1 << 20)
        self._words: dict[int, tuple[dist.Work | None, Tensor]] = {}
        self._sends: list[dist.Work] = []
        self._is_open = True
        if group.size() == 1 or _compat.is_fake(torch.empty(0)):
            return
        self._device = device or device_of(group)
        # An attribute, as gloo sends from this memory until `differing` has waited.
        self._word = torch.tensor([self._fingerprint], dtype=torch.int64, device=self._device)
        with explaining(group, f"agree about {subject}"):
            self._tell(group)

    def _tell(self, group: dist.ProcessGroup) -> None:
        rank, ranks = group.rank(), group.size()
        if ranks <= _DIRECT_RANKS and self._word.is_cpu and backend_of(group, self._device) == "gloo":
            wire = self._word.view(torch.uint8)
            # Only posted: the caller posts its own messages next, and nobody waits for a late rank.
            self._sends += [group.send([wire], peer, _WORD_TAG) for peer in range(rank + 1, ranks)]
            for peer in (*range(rank + 1, ranks), *range(rank)):
                word = torch.empty_like(self._word)
                self._words[peer] = (group.recv([word.view(torch.uint8)], peer, _WORD_TAG), word)
            self._sends += [group.send([wire], peer, _WORD_TAG) for peer in range(rank - 1, -1, -1)]
        else:
            words = _all_gather(self._word, group)
            self._words = {peer: (None, words[peer]) for peer in range(ranks) if peer != rank}

    def __enter__(self) -> Agreement:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if self._is_open and (kind is None or issubclass(kind, Exception)):
            self.confirm()

    def confirm(self) -> None:
        """Wait for everyone's word; raise RankMismatchError on every rank if any two differ."""
        texts = self.differing()
        if texts:
            raise _mismatch(self._subject, differences(texts))

    def differing(self) -> dict[int, str]:
        """Return every rank's description if any two differ, else nothing; equal on every rank."""
        self._is_open = False
        with explaining(self._group, f"agree about {self._subject}"):
            for peer, (receive, word) in self._words.items():
                if receive is not None:
                    receive.wait(_GROUP_TIMEOUT)
                    # gloo completes a receive only once: a second wait would last until the timeout.
                    self._words[peer] = (None, word)
            words = [int(word.item()) for _, word in self._words.values()]
            # A peer whose word came may not have posted its receive yet; until then gloo reads this word.
            for work in self._sends:
                work.wait(_GROUP_TIMEOUT)
        self._sends.clear()
        if all(word == self._fingerprint for word in words):
            return {}
        # All ranks have the same words, so all come here or none.
        _differences[self._group] = _differences.get(self._group, "") + "'"
        _have_differed[:] = [True]
        texts = gather_text(self._description, group=self._group, device=self._device)
        return dict(zip(dist.get_process_group_ranks(self._group), texts, strict=True))


def _mismatch(subject: str, details: str, advice: str = _ADVICE) -> RankMismatchError:
    return RankMismatchError(
        f"{here()}: ranks disagree about {subject}, so their messages would not match.\n{details}\n{advice}"
    )


# Actions that may fail on one rank


def together(
    operation: str,
    action: Callable[[], _T],
    *,
    group: dist.ProcessGroup | None = None,
    kind: type[ShardwiseError] = CheckpointError,
) -> list[_T]:
    """Run `action` on every rank; return every rank's result, by rank in the group.

    Collective over `group`, by default all ranks; without a process group, only this process takes part.

    Args:
        operation: the action in words, for the error: "loading x". Where the order of collectives is
            compared, ranks whose first words differ raise, so each public call uses its own first word.
        action: returns a value that JSON can hold (tuples come back as lists).

    Raises:
        ShardwiseError: of `kind`, on every rank, with the problems of all, if `action` raised on any.
    """
    result: Any = None
    own: Exception | None = None
    try:
        result = action()
        # Inside `try`: a result that JSON cannot hold also fails on all ranks.
        text = json.dumps([result, None])
    except Exception as error:
        # Kept, not raised: the other ranks wait for this one's text below.
        own = error
        text = json.dumps([None, _text_of(error)])
    group = group or (dist.group.WORLD if dist.is_initialized() else None)
    # Announced, so that if a rank never comes, the others' error says where it is.
    with announced(group, f"tell how {operation.partition(' ')[0]} went"):
        replies = [json.loads(reply) for reply in (gather_text(text, group=group) if group else [text])]
    ranks = dist.get_process_group_ranks(group) if group else [0]
    errors = {rank: error for rank, (_, error) in zip(ranks, replies, strict=True)}
    raise_all(operation, errors, kind=kind, cause=own)
    return [result for result, _ in replies]


def each_its_own(operation: str, action: Callable[[], _T]) -> _T:
    """Run `action` on all ranks, as `together` does; return this rank's result, whatever its type."""
    results: list[_T] = []
    together(operation, lambda: results.append(action()))
    return results.pop()


def raise_all(
    operation: str,
    problems: Mapping[int, str | None],
    *,
    kind: type[ShardwiseError] = CheckpointError,
    cause: Exception | None = None,
) -> None:
    """Raise if any rank has a problem; `problems` must be known to every rank. Local."""
    reported = {rank: problem for rank, problem in problems.items() if problem is not None}
    if reported:
        raise kind(f"{operation} failed\n{by_ranks(reported)}") from cause


def merge_or_raise(
    operation: str, described: Sequence[Mapping[str, Any]], kinds: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Merge what ranks described by name, for each of `kinds`; every rank must know `described`. Local.

    Args:
        described: by rank, its entries by kind and name, as JSON; equal on every rank.
        kinds: each kind, with the advice on how to fix a difference. The error names the higher rank.
    """
    merged: dict[str, dict[str, Any]] = {kind: {} for kind in kinds}
    problems: dict[int, str | None] = {}
    for rank, own in enumerate(described):
        wrong = []
        for kind, fix in kinds.items():
            for name, entry in own[kind].items():
                expected = merged[kind].setdefault(name, entry)
                if json.dumps(expected) != json.dumps(entry):
                    wrong.append(
                        f"{name}: expected {expected!r:.200} as on a lower rank, found {entry!r:.200}. {fix}"
                    )
        problems[rank] = "\n".join(wrong) or None
    raise_all(operation, problems)
    return merged


def _text_of(error: Exception) -> str:
    """Return an error's text without the rank, so that ranks that fail in the same way report the same."""
    text = str(error).removeprefix(f"{here()}: ")
    return text if isinstance(error, ShardwiseError) else f"{type(error).__name__}: {text}"


# Texts


def gather_text(text: str, *, group: dist.ProcessGroup, device: torch.device | None = None) -> list[str]:
    """Return every rank's `text`, by rank in `group`.

    Collective over `group`: one all-gather of lengths, and one of bytes padded to the longest. The second is
    omitted if all texts are empty, and both in a group of one rank. They run on `device`, or on one that the
    group's backend serves.
    """
    ranks = group.size()
    if ranks == 1:
        return [text]
    device = device or device_of(group)
    # File names that are not UTF-8 contain lone surrogates.
    encoded = text.encode("utf-8", "surrogatepass")
    lengths = _all_gather(torch.tensor([len(encoded)], dtype=torch.int64, device=device), group).tolist()
    longest = max(lengths)
    # All ranks have the same lengths, so all return here or none does.
    if longest == 0:
        return [""] * ranks
    # A bytearray, since torch warns about read-only memory.
    padded = torch.frombuffer(bytearray(encoded.ljust(longest, b"\0")), dtype=torch.uint8)
    rows = _all_gather(padded.to(device), group).cpu().view(ranks, longest)
    return [
        row[:length].numpy().tobytes().decode("utf-8", "surrogatepass")
        for row, length in zip(rows, lengths, strict=True)
    ]


def _all_gather(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    gathered = local.new_empty(group.size() * local.numel())
    _compat.all_gather_single(gathered, local, group, async_op=False)
    return gathered


# Backends and devices


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Return a device whose tensors `group` moves; the CPU if possible."""
    kinds = list(backends(group))
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())
