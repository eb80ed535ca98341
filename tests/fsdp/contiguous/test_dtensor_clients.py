"""The contiguous layout as code sees it that knows DTensor: loaders, checkpoints, optimizers, adapters."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from fsdp.models import EXACT, assert_same_parameters, update, whole
from ranks import RankPool, on_ranks
from shardwise import ShardedParameter, fully_shard
from shardwise.errors import ShardingError
from shardwise.sharded_tensor.rows import RowShard, ShardedRows

INPUT = torch.arange(10.0).view(2, 5) / 10


def bare(device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(device)


def sharded(mesh: Any = None, model: nn.Module | None = None, **how: Any) -> Any:
    return fully_shard(model or bare(), mesh=mesh, layout="contiguous", **how)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        model(INPUT).square().sum().backward()
        update(optimizer)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


@on_ranks(3)
def test_parameters_gradients_and_optimizer_state_are_dtensors() -> None:
    model = sharded()
    optimizer = adamw(model)
    train(model, optimizer)
    model(INPUT).sum().backward()
    for param in model.parameters():
        moment = optimizer.state[param]["exp_avg"]
        for tensor in (param, param.grad, moment, param.detach(), torch.zeros_like(param), param.clone()):
            assert isinstance(tensor, DTensor)
            assert type(tensor) is ShardedRows
            assert tensor.device_mesh == param.device_mesh
            assert tensor.placements == param.placements
        assert param.device_mesh.size() == 3
        (placement,) = param.placements
        assert placement.is_shard(0)
        assert not placement.is_replicate()
        assert placement != Shard(0)
        assert sum(placement.counts) == param.shape[0]
        assert param.to_local().shape[0] == placement.counts[dist.get_rank()]
        with torch.no_grad():
            assert param.to_local() is param.local
        kept = nn.Parameter(param)
        assert isinstance(kept, ShardedParameter)


@on_ranks(4)
def test_replicas_and_tensor_parallelism_show_among_the_placements() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh)
    param = model[0].weight
    assert param.device_mesh == mesh
    assert param.placements[0] == Replicate()
    assert param.placements[1] == RowShard(param.piece.counts)
    assert torch.equal(
        distribute_tensor(bare()[0].weight.detach(), mesh, param.placements).local, param.local
    )
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    net = parallelize_module(nn.Linear(6, 8), mesh["tensor"], ColwiseParallel())
    before = whole(net.weight)
    weight = sharded(mesh["data"], net).weight
    assert weight.device_mesh.mesh_dim_names == ("data", "tensor")
    assert weight.placements[0].is_shard(0)
    assert weight.placements[1] == Shard(0)
    assert torch.equal(weight.full_tensor(), before)
    again = distribute_tensor(before, weight.device_mesh, weight.placements)
    assert torch.equal(again.to_local(), weight.to_local())
    state = {"weight": before + 1, "bias": torch.ones(8)}
    set_model_state_dict(net, state, options=StateDictOptions(full_state_dict=True))
    assert torch.equal(whole(net.weight), before + 1)


def loaded_like_accelerate(model: nn.Module, source: nn.Module, distribute: Callable[..., Any]) -> None:
    """One tensor at a time from rank 0, distributed as the parameter says, and assigned."""
    state: dict[str, Tensor] = {}
    for name, param in model.state_dict().items():
        value = torch.zeros(param.shape)
        if dist.get_rank() == 0:
            value = source.state_dict()[name].clone()
        dist.broadcast(value, 0, group=param.device_mesh.get_group())
        state[name] = distribute(value, param.device_mesh, param.placements).to(torch.float32).contiguous()
    model.load_state_dict(state, assign=True)


def evenly(value: Tensor, mesh: Any, _: Any) -> DTensor:
    return distribute_tensor(value, mesh, [Shard(0)])


@on_ranks(2, 3)
@pytest.mark.parametrize(
    ("device", "distribute"), [("cpu", distribute_tensor), ("meta", distribute_tensor), ("meta", evenly)]
)
def test_a_loader_distributes_and_assigns(device: str, distribute: Callable[..., Any]) -> None:
    reference = bare()
    with torch.no_grad():
        for param in reference.parameters():
            param.add_(1)
    model = sharded(model=bare(device))
    counts = [param.placements[0].counts for param in model.parameters()]
    loaded_like_accelerate(model, reference, distribute)
    optimizer = adamw(model)
    if distribute is distribute_tensor:
        assert [param.placements[0].counts for param in model.parameters()] == counts
    train(model, optimizer)
    train(reference, adamw(reference))
    assert all(isinstance(param, ShardedParameter) for param in model.parameters())
    assert_same_parameters(model, reference)


OPTIONS = [
    {"full_state_dict": True},
    {"full_state_dict": True, "cpu_offload": True},
    {"full_state_dict": True, "broadcast_from_rank0": True},
    {"cpu_offload": True},
    {},
]


@on_ranks(2)
def test_state_dicts_of_torch_move_between_models_with_every_option() -> None:
    for given in OPTIONS:
        options = StateDictOptions(**given)
        source, target = sharded(), sharded()
        sources, targets = adamw(source), adamw(target)
        train(source, sources)
        state = get_model_state_dict(source, options=options)
        moments = get_optimizer_state_dict(source, sources, options=options)
        kind = torch.Tensor if given.get("full_state_dict") else ShardedRows
        assert all(type(value) is kind for value in state.values())
        if given.get("cpu_offload") and given.get("full_state_dict"):
            assert bool(state) == (dist.get_rank() == 0)
            continue
        set_model_state_dict(target, state, options=options)
        set_optimizer_state_dict(target, targets, copy.deepcopy(moments), options=options)
        train(source, sources, 1)
        train(target, targets, 1)
        assert_same_parameters(target, source, **EXACT)


@on_ranks(2)
def test_a_model_on_meta_takes_a_full_state_dict_from_rank_0() -> None:
    model = sharded(model=bare("meta"))
    state = bare().state_dict() if dist.get_rank() == 0 else {}
    set_model_state_dict(
        model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    )
    model(INPUT)
    assert_same_parameters(model, bare())


def save(path: Path) -> None:
    model = sharded()
    optimizer = adamw(model)
    train(model, optimizer)
    model_state, optimizer_state = model.state_dict(), get_optimizer_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)


def load(path: Path) -> None:
    model = sharded()
    optimizer = adamw(model)
    train(model, optimizer, 1)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=path)
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    train(model, optimizer, 1)
    reference = bare()
    train(reference, adamw(reference), 3)
    assert_same_parameters(model, reference)


def test_torch_checkpoints_hold_models_and_optimizers(ranks: RankPool, tmp_path: Path) -> None:
    ranks(save, tmp_path, world_size=3)
    ranks(load, tmp_path, world_size=2)


@on_ranks(2)
def test_torch_save_and_copies_keep_rows() -> None:
    model = sharded()
    optimizer = adamw(model)
    train(model, optimizer)
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    file = io.BytesIO()
    torch.save(states, file)
    for load_with in (
        lambda: copy.deepcopy(states),
        lambda: torch.load(io.BytesIO(file.getvalue()), weights_only=False),
        lambda: torch.load(io.BytesIO(file.getvalue()), weights_only=True),
    ):
        found = load_with()
        for name, value in states["model"].items():
            assert type(found["model"][name]) is ShardedRows
            assert found["model"][name].placements == value.placements
            assert torch.equal(found["model"][name].full_tensor(), value.full_tensor())
        other = sharded()
        other.load_state_dict(found["model"])
        others = adamw(other)
        others.load_state_dict(found["optimizer"])
        train(other, others, 1)
        reference = bare()
        train(reference, adamw(reference), 3)
        assert_same_parameters(other, reference)


@on_ranks(3)
def test_state_made_from_local_tensors_steps_with_parameters() -> None:
    """As optimizers with quantised state make theirs."""
    model, reference = sharded(), bare()
    model(INPUT).sum().backward()
    reference(INPUT).sum().backward()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        local = torch.zeros_like(mine.to_local())
        state = DTensor.from_local(local, mine.device_mesh, mine.placements, run_check=False)
        assert state.shape == mine.shape
        given = DTensor.from_local(
            local, mine.device_mesh, mine.placements, shape=mine.shape, stride=mine.stride()
        )
        assert given.placements == mine.placements
        state.lerp_(mine.grad, 0.5)
        with torch.no_grad():
            mine.add_(state, alpha=-1)
            theirs.sub_(0.5 * theirs.grad)
    assert_same_parameters(model, reference)
    with pytest.raises(ShardingError, match="expected this rank's rows"):
        DTensor.from_local(torch.zeros(9, 5), model[0].weight.device_mesh, model[0].weight.placements)


@on_ranks(2)
def test_an_adapter_is_merged_into_a_weight() -> None:
    model, reference = sharded(), bare()
    weight, theirs = model[0].weight, reference[0].weight
    delta = torch.randn(7, 5)
    mesh = weight.device_mesh
    for change in (
        delta,
        distribute_tensor(delta, mesh, [Shard(0)]),
        distribute_tensor(delta, mesh, [Shard(1)]),
        distribute_tensor(delta, mesh, [Replicate()]),
        DTensor.from_local(delta / 2, mesh, [Partial()]),
        distribute_tensor(delta, mesh, weight.placements),
    ):
        weight.data += change
        weight.data = (weight.data - 0.5 * weight.data).redistribute(mesh, [Shard(0)])
        theirs.data = (theirs.data + delta) * 0.5
    torch.testing.assert_close(whole(weight), theirs.detach())
    target = distribute_tensor(torch.zeros(7, 5), mesh, [Shard(1)])
    with torch.no_grad():
        assert torch.equal(target.copy_(weight).full_tensor(), whole(weight))
        with pytest.raises(ShardingError, match="full_tensor"):
            target.add_(weight)


@on_ranks(2)
def test_gradients_reach_parameters_through_every_change_of_form() -> None:
    factor = torch.randn(7, 5)
    expected = 2 * bare()[0].weight.detach() * factor
    weight = sharded()[0].weight
    mesh, own = weight.device_mesh, weight.placements
    first = sum(own[0].counts[: dist.get_rank()])
    mine = factor[first : first + own[0].counts[dist.get_rank()]]

    def gradient(loss: Tensor) -> Tensor:
        weight.grad = None
        loss.backward()
        assert type(weight.grad) is ShardedRows
        return whole(weight.grad)

    found = {
        "to_local": (weight.to_local().square() * mine).sum(),
        "to_local, placed": (weight.to_local(grad_placements=own).square() * mine).sum(),
        "full_tensor": (weight.full_tensor().square() * factor).sum(),
        "partial": (weight.full_tensor(grad_placements=[Partial()]).square() * factor / 2).sum(),
    }
    for placement in (Shard(0), Shard(1), Replicate()):
        other = weight.redistribute(placements=[placement])
        assert type(other) is DTensor
        assert other.placements == (placement,)
        back = other.redistribute(placements=own)
        assert type(back) is ShardedRows
        found[f"{placement}"] = (back.square() * factor).sum()
    for form, loss in found.items():
        torch.testing.assert_close(gradient(loss), expected, msg=form)
    with pytest.raises(ShardingError, match="grad_placements"):
        weight.to_local(grad_placements=[Replicate()])
    local = torch.zeros_like(mine).requires_grad_()
    (DTensor.from_local(local, mesh, own) * factor).sum().backward()
    assert torch.equal(local.grad, mine)


@on_ranks(2)
def test_rows_and_other_dtensors_are_clipped_and_stepped_together() -> None:
    torch.manual_seed(5)
    linear = nn.Linear(4, 4)
    models, references = [sharded(), fully_shard(copy.deepcopy(linear))], [bare(), linear]
    for pair in (models, references):
        for one, given in zip(pair, (INPUT, INPUT[:, :4]), strict=True):
            one(given).square().sum().backward()
    mine, theirs = ([p for one in pair for p in one.parameters()] for pair in (models, references))
    norm = torch.nn.utils.clip_grad_norm_(mine, 0.1)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(theirs, 0.1))
    for params in (mine, theirs):
        torch.optim.AdamW(params, lr=0.1, foreach=True).step()
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(whole(a), b.detach())


@on_ranks(2)
def test_a_tensor_sharded_by_rows_is_not_sharded_again() -> None:
    weight = sharded()[0].weight
    net = nn.Linear(5, 7)
    net.weight = nn.Parameter(weight.detach())
    for layout in ("contiguous", "interleaved"):
        with pytest.raises(ShardingError, match="'weight' is sharded by rows already"):
            fully_shard(net, layout=layout)  # type: ignore[call-overload]


@on_ranks(2)
def test_the_interleaved_layout_copies_rows_but_does_not_become_them() -> None:
    rows = sharded().state_dict()
    model = fully_shard(bare("cpu").requires_grad_(False))
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    model.load_state_dict(rows)
    assert_same_parameters(model, bare())
    with pytest.raises(ShardingError, match=r"a DTensor of shape .*, cut evenly"):
        model.load_state_dict(rows, assign=True)
