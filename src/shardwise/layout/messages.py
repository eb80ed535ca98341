"""Messages that bring ranks the boxes they want, from the boxes that ranks hold.

Both sides are boxes of one tensor, any number per rank. Every element of a target box comes once: from the
receiver itself if it holds the element, otherwise from the nearest rank that does (least distance of rank
numbers, the lower of two equally near ranks). So replicas share the work, and elements that a rank already
holds are never sent.

The message between a source and a target box depends only on the two, and on nearer boxes that overlap both.
So a rank can compute its own messages without those of others and still agree with them. If sources overlap
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
    """One box that moves from a rank that holds it to one that wants it; if they are one, a local copy."""

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
    sources, targets = _Sources(_boxes(source, ndim), ranks), _boxes(target, ndim)
    if rank is None:
        checked = np.arange(len(targets))
        pairs = _receiver_pairs(sources, targets, checked)
    else:
        checked = np.flatnonzero(targets.rank == rank)
        pairs = _join([_receiver_pairs(sources, targets, checked), _sender_pairs(sources, targets, rank)])
    parts = _parts(sources, targets, pairs)
    _check_filled(sources, targets, parts, checked, ndim)
    return _messages(sources, targets, parts, ndim)


def subtract(box: Box, other: Box) -> list[Box]:
    """Return the part of `box` outside `other` as disjoint boxes, at most two per dim."""
    common = box.intersect(other)
    if common is None:
        return [] if box.is_empty else [box]
    rest = []
    offsets, sizes = list(box.offsets), list(box.sizes)
    for dim, (start, end) in enumerate(zip(common.offsets, common.ends, strict=True)):
        for begin, size in ((offsets[dim], start - offsets[dim]), (end, offsets[dim] + sizes[dim] - end)):
            if size:
                corner = (*offsets[:dim], begin, *offsets[dim + 1 :])
                rest.append(Box(corner, (*sizes[:dim], size, *sizes[dim + 1 :])))
        offsets[dim], sizes[dim] = start, end - start
    return rest


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


class _Sources:
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
        self._keys, first = np.unique(keys, return_index=True)  # the first of a rank's equal boxes
        self.rank, self.place = ordered.rank[first], ordered.place[first]
        self._box: Ints = number[first]
        self._bounds = np.searchsorted(self._box, np.arange(self.starts.shape[1] + 1))

    def of(self, rank: int) -> Ints:
        return self._box[np.flatnonzero(self.rank == rank)]

    def nearest(self, box: Ints, receiver: Ints) -> Ints:
        """Return the copy (an index into `rank` and `place`) of each box that is nearest to its receiver."""
        upper = np.searchsorted(self._keys, box * self.ranks + receiver)
        lower = upper - 1
        above = np.minimum(upper, len(self.rank) - 1)
        down = np.where(lower >= self._bounds[box], receiver - self.rank[lower], self.ranks)
        up = np.where(upper < self._bounds[box + 1], self.rank[above] - receiver, self.ranks)
        copy: Ints = np.where(down <= up, lower, upper)
        return copy

    def distance(self, copy: Ints, receiver: Ints) -> Ints:
        """Return keys that order copies of different boxes: distance in ranks, lower rank, place."""
        rank, places = self.rank[copy], int(self.place.max(initial=0)) + 1
        distance: Ints = (np.abs(rank - receiver) * self.ranks + rank) * places + self.place[copy]
        return distance

    def boxes(self, columns: Ints) -> list[Box]:
        return _as_boxes(self.starts[:, columns], self.ends[:, columns])


_Parts = tuple[Ints, Ints, Ints, Ints]  # to move: source copy, target, starts and ends [dims, parts]


def _join(portions: Sequence[Ints]) -> Ints:
    """Concatenate portions of pairs [2, any]; there may be none."""
    return np.concatenate([np.empty((2, 0), np.int64), *portions], axis=1)


def _receiver_pairs(sources: _Sources, targets: _Boxes, chosen: Ints) -> Ints:
    """Return the pairs (source, target) [2, pairs] of the chosen target boxes."""
    boxes = targets.take(chosen)
    meetings = sources.index.meeting(boxes.starts, boxes.ends)
    return _join([np.stack([box, chosen[query]]) for query, box in meetings])


def _sender_pairs(sources: _Sources, targets: _Boxes, rank: int) -> Ints:
    """Return the pairs (source, target) [2, pairs] for which `rank` is nearest to another rank."""
    own = sources.of(rank)
    portions = []
    index = Index(targets.starts, targets.ends)
    for query, hit in index.meeting(sources.starts[:, own], sources.ends[:, own]):
        box, receiver = own[query], targets.rank[hit]
        sends = (receiver != rank) & (sources.rank[sources.nearest(box, receiver)] == rank)
        portions.append(np.stack([box, hit])[:, sends])
    return _join(portions)


def _parts(sources: _Sources, targets: _Boxes, pairs: Ints) -> _Parts:
    """Return the parts to move: each pair's overlap, without what boxes nearer to the receiver have."""
    box, target = pairs
    receiver = targets.rank[target]
    copy = sources.nearest(box, receiver)
    distance = sources.distance(copy, receiver)
    starts = np.maximum(sources.starts[:, box], targets.starts[:, target])
    ends = np.minimum(sources.ends[:, box], targets.ends[:, target])
    overlapping = np.flatnonzero(_meets_another(sources, box)[box])
    whole = np.ones(len(box), np.bool_)
    pieces: list[tuple[int, Box]] = []
    for query, rival in sources.index.meeting(starts[:, overlapping], ends[:, overlapping]):
        pair = overlapping[query]
        nearer = sources.distance(sources.nearest(rival, receiver[pair]), receiver[pair]) < distance[pair]
        pair, rival = pair[nearer], rival[nearer]
        whole[pair] = False
        common = _as_boxes(starts[:, pair], ends[:, pair])
        pieces += _remainders(pair.tolist(), common, sources.boxes(rival))
    numbers = np.concatenate([np.flatnonzero(whole), np.array([n for n, _ in pieces], np.int64)])
    offsets, sizes = corners([piece for _, piece in pieces], len(starts))
    return (
        copy[numbers],
        target[numbers],
        np.concatenate([starts[:, whole], offsets], axis=1),
        np.concatenate([ends[:, whole], offsets + sizes], axis=1),
    )


def _remainders(pairs: list[int], common: list[Box], cuts: list[Box]) -> Iterator[tuple[int, Box]]:
    """Yield what `cuts` leave of each pair's overlap, in the index's order: sender and receiver cut alike."""
    for pair, rows in itertools.groupby(zip(pairs, common, cuts, strict=True), key=lambda row: row[0]):
        rest: list[Box] | None = None
        for _, box, cut in rows:
            rest = [part for piece in ([box] if rest is None else rest) for part in subtract(piece, cut)]
        yield from ((pair, piece) for piece in rest or [])


def _meets_another(sources: _Sources, box: Ints) -> _Bools:
    """Return a mask of the sources that overlap a different one; computed only for those in `box`."""
    queried = np.flatnonzero(np.bincount(box, minlength=sources.starts.shape[1]))
    overlaps = np.zeros(sources.starts.shape[1], np.int64)
    for query, _ in sources.index.meeting(sources.starts[:, queried], sources.ends[:, queried]):
        overlaps += np.bincount(queried[query], minlength=len(overlaps))
    result: _Bools = overlaps > 1  # each overlaps itself
    return result


def _check_filled(sources: _Sources, targets: _Boxes, parts: _Parts, checked: Ints, ndim: int) -> None:
    """Raise unless parts fill each box: they are disjoint, so their elements must add up to the box's."""
    _, target, starts, ends = parts
    missing = (targets.ends - targets.starts).prod(axis=0)
    np.subtract.at(missing, target, (ends - starts).prod(axis=0))
    for number in checked[missing[checked] != 0].tolist():
        column = targets.take(np.array([number]))
        rest = whole = _as_boxes(column.starts, column.ends)
        for _, hit in sources.index.meeting(column.starts, column.ends):
            for source in sources.boxes(np.sort(hit)):
                rest = [part for piece in rest for part in subtract(piece, source)]
        box, missing_box = (Box(b.offsets[:ndim], b.sizes[:ndim]) for b in (whole[0], rest[0]))
        raise ShardingError(
            f"rank {targets.rank[number]} wants {box} (its box {targets.place[number]}), but no rank holds"
            f" {missing_box}; the boxes of source must cover those of target"
        )


def _messages(sources: _Sources, targets: _Boxes, parts: _Parts, ndim: int) -> list[Message]:
    copy, target, starts, ends = parts
    sender, receiver, place = sources.rank[copy], targets.rank[target], targets.place[target]
    order = np.lexsort((*starts[::-1], place, receiver, sender))
    return list(
        map(
            Message,
            sender[order].tolist(),
            receiver[order].tolist(),
            _as_boxes(starts[:ndim, order], ends[:ndim, order]),
            sources.place[copy[order]].tolist(),
            place[order].tolist(),
        )
    )
