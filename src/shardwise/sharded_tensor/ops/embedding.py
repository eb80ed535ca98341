"""Lookups in a sharded table: `embedding` and `embedding_bag`, and so `nn.Embedding` and `nn.EmbeddingBag`.

    ids                   table                        result                        communication
    plain                 cut along columns only       sharded, cut along the last   none
    plain                 any other boxes              plain                         one all-reduce of it
    plain, other ones     any boxes                    plain: of each rank's ids     ids to all, rows to
    on each rank                                                                     the ids' ranks
    sharded along dim 0   any boxes                    sharded like the ids          ids to all, rows to
                                                                                     the ids' holders
    sharded along dim 0   plain                        sharded like the ids          ids to all

Ranks compare plain ids in a small all-reduce before (`ops.asked`), for which table they may be.
A table of which one rank holds all counts among the other boxes. Gradients go back the same way;
`sparse=True` gives local shards sparse ones. Ids sharded along dim 0 have (bags, ids in each) for bags.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.errors import ShardingError, here
from shardwise.layout import Box
from shardwise.sharded_tensor.autograd import replicated
from shardwise.sharded_tensor.ops.arguments import called_as, probe
from shardwise.sharded_tensor.ops.asked import compared, of_all
from shardwise.sharded_tensor.ops.operands import check_group, like
from shardwise.sharded_tensor.ops.table import (
    Lookup,
    by_frequency,
    like_ids,
    renormalize,
    stand_in,
    to_all,
    to_holders,
)
from shardwise.sharded_tensor.tensor import ShardedTensor

# ------------------------------------------------------------ the two functions


@called_as(F.embedding)
def _embed(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    def ask() -> Lookup:
        # On the meta device torch checks the arguments, in its own words, and allocates nothing.
        F.embedding(probe(input), probe(weight), padding_idx)
        _check(input, weight, "embedding")
        ids = _whole_ids(input, weight)
        bag = torch.arange(ids.numel(), device=ids.device)
        return Lookup(ids.reshape(-1), bag, len(bag), "row", padding, tuple(ids.shape), sparse=sparse)

    padding = _padding(padding_idx, weight)
    options = {"padding_idx": padding, "sparse": sparse}
    return _looked_up(F.embedding, ask, input, weight, options, (max_norm, norm_type), scale_grad_by_freq)


@called_as(F.embedding_bag)
def _embed_bags(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    given: Any = {
        "offsets": offsets,
        "mode": mode,
        "sparse": sparse,
        "per_sample_weights": per_sample_weights,
        "include_last_offset": include_last_offset,
        "padding_idx": padding_idx,
    }

    def ask() -> Lookup:
        shown: Any = {
            key: probe(value) if isinstance(value, Tensor) else value for key, value in given.items()
        }
        bags = F.embedding_bag(
            probe(input), probe(weight), scale_grad_by_freq=scale_grad_by_freq, **shown
        ).shape[0]
        _check(input, weight, "embedding_bag", offsets)
        ids = _whole_ids(input, weight)
        bag = _bag_of_each(ids, offsets, bags, include_last_offset)
        weights = per_sample_weights
        if weights is not None:
            weights = None if isinstance(weights, ShardedTensor) else weights.reshape(-1)[: len(bag)]
        flat = ids.reshape(-1)[: len(bag)]
        padding = _padding(padding_idx, weight)
        return Lookup(flat, bag, bags, mode, padding, tuple(ids.shape), weights=weights, sparse=sparse)

    options = {**given, "padding_idx": _padding(padding_idx, weight)}
    return _looked_up(F.embedding_bag, ask, input, weight, options, (max_norm, norm_type), scale_grad_by_freq)


def _looked_up(
    func: Any,
    ask: Callable[[], Lookup],
    input: Tensor,
    weight: Tensor,
    options: dict[str, Any],
    norm: tuple[float | None, float],
    by_freq: bool,
) -> Tensor:
    """`func(input, weight, **options)` of what `ask` checks and says. Collective."""
    look, own, holders = _asked(ask, input, weight)
    if by_freq and options["sparse"]:
        raise ShardingError(
            f"{here()}: scale_grad_by_freq needs dense gradients, found sparse=True; pass sparse=False"
        )
    if norm[0] is not None:
        renormalize(weight, look.ids, max_norm=norm[0], norm_type=norm[1])
    weight = by_frequency(weight, look.ids) if by_freq else weight
    if not isinstance(weight, ShardedTensor):
        return _in_plain_table(func, cast(ShardedTensor, input), weight, options)
    weights = options.get("per_sample_weights")
    if own is not None and isinstance(weights, ShardedTensor):
        raise ShardingError(
            f"{here()}: embedding_bag of each rank's own ids takes its own per_sample_weights, found sharded"
            " ones; pass ids sharded alike"
        )
    if own is None and weights is not None:
        weights = replicated(_whole(weights), weight.process_group)
        options = {**options, "per_sample_weights": weights}
        look = replace(look, weights=weights.reshape(-1)[: len(look.bag)])
    if holders is None:
        lead = _lead(look)
        if _by_columns(weight):
            extra = [] if weights is None else [weights]
            return _on_columns(weight, lead, lambda table: func(input, table, **options), extra)
        return to_all(weight, look).reshape(*lead, weight.shape[1])
    made = to_holders(weight, look, holders)
    return made if own is None else made.tensors[0].reshape(*_lead(own), weight.shape[1])


def _lead(look: Lookup) -> tuple[int, ...]:
    """The result's dims before the columns."""
    return look.shape if look.mode == "row" else (look.bags,)


def _padding(padding_idx: int | None, weight: Tensor) -> int | None:
    return None if padding_idx is None else padding_idx % max(1, weight.shape[0])


def _asked(
    ask: Callable[[], Lookup], input: Tensor, weight: Tensor
) -> tuple[Lookup, Lookup | None, ShardedTensor | None]:
    """What is looked up, by all ranks together; what by this one, if each has ids of its own; and a tensor
    cut as the result is to be, None where every rank is to have all of it. Collective.
    """
    if isinstance(input, ShardedTensor) or not isinstance(weight, ShardedTensor):
        return ask(), None, input if isinstance(input, ShardedTensor) else None
    own, counts = compared(ask, weight.process_group)
    if not counts:
        return own, None, None
    everyones, holders = of_all(own, counts, weight.process_group)
    return everyones, own, holders


# ------------------------------------------------------------ arguments


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, ShardedTensor) else tensor


def _whole_ids(ids: Tensor, weight: Tensor) -> Tensor:
    ids, rows = _whole(ids), weight.shape[0]
    if ids.numel() and not ids.is_meta and bool(((ids < 0) | (ids >= rows)).any()):
        raise ShardingError(
            f"{here()}: ids of an embedding lie in [0, {rows}), found {int(ids.min())} to {int(ids.max())};"
            " give the table more rows or drop those ids"
        )
    return ids


def _check(ids: Tensor, weight: Tensor, name: str, offsets: Tensor | None = None) -> None:
    """Can these be looked up? By metadata alone, so that all ranks find the same."""
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
    rest = tuple(ids.shape[1:])
    cuts = [shard.box for shard in ids.metadata().shards_metadata]
    if not ids.ndim or any(box.sizes[1:] != rest and not box.is_empty for box in cuts):
        raise ShardingError(
            f"{here()}: {name} takes ids sharded along dim 0, found shape {tuple(ids.shape)} by"
            f" {ids.sharding_spec()!r}; call .reshard(ChunkShardingSpec(0, ...)) on them, or pass their"
            " full_tensor()"
        )
    if isinstance(weight, ShardedTensor):
        check_group(weight, ids)


def _bag_of_each(ids: Tensor, offsets: Tensor | None, bags: int, include_last_offset: bool) -> Tensor:
    """[ids] the bag that each is in, ascending; without those after an included last offset."""
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


# ------------------------------------------------------------ a table cut along columns


def _by_columns(weight: ShardedTensor) -> bool:
    """Has every shard all rows, and no shard all columns?"""
    filled = [s.box for s in weight.metadata().shards_metadata if not s.box.is_empty]
    return len(filled) > 1 and all(box.sizes[0] == weight.shape[0] for box in filled)


def _on_columns(
    weight: ShardedTensor, lead: Sequence[int], lookup: Any, extra: Sequence[Tensor] = ()
) -> ShardedTensor:
    """Each shard's columns of the result, of shape `lead` and those. `extra` takes part in gradients."""

    def of_result(box: Box) -> Box:
        columns = 0 if box.is_empty else box.sizes[1]
        return Box((*(0 for _ in lead), box.offsets[1]), (*lead, columns))

    metadata = weight.metadata().map((*lead, weight.shape[1]), of_result)
    anchor = stand_in(weight, extra)
    tensors = [
        anchor.new_zeros((*lead, 0)) + table.sum() + anchor.sum() if box.is_empty else lookup(table)
        for table, box in zip(weight.tensors, weight.boxes, strict=True)
    ]
    return weight.with_tensors(tensors, metadata=metadata, anchor=anchor)


def _in_plain_table(lookup: Any, ids: ShardedTensor, table: Tensor, options: dict[str, Any]) -> ShardedTensor:
    """Each rank looks up its own ids in a table that all ranks have."""
    if options["sparse"]:
        raise ShardingError(
            f"{here()}: {lookup.__name__} of sharded ids in a plain table has a gradient summed over ranks,"
            " which is dense; pass sparse=False, or shard the table"
        )
    table = replicated(table, ids.process_group)
    pieces: list[Any] = [None] * len(ids.tensors)
    nothing = [table]
    if options.get("per_sample_weights") is not None:
        pieces = like(ids, options["per_sample_weights"])
        nothing += pieces
    results = []
    for mine, piece in zip(ids.tensors, pieces, strict=False):
        if mine.shape[1:] != ids.shape[1:]:  # rows of no ids are no rows
            mine = mine.new_zeros((0, *ids.shape[1:]))
            piece = None if piece is None else piece.reshape(-1)[:0].reshape(mine.shape)
        given = options if piece is None else {**options, "per_sample_weights": piece}
        results.append(lookup(mine, table, **given))
    anchor = torch.cat([tensor.reshape(-1)[:0].to(table.dtype) for tensor in nothing])
    rest = ids.shape[1:] if lookup is F.embedding else ()
    return like_ids(ids, results, anchor, rest=(*rest, table.shape[1]))
