"""Sharding beside other parts of torch: tensor parallelism, meshes of more axes, clipping, loss
scaling, deferred initialisation, state dicts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._pytree import tree_flatten

from fsdp.parity.harness import (
    ONE_AXIS,
    OURS,
    TORCHS,
    TWO_AXES,
    ZERO2,
    Case,
    adamw,
    assert_bit_equal,
    by_block,
    compare,
    each_of,
    one_axis,
    run_training,
    sgd,
)
from fsdp.parity.models import LANGUAGE, RESIDUAL, Batch, Task
from ranks import on_ranks

Make = Callable[[int], DeviceMesh]
FEED_FORWARD = {"up": (Shard(0), Shard(0)), "down": (Shard(1), Replicate())}  # weight, bias


def axes(**sizes: int) -> Make:
    return lambda world: init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def slice_of(*names: str) -> Callable[[DeviceMesh], tuple[int, int]]:
    """Which slice of the batch a rank takes when `names` are the data-parallel axes."""

    def of(mesh: DeviceMesh) -> tuple[int, int]:
        which, count = 0, 1
        for name in names:
            size = mesh[name].size()
            which, count = which * size + mesh.get_local_rank(name), count * size
        return which, count

    return of


def beside_tensor_parallel(*data_axes: str) -> Any:
    def shard(api: ModuleType, model: nn.Module, mesh: DeviceMesh) -> None:
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            api.fully_shard(block, mesh=mesh[data_axes])
        api.fully_shard(model, mesh=mesh[data_axes])

    return shard


def parallel_everywhere(api: ModuleType, model: nn.Module, mesh: DeviceMesh) -> None:
    """Every parameter on both axes, so that one norm takes them all."""
    plan = {"inward": ColwiseParallel(output_layouts=Replicate())}
    plan |= {"outward": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, mesh["tp"], plan)
    beside_tensor_parallel("dp")(api, model, mesh)


def on_whole_mesh(dims: Callable[[ModuleType], Any]) -> Any:
    """Makes every parameter a DTensor on the whole mesh, cut over `tp` where there is one."""

    def shard(api: ModuleType, model: nn.Module, mesh: DeviceMesh) -> None:
        for name, module in model.named_modules():
            if not isinstance(module, nn.Linear):
                continue
            cut = FEED_FORWARD.get(name.rpartition(".")[2], (Replicate(), Replicate()))
            for kind, placement in zip(("weight", "bias"), cut, strict=True):
                placements = [placement if axis == "tp" else Replicate() for axis in mesh.mesh_dim_names]
                whole = distribute_tensor(getattr(module, kind).detach(), mesh, placements)
                setattr(module, kind, nn.Parameter(whole))
        rows = [Replicate() if axis == "tp" else Shard(0) for axis in mesh.mesh_dim_names]
        model.register_forward_pre_hook(
            lambda _, inputs: tuple(DTensor.from_local(x, mesh, rows, run_check=False) for x in inputs)
        )
        model.register_forward_hook(lambda _, __, output: output.redistribute(placements=rows).to_local())
        by_block(lambda _: {"dp_mesh_dims": dims(api)})(api, model, mesh)

    return shard


def clip(limit: float, *, norm: float = 2.0) -> Callable[[nn.Module], None]:
    def after_backward(model: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), limit, norm_type=norm)

    return after_backward


class Scaled:
    """An optimizer behind a GradScaler, which skips the steps whose gradients overflowed."""

    def __init__(self, model: nn.Module) -> None:
        self.inner = sgd(model)
        self.scaler = model.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)

    def step(self) -> None:
        self.scaler.step(self.inner)
        self.scaler.update()

    def zero_grad(self) -> None:
        self.inner.zero_grad()


def scaled_pass(model: nn.Module, task: Task, batch: Batch) -> Tensor:
    loss = task.loss(model, batch)
    model.scaler.scale(loss).backward()
    return loss.detach()


def overflowing(step: int) -> Batch:
    """At step 3 one row of the global batch, so one rank's slice, overflows."""
    inputs, targets = RESIDUAL.batch(step)
    if step == 3:
        inputs[0, 0] = float("inf")
    return inputs, targets


def initialise_on_meta(api: ModuleType, model: nn.Module, mesh: DeviceMesh) -> None:
    model.to("meta")
    by_block()(api, model, mesh)
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


HAS_MESH_DIMS = hasattr(TORCHS, "DataParallelMeshDims")

parallel = slice_of("dp")
# By rows, 2 x 2 ranks flattened are one axis of 4, and a norm adds the squares of other pieces first.
CASES: dict[str, Case] = {
    "replicas of tensor parallel": Case(
        RESIDUAL,
        beside_tensor_parallel("replicate", "dp"),
        mesh=axes(replicate=2, dp=1, tp=2),
        slices=slice_of("replicate", "dp"),
        ranks=4,
    ),
    "tensor parallel on the whole mesh": Case(
        RESIDUAL,
        on_whole_mesh(lambda api: api.DataParallelMeshDims(shard="dp")),
        mesh=axes(dp=2, tp=2),
        slices=parallel,
        steps=2,
        torchs=HAS_MESH_DIMS,
        ranks=4,
        strategies=ONE_AXIS,
    ),
    "replicas on the whole mesh": Case(
        RESIDUAL,
        on_whole_mesh(lambda api: api.DataParallelMeshDims(shard="dp", replicate="copies")),
        mesh=axes(copies=2, dp=2),
        steps=2,
        torchs=HAS_MESH_DIMS,
        ranks=4,
    ),
    "two axes flattened": Case(
        RESIDUAL,
        on_whole_mesh(lambda api: api.DataParallelMeshDims(shard=("dp", "cp"))),
        mesh=axes(dp=2, cp=2),
        steps=2,
        contiguous="rounding",
        torchs=torch.torch_version.TorchVersion(torch.__version__) >= "2.13",
        ranks=4,
    ),
    "only replicas": Case(
        RESIDUAL,
        on_whole_mesh(lambda api: api.DataParallelMeshDims(replicate="dp")),
        mesh=axes(dp=2),
        torchs=HAS_MESH_DIMS,
    ),
    "clipped": Case(
        RESIDUAL, by_block(), after_backward=clip(0.05), contiguous="rounding", ranks=3, strategies=ZERO2
    ),
    "clipped by the largest": Case(RESIDUAL, by_block(), after_backward=clip(0.01, norm=float("inf"))),
    "clipped replicas": Case(
        RESIDUAL,
        by_block(),
        mesh=axes(copies=2, dp=2),
        after_backward=clip(0.05),
        contiguous="rounding",
        ranks=4,
        strategies=TWO_AXES,
    ),
    "clipped beside tensor parallel": Case(
        RESIDUAL,
        parallel_everywhere,
        mesh=axes(dp=2, tp=2),
        slices=parallel,
        steps=2,
        after_backward=clip(0.05),
        contiguous="rounding",
        ranks=4,
    ),
    "loss scaled, one step skipped": Case(
        replace(RESIDUAL, batch=overflowing),
        by_block(),
        step=scaled_pass,
        alone=scaled_pass,
        optimizer=Scaled,
        steps=5,
        strategies=ZERO2,
    ),
}


@pytest.mark.filterwarnings("ignore:.*returns a view")  # a DTensor's local part is one
@each_of(CASES)
def test_composed_training_equals_torchs_and_one_process(name: str) -> None:
    compare(CASES[name])


@on_ranks(3)
def test_parameters_initialised_after_sharding_are_the_same() -> None:
    """No one-process reference: every rank draws its own piece from its own generator."""
    case = Case(RESIDUAL, initialise_on_meta)
    mesh = one_axis(dist.get_world_size())
    assert_bit_equal(*(run_training(api, case, mesh) for api in (OURS, TORCHS)))


def assert_same(mine: Any, theirs: Any) -> None:
    """The same nested containers of the same numbers, names and bits."""
    (mine_leaves, mine_spec), (their_leaves, their_spec) = tree_flatten(mine), tree_flatten(theirs)
    assert mine_spec == their_spec
    for one, other in zip(mine_leaves, their_leaves, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


def trained(api: ModuleType, mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = LANGUAGE.build()
    by_block()(api, model, mesh)
    optimizer = adamw(model)
    for step in range(2):
        LANGUAGE.loss(model, LANGUAGE.batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@on_ranks(3)
def test_state_dicts_are_the_same_and_load_into_each_other() -> None:
    mesh = one_axis(dist.get_world_size())
    options = StateDictOptions(full_state_dict=True)
    states = {}
    for api in (OURS, TORCHS):
        model, optimizer = trained(api, mesh)
        states[api] = (
            get_model_state_dict(model, options=options),
            get_optimizer_state_dict(model, optimizer, options=options),
        )
    assert_same(states[OURS], states[TORCHS])
    assert list(states[OURS][0]) == list(LANGUAGE.build().state_dict())

    fresh = LANGUAGE.build()
    by_block()(OURS, fresh, mesh)
    optimizer = adamw(fresh)
    model_state, optimizer_state = states[TORCHS]
    set_model_state_dict(fresh, dict(model_state), options=options)
    set_optimizer_state_dict(fresh, optimizer, optimizer_state, options=options)
    assert_same(get_model_state_dict(fresh, options=options), states[OURS][0])
    restored = get_optimizer_state_dict(fresh, optimizer, options=options)
    assert_same(restored["state"], states[OURS][1]["state"])
