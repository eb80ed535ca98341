"""Lookups of rows in a table cut in any way: rows are found on the ranks that hold them, and sent.

Ranks compare a hash of their plain ids, in one small all-reduce:

    equal on all ranks     one batch, replicated as any plain tensor: every rank gets the same result
    not                    each rank's own: it gets the rows of its ids, and the table's gradient is the sum
                           of all ranks'. Ids go to all ranks, rows to the rank that asks (`to_holders`)

An error in one rank's ids raises on all ranks. After that, every rank knows all ids and all boxes, so each
determines by itself what it finds, sends and receives; an id whose row is on another rank adds nothing.

    to_all        the result on every rank: each adds its part, in one all-reduce
    to_holders    the result on the ranks that hold the ids: each shard of the table sends to each of theirs
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardwise.comm.agree import fingerprint, together
from shardwise.errors import ShardingError
from shardwise.layout import Box, transfer
from shardwise.sharded_tensor import failure
from shardwise.sharded_tensor.autograd import all_reduced, moved, nothing_of, replicated, summed
from shardwise.sharded_tensor.group import is_outside
from shardwise.sharded_tensor.metadata import Shard, TensorProperties
from shardwise.sharded_tensor.ops.operands import total_of
from shardwise.sharded_tensor.spec import RaggedShardingSpec
from shardwise.sharded_tensor.tensor import ShardedTensor


@dataclass(frozen=True)
class Lookup:
    """A lookup of rows: of one rank, or of all together."""

    ids: Tensor  # [ids] rows of the table
    bag: Tensor  # [ids] the row of the result that each belongs to, ascending
    bags: int  # rows of the result
    mode: str  # "row": each id is a bag, `padding` gets no gradient; "sum", "mean", "max" leave `padding` out
    padding: int | None  # a row of the table
    shape: tuple[int, ...]  # of the ids as they were given
    weights: Tensor | None = None  # [ids] factors of the rows; of all together they are `replicated`
    sparse: bool = False

    def counted_mask(self) -> Tensor:
        if self.padding is None or self.mode == "row":
            return torch.ones_like(self.ids, dtype=torch.bool)
        return self.ids != self.padding

    def within(self, box: Box) -> Tensor:
        """Return the places, in ascending order, of the counted ids whose rows are in `box`."""
        begin, end = box.offsets[0], box.ends[0]
        inside = (self.ids >= begin) & (self.ids < end) & self.counted_mask()
        return inside.nonzero().squeeze(1)

    def finish(self, sums: Tensor, begin: int) -> Tensor:
        """Return the result from bag `begin` on, of the sums over all shards of the table."""
        if self.mode != "mean":
            return sums
        counts = torch.bincount(self.bag[self.counted_mask()], minlength=self.bags)
        return sums / counts[begin : begin + len(sums)].clamp(min=1).unsqueeze(1)


def stand_in(weight: ShardedTensor, weights: Tensor | None) -> Tensor:
    """Return an empty tensor that depends on `weights`, and on the table where this rank has none."""
    # A product saves what a lookup with weights saves for its backward.
    return weight.anchor.clone() if weights is None else weight.anchor * nothing_of(weights).to(weight.dtype)


def _partial(table: Tensor, box: Box, lookup: Lookup, positions: Tensor) -> Tensor:
    """Compute the shard's part of the result: by id of `positions` for "row", by bag otherwise."""
    ids = lookup.ids[positions] - box.offsets[0]
    if lookup.mode == "row":
        inside = lookup.padding is not None and box.offsets[0] <= lookup.padding < box.ends[0]
        padding = cast(int, lookup.padding) - box.offsets[0] if inside else None
        return F.embedding(ids, table, padding, sparse=lookup.sparse)
    starts = torch.searchsorted(lookup.bag[positions], torch.arange(lookup.bags, device=positions.device))
    factors = None if lookup.weights is None else lookup.weights[positions]
    mode = "max" if lookup.mode == "max" and len(positions) else "sum"
    return F.embedding_bag(ids, table, starts, mode=mode, sparse=lookup.sparse, per_sample_weights=factors)


def to_all(weight: ShardedTensor, lookup: Lookup) -> Tensor:
    """Return [bags, columns] on every rank."""
    parts = []
    for table, box in zip(weight.tensors, weight.boxes, strict=True):
        positions = lookup.within(box)
        part = _partial(table, box, lookup, positions)
        parts.append((box, _spread(part, positions, lookup.bags) if lookup.mode == "row" else part))
    total = _total(parts, lookup.bags, weight.shape[1], stand_in(weight, lookup.weights))
    return lookup.finish(summed(total, weight.process_group), 0)


def _spread(rows: Tensor, positions: Tensor, length: int) -> Tensor:
    """Return `rows` as the rows `positions` of a tensor of zeros."""
    return rows.new_zeros(length, rows.shape[1]).index_copy(0, positions, rows)


def _total(parts: Sequence[tuple[Box, Tensor]], rows: int, columns: int, anchor: Tensor) -> Tensor:
    """Return the sum of `parts`, each in the columns of its box of the table."""
    boxed = [(Box((0, box.offsets[1]), (rows, box.sizes[1])), part) for box, part in parts]
    return total_of(boxed, (rows, columns), anchor)


def to_holders(weight: ShardedTensor, lookup: Lookup, ids: ShardedTensor) -> ShardedTensor:
    """Return the result on the ranks that hold the ids, cut like them."""
    rank, tables = weight.process_group.rank(), weight.metadata().shards_metadata
    positions, source, target = _routes(weight, lookup, ids)
    local = [places for shard, places in zip(tables, positions, strict=True) if shard.rank == dist.get_rank()]
    shards = zip(weight.tensors, weight.boxes, local, strict=True)
    sent = [_partial(table, box, lookup, places).unsqueeze(0) for table, box, places in shards]
    route = transfer(source, target, rank=rank), source[rank], target[rank]
    anchor = stand_in(weight, lookup.weights)
    received, anchor = moved(sent, route, group=weight.process_group, anchor=anchor)
    results = []
    for index, batch in enumerate(ids.boxes):
        begin, end = _span(batch, lookup, ids)
        parts = [tensor.squeeze(0) for tensor in received[index :: len(ids.tensors)]]
        if lookup.mode == "row":
            inside = [places[(places >= begin) & (places < end)] - begin for places in positions]
            parts = [_spread(part, places, end - begin) for part, places in zip(parts, inside, strict=True)]
        boxed = [(shard.box, part) for shard, part in zip(tables, parts, strict=True)]
        results.append(lookup.finish(_total(boxed, end - begin, weight.shape[1], anchor), begin))
    trailing = ids.shape[1:] if lookup.mode == "row" else ()
    return like_ids(ids, results, anchor, trailing=(*trailing, weight.shape[1]))


def _routes(
    weight: ShardedTensor, lookup: Lookup, ids: ShardedTensor
) -> tuple[list[Tensor], list[list[Box]], list[list[Box]]]:
    """Return the positions of ids by shard of the table that has their rows; source and target boxes by rank.

    A box is of one shard of the table, of the rows that it makes (one for each of its ids, or all bags) and
    of its columns. Rows for one shard of the ids lie together; a rank wants for each of its own some of each
    shard of the table, in their order.
    """
    tables, batches = weight.metadata().shards_metadata, ids.metadata().shards_metadata
    edges = torch.tensor([edge for shard in batches for edge in _span(shard.box, lookup, ids)])
    positions = [lookup.within(shard.box) for shard in tables]
    source: dict[int, list[Box]] = defaultdict(list)
    target: dict[int, list[Box]] = defaultdict(list)
    for number, (table, places) in enumerate(zip(tables, positions, strict=True)):
        columns, by_row = table.box.sizes[1], lookup.mode == "row"
        cuts = torch.searchsorted(places.cpu(), edges) if by_row else edges
        source[table.rank].append(Box((number, 0, 0), (1, len(places) if by_row else lookup.bags, columns)))
        for batch, (begin, end) in zip(batches, cuts.view(-1, 2).tolist(), strict=True):
            target[batch.rank].append(Box((number, begin, 0), (1, end - begin, columns)))
    ranks = dist.get_process_group_ranks(weight.process_group)
    return positions, [source[rank] for rank in ranks], [target[rank] for rank in ranks]


def _span(box: Box, lookup: Lookup, ids: ShardedTensor) -> tuple[int, int]:
    """Return the first and last row of the flat result that the ids in `box` make."""
    rows_per_id = math.prod(ids.shape[1:]) if lookup.mode == "row" else 1
    begin = box.offsets[0]
    return begin * rows_per_id, (begin + _rows(box, ids)) * rows_per_id


def _rows(box: Box, ids: ShardedTensor) -> int:
    """Count the rows of ids, of full size, in a shard of them."""
    return box.sizes[0] if box.sizes[1:] == tuple(ids.shape[1:]) else 0


def like_ids(
    ids: ShardedTensor, results: Sequence[Tensor], anchor: Tensor, *, trailing: Sequence[int]
) -> ShardedTensor:
    """Return `results`, flat by row, in shape (len(ids), *rest), cut as `ids` along dim 0."""

    def of_result(box: Box) -> Box:
        return Box((box.offsets[0], *(0 for _ in trailing)), (_rows(box, ids), *trailing))

    metadata = ids.metadata().map((ids.shape[0], *trailing), of_result)
    shaped = [rows.reshape(_rows(box, ids), *trailing) for rows, box in zip(results, ids.boxes, strict=True)]
    return ids.with_tensors(shaped, metadata=metadata, anchor=anchor)


_RIGHT, _HASH, _IDS, _BAGS = range(4)  # columns of the ranks' descriptions of their lookups


def compare_ids(make: Callable[[], Lookup], weight: ShardedTensor) -> tuple[Lookup, list[tuple[int, int]]]:
    """Return this rank's lookup in `weight`; for each rank its numbers of ids and bags where ids differ.

    Collective. An error of `make` on any rank raises on all.
    """
    group, device = weight.process_group, weight.anchor.device
    if is_outside(group) or group.size() == 1:
        return make(), []
    lookup, error = None, None
    with failure.comparing("rows of a table", device=device, group=group, subject="what to look up"):
        try:
            lookup = make()
        except Exception as caught:  # of one rank's ids: the others must hear of it
            error = caught
    if lookup is not None and lookup.ids.is_meta:
        return lookup, []
    counts = torch.zeros(group.size(), 4, dtype=torch.int64)
    if lookup is not None:
        ids = fingerprint(f"{lookup.shape} {lookup.bags}", lookup.ids.to(torch.int64), lookup.bag)
        counts[group.rank()] = torch.tensor([1, ids, len(lookup.ids), lookup.bags])
    on_group = counts if lookup is None else counts.to(lookup.ids.device)
    counts = all_reduced(on_group, group).cpu()
    if not counts[:, _RIGHT].all():
        try:
            together("looking up ids", lambda: bool(make()), group=group, kind=ShardingError)
        except ShardingError as group_error:
            raise (error or group_error) from group_error.__cause__
    assert lookup is not None
    if (counts[:, _HASH] == counts[0, _HASH]).all():
        return lookup, []
    return lookup, [(ids, bags) for ids, bags in counts[:, [_IDS, _BAGS]].tolist()]


def join_lookups(
    lookup: Lookup, counts: Sequence[tuple[int, int]], group: dist.ProcessGroup
) -> tuple[Lookup, ShardedTensor]:
    """Join the lookups of all ranks, and make a tensor cut as the results. Collective."""
    starts = [0, *itertools.accumulate(bags for _, bags in counts)]
    id_counts = [ids for ids, _ in counts]
    pairs = torch.stack([lookup.ids.to(torch.int64), lookup.bag + starts[group.rank()]], 1)
    ids, bag = _shard_rows(pairs, id_counts, group).full_tensor().unbind(1)
    weights = lookup.weights
    if weights is not None:
        weights = replicated(_shard_rows(weights, id_counts, group).full_tensor(), group)
    nothing = lookup.ids.new_zeros(()).expand(lookup.bags)
    joined = replace(lookup, ids=ids, bag=bag, bags=starts[-1], weights=weights)
    return joined, _shard_rows(nothing, [n for _, n in counts], group)


def _shard_rows(rows: Tensor, lengths: Sequence[int], group: dist.ProcessGroup) -> ShardedTensor:
    """Return the tensor of all ranks' rows, one rank after another; differentiable."""
    ranks = dist.get_process_group_ranks(group)
    spec = RaggedShardingSpec(0, lengths, [f"rank:{rank}/{rows.device.type}" for rank in ranks])
    properties = TensorProperties(rows.dtype, requires_grad=rows.requires_grad)
    metadata = spec.build_metadata(torch.Size([sum(lengths), *rows.shape[1:]]), properties)
    shard = Shard(rows, metadata.shards_metadata[group.rank()])
    return ShardedTensor.wrap([shard], metadata, process_group=group, anchor=rows.reshape(-1)[:0])
