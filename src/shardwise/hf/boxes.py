"""Tensors without values that record which boxes of which sources they consist of.

transformers converts weights between a checkpoint's form and a model's: it renames, stacks, joins, cuts and
transposes them. Run on `Boxes`, the same code computes nothing; its result records where each element lies.
A rank can therefore read or write only the elements that it holds.

`_MOVES` has the operations that only move boxes. The result of any other operation is a source of its own,
`Computed`, which is always computed whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardwise import _compat
from shardwise.comm.count import on_tensors, tensors_in
from shardwise.layout import Box

aten = torch.ops.aten


class Source(Protocol):
    """A tensor of which any box can be read."""

    def read(self, begins: Sequence[int], ends: Sequence[int]) -> Tensor:
        """Read the elements from `begins` to `ends`, which have one index per dim."""


@dataclass(frozen=True)
class Piece:
    """A box of a tensor that is also a box of a source, perhaps with dims permuted, added or dropped."""

    box: Box
    source: Source
    origin: tuple[int, ...]  # of the box in the source
    dims: tuple[int | None, ...]  # the tensor's dim for each dim of the source; None: a dim of one element

    def clip(self, box: Box) -> Piece | None:
        """Return the part inside `box`, or None if there is none."""
        common = self.box.intersect(box)
        if common is None:
            return None
        further = [new - old for new, old in zip(common.offsets, self.box.offsets, strict=True)]
        origin = [o if d is None else o + further[d] for o, d in zip(self.origin, self.dims, strict=True)]
        return replace(self, box=common, origin=tuple(origin))

    @property
    def source_box(self) -> Box:
        return Box(self.origin, tuple(1 if dim is None else self.box.sizes[dim] for dim in self.dims))

    def to_tensor_box(self, box: Box) -> Box:
        """Translate a box of the source, inside `source_box`, to the tensor's coordinates."""
        offsets, sizes = list(self.box.offsets), list(self.box.sizes)
        for source_dim, dim in enumerate(self.dims):
            if dim is not None:
                offsets[dim] += box.offsets[source_dim] - self.origin[source_dim]
                sizes[dim] = box.sizes[source_dim]
        return Box(tuple(offsets), tuple(sizes))

    def arrange(self, values: Tensor) -> Tensor:
        """Return a view of the source's values with the tensor's dims."""
        order = [i for _, i in sorted((dim, i) for i, dim in enumerate(self.dims) if dim is not None)]
        dropped = [source_dim for source_dim, dim in enumerate(self.dims) if dim is None]
        view = values.permute(*dropped, *order)[(0,) * len(dropped)]
        for dim in range(len(self.box.sizes)):
            if dim not in self.dims:
                view = view.unsqueeze(dim)
        return view


@dataclass(frozen=True, eq=False)
class Computed:
    """A result of an operation that does more than move boxes; `index` selects one of several results."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: int | None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that it is computed from."""
        return sum(tensor.nbytes for tensor in tensors_in((self.args, self.kwargs)))

    def read(self, begins: Sequence[int], ends: Sequence[int]) -> Tensor:
        args, kwargs = on_tensors((self.args, self.kwargs), _values_of)
        result = self.func(*args, **kwargs)
        value: Tensor = result if self.index is None else result[self.index]
        return value[tuple(map(slice, begins, ends))]


@dataclass(frozen=True, eq=False)
class Plain:
    """A tensor with values, as a source."""

    tensor: Tensor

    def read(self, begins: Sequence[int], ends: Sequence[int]) -> Tensor:
        return self.tensor[tuple(map(slice, begins, ends))]


class Boxes(Tensor):
    """A tensor made of pieces, with a shape, a dtype and a device, but no values."""

    pieces: tuple[Piece, ...]
    like: Tensor  # same shape, strides and dtype, on the meta device

    @staticmethod
    def of(source: Source, shape: Sequence[int], dtype: torch.dtype) -> Boxes:
        """Return all of `source` as one tensor."""
        meta = torch.empty(tuple(shape), dtype=dtype, device="meta")
        return Boxes._wrap(meta, [_whole(source, meta)])

    @staticmethod
    def _wrap(like: Tensor, pieces: Sequence[Piece]) -> Boxes:
        boxes: Boxes = _compat.make_wrapper(
            Boxes, like.shape, strides=like.stride(), dtype=like.dtype, device=torch.device("cpu")
        )
        boxes.pieces, boxes.like = tuple(pieces), like
        return boxes

    def read(self, box: Box | None = None, into: Tensor | None = None) -> Tensor:
        """Read the values in `box` (default: all), converted to this tensor's dtype."""
        box = box or Box.whole(self.shape)
        out = torch.empty(box.sizes, dtype=self.dtype) if into is None else into
        for piece in self.pieces:
            if (part := piece.clip(box)) is not None:
                begins = [o - first for o, first in zip(part.box.offsets, box.offsets, strict=True)]
                place = tuple(slice(b, b + size) for b, size in zip(begins, part.box.sizes, strict=True))
                source_box = part.source_box
                out[place].copy_(part.arrange(part.source.read(source_box.offsets, source_box.ends)))
        return out

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return another tensor with the same pieces."""
        copy = Boxes._wrap(self.like, self.pieces)
        return nn.Parameter(copy, self.requires_grad) if isinstance(self, nn.Parameter) else copy

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Boxes({tuple(self.shape)}, {self.dtype}, {len(self.pieces)} pieces)"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten.equal.default:
            return _equal(*args)
        on_meta = kwargs | ({"device": torch.device("meta")} if "device" in kwargs else {})
        result = func(*on_tensors(args, _on_meta), **on_tensors(on_meta, _on_meta))
        if isinstance(result, Tensor):
            pieces = _MOVES[func](*args, **kwargs) if func in _MOVES else None
            return cls._wrap(result, pieces or [_whole(Computed(func, args, kwargs, None), result)])
        if not isinstance(result, (list, tuple)):
            return result
        parts = _PARTS[func](*args, **kwargs) if func in _PARTS else [None] * len(result)
        return [
            cls._wrap(tensor, pieces or [_whole(Computed(func, args, kwargs, index), tensor)])
            for index, (tensor, pieces) in enumerate(zip(result, parts, strict=True))
        ]


def _on_meta(tensor: Tensor) -> Tensor:
    return tensor.like if isinstance(tensor, Boxes) else tensor.to("meta")


def _equal(first: Tensor, second: Tensor, rows: int = 1024) -> bool:
    """Return whether the values are equal, reading `rows` rows at a time."""
    if first.shape != second.shape or not first.ndim:
        return first.shape == second.shape and torch.equal(*on_tensors((first, second), _values_of))
    parts = zip(first.split(rows), second.split(rows), strict=True)
    return all(torch.equal(*on_tensors(pair, _values_of)) for pair in parts)


def _values_of(tensor: Tensor) -> Tensor:
    return tensor.read() if isinstance(tensor, Boxes) else tensor


def _whole(source: Source, like: Tensor) -> Piece:
    return Piece(Box.whole(like.shape), source, (0,) * like.ndim, tuple(range(like.ndim)))


# ------------------------------------------------------------ operations that only move boxes


def _pieces(tensor: Tensor, *unused: Any, **options: Any) -> list[Piece]:
    return list(tensor.pieces) if isinstance(tensor, Boxes) else [_whole(Plain(tensor), tensor)]


def _view(tensor: Tensor, shape: Sequence[int]) -> list[Piece] | None:
    return _pieces(tensor) if tuple(shape) == tuple(tensor.shape) else None


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> list[Piece]:
    dim %= tensors[0].ndim + 1
    return [
        replace(
            piece,
            box=Box(_insert(piece.box.offsets, dim, index), _insert(piece.box.sizes, dim, 1)),
            dims=tuple(None if d is None else d + (d >= dim) for d in piece.dims),
        )
        for index, tensor in enumerate(tensors)
        for piece in _pieces(tensor)
    ]


def _insert(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index:])


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> list[Piece]:
    ends = itertools.accumulate(tensor.shape[dim] for tensor in tensors)
    return [
        _shift(piece, dim % tensor.ndim, end - tensor.shape[dim])
        for tensor, end in zip(tensors, ends, strict=True)
        for piece in _pieces(tensor)
    ]


def _shift(piece: Piece, dim: int, by: int) -> Piece:
    return replace(piece, box=piece.box.shifted([by if d == dim else 0 for d in range(len(piece.box.sizes))]))


def _split(tensor: Tensor, size: int | Sequence[int], dim: int = 0) -> list[list[Piece]]:
    length, dim = tensor.shape[dim], dim % tensor.ndim
    sizes = [min(size, length - b) for b in range(0, length, size)] if isinstance(size, int) else size
    parts = []
    for size, end in zip(sizes, itertools.accumulate(sizes), strict=True):
        offsets = tuple(end - size if d == dim else 0 for d in range(tensor.ndim))
        box = Box(offsets, tuple(size if d == dim else n for d, n in enumerate(tensor.shape)))
        clipped = [part for piece in _pieces(tensor) if (part := piece.clip(box)) is not None]
        parts.append([_shift(part, dim, size - end) for part in clipped])
    return parts


def _unbind(tensor: Tensor, dim: int = 0) -> list[list[Piece]]:
    order = [d for d in range(tensor.ndim) if d != dim % tensor.ndim]
    return [[_permute(piece, order) for piece in part] for part in _split(tensor, 1, dim)]


def _squeeze(tensor: Tensor, dim: int) -> list[Piece]:
    return _unbind(tensor, dim)[0] if tensor.shape[dim] == 1 else _pieces(tensor)


def _transpose(tensor: Tensor, first: int, second: int) -> list[Piece]:
    order = list(range(tensor.ndim))
    order[first], order[second] = order[second], order[first]
    return [_permute(piece, order) for piece in _pieces(tensor)]


def _permute(piece: Piece, order: Sequence[int]) -> Piece:
    """Return `piece` with its dims in `order`; dims left out have one element."""
    box = Box(tuple(piece.box.offsets[d] for d in order), tuple(piece.box.sizes[d] for d in order))
    dims = tuple(order.index(d) if d in order else None for d in piece.dims)
    return replace(piece, box=box, dims=dims)


_MOVES: dict[Any, Callable[..., list[Piece] | None]] = {
    aten.alias.default: _pieces,
    aten.detach.default: _pieces,
    aten.clone.default: _pieces,
    aten._to_copy.default: _pieces,
    aten.view.default: _view,
    aten.squeeze.dim: _squeeze,
    aten.transpose.int: _transpose,
    aten.stack.default: _stack,
    aten.cat.default: _cat,
}
_PARTS: dict[Any, Callable[..., list[list[Piece]]]] = {
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.unbind.int: _unbind,
}
