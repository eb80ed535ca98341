"""What `fully_shard(layout="contiguous")` makes of a module, and what its methods do, beyond numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp.contiguous.one_process import (
    all_strategies,
    assert_trains_like_one_process,
    each_case,
    full,
    lone,
    net,
    shard,
)
from fsdp.models import EXACT, Net, assert_same_gradients, step
from ranks import on_ranks
from shardwise import MixedPrecisionPolicy
from shardwise.layout import Owned, RaggedShard


def placed(placement: Any) -> Callable[[nn.Parameter], Any]:
    return lambda param: placement if param.ndim == 2 else None


@each_case(1, 3, block=[2, 3, 8, 100])
def test_blocks_of_rows_stay_together_and_train(block: int) -> None:
    model = net(shard_placement_fn=placed(RaggedShard(block)))
    for name, param in model.named_parameters():
        if param.ndim == 2:
            first, count = param.box.offsets[0], param.box.sizes[0]
            assert count == 0 or first % block == 0, name
            assert (first + count) % block == 0 or first + count == param.shape[0] or count == 0, name
    assert_trains_like_one_process(model, lone())


@each_case(3, rank=[None, 0, -1])
def test_owned_parameters_are_whole_on_one_rank_and_train(rank: int | None) -> None:
    ranks = dist.get_world_size()
    owner = None if rank is None else rank % ranks
    model = net(shard_placement_fn=placed(Owned(owner)))
    for name, param in model.named_parameters():
        if param.ndim == 2:
            held = torch.zeros(ranks, dtype=torch.int64)
            held[dist.get_rank()] = param.local.shape[0]
            dist.all_reduce(held)
            assert sorted(held.tolist()) == [0] * (ranks - 1) + [param.shape[0]], name
            assert owner is None or held[owner] == param.shape[0], name
    assert_trains_like_one_process(model, lone())


def initialise(model: nn.Module) -> None:
    torch.manual_seed(3)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


@all_strategies(3)
def test_a_model_made_on_meta_and_initialised_in_place_equals_one_process(strategy: str) -> None:
    reference = Net()
    initialise(reference)
    with torch.device("meta"):
        model = Net()
    shard(model, strategy=strategy)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    initialise(model)
    for name, value in full(model).items():
        assert torch.equal(value, reference.get_parameter(name).detach()), name
    assert_trains_like_one_process(model, reference)


@on_ranks(2)
def test_gradients_kept_without_synchronisation_are_forgotten_by_reset_iter_state() -> None:
    """In the reduction's dtype too; and the next synchronised backward starts from nothing."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model, healthy = net(mp_policy=policy), net(mp_policy=policy)
    step(healthy)
    model.set_requires_gradient_sync(False)
    step(model)
    model.reset_iter_state()
    model.set_requires_gradient_sync(True)
    step(model)
    assert_same_gradients(model, healthy, **EXACT)
