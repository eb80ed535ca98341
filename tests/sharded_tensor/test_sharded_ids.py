"""Plain ids that differ between ranks: each rank gets the rows of its own, the table all gradients."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from covers import boxes, cpu, cut, rows
from torch import Tensor

from ranks import on_ranks
from shardwise.errors import ShardingError
from shardwise.sharded_tensor import RaggedShardingSpec, ShardedTensor, ShardingSpec

ROWS, COLUMNS = 7, 4
Lookup = Callable[[int, Tensor, Tensor], Tensor]  # of a rank, a table and [3] numbers that are trained


def specs() -> list[ShardingSpec]:
    every, last = range(dist.get_world_size()), dist.get_world_size() - 1
    return [
        rows(*every),
        rows(last),
        rows(*every, dim=1),
        RaggedShardingSpec(0, [0, 3, 4], cpu(0, last, 0)),
        boxes((ROWS, COLUMNS), random.Random(1), cuts=5),
    ]


def _ids(rank: int, *size: int) -> Tensor:
    return torch.randint(ROWS, size, generator=torch.Generator().manual_seed(rank))


LOOKUPS: dict[str, Lookup] = {
    "rows": lambda rank, table, extra: F.embedding(_ids(rank, 2, 3), table, padding_idx=1),
    "rows, some ranks none": lambda rank, table, extra: F.embedding(_ids(rank, 3 * (rank % 2)), table),
    "other numbers": lambda rank, table, extra: F.embedding(_ids(rank, rank + 1, 2), table),
    "bags": lambda rank, table, extra: F.embedding_bag(_ids(rank, 3, 2), table, mode="mean", padding_idx=2),
    "greatest": lambda rank, table, extra: F.embedding_bag(_ids(rank, 2, 3), table, mode="max"),
    "offsets": lambda rank, table, extra: F.embedding_bag(
        _ids(rank, 4 + rank), table, torch.tensor([0, 0, 2 + rank]), mode="sum"
    ),
    "weights": lambda rank, table, extra: F.embedding_bag(
        _ids(rank, 2, 3), table, mode="sum", per_sample_weights=extra.expand(2, 3)
    ),
}


@on_ranks(2, 3)
@pytest.mark.parametrize("name", LOOKUPS)
def test_every_rank_gets_the_rows_of_its_own_ids_and_the_table_all_gradients(name: str) -> None:
    rank, world, lookup = dist.get_rank(), dist.get_world_size(), LOOKUPS[name]
    whole = torch.randn(ROWS, COLUMNS, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    numbers = [torch.full([3], 1.5 + r, dtype=torch.float64).cumsum(0) for r in range(world)]
    reference, extras = whole.clone().requires_grad_(), [n.requires_grad_() for n in numbers]
    expected = [lookup(r, reference, extras[r]) for r in range(world)]
    sum((made * (r + 1)).sum() for r, made in enumerate(expected)).backward()
    able = specs()[1:3] if name == "greatest" else specs()  # which needs all rows in a shard
    for spec in able if world == 3 else able[1::2]:
        table = cut(whole, spec).requires_grad_()
        extra = numbers[rank].detach().requires_grad_()
        found = lookup(rank, table, extra)
        assert not isinstance(found, ShardedTensor)
        torch.testing.assert_close(found, expected[rank])
        (found * (rank + 1)).sum().backward()
        assert table.grad is not None
        torch.testing.assert_close(table.grad.full_tensor(), reference.grad)
        if extras[rank].grad is not None:
            torch.testing.assert_close(extra.grad, extras[rank].grad)


@on_ranks(2)
def test_max_norm_and_frequencies_are_by_the_ids_of_all_ranks() -> None:
    rank = dist.get_rank()
    whole = torch.arange(8.0).view(4, 2)
    ids = [torch.tensor([0, 1, 1]), torch.tensor([3, 1])]
    options: dict[str, Any] = {"max_norm": 2.0, "scale_grad_by_freq": True}
    reference = whole.clone().requires_grad_()
    expected = F.embedding(torch.cat(ids), reference, **options)
    expected.sum().backward()
    table = cut(whole, rows(0, 1)).requires_grad_()
    found = F.embedding(ids[rank], table, **options)
    torch.testing.assert_close(found, expected[3 * rank : 3 + 2 * rank])
    found.sum().backward()
    assert table.grad is not None
    torch.testing.assert_close(table.grad.full_tensor(), reference.grad)
    torch.testing.assert_close(table.detach().full_tensor(), reference.detach())


@on_ranks(2, timeout=20)
def test_wrong_ids_of_one_rank_raise_on_all() -> None:
    rank = dist.get_rank()
    table = cut(torch.randn(ROWS, COLUMNS), rows(0, 1))
    with pytest.raises(ShardingError, match=r"rank 1: ids of an embedding lie in \[0, 7\), found 0 to 7"):
        F.embedding(torch.tensor([0, 6 + rank]), table)
    with pytest.raises(ShardingError, match="rank 0: offsets of embedding_bag"):
        F.embedding_bag(torch.tensor([0, 1]), table, torch.tensor([1 - rank]))
