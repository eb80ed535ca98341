"""Messages that bring ranks the boxes they want, from the boxes that ranks hold.

Both sides are boxes of one tensor, any number per rank. Every element of a wanted box comes once: from the
receiver itself if it holds the element, otherwise from the nearest rank that does (least distance of rank
numbers, the lower of two equally near ranks). So replicas share the work, and elements that a rank already
holds are never sent.

The message between a held and a wanted box depends only on the two, and on nearer boxes that overlap both. So
a rank can compute its own messages without those of others and still agree with them. If held boxes overlap
in part, the farther one sends what remains of it after subtracting the nearer ones.

Boxes, as columns of integer arrays, are compared only with those near them (`layout.index`): time and memory
grow with the number of messages. From rows to columns, n ranks send n^2 messages: list one rank's by `rank=`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.errors import ShardingError
from shardwise.layout.box import Box
from shardwise.layout.index import Index, Ints, corners

_Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Message:
    """One box that moves from a rank that holds it to a rank that wants it.

    If `sender == receiver`, it is a local copy.
    """

    sender: int
    receiver: int
    box: Box  # in coordinates of the global tensor, never empty
    source: int  # index of the sender's box that holds all of it
    target: int  # index of the receiver's box that it is a part of


def transfer(
    source: Sequence[Sequence[Box]], target: Sequence[Sequence[Box]], *, rank: int | None = None
) -> list[Message]:
    """List the messages that bring each rank r, which holds the boxes `source[r]`, the boxes `target[r]`.

    All boxes have the same number of dims. A rank may have no boxes; empty boxes move nothing. Boxes of
    `source` may overlap, between ranks and within one. So may boxes of `target`: each is filled separately,
    so an element in two boxes of one rank is sent to it twice.

    With `rank`, lists only the messages that this rank sends or receives, for about their cost (and that of
    reading the boxes). Messages are ordered by sender, receiver, target and box offsets, so that two ranks
    list the messages between them in the same order.

    Raises:
        ShardingError: boxes of different numbers of dims, lists for different numbers of ranks, no such
            `rank`, or a box of `target` with elements that no rank holds. With `rank`, only that rank's own
            boxes are checked for the last.
    """
    ranks = len(source)
    if len(target) != ranks:
        raise ShardingError(
            f"source has boxes for {ranks} ranks, target for {len(target)}; give both an entry for every rank"
        )
    if rank is not None and not 0 <= rank < ranks:
        raise ShardingError(f"expected a rank from 0 to {ranks - 1}, got {rank}")
    ndim = _common_ndim(source, target)
    held, wanted = _Held(_boxes(source, ndim), ranks), _boxes(target, ndim)
    if rank is None:
        checked = np.arange(len(wanted))
        pairs = _pairs_of_receivers(held, wanted, checked)
    else:
        checked = np.flatnonzero(wanted.rank == rank)
        pairs = _joined([_pairs_of_receivers(held, wanted, checked), _pairs_of_sender(held, wanted, rank)])
    parts = _parts(held, wanted, pairs)
    _check_filled(held, wanted, parts, checked, ndim)
    return _messages(held, wanted, parts, ndim)


def subtract(box: Box, other: Box) -> list[Box]:
    """Return the part of `box` outside `other` as disjoint boxes, at most two per dim."""
    common = box.intersect(other)
    if common is None:
        return [] if box.is_empty else [box]
    rest = []
    offsets, sizes = list(box.offsets), list(box.sizes)
    for dim, (start, end) in enumerate(zip(common.offsets, common.ends, strict=True)):
        for first, size in ((offsets[dim], start - offsets[dim]), (end, offsets[dim] + sizes[dim] - end)):
            if size:
                rest.append(
                    Box((*offsets[:dim], first, *offsets[dim + 1 :]), (*sizes[:dim], size, *sizes[dim + 1 :]))
                )
        offsets[dim], sizes[dim] = start, end - start
    return rest


# Boxes as arrays


@dataclass(frozen=True, slots=True)
class _Boxes:
    """Non-empty boxes, each a column in `starts` and `ends` [dims, boxes]."""

    starts: Ints
    ends: Ints
    rank: Ints  # [boxes] the rank that has it
    place: Ints  # [boxes] its position in that rank's list

    def __len__(self) -> int:
        return len(self.rank)

    def take(self, columns: Ints | _Bools) -> _Boxes:
        return _Boxes(self.starts[:, columns], self.ends[:, columns], self.rank[columns], self.place[columns])


def _common_ndim(source: Sequence[Sequence[Box]], target: Sequence[Sequence[Box]]) -> int:
    """Return the number of dims of all boxes; 0 if there is no box."""
    first: Box | None = None
    for verb, side in (("holds", source), ("wants", target)):
        for rank, boxes in enumerate(side):
            for box in boxes:
                if first is None:
                    first = box
                elif len(box.sizes) != len(first.sizes):
                    raise ShardingError(
                        f"rank {rank} {verb} {box}, which has {len(box.sizes)} dims, but {first} has"
                        f" {len(first.sizes)}; give boxes of one tensor"
                    )
    return len(first.sizes) if first else 0


def _boxes(side: Sequence[Sequence[Box]], ndim: int) -> _Boxes:
    """Join all ranks' boxes in order. Scalars become vectors of one element, which have a dim to sort by."""
    boxes = [box for own in side for box in own]
    rank = np.repeat(np.arange(len(side)), np.array([len(own) for own in side], np.int64))
    place = np.fromiter(itertools.chain.from_iterable(range(len(own)) for own in side), np.int64, len(boxes))
    if ndim:
        starts, sizes = corners(boxes, ndim)
    else:
        starts, sizes = np.zeros((1, len(boxes)), np.int64), np.ones((1, len(boxes)), np.int64)
    filled: _Bools = np.all(sizes > 0, axis=0)
    return _Boxes(starts, starts + sizes, rank, place).take(filled)


def _as_boxes(starts: Ints, ends: Ints) -> list[Box]:
    """Return the boxes of columns [dims, boxes]."""
    if not len(starts):
        return [Box((), ())] * starts.shape[1]
    return list(map(Box, zip(*starts.tolist(), strict=True), zip(*(ends - starts).tolist(), strict=True)))


class _Held:
    """The distinct boxes of `source`, each a column in `starts` and `ends`, and the ranks that hold each."""

    def __init__(self, boxes: _Boxes, ranks: int) -> None:
        self.ranks = ranks
        ordered = boxes.take(np.lexsort((boxes.place, boxes.rank, *boxes.ends, *boxes.starts)))
        corners = np.concatenate([ordered.starts, ordered.ends])
        new = np.ones(len(ordered), np.bool_)
        new[1:] = (corners[:, 1:] != corners[:, :-1]).any(axis=0)
        self.starts, self.ends = ordered.starts[:, new], ordered.ends[:, new]
        self.index = Index(self.starts, self.ends)
        # A copy is one rank that holds one of the boxes; ordered by box, then by rank.
        number: Ints = np.cumsum(new) - 1
        keys = number * ranks + ordered.rank
        self._keys, kept = np.unique(keys, return_index=True)  # the first of a rank's equal boxes
        self.rank, self.place = ordered.rank[kept], ordered.place[kept]
        self._box: Ints = number[kept]
        self._bounds = np.searchsorted(self._box, np.arange(self.starts.shape[1] + 1))

    def of(self, rank: int) -> Ints:
        """Return the boxes that `rank` holds."""
        return self._box[np.flatnonzero(self.rank == rank)]

    def nearest(self, box: Ints, receiver: Ints) -> Ints:
        """Return the copy (an index into `rank` and `place`) of each box that is nearest to its receiver."""
        after = np.searchsorted(self._keys, box * self.ranks + receiver)
        before = after - 1
        last = len(self.rank) - 1
        down = np.where(before >= self._bounds[box], receiver - self.rank[before], self.ranks)
        up = np.where(
            after < self._bounds[box + 1], self.rank[np.minimum(after, last)] - receiver, self.ranks
        )
        copy: Ints = np.where(down <= up, before, after)
        return copy

    def distance(self, copy: Ints, receiver: Ints) -> Ints:
        """Return keys that order copies of different boxes: distance in ranks, lower rank, place."""
        rank, places = self.rank[copy], int(self.place.max(initial=0)) + 1
        distance: Ints = (np.abs(rank - receiver) * self.ranks + rank) * places + self.place[copy]
        return distance

    def boxes(self, columns: Ints) -> list[Box]:
        return _as_boxes(self.starts[:, columns], self.ends[:, columns])


# Pairs of a held and a wanted box that have elements in common, and the parts of them that move


@dataclass(frozen=True, slots=True)
class _Parts:
    """Boxes to move: the held `copy` sends the part from `starts` to `ends` [dims, parts] to `wanted`."""

    copy: Ints
    wanted: Ints
    starts: Ints
    ends: Ints


def _joined(portions: Sequence[Ints]) -> Ints:
    """Concatenate portions of pairs [2, any]; there may be none."""
    return np.concatenate([np.empty((2, 0), np.int64), *portions], axis=1)


def _pairs_of_receivers(held: _Held, wanted: _Boxes, chosen: Ints) -> Ints:
    """Return the pairs (held, wanted) [2, pairs] of the chosen wanted boxes."""
    asking = wanted.take(chosen)
    found = held.index.meeting(asking.starts, asking.ends)
    return _joined([np.stack([box, chosen[asked]]) for asked, box in found])


def _pairs_of_sender(held: _Held, wanted: _Boxes, rank: int) -> Ints:
    """Return the pairs (held, wanted) [2, pairs] for which `rank` is nearest to another rank."""
    own = held.of(rank)
    portions = []
    index = Index(wanted.starts, wanted.ends)
    for asked, found in index.meeting(held.starts[:, own], held.ends[:, own]):
        box, receiver = own[asked], wanted.rank[found]
        sends = (receiver != rank) & (held.rank[held.nearest(box, receiver)] == rank)
        portions.append(np.stack([box, found])[:, sends])
    return _joined(portions)


def _parts(held: _Held, wanted: _Boxes, pairs: Ints) -> _Parts:
    """Return what each pair moves: its overlap, without the parts that boxes nearer to the receiver have."""
    box, want = pairs
    receiver = wanted.rank[want]
    copy = held.nearest(box, receiver)
    distance = held.distance(copy, receiver)
    starts = np.maximum(held.starts[:, box], wanted.starts[:, want])
    ends = np.minimum(held.ends[:, box], wanted.ends[:, want])
    shared = np.flatnonzero(_meets_another(held, box)[box])
    whole = np.ones(len(box), np.bool_)
    pieces: list[tuple[int, Box]] = []
    for asked, rival in held.index.meeting(starts[:, shared], ends[:, shared]):
        pair = shared[asked]
        nearer = held.distance(held.nearest(rival, receiver[pair]), receiver[pair]) < distance[pair]
        pair, rival = pair[nearer], rival[nearer]
        whole[pair] = False
        common = _as_boxes(starts[:, pair], ends[:, pair])
        pieces += _remainders(pair.tolist(), common, held.boxes(rival))
    numbers = np.concatenate([np.flatnonzero(whole), np.array([n for n, _ in pieces], np.int64)])
    offsets, sizes = corners([piece for _, piece in pieces], len(starts))
    return _Parts(
        copy[numbers],
        want[numbers],
        np.concatenate([starts[:, whole], offsets], axis=1),
        np.concatenate([ends[:, whole], offsets + sizes], axis=1),
    )


def _remainders(pairs: list[int], common: list[Box], taken: list[Box]) -> Iterator[tuple[int, Box]]:
    """Yield what remains of each pair's overlap after subtracting every box in `taken`.

    The cuts depend on the order of `taken`, which is the index's, so that sender and receiver cut alike.
    """
    for pair, rows in itertools.groupby(zip(pairs, common, taken, strict=True), key=lambda row: row[0]):
        rest: list[Box] | None = None
        for _, box, other in rows:
            rest = [part for piece in ([box] if rest is None else rest) for part in subtract(piece, other)]
        yield from ((pair, piece) for piece in rest or [])


def _meets_another(held: _Held, box: Ints) -> _Bools:
    """Return which held boxes overlap a different one; computed only for those in `box`."""
    asked_for = np.flatnonzero(np.bincount(box, minlength=held.starts.shape[1]))
    met = np.zeros(held.starts.shape[1], np.int64)
    for asked, _ in held.index.meeting(held.starts[:, asked_for], held.ends[:, asked_for]):
        met += np.bincount(asked_for[asked], minlength=len(met))
    several: _Bools = met > 1  # each overlaps itself
    return several


def _check_filled(held: _Held, wanted: _Boxes, parts: _Parts, checked: Ints, ndim: int) -> None:
    """Raise unless parts fill each box: they are disjoint, so their elements must add up to the box's."""
    missing = (wanted.ends - wanted.starts).prod(axis=0)
    np.subtract.at(missing, parts.wanted, (parts.ends - parts.starts).prod(axis=0))
    for number in checked[missing[checked] != 0].tolist():
        column = wanted.take(np.array([number]))
        rest = whole = _as_boxes(column.starts, column.ends)
        for _, found in held.index.meeting(column.starts, column.ends):
            for other in held.boxes(np.sort(found)):
                rest = [part for piece in rest for part in subtract(piece, other)]
        box, missing_box = (Box(b.offsets[:ndim], b.sizes[:ndim]) for b in (whole[0], rest[0]))
        raise ShardingError(
            f"rank {wanted.rank[number]} wants {box} (its box {wanted.place[number]}), but no rank holds"
            f" {missing_box}; the boxes of source must cover those of target"
        )


def _messages(held: _Held, wanted: _Boxes, parts: _Parts, ndim: int) -> list[Message]:
    sender, receiver = held.rank[parts.copy], wanted.rank[parts.wanted]
    target = wanted.place[parts.wanted]
    order = np.lexsort((*parts.starts[::-1], target, receiver, sender))
    return list(
        map(
            Message,
            sender[order].tolist(),
            receiver[order].tolist(),
            _as_boxes(parts.starts[:ndim, order], parts.ends[:ndim, order]),
            held.place[parts.copy[order]].tolist(),
            target[order].tolist(),
        )
    )
