"""Sharded modules and `ShardedTensor`s in one model: gradients are those of one process."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp.models import EXACT, assert_same_gradients, in_each_layout, refused
from ranks import on_ranks
from shardwise import fully_shard
from shardwise.sharded_tensor import ChunkShardingSpec, ShardedTensor, shard_parameter, shard_tensor


def _places(ranks: int) -> list[str]:
    return [f"rank:{rank}/cpu" for rank in range(ranks)]


def assert_gradients_equal(model: nn.Module, whole: nn.Module) -> None:
    for (name, found), expected in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert found.grad is not None, name
        assert expected.grad is not None
        torch.testing.assert_close(
            found.grad.full_tensor(), expected.grad, msg=lambda text, n=name: f"{n}: {text}"
        )


@on_ranks(3)
@pytest.mark.parametrize(("layout", "holders"), [("interleaved", 2), ("contiguous", 3)])
def test_a_sharded_module_hands_the_gradient_of_a_sharded_input_on(layout: Any, holders: int) -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 4), nn.Linear(4, 4))
    model = deepcopy(whole)
    shard_parameter(model[0], "weight", ChunkShardingSpec(1, _places(holders)))
    for layer in (model[1], model[2], model[1:]):
        fully_shard(layer, layout=layout)
    ids = torch.arange(6)
    for one in (model, whole):
        for _ in range(2):
            one(ids).square().mean().backward()
    assert_gradients_equal(model, whole)


@in_each_layout(3)
def test_sharded_modules_take_and_return_a_batch_cut_over_ranks(layout: Any) -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 4))
    model = deepcopy(whole)
    for layer in (model[0], model[2], model):
        fully_shard(layer, layout=layout)
    values = torch.randn(7, 4)
    batch = shard_tensor(values, ChunkShardingSpec(0, _places(2))).requires_grad_()
    values.requires_grad_()
    out = model(batch * 2)
    assert isinstance(out, ShardedTensor)
    for result in (out, whole(values * 2)):
        result.square().mean().backward()
    assert_gradients_equal(model, whole)
    assert isinstance(batch.grad, ShardedTensor)
    assert values.grad is not None
    torch.testing.assert_close(batch.grad.full_tensor(), values.grad)


@in_each_layout(2)
@pytest.mark.parametrize("dim", [0, 1])
def test_a_sharded_parameter_is_refused_before_anything_changes_and_may_be_ignored(
    layout: Any, dim: int
) -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 8)))
    model = deepcopy(whole)
    shard_parameter(model[1][0], "weight", ChunkShardingSpec(dim, _places(2)))
    for act in (
        lambda: fully_shard(model[1], layout=layout),
        lambda: fully_shard(list(model), layout=layout, group_small=1),
    ):
        refused(act, "'0.weight' is a ShardedTensor", "ignored_params")
        assert type(model[0]) is nn.Linear
        assert type(model[1]) is nn.Sequential
    fully_shard(model[1], layout=layout, ignored_params={model[1][0].weight})
    for one in (model, whole):
        one[1](torch.arange(7)).square().mean().backward()
    assert_gradients_equal(model[1], whole[1])


@on_ranks(2)
@pytest.mark.parametrize("dim", [0, 1])
def test_a_compiled_model_looks_up_ids_of_each_rank_in_a_table_outside_of_its_graphs(dim: int) -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 4))
    eager, model = deepcopy(whole), deepcopy(whole)
    for one in (eager, model):
        shard_parameter(one[0], "weight", ChunkShardingSpec(dim, _places(2)))
        fully_shard(one, layout="interleaved", ignored_params={one[0].weight})
    compiled = torch.compile(model, backend="aot_eager")
    for step in range(3):
        ids = torch.randint(10, (2, 4))[dist.get_rank() if step else 0]
        for one in (eager, compiled):
            one(ids).square().mean().backward()
    assert_same_gradients(model, eager, **EXACT)
    torch.compiler.reset()
    with pytest.raises(RuntimeError, match="a graph holds no ShardedTensor; pass fullgraph=False"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(ids)
