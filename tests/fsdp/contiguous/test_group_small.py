"""`group_small` and `host_bound_groups`: fewer, larger groups, and the names of those too small."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from fsdp.models import assert_same_parameters, in_each_layout, update
from ranks import on_ranks
from shardwise import MixedPrecisionPolicy, ShardingError, fully_shard
from shardwise.comm.count import CommCounter
from shardwise.fsdp.module_state import state_of

BLOCKS, WIDTH = 6, 8
BLOCK_BYTES = (WIDTH * WIDTH + WIDTH) * 4


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))


def _groups(model: nn.Sequential) -> list[int]:
    """How many blocks each group has, in order."""
    states = list(dict.fromkeys(state_of(block) for block in model))
    return [sum(state_of(block) is state for block in model) for state in states]


def _shard(layout: str, group_small: int | None, **options: object) -> nn.Sequential:
    model = _model()
    fully_shard([*model], layout=layout, group_small=group_small, **options)
    fully_shard(model, layout=layout, **options)
    return model


@in_each_layout(1, 2)
def test_consecutive_modules_share_a_group_until_it_is_large_enough(layout: str) -> None:
    assert _groups(_shard(layout, None)) == [BLOCKS]
    assert _groups(_shard(layout, 1)) == [1] * BLOCKS
    assert _groups(_shard(layout, BLOCK_BYTES)) == [1] * BLOCKS
    assert _groups(_shard(layout, BLOCK_BYTES + 1)) == [2, 2, 2]
    assert _groups(_shard(layout, 4 * BLOCK_BYTES)) == [4, 2]
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    assert _groups(_shard(layout, BLOCK_BYTES, mp_policy=half)) == [2, 2, 2]
    model = _model()
    ignored = {block.bias for block in model}  # which count for nothing
    fully_shard([*model], layout=layout, group_small=BLOCK_BYTES, ignored_params=ignored)
    assert _groups(model) == [2, 2, 2]


@in_each_layout(2, 3)
def test_grouped_modules_train_as_one_process_in_fewer_collectives(layout: str) -> None:
    alone, model = _model(), _shard(layout, 2 * BLOCK_BYTES)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (alone, model)]
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(3):
        inputs = torch.randn(world * 2, WIDTH, generator=torch.Generator().manual_seed(step))
        alone(inputs).square().mean().backward()
        with CommCounter() as counter:
            model(inputs[2 * rank : 2 * rank + 2]).square().mean().backward()
        if step:  # the first compares ranks
            # The last group of forward is kept for backward: 3 + 2 gathers.
            assert (counter.count("all_gather"), counter.count("reduce_scatter")) == (5, 3)
        for optimizer in optimizers:
            update(optimizer)
    assert_same_parameters(model, alone, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_one_module_is_refused() -> None:
    with pytest.raises(ShardingError, match="pass its blocks as a list"):
        fully_shard(_model(), group_small=1)


@in_each_layout(2)
def test_host_bound_groups_are_named_with_their_bytes(layout: str) -> None:
    model = _shard(layout, 2 * BLOCK_BYTES)
    assert isinstance(model, shardwise.FSDPModule)
    assert len(model.host_bound_groups(bytes_per_second=1e9)) == 3  # not named yet
    model(torch.randn(2, WIDTH))
    found = model.host_bound_groups(bytes_per_second=1e9, host_seconds=1e-3)
    assert found == {"0, 1": 2 * BLOCK_BYTES, "2, 3": 2 * BLOCK_BYTES, "4, 5": 2 * BLOCK_BYTES}
    assert model.host_bound_groups(bytes_per_second=1.0) == {}
