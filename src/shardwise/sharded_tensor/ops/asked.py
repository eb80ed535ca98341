"""Plain ids for a sharded table: one batch that all ranks have, or one of each rank.

Ranks tell each other a hash of their ids, in one small all-reduce:

    equal on all ranks     one batch, replicated as any plain tensor: every rank gets the same result
    not                    each rank's own: it gets the rows of its ids, and the table's gradient is the sum
                           of all ranks'. Ids go to all ranks, rows to the rank that asks (`table.to_holders`)

What is wrong with one rank's ids raises on all ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.agree import fingerprint, together
from shardwise.errors import ShardingError
from shardwise.sharded_tensor.autograd import all_reduced, replicated
from shardwise.sharded_tensor.group import is_outside
from shardwise.sharded_tensor.metadata import Shard, TensorProperties
from shardwise.sharded_tensor.ops.table import Lookup
from shardwise.sharded_tensor.spec import RaggedShardingSpec
from shardwise.sharded_tensor.tensor import ShardedTensor

_RIGHT, _HASH, _IDS, _BAGS = range(4)  # what ranks tell each other of what they ask for


def compared(ask: Callable[[], Lookup], group: dist.ProcessGroup) -> tuple[Lookup, list[tuple[int, int]]]:
    """Return this rank's lookup; for each rank its numbers of ids and bags where ranks' ids differ.

    Collective over `group`. An error of `ask` on any rank raises on all.
    """
    if is_outside(group) or group.size() == 1:
        return ask(), []
    asked, error = None, None
    try:
        asked = ask()
    except Exception as wrong:  # of one rank's ids: the others must hear of it
        error = wrong
    if asked is not None and asked.ids.is_meta:
        return asked, []
    told = torch.zeros(group.size(), 4, dtype=torch.int64)
    if asked is not None:
        ids = fingerprint(f"{asked.shape} {asked.bags}", asked.ids.to(torch.int64), asked.bag)
        told[group.rank()] = torch.tensor([1, ids, len(asked.ids), asked.bags])
    on_group = told if asked is None else told.to(asked.ids.device)
    told = all_reduced(on_group, group).cpu()
    if not told[:, _RIGHT].all():
        try:
            together("looking up ids", lambda: _raise(error), group=group, kind=ShardingError)
        except ShardingError as everywhere:
            raise (error or everywhere) from everywhere.__cause__
    assert asked is not None
    if (told[:, _HASH] == told[0, _HASH]).all():
        return asked, []
    return asked, [(ids, bags) for ids, bags in told[:, [_IDS, _BAGS]].tolist()]


def of_all(
    asked: Lookup, counts: Sequence[tuple[int, int]], group: dist.ProcessGroup
) -> tuple[Lookup, ShardedTensor]:
    """Join the lookups of all ranks, and make a tensor cut as the results. Collective."""
    starts = [0, *itertools.accumulate(bags for _, bags in counts)]
    each = [ids for ids, _ in counts]
    pairs = torch.stack([asked.ids.to(torch.int64), asked.bag + starts[group.rank()]], 1)
    ids, bag = _by_rank(pairs, each, group).full_tensor().unbind(1)
    weights = asked.weights
    if weights is not None:
        weights = replicated(_by_rank(weights, each, group).full_tensor(), group)
    nothing = asked.ids.new_zeros(()).expand(asked.bags)
    everyones = replace(asked, ids=ids, bag=bag, bags=starts[-1], weights=weights)
    return everyones, _by_rank(nothing, [n for _, n in counts], group)


def _by_rank(mine: Tensor, lengths: Sequence[int], group: dist.ProcessGroup) -> ShardedTensor:
    """Return every rank's rows, after each other; differentiable."""
    ranks = dist.get_process_group_ranks(group)
    spec = RaggedShardingSpec(0, lengths, [f"rank:{rank}/{mine.device.type}" for rank in ranks])
    properties = TensorProperties(mine.dtype, requires_grad=mine.requires_grad)
    metadata = spec.build_metadata(torch.Size([sum(lengths), *mine.shape[1:]]), properties)
    shard = Shard(mine, metadata.shards_metadata[group.rank()])
    return ShardedTensor.wrap([shard], metadata, process_group=group, anchor=mine.reshape(-1)[:0])


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error
