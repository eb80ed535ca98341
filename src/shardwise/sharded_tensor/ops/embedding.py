"""Lookups in a sharded table: `embedding` and `embedding_bag`, and so `nn.Embedding` and `nn.EmbeddingBag`.

    ids                   table                    result                        communication
    plain                 cut along columns only   sharded, cut along the last   none
    plain                 any other boxes          plain                         one all-reduce of it
    of each rank, plain   any boxes                plain: of each rank's ids     ids to all, rows to each rank
    sharded along dim 0   any boxes                sharded like the ids          ids to all, rows to holders
    sharded along dim 0   plain                    sharded like the ids          ids to all

Ranks first compare plain ids in a small all-reduce (`ops.lookup`). A table that one rank holds completely
counts as "any other boxes". Gradients go back in the same way; `sparse=True` gives local shards sparse ones.
For bags, ids sharded along dim 0 have shape (bags, ids in each); their maximum (`mode="max"`) needs all rows
in every shard, `max_norm` all columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.errors import ShardingError, here
from shardwise.layout import Box
from shardwise.sharded_tensor.autograd import linked, replicated
from shardwise.sharded_tensor.ops.lookup import (
    Lookup,
    compare_ids,
    join_lookups,
    like_ids,
    stand_in,
    to_all,
    to_holders,
)
from shardwise.sharded_tensor.ops.operands import by_name, check_group, parts, probe, unsharded
from shardwise.sharded_tensor.refuse import refuse_case
from shardwise.sharded_tensor.registry import Args, Kwargs, handles
from shardwise.sharded_tensor.tensor import ShardedTensor


@handles(F.embedding, F.embedding_bag)
def _look_up(func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    options = by_name(func, args, kwargs)
    names = ("input", "weight", "max_norm", "norm_type", "scale_grad_by_freq")
    input, weight, max_norm, norm_type, by_freq = (options.pop(name) for name in names)
    if isinstance(weight, ShardedTensor):
        _check_cut(func, weight, max_norm, options.get("mode"))
    make = partial(_make_lookup, func, input, weight, options)
    local, holders = None, input if isinstance(input, ShardedTensor) else None
    if holders is not None or not isinstance(weight, ShardedTensor):
        lookup = make()
    else:
        lookup, counts = compare_ids(make, weight)
        if counts:  # each rank has ids of its own, and its part of the result
            local, (lookup, holders) = lookup, join_lookups(lookup, counts, weight.process_group)
    options["padding_idx"] = lookup.padding
    if by_freq and options["sparse"]:
        raise ShardingError(
            f"{here()}: scale_grad_by_freq needs dense gradients, found sparse=True; pass sparse=False"
        )
    if max_norm is not None:
        _renormalize(weight, lookup.ids, max_norm, norm_type)
    weight = _divide_by_frequency(weight, lookup.ids) if by_freq else weight
    if not isinstance(weight, ShardedTensor):
        return _look_up_plain(func, cast(ShardedTensor, input), weight, options)
    weights = options.get("per_sample_weights")
    if local is not None and isinstance(weights, ShardedTensor):
        raise ShardingError(
            f"{here()}: embedding_bag of each rank's own ids takes its own per_sample_weights, found sharded"
            " ones; pass ids sharded alike"
        )
    if local is None and weights is not None:
        weights = replicated(unsharded(weights), weight.process_group)
        options = {**options, "per_sample_weights": weights}
        lookup = replace(lookup, weights=weights.reshape(-1)[: len(lookup.bag)])
    if holders is not None:
        result = to_holders(weight, lookup, holders)
        return result if local is None else result.tensors[0].reshape(*_lead(local), weight.shape[1])
    nonempty = sum(not shard.box.is_empty for shard in weight.metadata().shards_metadata)
    # Whether every shard has all rows, and no shard all columns.
    if nonempty > 1 and not weight.metadata().is_cut((0,)):
        return _on_columns(weight, _lead(lookup), lambda table: func(input, table, **options), weights)
    return to_all(weight, lookup).reshape(*_lead(lookup), weight.shape[1])


def _make_lookup(func: Any, ids: Tensor, weight: Tensor, options: dict[str, Any]) -> Lookup:
    offsets, weights = options.get("offsets"), options.get("per_sample_weights")
    # On the meta device torch checks the arguments, in its own words, and allocates nothing.
    probes = {name: probe(value) if isinstance(value, Tensor) else value for name, value in options.items()}
    result = func(probe(ids), probe(weight), **probes)
    _check(ids, weight, func.__name__, offsets)
    ids, rows = unsharded(ids), weight.shape[0]
    if ids.numel() and not ids.is_meta and bool(((ids < 0) | (ids >= rows)).any()):
        raise ShardingError(
            f"{here()}: ids of an embedding lie in [0, {rows}), found {int(ids.min())} to {int(ids.max())};"
            " give the table more rows or drop those ids"
        )
    if func is F.embedding:
        mode, bags = "row", ids.numel()
        bag = torch.arange(bags, device=ids.device)
    else:
        mode, bags = options["mode"], result.shape[0]
        bag = _bags_of_ids(ids, offsets, bags, options["include_last_offset"])
    padding, flat = options["padding_idx"], ids.reshape(-1)[: len(bag)]
    padding = None if padding is None else padding % max(1, rows)
    is_plain = isinstance(weights, Tensor) and not isinstance(weights, ShardedTensor)
    factors = cast(Tensor, weights).reshape(-1)[: len(bag)] if is_plain else None
    return Lookup(flat, bag, bags, mode, padding, tuple(ids.shape), factors, options["sparse"])


def _lead(lookup: Lookup) -> tuple[int, ...]:
    """Return the result's dims before the columns."""
    return lookup.shape if lookup.mode == "row" else (lookup.bags,)


def _check_cut(func: Any, weight: ShardedTensor, max_norm: float | None, mode: str | None) -> None:
    if mode == "max" and weight.metadata().is_cut((0,)):
        reason = "the greatest of a bag needs all rows of the table in every shard"
        hint = "cut it by columns, with reshard(), or pass mode='sum' or 'mean'"
        refuse_case(func.__name__, weight, reason=reason, hint=hint)
    if max_norm is not None and weight.metadata().is_cut((1,)):
        reason = "max_norm needs whole rows of the table in every shard"
        hint = "cut it by rows, with reshard()"
        refuse_case(func.__name__, weight, reason=reason, hint=hint)


def _check(ids: Tensor, weight: Tensor, name: str, offsets: Tensor | None) -> None:
    """Raise unless `ids` can be looked up in `weight`; reads metadata alone, so that all ranks raise."""
    if isinstance(offsets, ShardedTensor) or (offsets is not None and isinstance(ids, ShardedTensor)):
        raise ShardingError(
            f"{here()}: {name} takes offsets, with ids of one dim, as plain tensors, equal on every rank;"
            " pass full_tensor() of both, or ids of shape (bags, ids in each) sharded along dim 0"
        )
    if not isinstance(ids, ShardedTensor):
        if not isinstance(weight, ShardedTensor):
            raise ShardingError(
                f"{here()}: {name} of plain ids in a plain table takes plain per_sample_weights; pass their"
                " full_tensor()"
            )
        return
    if not ids.ndim or ids.metadata().is_cut(range(1, ids.ndim)):
        raise ShardingError(
            f"{here()}: {name} takes ids sharded along dim 0, found shape {tuple(ids.shape)} by"
            f" {ids.sharding_spec()!r}; call .reshard(ChunkShardingSpec(0, ...)) on them, or pass their"
            " full_tensor()"
        )
    if isinstance(weight, ShardedTensor):
        check_group(weight, ids)


def _bags_of_ids(ids: Tensor, offsets: Tensor | None, bags: int, include_last_offset: bool) -> Tensor:
    """Return [ids] the bag of each id, ascending; without ids after an included last offset."""
    numbers = torch.arange(bags, device=ids.device)
    if offsets is None:
        return numbers.repeat_interleave(ids.shape[1])
    ends = offsets if include_last_offset else torch.cat([offsets, offsets.new_tensor([ids.numel()])])
    sizes = ends.diff()
    if len(ends) and (int(ends[0]) != 0 or int(ends[-1]) > ids.numel() or bool((sizes < 0).any())):
        raise ShardingError(
            f"{here()}: offsets of embedding_bag begin with 0, ascend, and end within the {ids.numel()} ids,"
            f" found {offsets.tolist()}"
        )
    return numbers.repeat_interleave(sizes.to(numbers.device))


def _divide_by_frequency(weight: Tensor, ids: Tensor) -> Tensor:
    """Return `weight` with each row's gradient divided by its number of occurrences in `ids`. Local."""
    counts = torch.bincount(ids.reshape(-1), minlength=weight.shape[0]).clamp(min=1).unsqueeze(1)

    def divide(table: Tensor, counts: Tensor) -> Tensor:
        return cast(Tensor, linked(lambda t: t.view_as(t), lambda grad: (grad / counts,), table))

    if not isinstance(weight, ShardedTensor):
        return divide(weight, counts)
    shards = zip(weight.tensors, weight.boxes, strict=True)
    tensors = [divide(table, counts[box.offsets[0] : box.ends[0]]) for table, box in shards]
    return weight.with_tensors(tensors, anchor=weight.anchor)


@torch.no_grad()
def _renormalize(weight: Tensor, ids: Tensor, max_norm: float, norm_type: float) -> None:
    """Scale, in place, the rows that `ids` name down to a norm of at most `max_norm`. Local."""
    if not isinstance(weight, ShardedTensor):
        torch.embedding_renorm_(weight.detach(), ids, max_norm, norm_type)
        return
    rows = ids.unique()
    for table, box in zip(weight.tensors, weight.boxes, strict=True):
        local_rows = rows[(rows >= box.offsets[0]) & (rows < box.ends[0])]
        if local_rows.numel() and not box.is_empty:
            torch.embedding_renorm_(table.detach(), local_rows - box.offsets[0], max_norm, norm_type)


def _on_columns(
    weight: ShardedTensor, lead: Sequence[int], lookup: Any, weights: Tensor | None
) -> ShardedTensor:
    """Look up each shard's columns of the result, of shape (*lead, columns)."""

    def of_result(box: Box) -> Box:
        columns = 0 if box.is_empty else box.sizes[1]
        return Box((*(0 for _ in lead), box.offsets[1]), (*lead, columns))

    metadata = weight.metadata().map((*lead, weight.shape[1]), of_result)
    anchor = stand_in(weight, weights)
    shards = zip(weight.tensors, weight.boxes, strict=True)
    nothing = anchor.new_zeros((*lead, 0)) + anchor.sum()
    tensors = [nothing + table.sum() if box.is_empty else lookup(table) for table, box in shards]
    return weight.with_tensors(tensors, metadata=metadata, anchor=anchor)


def _look_up_plain(lookup: Any, ids: ShardedTensor, table: Tensor, options: dict[str, Any]) -> ShardedTensor:
    """Look up each rank's own ids in a table that all ranks have."""
    if options["sparse"]:
        raise ShardingError(
            f"{here()}: {lookup.__name__} of sharded ids in a plain table has a gradient summed over ranks,"
            " which is dense; pass sparse=False, or shard the table"
        )
    table = replicated(table, ids.process_group)
    pieces = parts(options.get("per_sample_weights"), leader=ids, metadata=ids.metadata())
    results = []
    for local_ids, piece in zip(ids.tensors, pieces, strict=False):
        if local_ids.shape[1:] != ids.shape[1:]:  # rows of no ids are no rows
            local_ids = local_ids.new_zeros((0, *ids.shape[1:]))
            piece = None if piece is None else piece.reshape(-1)[:0].reshape(local_ids.shape)
        arguments = options if piece is None else {**options, "per_sample_weights": piece}
        results.append(lookup(local_ids, table, **arguments))
    inputs = [table, *(piece for piece in pieces if piece is not None)]
    anchor = torch.cat([tensor.reshape(-1)[:0].to(table.dtype) for tensor in inputs])
    trailing = ids.shape[1:] if lookup is F.embedding else ()
    return like_ids(ids, results, anchor, trailing=(*trailing, table.shape[1]))
