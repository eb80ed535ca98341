"""An ordinary optimizer over shards gives the numbers that it gives over whole parameters."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.optim import Optimizer

from ranks import on_ranks
from sharded_tensor import covers
from shardwise.errors import ShardingError
from shardwise.optim.muon import Muon
from shardwise.optim.sharded import ShardedOptimizer
from shardwise.sharded_tensor import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    RaggedShardingSpec,
    ShardedTensor,
    ShardingSpec,
    ShardMetadata,
)
from shardwise.sharded_tensor.module import ShardingPlan, named_params_with_sharded_tensor, shard_module

# Rank 1 has none of the first cut's shards, several of the second's.
CUTS: list[dict[str, ShardingSpec]] = [
    {
        "matrix": ChunkShardingSpec(0, ["rank:2", "rank:0"]),
        "scale": EnumerableShardingSpec([ShardMetadata([], [], "rank:1")]),
    },
    {
        "matrix": ChunkShardingSpec(1, ["rank:1", "rank:0", "rank:1"]),
        "vector": RaggedShardingSpec(0, [3, 0, 4], ["rank:0", "rank:1", "rank:0"]),
    },
]
KINDS: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {}),
    (torch.optim.Adagrad, {}),
    (torch.optim.RMSprop, {"centered": True}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.Rprop, {}),
    (torch.optim.ASGD, {}),
]


class Model(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.matrix = nn.Parameter(torch.randn(5, 4, generator=generator))
        self.vector = nn.Parameter(torch.randn(7, generator=generator))
        self.scale = nn.Parameter(torch.randn((), generator=generator))


def cut_model(cut: int, seed: int = 0) -> Model:
    model = Model(seed)
    shard_module(model, ShardingPlan(dict(CUTS[cut])), src_rank=None)
    return model


def give_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator)
        if isinstance(parameter, ShardedTensor):
            parameter.grad = covers.cut(gradient, parameter.sharding_spec())
        else:
            parameter.grad = gradient


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        give_gradients(model, step)
        optimizer.step()
        optimizer.zero_grad()


def assert_equal(model: nn.Module, reference: nn.Module) -> None:
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(covers.whole_of(parameter), expected[name]), name


def whole_state(optimizer: Optimizer) -> dict[int, Any]:
    """A sharded optimizer's state, numbered as an ordinary one's, in whole tensors of their own."""
    state = optimizer.state_dict()["state"]
    return {
        i: {
            k: v.full_tensor() if isinstance(v, ShardedTensor) else deepcopy(v)
            for k, v in state[name].items()
        }
        for i, name in enumerate(("matrix", "vector", "scale"))
        if name in state
    }


@on_ranks(3)
def test_shards_train_as_whole_parameters_do_and_their_state_moves_to_any_cut(tmp_path: Path) -> None:
    for index, (kind, options) in enumerate(KINDS):
        reference = Model()
        whole = kind(reference.parameters(), lr=0.1, **options)  # type: ignore[call-arg]
        first = cut_model(0)
        optimizer = ShardedOptimizer(dict(first.named_parameters()), kind, lr=0.1, **options)
        train(first, optimizer, range(2))
        train(reference, whole, range(2))
        assert_equal(first, reference)
        kept_model, kept_state = whole_copy(first), whole_state(optimizer)
        torch.testing.assert_close(kept_state, whole.state_dict()["state"], rtol=0, atol=0)

        second = cut_model(1, seed=1)
        other = ShardedOptimizer(dict(second.named_parameters()), kind, lr=0.7, **options)
        if index % 8:  # in this process
            second.load_state_dict(first.state_dict())
            other.load_state_dict(optimizer.state_dict())
        else:  # through a checkpoint
            saved = {"model": first.state_dict(), "optimizer": optimizer.state_dict()}
            dcp.save(saved, checkpoint_id=tmp_path / str(index))
            other.allocate_state()
            assert_equal(second, Model(seed=1))
            loaded = {"model": second.state_dict(), "optimizer": other.state_dict()}
            dcp.load(loaded, checkpoint_id=tmp_path / str(index))
            other.load_state_dict(loaded["optimizer"])
        assert other.param_groups[0]["lr"] == 0.1
        train(second, other, range(2, 4))
        train(reference, whole, range(2, 4))
        assert_equal(second, reference)
        torch.testing.assert_close(whole_state(other), whole.state_dict()["state"], rtol=0, atol=0)
        assert_equal(first, kept_model)  # the second has memory of its own
        torch.testing.assert_close(whole_state(optimizer), kept_state, rtol=0, atol=0)


def whole_copy(model: nn.Module) -> nn.Module:
    copied = Model()
    copied.load_state_dict(model.state_dict())
    return copied


@on_ranks(3)
def test_groups_schedulers_and_closures_work_as_in_torch() -> None:
    reference = Model()
    sets = [
        {"params": [reference.vector]},
        {"params": [reference.scale, reference.matrix], "lr": 0.3, "weight_decay": 0.5},
    ]
    whole = torch.optim.AdamW(sets, lr=0.1)
    model = cut_model(0)
    optimizer = ShardedOptimizer(
        {name: p for name, p in model.named_parameters() if name != "matrix"},
        torch.optim.AdamW,
        0.1,
        param_groups=[{"names": ["scale"], "lr": 0.3, "weight_decay": 0.5}],
    )
    optimizer.add_param_group({"params": {"matrix": model.matrix}, "lr": 0.3, "weight_decay": 0.5})
    assert isinstance(optimizer, Optimizer)
    assert [group["names"] for group in optimizer.param_groups] == [["vector"], ["scale"], ["matrix"]]
    assert list(optimizer.named_params) == ["vector", "scale", "matrix"]
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (optimizer, whole)]
    called = []
    optimizer.register_step_post_hook(lambda *unused: called.append("hook"))
    for step in range(3):
        train(model, optimizer, range(step, step + 1))
        train(reference, whole, range(step, step + 1))
        for scheduler in schedulers:
            scheduler.step()
    assert_equal(model, reference)
    assert called == ["hook"] * 3

    def evaluate() -> int:
        give_gradients(model, 9)
        return 7

    assert optimizer.step(evaluate) == 7
    give_gradients(reference, 9)
    whole.step()
    assert_equal(model, reference)

    optimizer.zero_grad(set_to_none=False)
    locals_ = [t for p in model.parameters() for t in (p.tensors if isinstance(p, ShardedTensor) else [p])]
    assert all(torch.equal(t.grad, torch.zeros_like(t)) for t in locals_)
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    before = whole_copy(model)
    optimizer.step()  # without any gradient, nothing changes
    assert_equal(model, before)


@on_ranks(3)
def test_a_shard_without_gradient_beside_one_with_has_a_gradient_of_zero() -> None:
    reference, model = Model(), cut_model(1)
    gradient = torch.zeros(5, 4)
    gradient[:, 3:] = 2.0  # of the last of rank 1's shards alone
    reference.matrix.grad = gradient
    torch.optim.AdamW([reference.matrix], lr=0.1).step()
    assert isinstance(model.matrix, ShardedTensor)
    for tensor, box in zip(model.matrix.tensors, model.matrix.boxes, strict=True):
        if box.offsets[1] >= 2 or dist.get_rank() == 0:
            tensor.grad = gradient[:, box.offsets[1] : box.ends[1]].clone()
    optimizer = ShardedOptimizer({"matrix": model.matrix}, torch.optim.AdamW, lr=0.1)
    optimizer.step()
    assert torch.equal(model.matrix.full_tensor(), reference.matrix)


class Sign(Optimizer):
    """One of the user's, which says that it treats every element alone."""

    elementwise = True

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                    mean.lerp_(parameter.grad, 0.3)
                    parameter.sub_(mean.sign(), alpha=group["lr"])


@on_ranks(3)
def test_an_optimizer_of_the_users_may_say_that_it_treats_every_element_alone() -> None:
    model, reference = cut_model(1), Model()
    optimizer = ShardedOptimizer(dict(model.named_parameters()), Sign, lr=0.1)
    optimizer.allocate_state()
    found = optimizer.state_dict()["state"]
    assert list(found) == ["matrix", "vector", "scale"]
    assert torch.equal(found["matrix"]["mean"].full_tensor(), torch.zeros(5, 4))
    assert_equal(model, reference)
    train(model, optimizer, range(2))
    train(reference, Sign(reference.parameters(), lr=0.1), range(2))
    assert_equal(model, reference)


@on_ranks(3)
def test_what_cannot_be_optimized_by_shards_is_refused() -> None:
    for kind, options in ((torch.optim.Adafactor, {}), (torch.optim.AdamW, {"fused": True})):
        model = cut_model(1)
        with pytest.raises(ShardingError, match="ShardedTensor"):
            train(model, kind(model.parameters(), **options), range(1))
    model = cut_model(0)
    named = dict(named_params_with_sharded_tensor(model))
    refused: list[tuple[type[Optimizer], str]] = [
        (torch.optim.Adafactor, "sums over the rows"),
        (torch.optim.LBFGS, "inner products of all parameters"),
        (torch.optim.Muon, "multiplies whole matrices"),
        (Muon, "multiplies whole matrices"),
        (torch.optim.SparseAdam, "sparse gradients"),
        (type("Mine", (torch.optim.AdamW,), {}), "elementwise = True"),
    ]
    for kind, why in refused:
        with pytest.raises(ShardingError, match=f"{kind.__name__} cannot step on shards.*{why}"):
            ShardedOptimizer(named, kind)
    for parameters, groups, why in (
        ({**named, "again": model.matrix}, None, "matrix and again are one parameter"),
        ({"sum": 2 * model.vector}, None, "sum is the result of an operation"),
        (named, [{"names": ["matrx"]}], r"no parameter is named 'matrx'; near names are \['matrix'\]"),
        (named, [{"names": ["matrix"]}, {"names": ["matrix"]}], "matrix is in two param_groups"),
    ):
        with pytest.raises(ShardingError, match=why):
            ShardedOptimizer(parameters, torch.optim.SGD, param_groups=groups)
    optimizer = ShardedOptimizer(named, torch.optim.SGD, lr=0.1, momentum=0.9)
    with pytest.raises(ShardingError, match='has "params" by name'):
        optimizer.add_param_group({"params": [model.matrix]})
    with pytest.raises(ShardingError, match="optimized already"):
        optimizer.add_param_group({"params": {"matrix": model.matrix}})
    train(model, optimizer, range(1))
    state = optimizer.state_dict()
    one_less = {n: p for n, p in named.items() if n != "scale"}
    with pytest.raises(ShardingError, match=r"lacks nothing, and has \['scale'"):
        ShardedOptimizer(one_less, torch.optim.SGD).load_state_dict(state)
    grouped = ShardedOptimizer(named, torch.optim.SGD, param_groups=[{"names": ["scale"]}])
    with pytest.raises(ShardingError, match="one group here but several"):
        optimizer.load_state_dict(grouped.state_dict())
    wrong: dict[str, Tensor] = {"momentum_buffer": torch.zeros(3)}
    with pytest.raises(
        ShardingError, match=r"'momentum_buffer' of 'matrix' has shape \(3,\), expected.*\(5, 4\)"
    ):
        optimizer.load_state_dict({**state, "state": {**state["state"], "matrix": wrong}})
    model.matrix.data = model.matrix.detach().reshard(CUTS[1]["matrix"])
    with pytest.raises(ShardingError, match="matrix holds other shards"):
        optimizer.step()
