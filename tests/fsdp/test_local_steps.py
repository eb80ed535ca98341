"""Elementwise optimizers step on local memory, with FSDP2's bits, state and names."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from copy import deepcopy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp.models import assert_same_parameters, in_each_layout, update
from ranks import on_ranks
from shardwise import fully_shard
from shardwise.fsdp import fast
from shardwise.optim import AdamW8bit, clip_grad_norm_
from shardwise.sharded_tensor import ChunkShardingSpec, ShardingPlan, shard_module, shard_parameter

AdamW, SGD = torch.optim.AdamW, torch.optim.SGD
KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    **{
        name: (getattr(torch.optim, name), {"foreach": False})
        for name in ("ASGD", "Adadelta", "Adagrad", "Adam", "Adamax", "NAdam", "RAdam", "RMSprop")
    },
    "AdamW": (AdamW, {}),
    "AdamW amsgrad foreach": (AdamW, {"amsgrad": True, "foreach": True}),
    "AdamW fused": (AdamW, {"fused": True}),
    "AdamW maximize": (AdamW, {"maximize": True, "weight_decay": 0.1}),
    "RMSprop momentum": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True, "foreach": True}),
    "SGD": (SGD, {}),
    "SGD momentum": (SGD, {"momentum": 0.9, "nesterov": True}),
    "SGD momentum foreach": (SGD, {"momentum": 0.9, "foreach": True}),
    "SGD momentum fused": (SGD, {"momentum": 0.9, "fused": True}),
}


def _model(shard: Any) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3), nn.Linear(3, 3))
    shard(model[0])
    shard(model[1], shard_placement_fn=lambda p: Shard(p.ndim - 1))
    shard(model)
    return model


def _backward(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed * 10 + dist.get_rank())
    model(torch.randn(4, 5, generator=generator)).square().mean().backward()


def assert_equal(ours: torch.optim.Optimizer, torchs: torch.optim.Optimizer) -> None:
    """Parameters and state, with types and placements."""
    one, other = ours.state_dict(), torchs.state_dict()
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for key, state in one["state"].items():
        assert list(state) == list(other["state"][key])
        for name, value in state.items():
            theirs = other["state"][key][name]
            assert type(value) is type(theirs)
            if isinstance(value, DTensor):
                assert (value.placements, value.shape) == (theirs.placements, theirs.shape)
            if isinstance(value, Tensor):
                bits = (getattr(one, "_local_tensor", one) for one in (value, theirs))
                assert torch.equal(*bits), (key, name)
    mine, theirs = ([p for group in one.param_groups for p in group["params"]] for one in (ours, torchs))
    assert all(torch.equal(a.to_local(), b.to_local()) for a, b in zip(mine, theirs, strict=True))
    assert len(ours.state) == len(torchs.state)


@on_ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_state_and_loading_are_those_of_fsdp2_bit_for_bit(kind: str) -> None:
    make, options = KINDS[kind]
    models = [_model(fully_shard), _model(torch_fully_shard)]
    optimizers = [make(model.parameters(), lr=0.05, **options) for model in models]
    fused = kind == "SGD momentum fused"  # which torch has not over DTensors; it begins with all or none
    late = [1] if fused else [0, 1]
    as_torchs = nullcontext() if fused else mock.patch.object(fast, "step_locally", return_value=None)
    for step in range(3):
        for model, optimizer, how in zip(models, optimizers, (nullcontext(), as_torchs), strict=True):
            _backward(model, step)
            if step in late:
                list(model.parameters())[step].grad = None
            with how:
                optimizer.step()
            optimizer.zero_grad()
        if step == 1:
            for optimizer in optimizers:
                optimizer.load_state_dict(optimizer.state_dict())
        assert_equal(*optimizers)
    assert [optimizer in fast._local_steps for optimizer in optimizers] == [True, fused]
    assert all(p.grad is None for p in models[0].parameters())


class _Seen(TorchDispatchMode):
    """How often each op reaches DTensors, and plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.sharded: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            self.sharded[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


@on_ranks(2)
def test_a_steady_step_dispatches_no_op_over_dtensors() -> None:
    for layout in ("interleaved", "contiguous"):
        for options in ({"foreach": True}, {"foreach": False}, {"fused": True}):
            model = fully_shard(nn.Linear(6, 6), layout=layout)
            optimizer = AdamW(model.parameters(), **options)
            for step in range(3):
                model(torch.ones(2, 6)).sum().backward()
                with _Seen() as seen:
                    optimizer.step()
                if step:
                    assert not seen.sharded
                optimizer.zero_grad()
            saved = model.weight * model.weight  # of the sharded parameter
            model(torch.ones(2, 6)).sum().backward()
            optimizer.step()
            if model.weight.to_local().numel():
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    saved.sum().backward()


@on_ranks(2)
def test_what_is_not_cut_alike_steps_as_before() -> None:
    """Plain parameters beside sharded ones, DTensors of others, and state placed otherwise."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    model, plain = fully_shard(nn.Linear(4, 4)), nn.Parameter(torch.ones(3))
    other = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    optimizer = SGD([*model.parameters(), plain, other], lr=0.1, momentum=0.9)
    for _ in range(3):
        (model(torch.ones(2, 4)).sum() + plain.sum() + other.full_tensor().sum()).backward()
        update(optimizer)
    assert torch.allclose(plain, 1 - 0.1 * torch.tensor(1 + 1.9 + 2.71))
    assert torch.allclose(other.full_tensor(), plain[:1].expand(4))
    assert all(type(optimizer.state[p]["momentum_buffer"]) is DTensor for p in model.parameters())
    assert len(optimizer.state) == 4

    sharded = fully_shard(nn.Linear(4, 4, bias=False))
    adam = AdamW(sharded.parameters())
    sharded(torch.ones(2, 4)).sum().backward()
    adam.step()
    adam.state[sharded.weight]["exp_avg"] = torch.zeros(4, 4)  # whole, where rows are expected
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        adam.step()


@on_ranks(2)
def test_momentum_begins_in_a_step_that_follows_one_that_raised() -> None:
    model = _model(fully_shard)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    _backward(model, 0)
    optimizer.param_groups[0]["lr"] = "fast"
    with pytest.raises(TypeError):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step()
    assert len(optimizer.state) == len(list(model.parameters()))
    assert all(type(optimizer.state[param]["momentum_buffer"]) is DTensor for param in model.parameters())


@on_ranks(2)
def test_a_large_table_keeps_fp32_moments_beside_those_in_8_bits() -> None:
    torch.manual_seed(0)
    whole = nn.Embedding(80, 64)
    table = deepcopy(whole)
    shard_parameter(table, "weight", ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]))
    ours, plain = AdamW8bit(table.parameters()), AdamW(whole.parameters(), foreach=False)
    for _ in range(3):
        for one, optimizer in ((table, ours), (whole, plain)):
            one(torch.arange(80)).square().mean().backward()
            update(optimizer)
    torch.testing.assert_close(table.weight.full_tensor(), whole.weight.detach(), rtol=1e-6, atol=1e-7)


@in_each_layout(2)
@pytest.mark.parametrize("name", ["SGD", "SGD momentum foreach", "AdamW", "AdamW amsgrad foreach", "Rprop"])
def test_tables_that_are_sharded_tensors_step_beside_sharded_modules(layout: str, name: str) -> None:
    kind, options = KINDS.get(name, (torch.optim.Rprop, {"foreach": True}))
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 3)).double()
    model = deepcopy(whole)
    shard_module(model, ShardingPlan(plan={"0.weight": ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])}))
    for layer in model[1:]:
        fully_shard(layer, layout=layout)
        layer.set_manual_backward_finalization(True)
    ours, plain = (kind(one.parameters(), lr=0.1, **options) for one in (model, whole))
    for step in range(3):
        for one, optimizer, clip in (
            (model, ours, clip_grad_norm_),
            (whole, plain, nn.utils.clip_grad_norm_),
        ):
            one(torch.arange(7)).square().mean().backward()
            if one is model:
                for layer in model[1:]:
                    layer.finalize_backward()
            if step == 0:
                one[1].bias.grad = None  # its state begins later than the others'
            clip(one.parameters(), 0.2)
            update(optimizer)
            assert all(param.grad is None for param in one.parameters())
    assert_same_parameters(model, whole, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "fsdp"])
@on_ranks(2)
def test_an_optimizer_of_another_model_may_step_on_some_ranks(strategy: str) -> None:
    model: Any = nn.Linear(4, 4)
    options = {"layout": "contiguous", "strategy": strategy} if strategy != "fsdp" else {}
    fully_shard(model, reshard_after_forward=False, **options).set_reshard_after_backward(False)
    own = nn.Parameter(torch.ones(3))
    others, optimizer = SGD([own], lr=0.1), SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        model(torch.ones(1, 4)).sum().backward()
        if dist.get_rank() == 0:
            own.grad = torch.ones(3)
            others.step()
        with torch.no_grad():
            model(torch.ones(1, 4))
    model.reshard()
    before, first = fast.process.steps, model.weight.to_local()
    for params in ([first.detach()], [torch.empty(0)], list(model.parameters())):  # memory of it, or perhaps
        SGD(params, lr=0.1).step()
    others.step()
    others.add_param_group({"params": model.bias})
    others.step()
    assert fast.process.steps == before + 4
