"""Groups of dims with the same elements before and after a reshape; boxes after reshape, index, expansion.

A reshape splits into the smallest groups of old and new dims that hold the same elements:

    (4, 6, 5) to (2, 2, 30)     4 to (2, 2), and (6, 5) to 30
    (4, 1) to (4,)              4 to 4, and 1 to nothing

A box stays a box if it does in every group. Strides within a group agree only at its ends, so the box must be
one range of the flattened group, and that range must be a box of the new dims:

    (4, 6) to 24      rows 1 to 2 are the range 6 to 17; columns 1 to 2 are not a range
    24 to (4, 6)      6 to 17 are rows 1 to 2; 6 to 14 are not a box

For boxes, dims of size 1 are in no group: an empty box stays empty where it was. An index with steps keeps
boxes: in each dim, the elements left of a range are a range of the result.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

from shardwise.layout import Box

Groups = list[tuple[list[int], list[int]]]


def regrouped(
    old: Sequence[Any],
    new: Sequence[Any],
    *,
    same: Callable[[Any, Any], bool] = operator.eq,
    hint: Callable[[Any], int] = int,
) -> Groups:
    """Group dims of `old` and of `new`; without elements, only equal dims at the ends are separate.

    Sizes are numbers or symbols: `same` compares two, `hint` returns one as a number, to find the smaller.
    """
    if any(isinstance(size, int) and size == 0 for size in old):
        return _without_elements(old, new, same)
    groups: Groups = []
    i = j = 0
    while i < len(old) or j < len(new):
        before, after = [i] if i < len(old) else [], [j] if j < len(new) else []
        i, j = i + 1, j + 1
        while not same(old_size := _product(old, before), new_size := _product(new, after)):
            if i < len(old) and (hint(old_size) < hint(new_size) or j >= len(new)):
                before.append(i)
                i += 1
            elif j < len(new):
                after.append(j)
                j += 1
            else:
                break
        groups.append((before, after))
    return groups


def _product(sizes: Sequence[Any], dims: Sequence[int]) -> Any:
    return math.prod(sizes[dim] for dim in dims)


def _without_elements(old: Sequence[Any], new: Sequence[Any], same: Callable[[Any, Any], bool]) -> Groups:
    common = min(len(old), len(new))
    prefix = next((d for d in range(common) if not same(old[d], new[d])), common)
    common -= prefix
    suffix = next((d for d in range(common) if not same(old[-1 - d], new[-1 - d])), common)
    middle = list(range(prefix, len(old) - suffix)), list(range(prefix, len(new) - suffix))
    ends = [([len(old) - d], [len(new) - d]) for d in range(suffix, 0, -1)]
    return [*(([d], [d]) for d in range(prefix)), *([middle] if any(middle) else []), *ends]


Pick = int | range | None  # for a dim: one element, or several; None is a new dim of size 1
_Extent = tuple[int, int]  # offset and size


def reshape_boxes(boxes: Sequence[Box], *, old: Sequence[int], new: Sequence[int]) -> list[Box | None]:
    """Reshape each box of a tensor of shape `old` to `new`, which has the same number of elements.

    Returns None for a box whose elements are not a box of `new`, or for an empty box if `new` is a scalar.
    """
    old_dims, new_dims = ([dim for dim, size in enumerate(sizes) if size != 1] for sizes in (old, new))
    groups = [
        ([old_dims[dim] for dim in before], [new_dims[dim] for dim in after])
        for before, after in regrouped([old[dim] for dim in old_dims], [new[dim] for dim in new_dims])
    ]
    return [_reshape_box(box, old, new, groups) for box in boxes]


def _reshape_box(box: Box, old: Sequence[int], new: Sequence[int], groups: Groups) -> Box | None:
    extents: list[_Extent] = [(0, size) for size in new]
    for old_dims, new_dims in groups:
        if len(old_dims) == len(new_dims) == 1 and old[old_dims[0]] == new[new_dims[0]]:
            extents[new_dims[0]] = (box.offsets[old_dims[0]], box.sizes[old_dims[0]])
            continue
        span = _span([(box.offsets[d], box.sizes[d]) for d in old_dims], [old[d] for d in old_dims])
        image = None if span is None else _split(*span, [new[d] for d in new_dims])
        if image is None and not box.is_empty:
            return None
        for dim, extent in zip(new_dims, image or [], strict=False):
            extents[dim] = extent
    if box.is_empty and all(size for _, size in extents):
        if not new:
            return None
        dim = next((d for d, size in enumerate(new) if size == 1), 0)  # it was empty in a dim of size 1
        extents[dim] = (new[dim], 0)
    return Box(tuple(offset for offset, _ in extents), tuple(size for _, size in extents))


def _span(extents: Sequence[_Extent], sizes: Sequence[int]) -> _Extent | None:
    """Return the first element and number of elements in the flattened dims; None if they are not a range."""
    start, count, whole = 0, 1, True
    for (offset, length), size in zip(extents, sizes, strict=True):
        start = start * size + offset
        if count > 1 and length != size:
            whole = False
        count *= length
    return (start, count) if whole or not count else None


def _split(start: int, count: int, sizes: Sequence[int]) -> list[_Extent] | None:
    """Return the range of `count` elements from `start` on as a box of `sizes`; None if it is not one."""
    extents: list[_Extent] = []
    stride = math.prod(sizes)
    if not stride or not (count or sizes):
        return None
    if not count:
        return [(min(start * sizes[0] // stride, sizes[0]), 0), *((0, size) for size in sizes[1:])]
    for dim, size in enumerate(sizes):
        stride //= size
        if count <= stride and start // stride == (start + count - 1) // stride:
            extents.append((start // stride, 1))
            start %= stride
        elif start % stride or count % stride:
            return None
        else:
            return [*extents, (start // stride, count // stride), *((0, s) for s in sizes[dim + 1 :])]
    return extents


def pick_box(box: Box, picks: Sequence[Pick]) -> tuple[Box, tuple[int | slice | None, ...]] | None:
    """Apply `picks`, by dim, to a box: return its place in the result, and an index into its tensor.

    Returns None if nothing of the box is left, unless nothing of the whole tensor is left either or the box
    was already empty.
    """
    offsets: list[int] = []
    sizes: list[int] = []
    index: list[int | slice | None] = []
    extents = iter(zip(box.offsets, box.sizes, strict=True))
    for pick in picks:
        if pick is None:
            offsets.append(0)
            sizes.append(1)
            index.append(None)
            continue
        offset, size = next(extents)
        if isinstance(pick, int):
            if not offset <= pick < offset + size:
                return None
            index.append(pick - offset)
            continue
        first, end = _steps(pick, offset), _steps(pick, offset + size)
        if first == end and size and pick:
            return None
        offsets.append(first)
        sizes.append(end - first)
        index.append(
            slice(pick[first] - offset, pick[end - 1] - offset + 1, pick.step) if first < end else slice(0)
        )
    return Box(tuple(offsets), tuple(sizes)), tuple(index)


def _steps(pick: range, before: int) -> int:
    """Count the picked elements that lie before the element `before`."""
    return min(max(-(-(before - pick.start) // pick.step), 0), len(pick))


def expand_box(box: Box, *, old: Sequence[int], new: Sequence[int]) -> Box:
    """Return a box of a tensor of shape `old` which is broadcast to `new`."""
    added = len(new) - len(old)
    offsets, sizes = [0] * added, list(new[:added])
    for offset, length, before, after in zip(box.offsets, box.sizes, old, new[added:], strict=True):
        grows = before == 1 and after != 1
        offsets.append(offset * after if grows else offset)
        sizes.append(length * after if grows else length)
    return Box(tuple(offsets), tuple(sizes))
