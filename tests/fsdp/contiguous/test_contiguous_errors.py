"""What the contiguous layout refuses, on every rank, by name and with a way out."""

from __future__ import annotations

import math
from types import MethodType

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from fsdp.models import Net, raises_on_every_rank, sharded_net, step
from fsdp.parity.extension import Narrowed, Quantized, wrap_weights
from ranks import on_ranks
from shardwise import RankMismatchError, ShardingError, fully_shard
from shardwise.layout import Box, Owned, RaggedShard
from shardwise.sharded_tensor.rows.piece import Piece


def mentions(message: str, *words: str) -> None:
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in: {message}"


def contiguous(model: nn.Module, **options: object) -> nn.Module:
    return fully_shard(model, layout="contiguous", **options)


@on_ranks(2)
@pytest.mark.parametrize("dim", [1, -1])
def test_a_cut_on_another_dim_than_0_is_refused_before_anything_is_sharded(dim: int) -> None:
    model = Net()
    message = raises_on_every_rank(
        ShardingError,
        lambda: contiguous(model, shard_placement_fn=lambda p: Shard(dim) if p.ndim > 1 else None),
    )
    mentions(message, f"rank {dist.get_rank()}", "'inner.weight'", "(8, 8)", "Shard(0)", "interleaved")
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert type(model) is Net


@on_ranks(2)
@pytest.mark.parametrize("kind", [Narrowed, Quantized])
def test_tensor_subclasses_that_choose_what_is_gathered_are_refused_by_name(kind: type) -> None:
    model = Net()
    wrap_weights(kind)(model)
    message = raises_on_every_rank(ShardingError, lambda: contiguous(model.blocks[0]))
    mentions(message, kind.__name__, "weight'", "fsdp_pre_all_gather", 'layout="interleaved"')
    mentions(message, "an equal share on every rank", "enable_fsdp_float8_all_gather=False")
    for block in model.blocks:  # as it says
        fully_shard(block)
    assert math.isfinite(step(contiguous(model)).item())


@on_ranks(2)
def test_hooks_set_on_local_rows_are_refused_and_not_passed_over() -> None:
    model = contiguous(Net())
    local = model.head.weight._local_tensor
    local.fsdp_pre_all_gather = MethodType(lambda self, mesh: ((self,), None), local)
    message = raises_on_every_rank(ShardingError, lambda: step(model))
    mentions(message, "'head.weight' has local rows with hooks", 'layout="interleaved"')


@on_ranks(2)
def test_complex_parameters_are_refused_and_one_without_columns_has_its_shape() -> None:
    complex_one = nn.Linear(2, 2, dtype=torch.complex64)
    mentions(raises_on_every_rank(ShardingError, lambda: contiguous(complex_one)), "'weight' is complex")
    assert contiguous(nn.Linear(0, 4)).weight.full_tensor().shape == (4, 0)


@on_ranks(2)
def test_an_owner_that_is_not_there_is_refused() -> None:
    message = raises_on_every_rank(
        ShardingError, lambda: contiguous(Net(), shard_placement_fn=lambda p: Owned(2))
    )
    mentions(message, "rank 2", "2 ranks")


@on_ranks(2)
def test_a_wrong_answer_of_shard_placement_fn_names_the_parameter() -> None:
    message = raises_on_every_rank(
        ShardingError, lambda: contiguous(nn.Linear(4, 4), shard_placement_fn=lambda p: 1)
    )
    mentions(message, "'weight'", "got 1")


@on_ranks(2)
def test_blocks_of_rows_need_the_contiguous_layout() -> None:
    message = raises_on_every_rank(
        ShardingError, lambda: fully_shard(nn.Linear(4, 4), shard_placement_fn=lambda p: RaggedShard(2))
    )
    mentions(message, "'weight'", 'layout="contiguous"')


@on_ranks(4)
def test_a_strategy_must_fit_the_mesh() -> None:
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    message = raises_on_every_rank(ShardingError, lambda: contiguous(Net(), strategy="zero9"))
    mentions(message, "'zero9'", "zero1")
    message = raises_on_every_rank(ShardingError, lambda: contiguous(Net(), strategy="hsdp"))
    mentions(message, "'hsdp'", "2-D")
    message = raises_on_every_rank(ShardingError, lambda: contiguous(Net(), strategy="zero1", mesh=square))
    mentions(message, "'zero1'", "1-D")


@on_ranks(2)
def test_a_strategy_needs_the_contiguous_layout() -> None:
    """The interleaved layout would silently train another way."""
    message = raises_on_every_rank(ShardingError, lambda: fully_shard(Net(), strategy="zero1"))
    mentions(message, "strategy", "contiguous")


@on_ranks(2)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_built_before_sharding_is_caught_at_its_first_step(kind: type) -> None:
    model = Net(blocks=1)
    optimizer = kind(model.parameters(), lr=0.1)
    contiguous(model)
    step(model)
    message = raises_on_every_rank(ShardingError, optimizer.step)
    mentions(message, kind.__name__, "blocks.0.up.weight", "after fully_shard")


@on_ranks(2)
def test_an_optimizer_built_from_gathered_parameters_is_caught_at_its_first_step() -> None:
    model = sharded_net(layout="contiguous")
    optimizers: list[torch.optim.Optimizer] = []
    step(model, then=lambda: optimizers.append(torch.optim.SGD(model.parameters(), lr=0.1)))
    message = raises_on_every_rank(ShardingError, optimizers[0].step)
    mentions(message, "SGD", "inner.weight", "before the first forward")
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@on_ranks(2)
def test_parameters_left_on_the_meta_device_are_named() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    contiguous(model)
    message = raises_on_every_rank(ShardingError, lambda: model(torch.ones(1, 4)))
    mentions(message, "'0.weight'", "meta", "to_empty")


@on_ranks(2)
def test_a_parameter_moved_to_the_wrong_device_is_named() -> None:
    model = contiguous(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    model[1].to("meta")
    message = raises_on_every_rank(ShardingError, lambda: model(torch.ones(1, 4)))
    mentions(message, "'1.weight'", "meta")


@on_ranks(2)
def test_replacing_a_sharded_parameter_by_a_plain_one_is_refused() -> None:
    model = contiguous(nn.Linear(4, 4))
    model.weight = nn.Parameter(torch.ones(4, 4))
    message = raises_on_every_rank(ShardingError, lambda: model(torch.ones(1, 4)))
    mentions(message, "'weight'", "DTensor of shape (4, 4)")


@on_ranks(2)
def test_converting_a_part_of_a_group_is_refused_by_name() -> None:
    model = contiguous(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    model[0].double()
    message = raises_on_every_rank(ShardingError, lambda: model(torch.ones(1, 4)))
    mentions(message, "float64", "float32", "before fully_shard")


@on_ranks(2, 3)
def test_different_models_on_different_ranks_raise_on_each_rank_with_both_sides() -> None:
    width = 8 if dist.get_rank() == 0 else 9
    model = contiguous(nn.Linear(width, 4))
    message = raises_on_every_rank(RankMismatchError, lambda: model(torch.ones(1, width)))
    mentions(message, "weight: shape [4, 8]", "weight: shape [4, 9]", "Build the same model")


@on_ranks(2)
def test_freezing_a_parameter_on_one_rank_only_is_caught_before_its_reduction_hangs() -> None:
    model = Net(blocks=1)
    model.head.requires_grad_(dist.get_rank() == 0)
    contiguous(model)
    message = raises_on_every_rank(RankMismatchError, lambda: step(model))
    mentions(message, "head.weight")


@on_ranks(2)
def test_calling_a_part_of_a_sharded_model_is_refused_by_its_parameters() -> None:
    model = sharded_net(layout="contiguous")
    for call in (lambda: model.head(torch.ones(1, 8)), lambda: model.features(torch.ones(1, 8))):
        mentions(raises_on_every_rank(ShardingError, call), "sharded by rows", "full_tensor()")
        step(model)
    model.unshard()
    assert model.head(torch.ones(1, 8)).shape == (1, 2)
    model.reshard()
    with pytest.raises(ShardingError, match="sharded by rows"):
        model.head(torch.ones(1, 8))


@on_ranks(2)
def test_one_parameter_in_two_groups_is_refused() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight

    tied = Tied()
    contiguous(tied.a)
    message = raises_on_every_rank(ShardingError, lambda: contiguous(tied.b))
    mentions(message, "'weight'", "fully_shard([")


@on_ranks(2)
def test_scalar_and_non_contiguous_parameters_are_refused_by_name() -> None:
    scalar = nn.Module()
    scalar.scale = nn.Parameter(torch.tensor(1.0))
    mentions(raises_on_every_rank(ShardingError, lambda: contiguous(scalar)), "'scale'", "ignored_params")
    turned = nn.Linear(4, 2)
    turned.weight = nn.Parameter(torch.ones(4, 2).t())
    mentions(raises_on_every_rank(ShardingError, lambda: contiguous(turned)), "'weight'", "contiguous")


def test_a_torch_that_runs_our_operations_as_dtensor_s_is_refused_by_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shardwise._compat.dtensors.RUNS_OWN_DTENSORS", False)
    model = Net()
    with pytest.raises(ShardingError) as refused:
        contiguous(model)
    mentions(str(refused.value), torch.__version__, "2.12", "interleaved")
    assert type(model) is Net
    with pytest.raises(ShardingError, match=r"rows .* needs torch 2\.12"):
        Piece(torch.Size([2]), (), lambda rank: Box.whole([2]))
