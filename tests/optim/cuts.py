"""Matrices of which each rank holds some rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shardwise.layout import Box
from shardwise.sharded_tensor import ShardedTensor
from shardwise.sharded_tensor.rows import Piece, ShardedParameter, ShardedRows


def ragged(count: int, ranks: int, seed: int) -> list[int]:
    """Any number of rows on each rank, often none."""
    generator = torch.Generator().manual_seed(seed)
    ends = torch.randint(0, count + 1, (ranks - 1,), generator=generator).sort().values.tolist()
    return [b - a for a, b in zip([0, *ends], [*ends, count], strict=True)]


def owned(count: int, ranks: int, seed: int) -> list[int]:
    return [count if rank == seed % ranks else 0 for rank in range(ranks)]


def row_boxes(shape: Sequence[int], rows: list[int]) -> list[Box]:
    starts, trailing = [sum(rows[:rank]) for rank in range(len(rows))], tuple(shape[1:])
    others = (0,) * len(trailing)
    return [Box((start, *others), (size, *trailing)) for start, size in zip(starts, rows, strict=True)]


def rows_of(whole: Tensor, rows: list[int], *, kind: type[ShardedRows] = ShardedRows) -> ShardedRows:
    """This rank's rows of `whole`; rank r has `rows[r]` of them."""
    boxes = row_boxes(whole.shape, rows)
    box = boxes[dist.get_rank()]
    group = dist.group.WORLD
    piece = Piece(whole.shape, (group,) if len(rows) > 1 else (), boxes.__getitem__)
    local = whole.narrow(0, box.offsets[0], box.sizes[0]).clone()
    return kind.wrap(local, piece, requires_grad=kind is ShardedParameter)


Place = Callable[[int, Tensor], Tensor]  # what this rank holds of matrix i


def places(how: Callable[[int, int, int], list[int]] | int) -> tuple[Place, Place]:
    """Of gradients and of parameters: rows by `how(count, ranks, i)`, or DTensors cut along dim `how`."""
    ranks = dist.get_world_size()
    if callable(how):

        def rows(i: int, whole: Tensor, kind: type[ShardedRows] = ShardedRows) -> Tensor:
            return rows_of(whole, how(whole.shape[0], ranks, i), kind=kind)

        return rows, functools.partial(rows, kind=ShardedParameter)
    mesh, placements = init_device_mesh("cpu", (ranks,)), [Shard(how)]

    def part(i: int, whole: Tensor) -> Tensor:
        return distribute_tensor(whole, mesh, placements, src_data_rank=None)

    return part, lambda i, whole: nn.Parameter(part(i, whole))


def whole_of(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, (DTensor, ShardedRows, ShardedTensor)) else tensor
