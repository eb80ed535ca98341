"""Models in the contiguous layout train as in one process: frozen, mixed, loaded or accumulated."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp.contiguous.one_process import (
    all_strategies,
    assert_trains_like_one_process,
    each_case,
    full,
    lone,
    net,
    shard,
    whole,
)
from fsdp.models import Net, assert_same_gradients, step, update
from ranks import on_ranks
from shardwise import FSDPModule, fully_shard
from shardwise.fsdp.module_state import state_of


def freeze_some(model: Net) -> Net:
    """The first parameter of the root and of each block, and all of the last block."""
    model.inner.weight.requires_grad_(False)
    for block in model.blocks:
        block.up.weight.requires_grad_(False)
    model.blocks[-1].requires_grad_(False)
    return model


@all_strategies(2, 3)
def test_frozen_parameters_lie_apart_and_the_rest_trains(strategy: str) -> None:
    """The frozen segment is the first and of another size than the trained one."""
    model = shard(freeze_some(lone()), strategy=strategy)
    segments = state_of(model).groups[0].layout.segments
    assert [s.trainable for s in segments] == [False, True]
    assert segments[0].shard_numel != segments[1].shard_numel
    assert_trains_like_one_process(model, freeze_some(lone()))


@each_case(4, strategy=["hsdp", "hierarchical_fsdp"])
def test_frozen_parameters_over_two_axes(strategy: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    assert_trains_like_one_process(
        shard(freeze_some(lone()), strategy=strategy, mesh=mesh), freeze_some(lone())
    )


@all_strategies(3)
def test_parameters_frozen_and_thawed_later_train_when_thawed(strategy: str) -> None:
    model, reference = shard(freeze_some(lone()), strategy=strategy), freeze_some(lone())
    assert_trains_like_one_process(model, reference, steps=1)
    for one in (model, reference):
        one.requires_grad_(True)
        one.blocks[1].requires_grad_(False)
    assert_trains_like_one_process(model, reference, steps=2)
    for one in (model, reference):
        one.requires_grad_(True)
    assert_trains_like_one_process(model, reference, steps=2)


@all_strategies(2)
def test_a_loss_may_have_sums_and_means_of_sharded_parameters(strategy: str) -> None:
    model, reference = shard(lone(), strategy=strategy), lone()
    for one in (model, reference):
        loss = one(torch.ones(4, 8)).square().mean()
        (loss + sum(p.sum() + (2 * p).mean() for p in one.blocks[0].parameters())).backward()
    assert_same_gradients(model, reference)


class Mixed(nn.Module):
    """A layer in double precision between two in single."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(8, 5), nn.Linear(5, 7, dtype=torch.float64), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(self.a(x).double())).float())


@all_strategies(1, 3)
def test_parameters_of_several_dtypes_in_a_group_train(strategy: str) -> None:
    assert_trains_like_one_process(fully_shard(Mixed(), layout="contiguous", strategy=strategy), Mixed())


@all_strategies(2, 3)
def test_values_loaded_or_written_between_steps_are_never_stale(strategy: str) -> None:
    """In evaluation, training, and `unshard`, whether or not parameters were left gathered."""
    model = net(strategy=strategy, reshard_after_forward=False)
    source = lone()
    x = torch.ones(2, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for round_ in range(4):
        with torch.no_grad():
            for param in source.parameters():
                param.mul_(0.9).add_(0.01 * round_)
            model.load_state_dict(_sharded_like(model, source))
            assert torch.equal(model(x), source(x)), "loaded"
            model.unshard()
            assert torch.equal(model.inner.weight, source.inner.weight), "loaded, then unsharded"
        step(model)
        update(optimizer)
        stepped = lone()
        stepped.load_state_dict(full(_resharded(model)))
        with torch.no_grad():
            assert torch.equal(model(x), stepped(x)), "after an optimizer step"
            _resharded(model)
            for name, param in model.named_parameters():
                param.copy_(source.get_parameter(name))
            assert torch.equal(model(x), source(x)), "copied into while sharded"


def _resharded(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return model


def _sharded_like(model: nn.Module, source: nn.Module) -> dict[str, Tensor]:
    """The source's values as the model's own state dict holds them."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for name, value in source.state_dict().items():
        state[name].copy_(value)
    return state


@on_ranks(4)
def test_a_parameter_used_only_before_the_last_backward_keeps_its_gradient() -> None:
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x: Tensor, which: str) -> Tensor:
            return self.get_submodule(which)(x)

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, reference = fully_shard(Either(), mesh=mesh, layout="contiguous"), Either()
    for index, which in enumerate("ab"):
        model.set_requires_all_reduce(index == 1)
        x = torch.full((2, 8), 1.0 + dist.get_rank())
        model(x, which).square().mean().backward()
        torch.stack(
            [reference(torch.full((2, 8), 1.0 + r), which).square().mean() for r in range(4)]
        ).mean().backward()
    for (name, mine), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert mine.grad is not None, name
        torch.testing.assert_close(whole(mine.grad), other.grad, rtol=1e-5, atol=1e-6)
