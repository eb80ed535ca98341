"""Parts of sharded tensors, and tensors made of several. No communication.

An index of ints, slices, None and `...` keeps the shards that hold some of the selected elements, on their
ranks; the result lacks the others, so some ranks may have no shard. Kept parts are views of the shard's
memory: in-place operations on `st[2:4]` write `st`, as in torch. Indices that are tensors, lists or bools
would move elements between ranks, and are refused. One exception: a number can be assigned through a mask of
the same shape, plain or of the same cut.

`cat` and `stack` of tensors of one cut, whole in the dim that grows, join each shard with its counterparts.
In all other cases every shard of every operand is kept (in new memory), so a rank has the shards of all.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from shardwise.errors import ShardingError
from shardwise.layout import Box, cover
from shardwise.layout.regroup import Pick, pick_box
from shardwise.sharded_tensor.autograd import tied
from shardwise.sharded_tensor.base import first_sharded
from shardwise.sharded_tensor.metadata import ShardMetadata
from shardwise.sharded_tensor.ops.operands import anchor_of, check_group, functions, parts, probe, rule
from shardwise.sharded_tensor.ops.shape import assemble, derive, split_operand
from shardwise.sharded_tensor.refuse import refuse, refuse_case
from shardwise.sharded_tensor.registry import Args, Kwargs, handles
from shardwise.sharded_tensor.tensor import ShardedTensor

_T: Any = Tensor


@rule(_T.__getitem__, takes="input index")
def _getitem(func: Any, sharded: ShardedTensor, index: Any) -> ShardedTensor:
    items = [_item(sharded, item) for item in (index if isinstance(index, tuple) else (index,))]
    size = probe(sharded)[tuple(items)].shape  # raises what torch raises for such an index
    indexed = sum(item is not None and item is not Ellipsis for item in items)
    ellipsis = items.index(Ellipsis) if Ellipsis in items else len(items)
    items[ellipsis : ellipsis + 1] = [slice(None)] * (sharded.ndim - indexed)
    lengths = iter(sharded.metadata().size)
    return _pick(sharded, [item if item is None else range(next(lengths))[item] for item in items], size)


def _item(sharded: ShardedTensor, item: Any) -> Any:
    """Return an item of an index; an int in place of a tensor of one element."""
    if isinstance(item, Tensor) and not isinstance(item, ShardedTensor) and item.ndim == 0:
        item = item.item()
    if item is None or item is Ellipsis or isinstance(item, slice):
        return item
    try:
        if isinstance(item, (bool, Tensor)):
            raise TypeError
        return operator.index(item)
    except TypeError:
        found = f"a tensor of shape {tuple(item.shape)}" if isinstance(item, Tensor) else repr(item)
        refuse_case(
            "indexing",
            sharded,
            reason=f"an index is of ints, slices, None and ..., found {found}",
            hint="for rows of a table use torch.nn.functional.embedding; to fill by a mask, masked_fill or"
            " torch.where; otherwise full_tensor()[...]",
        )


def _pick(sharded: ShardedTensor, picks: Sequence[Pick], size: Sequence[int]) -> ShardedTensor:
    """Apply `picks` to every shard, for a tensor of `size`; views. Local."""
    picked = [pick_box(shard.box, picks) for shard in sharded.metadata().shards_metadata]
    boxes = [None if part is None else part[0] for part in picked]
    if all(box is None for box in boxes):  # of a tensor without elements: one shard must remain
        boxes[0] = Box.whole(size)

    def make(tensor: Tensor, number: int, box: Box) -> Tensor:
        part = picked[number]
        return tensor.reshape(box.sizes) if part is None else tensor[part[1]]

    return derive(sharded, size=size, boxes=boxes, make=make)


@rule(_T.__setitem__, takes="input index value")
def _setitem(func: Any, sharded: ShardedTensor, index: Any, value: Any) -> None:
    if torch.is_grad_enabled() and sharded.requires_grad and sharded.is_leaf:
        reason = "it is not differentiable on a leaf of the autograd graph"
        hint = "assign within torch.no_grad(), or to a clone()"
        refuse_case("assignment to an index", sharded, reason=reason, hint=hint)
    is_scalar = not isinstance(value, Tensor) or value.ndim == 0
    if isinstance(index, Tensor) and index.dtype == torch.bool and index.shape == sharded.shape and is_scalar:
        cast(Tensor, sharded).masked_fill_(index, value)
        return
    part = _getitem(func, sharded, index)
    if isinstance(value, Tensor):
        probe(part).copy_(probe(value))  # raises on every rank what torch raises
        part.copy_(value)
        return
    probe(part).fill_(value)
    cast(Tensor, part).fill_(value)


@handles(*functions("narrow select unbind chunk split split_with_sizes tensor_split"))
def _along(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Cut along one dim; torch's own result for a tensor of that dim determines the elements of each part."""
    sharded, rest, kwargs = split_operand(args, kwargs)
    rest = tuple(value.tolist() if isinstance(value, Tensor) else value for value in rest)
    kwargs = {name: v.tolist() if isinstance(v, Tensor) else v for name, v in kwargs.items()}
    func(probe(sharded), *rest, **kwargs)  # raises what torch raises
    position = 0 if func.__name__ in ("narrow", "select", "unbind") else 1
    if len(rest) > position:
        dim, rest = rest[position], (*rest[:position], 0, *rest[position + 1 :])
    else:
        dim, kwargs = kwargs.get("dim", 0), {**kwargs, "dim": 0}
    dim %= sharded.ndim
    size = sharded.metadata().size
    parts = func(torch.empty(size[dim], device="meta"), *rest, **kwargs)

    def make_part(view: Tensor) -> ShardedTensor:
        first, count = int(view.storage_offset()), [len(view)] if view.ndim else []
        picks: list[Pick] = [*map(range, size)]
        picks[dim] = range(first, first + count[0]) if count else first
        return _pick(sharded, picks, [*size[:dim], *count, *size[dim + 1 :]])

    return make_part(parts) if isinstance(parts, Tensor) else type(parts)(map(make_part, parts))


@handles(torch.cat, torch.concat, torch.concatenate, torch.stack)
def _join(func: Any, args: Args, kwargs: Kwargs) -> ShardedTensor:
    """Return the tensors one after another along `dim`, in new memory. Local.

    Plain ones are replicated, and may be joined with sharded ones that are whole in `dim`.
    """
    values = dict(zip(("tensors", "dim"), args, strict=False)) | kwargs
    tensors, dim = values["tensors"], values.get("dim", values.get("axis", 0))
    if values.get("out") is not None or not isinstance(tensors, (list, tuple)):
        refuse(func, args, kwargs)
    first: ShardedTensor = first_sharded((tensors,), {})
    result = func([probe(tensor) for tensor in tensors], dim)  # raises what torch raises
    if func is torch.stack:
        tensors = [tensor.unsqueeze(dim) for tensor in tensors]
    elif result.ndim > 1:  # torch lets tensors of shape (0,) stand beside any others
        tensors = [tensor for tensor in tensors if tensor.ndim > 1]
    dim %= result.ndim
    sharded = [tensor for tensor in tensors if isinstance(tensor, ShardedTensor)]
    name = "stack" if func is torch.stack else "cat"
    if not sharded:
        refuse_case(name, first, reason="of the sharded tensors none has elements", hint="leave them out")
    for other in sharded[1:]:
        check_group(sharded[0], other)
    if all(_can_join(tensor, sharded[0], dim) for tensor in sharded):
        return _join_shards(tensors, dim=dim, size=result.shape)
    if len(sharded) < len(tensors):
        reason = f"beside a plain tensor, the sharded ones must be cut alike and whole in dim {dim}"
        hint = "cut the plain tensor by shard_tensor(), or reshard() the others"
        refuse_case(name, *sharded, reason=reason, hint=hint)
    shards: list[ShardMetadata] = []
    start = [0] * result.ndim
    for tensor in sharded:
        shards += tensor.metadata().map(result.shape, lambda box: box.shifted(start)).shards_metadata
        start[dim] += tensor.metadata().size[dim]
    # Where one operand requires grad, so does every shard: also those of others, and on every rank.
    ends = [anchor_of(tensor) for tensor in sharded if tensor.requires_grad]
    pieces = [piece for tensor in sharded for piece in tensor.tensors]
    tied_pieces = (piece if piece.requires_grad else tied(piece, ends) for piece in pieces)
    local = [piece.to(result.dtype, copy=True) for piece in tied_pieces]
    anchors = [tensor.anchor.to(result.dtype, copy=True) for tensor in sharded if not tensor.tensors]
    return assemble(sharded[0], shards, local, size=result.shape, ends=anchors)


def _can_join(tensor: ShardedTensor, first: ShardedTensor, dim: int) -> bool:
    """Return whether shards of `tensor` are whole in `dim` and otherwise those of `first`."""
    length = tensor.metadata().size[dim]
    return tensor.metadata().places() == [
        (rank, offsets, [*sizes[:dim], length, *sizes[dim + 1 :]])
        for rank, offsets, sizes in first.metadata().places()
    ]


def _join_shards(tensors: Sequence[Tensor], *, dim: int, size: torch.Size) -> ShardedTensor:
    """Join each shard of the first sharded tensor with the corresponding shards of the others."""
    sharded = [tensor for tensor in tensors if isinstance(tensor, ShardedTensor)]
    first = sharded[0]
    metadata = first.metadata().map(
        size, lambda box: Box(box.offsets, (*box.sizes[:dim], size[dim], *box.sizes[dim + 1 :]))
    )
    if not any(tensor.numel() for tensor in sharded):  # of nothing any boxes are a cover, of the result not
        try:
            cover([shard.box for shard in metadata.shards_metadata], size)
        except ShardingError as error:
            refuse_case("cat", *sharded, reason=str(error), hint="leave out the tensors without elements")
    cut = partial(parts, leader=first, metadata=metadata)  # of a plain one
    columns = [t.tensors or [t.anchor] if isinstance(t, ShardedTensor) else cut(t) for t in tensors]
    if not first.tensors:
        return first.with_tensors([], metadata=metadata, anchor=torch.cat([piece for [piece] in columns]))
    joined = [torch.cat(pieces, dim) for pieces in zip(*columns, strict=True)]
    return first.with_tensors(joined, metadata=metadata)
