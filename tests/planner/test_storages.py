"""Bytes alive, against sums done by hand. A float32 vector of 100 elements holds 400 bytes."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Shard

import shardwise
from planner.models import Even
from shardwise.planner.noop_group import noop_world
from shardwise.planner.storages import Storages


@pytest.mark.parametrize("fake", [False, True])
def test_a_peak_counts_views_once_and_memory_until_its_last_view_dies(fake: bool) -> None:
    with FakeTensorMode() if fake else torch.no_grad(), Storages() as storages:
        a = torch.empty(100)
        with storages.peak("a, b, d, then a, d, e"):
            b = a + 1
            c = b.view(10, 10)
            del b
            d = c * 2
            assert storages.live == 1200
            del c
            assert storages.live == 800
            e = d + 1
        assert storages.peaks == {"a, b, d, then a, d, e": 1200}
        with storages.peak("nothing new"):
            del a
        assert storages.peaks["nothing new"] == 1200
        assert storages.live == 800
        del d, e
        assert storages.live == 0


@pytest.mark.parametrize("fake", [False, True])
def test_a_storage_that_is_resized_counts_as_it_is_then(fake: bool) -> None:
    with FakeTensorMode() if fake else torch.no_grad(), Storages() as storages:
        a = torch.empty(100)
        with storages.peak("emptied, then doubled"):
            a.untyped_storage().resize_(0)
            assert storages.live == 0
            a.untyped_storage().resize_(800)
        assert storages.peaks == {"emptied, then doubled": 800}
        assert storages.life(a).sizes == [400, 0, 800]


def test_gradients_and_activations_of_a_backward_are_counted() -> None:
    weight = torch.ones(100, requires_grad=True)
    with Storages() as storages:
        storages.see([weight])
        with storages.peak("forward"):  # the weight, its exponential, their product, the scalar sum
            loss = (weight.exp() * weight).sum()
        assert storages.peaks["forward"] == 3 * 400 + 4
        loss.backward()
        del loss
        assert storages.live == 2 * 400  # the weight and its gradient


def test_a_tensor_that_wraps_another_counts_as_what_it_wraps() -> None:
    with noop_world(4) as mesh, Storages() as storages:
        whole = DTensor.from_local(torch.empty(100), mesh, [Shard(0)], run_check=False)
        doubled = whole * 2
        assert whole.numel() == doubled.numel() == 400
        assert storages.live == 800


def test_memory_that_was_there_before_counts_once_it_is_seen() -> None:
    a, b = torch.empty(100), torch.empty(50)
    with Storages() as storages:
        storages.see({"a": [a, (a[:10], 3, "text", None)]})
        assert storages.live == 400
        b.add_(1)
        assert storages.live == 600
    assert torch.UntypedStorage.resize_.__name__ == "resize_"
    b.untyped_storage().resize_(0)
    assert storages.live == 600  # nothing is watched any more


def test_groups_that_a_rank_makes_after_a_plan_have_the_names_that_other_ranks_give_them() -> None:
    before = dist.distributed_c10d._world.group_count
    with noop_world(4, axes={"replicate": 2, "shard": 2}):
        assert dist.distributed_c10d._world.group_count > before
    assert dist.distributed_c10d._world.group_count == before


@pytest.mark.parametrize("enabled", [True, False])
def test_a_plan_leaves_garbage_collection_as_the_caller_set_it(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    shardwise.plan(Even, ranks=2, sequence=8)
    left = gc.isenabled()
    gc.enable()
    assert left == enabled
