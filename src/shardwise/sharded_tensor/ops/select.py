"""Parts of sharded tensors, and tensors made of several. No communication.

An index of ints, slices, None and `...` keeps the shards that hold some of what it asks for, on their ranks;
others are absent from the result, so that ranks may be left without a shard. What is kept is a view of the
shard's memory: in-place operations on `st[2:4]` write `st`, as in torch. Indices that are tensors, lists or
bools would move elements between ranks and are refused; but where a mask of the same shape holds, cut alike
or plain, one number can be assigned.

`cat` and `stack` of tensors cut alike, whole in the dim that grows, join each shard with its counterparts.
All others keep every shard of every operand (in new memory), so a rank has as many as of all together.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.errors import ShardingError
from shardwise.layout import Box, cover
from shardwise.sharded_tensor.autograd import replicated
from shardwise.sharded_tensor.base import first_sharded
from shardwise.sharded_tensor.metadata import ShardMetadata
from shardwise.sharded_tensor.ops.boxes import Pick, pick_box
from shardwise.sharded_tensor.ops.operands import like
from shardwise.sharded_tensor.ops.shape import assembled, derived, probe, reshaped, taken
from shardwise.sharded_tensor.refuse import refuse, refuse_case
from shardwise.sharded_tensor.registry import handles
from shardwise.sharded_tensor.tensor import ShardedTensor

_T: Any = Tensor
_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]


# ---------------------------------------------------------------- one part


@handles(_T.__getitem__)
def _getitem(func: Any, args: _Args, kwargs: _Kwargs) -> ShardedTensor:
    sharded, index = args
    if not isinstance(sharded, ShardedTensor):
        refuse(func, args, kwargs)
    items = _items(sharded, index)
    size = probe(sharded)[items].shape  # raises what torch raises for such an index
    return picked(sharded, _picks(sharded.metadata().size, items), size=size)


@handles(_T.__setitem__)
def _setitem(func: Any, args: _Args, kwargs: _Kwargs) -> None:
    sharded, index, value = args
    if not isinstance(sharded, ShardedTensor):
        refuse(func, args, kwargs)
    gradient = sharded.requires_grad or (isinstance(value, Tensor) and value.requires_grad)
    if torch.is_grad_enabled() and gradient:
        refuse_case(
            "assignment to an index",
            sharded,
            why="it is not differentiable, and the tensor or the value requires grad",
            instead="assign within torch.no_grad(), or make the result with torch.cat or torch.where",
        )
    if isinstance(index, Tensor) and index.dtype == torch.bool and index.ndim:
        _fill_where(sharded, index, value)
        return
    part = _getitem(_T.__getitem__, (sharded, index), {})
    if isinstance(value, Tensor):
        probe(part).copy_(probe(value))  # raises on every rank what torch raises
        part.copy_(value)
        return
    probe(part).fill_(value)
    for tensor in part.tensors:
        tensor.fill_(value)


def _fill_where(sharded: ShardedTensor, mask: Tensor, value: Any) -> None:
    """Assign one number to the elements where `mask` holds. Local."""
    one = not isinstance(value, ShardedTensor) and (value.ndim == 0 if isinstance(value, Tensor) else True)
    if mask.shape != sharded.shape or not one:
        refuse_case(
            "assignment by a mask",
            sharded,
            why=f"it takes one number and a mask of the same shape, found {_shown(value)} and a mask of shape"
            f" {tuple(mask.shape)}",
            instead="use torch.where(mask, value, tensor), whose operands broadcast",
        )
    pieces = like(sharded, mask)
    for tensor, piece in zip(sharded.tensors or [sharded.anchor], pieces, strict=True):
        tensor[piece] = value


@handles(torch.narrow, _T.narrow)
def _narrow(func: Any, args: _Args, kwargs: _Kwargs) -> ShardedTensor:
    sharded, rest, kwargs = taken(args, kwargs)
    values = dict(zip(("dim", "start", "length"), rest, strict=False)) | kwargs
    values["start"] = operator.index(values["start"])
    dim, extent = _dim(sharded, values["dim"]), func(probe(sharded), **values).shape
    start = values["start"] % max(sharded.metadata().size[dim], 1) if values["start"] < 0 else values["start"]
    return _part(sharded, dim, range(start, start + extent[dim]))


@handles(torch.select, _T.select)
def _select(func: Any, args: _Args, kwargs: _Kwargs) -> ShardedTensor:
    sharded, rest, kwargs = taken(args, kwargs)
    func(probe(sharded), *rest, **kwargs)
    values = dict(zip(("dim", "index"), rest, strict=False)) | kwargs
    dim = _dim(sharded, values["dim"])
    return _part(sharded, dim, operator.index(values["index"]) % sharded.metadata().size[dim])


def picked(sharded: ShardedTensor, picks: Sequence[Pick], *, size: Sequence[int]) -> ShardedTensor:
    """What `picks` leave of every shard, in a tensor of `size`; views. Local."""
    found = [pick_box(shard.box, picks) for shard in sharded.metadata().shards_metadata]
    if all(part is None for part in found):  # of a tensor without elements: one shard must remain
        boxes = [Box.whole(size), *[None] * (len(found) - 1)]
        return derived(
            sharded, size=size, boxes=boxes, make=lambda tensor, number, box: tensor.reshape(box.sizes)
        )

    def make(tensor: Tensor, number: int, box: Box) -> Tensor:
        part = found[number]
        assert part is not None
        return tensor[part[1]]

    return derived(sharded, size=size, boxes=[None if part is None else part[0] for part in found], make=make)


def _items(sharded: ShardedTensor, index: Any) -> tuple[Any, ...]:
    """The parts of an index, all ints, slices, None or Ellipsis."""
    items = []
    for item in index if isinstance(index, tuple) else (index,):
        if isinstance(item, Tensor) and not isinstance(item, ShardedTensor) and item.ndim == 0:
            item = item.item()
        if not (item is None or item is Ellipsis or isinstance(item, slice)):
            item = _int(sharded, item)
        items.append(item)
    return tuple(items)


def _int(sharded: ShardedTensor, item: Any) -> int:
    try:
        if isinstance(item, (bool, Tensor)):
            raise TypeError
        return operator.index(item)
    except TypeError:
        refuse_case(
            "indexing",
            sharded,
            why=f"an index is of ints, slices, None and ..., found {_shown(item)}",
            instead="for rows of a table use torch.nn.functional.embedding; to fill by a mask, masked_fill or"
            " torch.where; otherwise full_tensor()[...]",
        )


def _shown(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def _picks(size: Sequence[int], items: Sequence[Any]) -> list[Pick]:
    """An index that fits `size`, by dim."""
    given = sum(item is not None and item is not Ellipsis for item in items)
    filled: list[Any] = []
    for item in items if Ellipsis in items else [*items, Ellipsis]:
        filled += [slice(None)] * (len(size) - given) if item is Ellipsis else [item]
    sizes = iter(size)
    picks: list[Pick] = []
    for item in filled:
        length = 0 if item is None else next(sizes)
        if isinstance(item, slice):
            picks.append(range(*item.indices(length)))
        else:
            picks.append(item if item is None else item % length)
    return picks


def _dim(sharded: ShardedTensor, dim: int) -> int:
    return dim % max(len(sharded.metadata().size), 1)


def _part(sharded: ShardedTensor, dim: int, pick: int | range) -> ShardedTensor:
    size = sharded.metadata().size
    picks: list[Pick] = [*map(range, size)]
    picks[dim] = pick
    after = [] if isinstance(pick, int) else [len(pick)]
    return picked(sharded, picks, size=[*size[:dim], *after, *size[dim + 1 :]])


# ---------------------------------------------------------------- all parts


@handles(torch.split, torch.split_with_sizes, torch.chunk, _T.split, _T.split_with_sizes, _T.chunk)
def _split(func: Any, args: _Args, kwargs: _Kwargs) -> Any:
    sharded, rest, kwargs = _taken(args, kwargs)
    dim = _dim(sharded, rest[1] if len(rest) > 1 else kwargs.get("dim", 0))
    pieces = func(probe(sharded), *rest, **kwargs)
    return type(pieces)(_parts(sharded, dim, [piece.shape[dim] for piece in pieces]))


@handles(torch.tensor_split, _T.tensor_split)
def _tensor_split(func: Any, args: _Args, kwargs: _Kwargs) -> tuple[ShardedTensor, ...]:
    sharded, rest, kwargs = _taken(args, kwargs)
    values = dict(zip(("where", "dim"), rest, strict=False)) | kwargs
    dim = _dim(sharded, values.get("dim", 0))
    where = next(
        values[key] for key in ("where", "indices_or_sections", "sections", "indices") if key in values
    )
    where = where.tolist() if isinstance(where, Tensor) else where
    pieces = torch.tensor_split(probe(sharded), where, dim=values.get("dim", 0))
    if isinstance(where, int):
        return tuple(_parts(sharded, dim, [piece.shape[dim] for piece in pieces]))
    bounds = itertools.pairwise([0, *where, sharded.metadata().size[dim]])
    whole = range(sharded.metadata().size[dim])
    return tuple(_part(sharded, dim, whole[start:end]) for start, end in bounds)


@handles(torch.unbind, _T.unbind)
def _unbind(func: Any, args: _Args, kwargs: _Kwargs) -> tuple[ShardedTensor, ...]:
    sharded, rest, kwargs = taken(args, kwargs)
    dim = _dim(sharded, rest[0] if rest else kwargs.get("dim", 0))
    return tuple(_part(sharded, dim, i) for i in range(len(func(probe(sharded), *rest, **kwargs))))


@handles(_T.__iter__)
def _iter(func: Any, args: _Args, kwargs: _Kwargs) -> Iterator[ShardedTensor]:
    sharded: ShardedTensor = args[0]
    if not sharded.metadata().size:
        raise TypeError("iteration over a 0-d tensor")
    return iter(_unbind(_T.unbind, (sharded,), {}))


def _parts(sharded: ShardedTensor, dim: int, lengths: Sequence[int]) -> list[ShardedTensor]:
    starts = itertools.accumulate(lengths, initial=0)
    return [
        _part(sharded, dim, range(start, start + length))
        for start, length in zip(starts, lengths, strict=False)
    ]


def _taken(args: _Args, kwargs: _Kwargs) -> tuple[Any, _Args, _Kwargs]:
    """As `taken`; torch.split calls its operand `tensor`."""
    if not args and "tensor" in kwargs:
        kwargs = {"input" if key == "tensor" else key: value for key, value in kwargs.items()}
    return taken(args, kwargs)


# ---------------------------------------------------------------- several together


@handles(torch.cat, torch.concat, torch.concatenate)
def _cat(func: Any, args: _Args, kwargs: _Kwargs) -> ShardedTensor:
    values = _joining(func, args, kwargs)
    return joined(values["tensors"], dim=values.get("dim", values.get("axis", 0)), name="cat")


@handles(torch.stack)
def _stack(func: Any, args: _Args, kwargs: _Kwargs) -> ShardedTensor:
    values = _joining(func, args, kwargs)
    tensors, dim = values["tensors"], values.get("dim", 0)
    size = torch.stack([probe(tensor) for tensor in tensors], dim).shape
    dim %= len(size)
    grown = []
    for tensor in tensors:
        one = [*size[:dim], 1, *size[dim + 1 :]]
        sharded = isinstance(tensor, ShardedTensor)
        grown.append(reshaped(tensor, one, name="stack") if sharded else tensor.unsqueeze(dim))
    return joined(grown, dim=dim, name="stack")


def _joining(func: Any, args: _Args, kwargs: _Kwargs) -> dict[str, Any]:
    values = dict(zip(("tensors", "dim"), args, strict=False)) | kwargs
    if values.get("out") is not None or not isinstance(values["tensors"], (list, tuple)):
        refuse(func, args, kwargs)
    return values


def joined(tensors: Sequence[Tensor], *, dim: int, name: str) -> ShardedTensor:
    """The tensors one after another along `dim`, in new memory. Local.

    Plain ones are replicated, and may stand beside sharded ones that are whole in `dim`.
    """
    first: ShardedTensor = first_sharded((tensors,), {})
    result = torch.cat([probe(tensor) for tensor in tensors], dim)  # raises what torch raises
    if result.ndim > 1:  # torch lets tensors of shape (0,) stand beside any others
        tensors = [tensor for tensor in tensors if tensor.ndim > 1]
    dim %= result.ndim
    sharded = [tensor for tensor in tensors if isinstance(tensor, ShardedTensor)]
    if any(tensor.process_group is not first.process_group for tensor in sharded):
        refuse_case(
            name,
            *sharded,
            why="the tensors belong to different process groups",
            instead="make all over one group",
        )
    if not sharded:
        refuse_case(name, first, why="of the sharded tensors none has elements", instead="leave them out")
    if all(_whole_alike(tensor, sharded[0], dim) for tensor in sharded):
        return _joined_shards(tensors, sharded, dim=dim, result=result)
    if len(sharded) < len(tensors):
        refuse_case(
            name,
            *sharded,
            why=f"beside a plain tensor, the sharded ones must be cut alike and whole in dim {dim}",
            instead="cut the plain tensor by shard_tensor(), or reshard() the others",
        )
    shards: list[ShardMetadata] = []
    start = 0
    for tensor in sharded:
        for shard in tensor.metadata().shards_metadata:
            offsets = list(shard.shard_offsets)
            offsets[dim] += start
            shards.append(ShardMetadata(offsets, shard.shard_sizes, shard.placement))
        start += tensor.metadata().size[dim]
    local = [piece.to(result.dtype, copy=True) for tensor in sharded for piece in tensor.tensors]
    beside = [tensor.anchor.to(result.dtype) for tensor in sharded if not tensor.tensors]
    return assembled(sharded[0], shards, local, size=result.shape, beside=beside)


def _whole_alike(tensor: ShardedTensor, first: ShardedTensor, dim: int) -> bool:
    """Are its shards whole in `dim` and otherwise those of `first`?"""
    shards, others = tensor.metadata().shards_metadata, first.metadata().shards_metadata
    return len(shards) == len(others) and all(
        shard.rank == other.rank
        and shard.shard_offsets[dim] == 0
        and shard.shard_sizes[dim] == tensor.metadata().size[dim]
        and _without(shard.shard_offsets, dim) == _without(other.shard_offsets, dim)
        and _without(shard.shard_sizes, dim) == _without(other.shard_sizes, dim)
        for shard, other in zip(shards, others, strict=True)
    )


def _without(values: list[int], dim: int) -> list[int]:
    return values[:dim] + values[dim + 1 :]


def _joined_shards(
    tensors: Sequence[Tensor], sharded: Sequence[ShardedTensor], *, dim: int, result: Tensor
) -> ShardedTensor:
    """Each shard of the first joined with the same of the others."""
    first, group = sharded[0], sharded[0].process_group
    parts: list[Any] = [
        tensor if isinstance(tensor, ShardedTensor) else replicated(tensor, group) for tensor in tensors
    ]

    def make(number: int, box: Box) -> Tensor:
        pieces = []
        for part in parts:
            if isinstance(part, ShardedTensor):
                pieces.append(part.tensors[number])
                continue
            for d in range(part.ndim):
                part = part if d == dim else part.narrow(d, box.offsets[d], box.sizes[d])
            pieces.append(part)
        return torch.cat(pieces, dim)

    shards = []
    for shard in first.metadata().shards_metadata:
        sizes = list(shard.shard_sizes)
        sizes[dim] = result.shape[dim]
        shards.append(ShardMetadata(shard.shard_offsets, sizes, shard.placement))
    if not any(tensor.numel() for tensor in sharded):  # of nothing any boxes are a cover, of the result not
        try:
            cover([shard.box for shard in shards], result.shape)
        except ShardingError as error:
            refuse_case("cat", *sharded, why=str(error), instead="leave out the tensors without elements")
    mine = [shard.box for shard in shards if shard.rank == dist.get_rank()]
    local = [make(number, box) for number, box in enumerate(mine)]
    ends = [part.anchor if isinstance(part, ShardedTensor) else part.reshape(-1)[:0] for part in parts]
    beside = [] if local else [end.to(result.dtype) for end in ends]
    return assembled(first, shards, local, size=result.shape, beside=beside)


# ---------------------------------------------------------------- several times


@handles(_T.repeat, torch.tile, _T.tile)
def _repeat(func: Any, args: _Args, kwargs: _Kwargs) -> ShardedTensor:
    sharded, rest, kwargs = taken(args, kwargs)
    size = func(probe(sharded), *rest, **kwargs).shape
    values = rest or tuple(kwargs.values())
    times = [*(values[0] if isinstance(values[0], (tuple, list)) else values)] if values else []
    times = [1] * (len(size) - len(times)) + times
    old = sharded.metadata().size
    made = reshaped(sharded, [1] * (len(size) - len(old)) + [*old], name=func.__name__)
    for dim, count in enumerate(times):
        if count == 0:
            made = _part(made, dim, range(0))
        elif count > 1:
            made = joined([made] * count, dim=dim, name=func.__name__)
    return made if any(count > 1 for count in times) else cast(ShardedTensor, made.clone())
