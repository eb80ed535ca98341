"""Row ranges (`ShardedRows`, parameters of the contiguous layout) to sharded tensors and back.

A piece knows its own box, and the boxes of the one group over which its rows are cut. What lies elsewhere,
over several groups, on tensor-parallel axes or in replicas, ranks tell each other; of ranks that hold one box
the first holds the shard.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from shardwise.comm.agree import agree, together
from shardwise.errors import ShardingError, here
from shardwise.layout import Box
from shardwise.sharded_tensor.autograd import fill
from shardwise.sharded_tensor.dtensor import check_detached, of_boxes
from shardwise.sharded_tensor.group import group_or_default
from shardwise.sharded_tensor.move import boxes_of, said_of
from shardwise.sharded_tensor.rows import ShardedRows
from shardwise.sharded_tensor.tensor import ShardedTensor


def from_rows(rows: ShardedRows, *, process_group: dist.ProcessGroup | None = None) -> ShardedTensor:
    """Return rows as a sharded tensor, which shares their memory, detached: no gradient passes.

    A rank without rows holds an empty shard. Local where rows are cut over one group, without tensor
    parallelism, and no other group is asked for; otherwise collective: ranks tell their boxes.

    Args:
        rows: a `ShardedParameter`, its gradient or an optimizer's state.
        process_group: by default the one group over which rows are cut, or the default group.

    Raises:
        ShardingError: ranks that together do not hold all of the tensor, or parts of it twice; in grad mode,
            a result with a gradient to pass.
    """
    check_detached(rows)
    piece = rows.piece
    if process_group is None and piece.group is not None and not piece.even_cuts:
        group, boxes = piece.group, list(piece.boxes)
    else:
        group = group_or_default(process_group)
        boxes = _all_boxes(rows, group=group)
    ranks = dist.get_process_group_ranks(group)
    held_by = list(zip(boxes, ranks, strict=True))
    first = dict(reversed(held_by))
    placed = [(box, rank) for box, rank in held_by if box.is_empty or first[box] == rank]
    held = [rows.local.detach() for _, rank in placed if rank == dist.get_rank()]
    made = of_boxes(placed, held, shape=piece.shape, like=rows.local, group=group)
    made.metadata().check(ranks)
    return made


@torch.no_grad()
def to_rows(sharded: ShardedTensor, rows: ShardedRows) -> None:
    """Copy the values of a sharded tensor into `rows`, wherever they lie; each rank gets what it lacks once.

    Collective over the group of `sharded`, of which every rank passes its rows of a tensor of the same shape.
    Values are converted to their dtype and device. As with any copy in place nothing is returned; no gradient
    passes.

    Raises:
        ShardingError: on every rank, where a rank passes rows of a tensor of another shape.
        RankMismatchError: on every rank, where ranks pass differently cut tensors.
    """
    metadata, group = sharded.metadata(), sharded.process_group
    wanted = _all_boxes(rows, group=group, shape=metadata.size)
    agree(said_of(sharded), group=group, what="the sharded tensor to copy into rows")
    fill(
        boxes_of(metadata, group),
        [[box] for box in wanted],
        source=sharded.tensors,
        target=[rows.local],
        group=group,
        wire=sharded.anchor,
    )


def _all_boxes(
    rows: ShardedRows, *, group: dist.ProcessGroup, shape: Sequence[int] | None = None
) -> list[Box]:
    """Return every rank's box. Raises on every rank where rows are not of one tensor."""
    tensor = f"{tuple(rows.shape)} of {rows.dtype}" if shape is None else f"{tuple(rows.shape)}"
    told = together(
        "comparing rows", lambda: (tensor, rows.box.offsets, rows.box.sizes), group=group, kind=ShardingError
    )
    expected = told[0][0] if shape is None else f"{tuple(shape)}"
    for rank, (found, _, _) in zip(dist.get_process_group_ranks(group), told, strict=True):
        if found != expected:
            raise ShardingError(
                f"{here()}: expected rows of a tensor of shape {expected} on every rank, found {found} on"
                f" rank {rank}; pass the rows of the same tensor"
            )
    return [Box(tuple(offsets), tuple(sizes)) for _, offsets, sizes in told]
