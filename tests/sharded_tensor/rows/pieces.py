"""Tensors cut by hand into rows, in every way that a piece can say."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ranks import on_ranks
from shardwise.layout import Box
from shardwise.sharded_tensor.rows import Piece, ShardedParameter, ShardedRows
from shardwise.sharded_tensor.rows.piece import even_cuts_of

Cut = Callable[[Sequence[int]], Piece]


def two_by_two(*names: str) -> DeviceMesh:
    return _mesh_of(dist.group.WORLD, names)


@lru_cache(maxsize=1)
def _mesh_of(default: dist.ProcessGroup, names: tuple[str, ...]) -> DeviceMesh:
    """One for all cuts of a test: its groups take longer to meet than most of what is done on them."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def boxes_of(shape: Sequence[int], counts: Sequence[int]) -> list[Box]:
    """`counts[i]` rows for index i, one after the other."""
    assert sum(counts) == shape[0]
    starts = itertools.accumulate(counts, initial=0)
    rest = tuple(shape[1:])
    return [Box((start, *[0] * len(rest)), (n, *rest)) for start, n in zip(starts, counts, strict=False)]


def by_counts(
    shape: Sequence[int], counts: Sequence[int], mesh: DeviceMesh | None = None, names: Sequence[str] = ()
) -> Piece:
    """Rows by counts over the default group, or over some axes of a mesh."""
    boxes = boxes_of(shape, counts)
    if mesh is None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        groups = (mesh.get_group(),)
    else:
        groups = tuple(mesh.get_group(name) for name in names)
    return Piece(torch.Size(shape), groups, boxes.__getitem__, on_mesh=mesh)


def uneven(shape: Sequence[int]) -> Piece:
    """The last rank holds most; with more than one other rank, rank 1 holds none."""
    ranks = dist.get_world_size()
    counts = [0] * ranks
    for row in range(shape[0]):
        rank = row % (ranks + 2)
        counts[ranks - 1 if rank >= ranks or rank == 1 else rank] += 1
    return by_counts(shape, counts)


def even(shape: Sequence[int]) -> Piece:
    ranks = dist.get_world_size()
    chunk = -(-shape[0] // ranks)
    counts = [max(0, min(chunk, shape[0] - rank * chunk)) for rank in range(ranks)]
    return by_counts(shape, counts)


def all_on_last(shape: Sequence[int]) -> Piece:
    return by_counts(shape, [0] * (dist.get_world_size() - 1) + [shape[0]])


def two_groups(shape: Sequence[int]) -> Piece:
    """Over a 2 x 2 mesh, the inner axis fastest; uneven."""
    mesh = two_by_two("outer", "inner")
    rows = shape[0]
    counts = [rows // 2, 0, rows // 4, rows - rows // 2 - rows // 4]
    return by_counts(shape, counts, mesh, ("inner", "outer"))


def replicated(shape: Sequence[int]) -> Piece:
    """Over the inner axis of a 2 x 2 mesh; the outer one replicates."""
    mesh = two_by_two("outer", "inner")
    return by_counts(shape, [shape[0] // 3, shape[0] - shape[0] // 3], mesh, ("inner",))


def _tensor_parallel(shape: Sequence[int], dim: int) -> Piece:
    mesh = two_by_two("data", "tensor")
    whole = distribute_tensor(torch.zeros(*shape), mesh["tensor"], [Shard(dim)])
    held = tuple(whole.to_local().shape)
    boxes = boxes_of(held, [held[0] // 3, held[0] - held[0] // 3])
    groups = (mesh.get_group("data"),)
    cuts = even_cuts_of(mesh["tensor"], [Shard(dim)])
    return Piece(torch.Size(shape), groups, boxes.__getitem__, cuts, on_mesh=mesh)


def rowwise(shape: Sequence[int]) -> Piece:
    """Cut over a tensor-parallel axis along dim 0, each half by rows."""
    return _tensor_parallel(shape, 0)


def columnwise(shape: Sequence[int]) -> Piece:
    """Cut over a tensor-parallel axis along dim 1 (dim 0 of a vector), each half by rows."""
    return _tensor_parallel(shape, 1 if len(shape) > 1 else 0)


ANY_RANKS: list[Cut] = [even, uneven, all_on_last]
FOUR_RANKS: list[Cut] = [*ANY_RANKS, two_groups, replicated, rowwise, columnwise]


def on_cuts(
    *world_sizes: int, of: Sequence[Cut] = ANY_RANKS, meshes: Sequence[Cut] = FOUR_RANKS[3:]
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Run a test of a `cut` on ranks: for each `of` these on each of `world_sizes`, for `meshes` on four.

    On one rank there is one cut.
    """
    cases = [(size, cut) for size in world_sizes for cut in (of if size > 1 else of[-1:])]
    cases += itertools.product((4,), meshes)
    ids = [f"{cut.__name__}-{size}ranks" for size, cut in cases]

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        test: Any = on_ranks(4)(body)
        test.pytestmark = [pytest.mark.parametrize(("world_size", "cut"), cases, ids=ids).mark]
        return test  # type: ignore[no-any-return]

    return decorate


def local_rows(whole: Tensor, piece: Piece) -> Tensor:
    """This rank's part, in memory of its own."""
    for dim, (offset, size) in enumerate(zip(piece.box.offsets, piece.box.sizes, strict=True)):
        whole = whole.narrow(dim, offset, size)
    return whole.clone(memory_format=torch.contiguous_format)


def sharded(whole: Tensor, cut: Cut) -> ShardedRows:
    piece = cut(tuple(whole.shape))
    return ShardedRows.wrap(local_rows(whole, piece), piece)


def parameter(whole: Tensor, cut: Cut) -> ShardedParameter:
    piece = cut(tuple(whole.shape))
    return ShardedParameter.wrap(local_rows(whole, piece), piece, requires_grad=True)


def gathered(value: Tensor) -> Tensor:
    """The whole of a sharded tensor; a plain one as it is."""
    return value.full_tensor() if isinstance(value, ShardedRows) else value
