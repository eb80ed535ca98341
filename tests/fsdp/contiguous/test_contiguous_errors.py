"""What the contiguous layout refuses, on every rank, by name and with a way out."""

from __future__ import annotations

import math
from types import MethodType

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

from fsdp.models import Net, refused, sharded_net, step
from fsdp.parity.extension import Narrowed, Quantized, wrap_weights
from ranks import on_ranks
from shardwise import fully_shard
from shardwise.layout import Owned, RaggedShard


def contiguous(model: nn.Module, **options: object) -> nn.Module:
    return fully_shard(model, layout="contiguous", **options)


@on_ranks(2)
@pytest.mark.parametrize("dim", [1, -1])
def test_a_cut_on_another_dim_than_0_is_refused_before_anything_is_sharded(dim: int) -> None:
    model = Net()
    words = f"rank {dist.get_rank()}", "'inner.weight'", "(8, 8)", "Shard(0)", "interleaved"
    cut = {"shard_placement_fn": lambda p: Shard(dim) if p.ndim > 1 else None}
    refused(lambda: contiguous(model, **cut), *words)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert type(model) is Net


@on_ranks(2)
@pytest.mark.parametrize("kind", [Narrowed, Quantized])
def test_tensor_subclasses_that_choose_what_is_gathered_are_refused_by_name(kind: type) -> None:
    model = Net()
    wrap_weights(kind)(model)
    words = kind.__name__, "weight'", "fsdp_pre_all_gather", 'layout="interleaved"'
    refused(lambda: contiguous(model.blocks[0]), *words, "an equal share on every rank")
    refused(lambda: contiguous(model.blocks[0]), "enable_fsdp_float8_all_gather=False")
    for block in model.blocks:  # as it says
        fully_shard(block)
    assert math.isfinite(step(contiguous(model)).item())


@on_ranks(2)
def test_hooks_set_on_local_rows_are_refused_and_not_passed_over() -> None:
    model = contiguous(Net())
    local = model.head.weight._local_tensor
    local.fsdp_pre_all_gather = MethodType(lambda self, mesh: ((self,), None), local)
    refused(lambda: step(model), "'head.weight' has local rows with hooks", 'layout="interleaved"')


@on_ranks(2)
def test_complex_parameters_are_refused_and_one_without_columns_has_its_shape() -> None:
    complex_one = nn.Linear(2, 2, dtype=torch.complex64)
    refused(lambda: contiguous(complex_one), "'weight' is complex")
    assert contiguous(nn.Linear(0, 4)).weight.full_tensor().shape == (4, 0)


@on_ranks(2)
def test_an_owner_that_is_not_there_and_blocks_of_rows_without_the_layout_are_refused() -> None:
    refused(lambda: contiguous(Net(), shard_placement_fn=lambda p: Owned(2)), "rank 2", "2 ranks")
    blocks = {"shard_placement_fn": lambda p: RaggedShard(2)}
    refused(lambda: fully_shard(nn.Linear(4, 4), **blocks), "'weight'", 'layout="contiguous"')


@on_ranks(2)
def test_converting_a_part_of_a_group_is_refused_by_name() -> None:
    model = contiguous(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    model[0].double()
    refused(lambda: model(torch.ones(1, 4)), "float64", "float32", "before fully_shard")


@on_ranks(2)
def test_calling_a_part_of_a_sharded_model_is_refused_by_its_parameters() -> None:
    model = sharded_net(layout="contiguous")
    for call in (lambda: model.head(torch.ones(1, 8)), lambda: model.features(torch.ones(1, 8))):
        refused(call, "sharded by rows", "full_tensor()")
        step(model)
    model.unshard()
    assert model.head(torch.ones(1, 8)).shape == (1, 2)
    model.reshard()
    refused(lambda: model.head(torch.ones(1, 8)), "sharded by rows")
