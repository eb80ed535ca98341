"""Rows of a table cut in any way: found where they lie, brought where they are wanted.

Every rank knows all ids and all boxes, so each works out by itself what it finds, sends and gets:

    to_all        the result on every rank: each adds its part, in one all-reduce
    to_holders    the result on the ranks that hold the ids: each shard of the table sends to each of theirs
    renormalize   `max_norm`, in place

An id whose row lies elsewhere adds nothing. For `mode="max"` ranks compare values, then places in the bag: of
equal values the first wins, as in torch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardwise.errors import ShardingError, here
from shardwise.layout import Box, transfer
from shardwise.sharded_tensor.autograd import all_reduced, linked, moved, nothing_of, summed, valued
from shardwise.sharded_tensor.tensor import ShardedTensor

_NOWHERE = 1 << 62  # a float64 too, as which functions like `pad` take it


@dataclass(frozen=True)
class Lookup:
    """What to look up: of one rank, or of all together.

    Attributes:
        ids: [ids] rows of the table.
        bag: [ids] the row of the result that each belongs to, ascending.
        bags: number of rows of the result.
        mode: "row" (each id is a bag and `padding` gets no gradient), or "sum", "mean", "max" of a bag
            (and `padding` is left out).
        padding: a row of the table.
        shape: of the ids as they were given.
        weights: [ids] factors of the rows; of all together they are `replicated`.
    """

    ids: Tensor
    bag: Tensor
    bags: int
    mode: str
    padding: int | None
    shape: tuple[int, ...]
    weights: Tensor | None = None
    sparse: bool = False

    def counted(self) -> Tensor:
        """[ids] does this id count in its bag?"""
        if self.padding is None or self.mode == "row":
            return torch.ones_like(self.ids, dtype=torch.bool)
        return self.ids != self.padding

    def counts(self) -> Tensor:
        """[bags] how many ids count in each."""
        return torch.bincount(self.bag[self.counted()], minlength=self.bags)

    def within(self, box: Box) -> Tensor:
        """Where the ids are, ascending, whose rows lie in `box` and count."""
        begin, end = box.offsets[0], box.ends[0]
        inside = (self.ids >= begin) & (self.ids < end) & self.counted()
        return inside.nonzero().squeeze(1)


def stand_in(weight: ShardedTensor, extra: Sequence[Tensor] = ()) -> Tensor:
    """An empty tensor that depends on the table where this rank has none of it, and on all of `extra`."""
    return torch.cat([weight.anchor, *(nothing_of(tensor).to(weight.dtype) for tensor in extra)])


# ------------------------------------------------------------ a table cut in any way


def _partial(table: Tensor, box: Box, look: Lookup, at: Tensor) -> Tensor:
    """What the shard adds: by id of `at` for "row", by bag else."""
    ids = look.ids[at] - box.offsets[0]
    if look.mode == "row":
        inside = look.padding is not None and box.offsets[0] <= look.padding < box.ends[0]
        padding = cast(int, look.padding) - box.offsets[0] if inside else None
        return F.embedding(ids, table, padding, sparse=look.sparse)
    starts = torch.searchsorted(look.bag[at], torch.arange(look.bags, device=at.device))
    factors = None if look.weights is None else look.weights[at]
    return F.embedding_bag(ids, table, starts, mode="sum", sparse=look.sparse, per_sample_weights=factors)


def to_all(weight: ShardedTensor, look: Lookup) -> Tensor:
    """[bags, columns] on every rank."""
    if look.mode == "max":
        return _max_to_all(weight, look)
    parts = []
    for table, box in zip(weight.tensors, weight.boxes, strict=True):
        at = look.within(box)
        part = _partial(table, box, look, at)
        parts.append((box, _spread(part, at, look.bags) if look.mode == "row" else part))
    extra = [] if look.weights is None else [look.weights]
    whole = summed(_joined(parts, look.bags, weight.shape[1], stand_in(weight, extra)), weight.process_group)
    return whole / look.counts().clamp(min=1).unsqueeze(1) if look.mode == "mean" else whole


def _spread(rows: Tensor, at: Tensor, length: int) -> Tensor:
    """`rows` as the rows `at` of a tensor of zeros."""
    return rows.new_zeros(length, rows.shape[1]).index_copy(0, at, rows)


def _joined(parts: Sequence[tuple[Box, Tensor]], rows: int, columns: int, anchor: Tensor) -> Tensor:
    """The sum of `parts`, each in the columns of its box of the table."""
    whole = anchor.new_zeros(rows, columns) + anchor.sum() if not parts or anchor.requires_grad else None
    for box, part in parts:
        if box.sizes[1] != columns:
            part = F.pad(part, (box.offsets[1], columns - box.ends[1]))
        whole = part if whole is None else whole + part
    assert whole is not None
    return whole


# ------------------------------------------------------------ the greatest of a bag


@torch.no_grad()
def _greatest(table: Tensor, box: Box, look: Lookup) -> tuple[Tensor, Tensor]:
    """[bags, columns] the greatest values of the shard's rows in each bag, and at which id the first is.

    Without any: the least number, `_NOWHERE`.
    """
    at = look.within(box)
    rows = table.detach()[look.ids[at] - box.offsets[0]]
    bag = look.bag[at].unsqueeze(1).expand_as(rows)
    best = rows.new_full((look.bags, box.sizes[1]), -math.inf).scatter_reduce(0, bag, rows, "amax")
    places = torch.where(rows == best.gather(0, bag), at.unsqueeze(1), _NOWHERE)
    first = at.new_full(best.shape, _NOWHERE).scatter_reduce(0, bag, places, "amin")
    return best, first


def _rows_of(table: Tensor, box: Box, look: Lookup, first: Tensor) -> Tensor:
    """[bags, columns] the elements of `table` at the ids `first`; zero where these lie elsewhere."""
    if not look.ids.numel() or not table.numel():
        return table.new_zeros(first.shape) + nothing_of(table).sum()
    row = look.ids[first.clamp(max=len(look.ids) - 1)] - box.offsets[0]
    inside = (first != _NOWHERE) & (row >= 0) & (row < box.sizes[0])
    found = table.gather(0, row.clamp(0, box.sizes[0] - 1).to(torch.int64))
    return torch.where(inside, found, found.new_zeros(()))


def _max_to_all(weight: ShardedTensor, look: Lookup) -> Tensor:
    group, shape = weight.process_group, (look.bags, weight.shape[1])
    best = weight.anchor.detach().new_full(shape, -math.inf)
    first = torch.full(shape, _NOWHERE, device=best.device)
    for table, box in zip(weight.tensors, weight.boxes, strict=True):
        columns = slice(box.offsets[1], box.ends[1])
        value, place = _greatest(table, box, look)
        better = _better(value, place, best[:, columns], first[:, columns])
        best[:, columns] = torch.where(better, value, best[:, columns])
        first[:, columns] = torch.where(better, place, first[:, columns])
    greatest = all_reduced(best, group, dist.ReduceOp.MAX)
    first = all_reduced(torch.where(best == greatest, first, _NOWHERE), group, dist.ReduceOp.MIN)
    parts = [
        (box, _rows_of(table, box, look, first[:, box.offsets[1] : box.ends[1]]))
        for table, box in zip(weight.tensors, weight.boxes, strict=True)
    ]
    partial = _joined(parts, *shape, stand_in(weight))
    value = torch.where(look.counts().unsqueeze(1) > 0, greatest, greatest.new_zeros(()))
    return valued(partial, value)


def _better(value: Tensor, place: Tensor, best: Tensor, first: Tensor) -> Tensor:
    return (value > best) | ((value == best) & (place < first))


# ------------------------------------------------------------ sharded ids


def _routes(
    weight: ShardedTensor, look: Lookup, ids: ShardedTensor
) -> tuple[list[Tensor], list[list[Box]], list[list[Box]]]:
    """By shard of the table, where the ids are whose rows it has; and by rank, what it makes, and wants.

    A box is of one shard of the table, of the rows that it makes (one for each of its ids, or all bags) and
    of its columns. Rows for one shard of the ids lie together; a rank wants for each of its own some of each
    shard of the table, in their order.
    """
    tables, batches = weight.metadata().shards_metadata, ids.metadata().shards_metadata
    edges = torch.tensor([edge for shard in batches for edge in _span(shard.box, look, ids)])
    found = [look.within(shard.box) for shard in tables]
    made: dict[int, list[Box]] = defaultdict(list)
    wanted: dict[int, list[Box]] = defaultdict(list)
    for number, (table, at) in enumerate(zip(tables, found, strict=True)):
        columns, by_row = table.box.sizes[1], look.mode == "row"
        cuts = torch.searchsorted(at.cpu(), edges) if by_row else edges
        made[table.rank].append(Box((number, 0, 0), (1, len(at) if by_row else look.bags, columns)))
        for batch, (begin, end) in zip(batches, cuts.view(-1, 2).tolist(), strict=True):
            wanted[batch.rank].append(Box((number, begin, 0), (1, end - begin, columns)))
    ranks = dist.get_process_group_ranks(weight.process_group)
    return found, [made[rank] for rank in ranks], [wanted[rank] for rank in ranks]


def _span(box: Box, look: Lookup, ids: ShardedTensor) -> tuple[int, int]:
    """First and last row of the flat result that the ids in `box` make."""
    each = math.prod(ids.shape[1:]) if look.mode == "row" else 1
    begin = box.offsets[0]
    return begin * each, (begin + _rows(box, ids)) * each


def _rows(box: Box, ids: ShardedTensor) -> int:
    """How many rows of ids, of full size, a shard of them has."""
    return box.sizes[0] if box.sizes[1:] == tuple(ids.shape[1:]) else 0


def to_holders(weight: ShardedTensor, look: Lookup, ids: ShardedTensor) -> ShardedTensor:
    """The result on the ranks that hold the ids, cut like them."""
    group, tables = weight.process_group, weight.metadata().shards_metadata
    rank = group.rank()
    found, made, wanted = _routes(weight, look, ids)
    own = [at for shard, at in zip(tables, found, strict=True) if shard.rank == dist.get_rank()]
    way: dict[str, Any] = {
        "messages": transfer(made, wanted, rank=rank),
        "source": made[rank],
        "target": wanted[rank],
        "group": group,
    }
    sent, places = [], []
    for table, box, at in zip(weight.tensors, weight.boxes, own, strict=True):
        if look.mode == "max":
            places.append(_greatest(table, box, look)[1].unsqueeze(0))
            sent.append(_rows_of(table, box, look, places[-1][0]).unsqueeze(0))
        else:
            sent.append(_partial(table, box, look, at).unsqueeze(0))
    extra = [] if look.weights is None else [look.weights]
    received, anchor = moved(sent, **way, anchor=stand_in(weight, extra))
    received = [tensor.squeeze(0) for tensor in received]
    first: list[Tensor] = []
    if look.mode == "max":
        no_place = torch.empty(0, dtype=torch.int64, device=anchor.device)
        first = [tensor.squeeze(0) for tensor in moved(places, **way, anchor=no_place)[0]]
    boxes = [shard.box for shard in tables]
    step, results = len(ids.tensors), []
    for number, batch in enumerate(ids.boxes):
        span, parts = _span(batch, look, ids), received[number::step]
        shape = span[1] - span[0], weight.shape[1]
        if look.mode == "max":
            none = anchor.new_zeros(shape) + anchor.sum()
            results.append(_first_greatest(boxes, parts, first[number::step], none))
            continue
        if look.mode == "row":
            inside = [at[(at >= span[0]) & (at < span[1])] - span[0] for at in found]
            parts = [_spread(part, at, shape[0]) for part, at in zip(parts, inside, strict=True)]
        result = _joined(list(zip(boxes, parts, strict=True)), *shape, anchor)
        if look.mode == "mean":
            result = result / look.counts()[span[0] : span[1]].clamp(min=1).unsqueeze(1)
        results.append(result)
    rest = ids.shape[1:] if look.mode == "row" else ()
    return like_ids(ids, results, anchor, rest=(*rest, weight.shape[1]))


def _first_greatest(
    boxes: Sequence[Box], values: Sequence[Tensor], places: Sequence[Tensor], none: Tensor
) -> Tensor:
    """[bags, columns] of the shards' greatest `values`, the first in the bag; `none` where there is none."""
    best, first = none, torch.full(none.shape, _NOWHERE, device=none.device)
    for box, value, place in zip(boxes, values, places, strict=True):
        around = box.offsets[1], none.shape[1] - box.ends[1]
        place = F.pad(place, around, value=_NOWHERE)
        value = F.pad(value, around)
        better = (place != _NOWHERE) & ((first == _NOWHERE) | _better(value, place, best, first))
        best, first = torch.where(better, value, best), torch.where(better, place, first)
    return best


def like_ids(
    ids: ShardedTensor, results: Sequence[Tensor], anchor: Tensor, *, rest: Sequence[int]
) -> ShardedTensor:
    """`results`, flat by row, as a tensor of shape (len(ids), *rest) cut as `ids` along dim 0."""

    def of_result(box: Box) -> Box:
        return Box((box.offsets[0], *(0 for _ in rest)), (_rows(box, ids), *rest))

    metadata = ids.metadata().map((ids.shape[0], *rest), of_result)
    shaped = [result.reshape(_rows(box, ids), *rest) for result, box in zip(results, ids.boxes, strict=True)]
    return ids.with_tensors(shaped, metadata=metadata, anchor=anchor)


# ------------------------------------------------------------ scale_grad_by_freq, max_norm


def by_frequency(weight: Tensor, ids: Tensor) -> Tensor:
    """`weight` itself, but each row's gradient is divided by how often `ids` name it. Local."""
    counts = torch.bincount(ids.reshape(-1), minlength=weight.shape[0]).clamp(min=1).unsqueeze(1)
    if not isinstance(weight, ShardedTensor):
        return _divided(weight, counts)
    shards = zip(weight.tensors, weight.boxes, strict=True)
    tensors = [_divided(table, counts[box.offsets[0] : box.ends[0]]) for table, box in shards]
    return weight.with_tensors(tensors, anchor=weight.anchor)


def _divided(tensor: Tensor, counts: Tensor) -> Tensor:
    """`tensor`, whose gradient is divided by `counts`."""
    return cast(Tensor, linked(lambda t: t.view_as(t), lambda grad: (grad / counts,), tensor))


@torch.no_grad()
def renormalize(weight: Tensor, ids: Tensor, *, max_norm: float, norm_type: float) -> None:
    """Scale, in place, the rows that `ids` name down to a norm of at most `max_norm`. Collective."""
    if not isinstance(weight, ShardedTensor):
        torch.embedding_renorm_(weight.detach(), ids, max_norm, norm_type)
        return
    rows = ids.unique()
    columns = weight.shape[1]
    shards = zip(weight.tensors, weight.boxes, strict=True)
    local = [
        (table.detach(), box, rows[(rows >= box.offsets[0]) & (rows < box.ends[0])]) for table, box in shards
    ]
    boxes = [shard.box for shard in weight.metadata().shards_metadata]
    if all(box.is_empty or box.sizes[1] == columns for box in boxes):
        for table, box, found in local:
            if found.numel() and not box.is_empty:
                torch.embedding_renorm_(table, found - box.offsets[0], max_norm, norm_type)
        return
    if norm_type <= 0:
        raise ShardingError(
            f"{here()}: max_norm with norm_type {norm_type} needs whole rows on their ranks, found a table by"
            f" {weight.sharding_spec()!r}; call .reshard(ChunkShardingSpec(0, ...)) on it"
        )
    highest = math.isinf(norm_type)
    powers = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
    for table, box, found in local:
        if found.numel() and not box.is_empty:
            norms = torch.linalg.vector_norm(table[found - box.offsets[0]].double(), norm_type, dim=1)
            at = torch.searchsorted(rows, found)
            powers[at] = torch.maximum(powers[at], norms) if highest else powers[at] + norms**norm_type
    powers = all_reduced(powers, weight.process_group, dist.ReduceOp.MAX if highest else dist.ReduceOp.SUM)
    norms = powers if highest else powers ** (1 / norm_type)
    scale = torch.where(norms > max_norm, max_norm / (norms + 1e-7), 1.0)
    for table, box, found in local:
        if found.numel() and not box.is_empty:
            factors = scale[torch.searchsorted(rows, found)].to(table.dtype).unsqueeze(1)
            table[found - box.offsets[0]] = table[found - box.offsets[0]] * factors
