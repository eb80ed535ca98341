"""Ranks stay in step: in random numbers, gradients and collectives, also where their shards are unlike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from covers import boxes_on, counted, cut, rows
from torch import Tensor

from ranks import on_ranks
from shardwise.sharded_tensor import RaggedShardingSpec, ShardedTensor, rand


def equal_everywhere(value: Tensor) -> bool:
    found = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(found, value)
    return all(torch.equal(value, other) for other in found)


@on_ranks(2)
def test_drawing_a_seed_advances_every_ranks_generator_alike() -> None:
    torch.manual_seed(0)
    made = rand(rows(0, 1), 4)
    F.dropout(made)
    made.normal_()
    assert equal_everywhere(torch.rand(4))


@on_ranks(2)
def test_after_cat_every_rank_has_a_gradient_of_every_tensor() -> None:
    one = cut(counted((2, 3)), rows(0), requires_grad=True)
    other = cut(counted((4, 3)), rows(0, 1), requires_grad=True)
    for dim, beside in ((0, other), (1, cut(counted((2, 1)), rows(0), requires_grad=True))):
        torch.cat([one, beside], dim).sum().backward()
        assert one.grad is not None
        assert torch.equal(one.grad.full_tensor(), torch.ones(2, 3))
        one.grad = None


@on_ranks(2)
def test_a_shard_left_out_of_an_index_has_a_gradient_of_zero_as_the_whole_has() -> None:
    both = cut(counted((4, 3)), rows(0, 0, 1), requires_grad=True)
    both[:2].sum().backward()
    assert all(tensor.grad is not None for tensor in both.tensors)


@on_ranks(2)
@pytest.mark.parametrize("name", ["binary_cross_entropy", "binary_cross_entropy_with_logits", "mse_loss"])
def test_a_loss_of_shards_empty_in_a_dim_of_size_1_is_that_of_the_whole(name: str) -> None:
    loss: Any = getattr(F, name)
    values, target = torch.rand(1, 4, dtype=torch.float64), torch.rand(1, 4, dtype=torch.float64)
    for spec in (rows(0, 1), RaggedShardingSpec(0, [0, 1], ["rank:0", "rank:1"])):
        whole, sharded = values.clone().requires_grad_(), cut(values, spec, requires_grad=True)
        expected, found = loss(whole, target), loss(sharded, target)
        torch.testing.assert_close(found, expected)
        expected.backward()
        found.backward()
        assert isinstance(sharded.grad, ShardedTensor)
        torch.testing.assert_close(sharded.grad.full_tensor(), whole.grad)


@on_ranks(2, timeout=20)
def test_a_plain_tensor_that_does_not_broadcast_is_refused_on_every_rank() -> None:
    sharded = cut(counted((4, 3)), rows(0, 1))
    for action in (
        lambda: sharded.copy_(torch.ones(3, 3)),
        lambda: F.linear(torch.ones(2, 3), sharded, torch.ones(3)),
        lambda: torch._foreach_copy_([sharded], [torch.ones(3, 3)]),
    ):
        with pytest.raises(RuntimeError):
            action()
    assert equal_everywhere(sharded.sum())


@on_ranks(2, timeout=20)
def test_weights_of_bags_get_their_gradient_from_a_table_with_an_empty_shard() -> None:
    table = cut(counted((5, 4)), boxes_on(([0, 0], [5, 4], 0), ([0, 4], [5, 0], 0), ([0, 4], [5, 0], 1)))
    columns = cut(counted((5, 4)), boxes_on(([0, 0], [5, 2], 0), ([0, 2], [5, 2], 0), ([0, 4], [5, 0], 1)))
    ids = torch.tensor([[0, 3], [4, 1]])
    for sharded in (table, columns):
        sharded.requires_grad_()
        weights, plain = (torch.ones(2, 2, requires_grad=True) for _ in range(2))
        F.embedding_bag(ids, sharded, per_sample_weights=weights, mode="sum").sum().backward()
        F.embedding_bag(ids, counted((5, 4)), per_sample_weights=plain, mode="sum").sum().backward()
        torch.testing.assert_close(weights.grad, plain.grad)
