"""Trains one case with our `fully_shard`, with torch's, and in one process, and compares the three.

A `Case` says what is trained (a `Task`), how it is sharded, and how a step runs; nothing in it names
an implementation: the module that offers `fully_shard` and its policies is passed in as `api`. On
every rank, `compare(case)` trains

    ours        with shardwise         every rank its slice of the global batch
    torchs      with torch's FSDP2     the same ranks, meshes and slices
    contiguous  `ours` cut by rows     as above, with `layout="contiguous"`
    alone       no sharding at all     the whole global batch

and asserts `ours == torchs` bit for bit (each rank's loss, pieces of gradients and of parameters,
at every step; names, placements and state_dict keys) and `ours ~ alone` within the case's rounding
(mean loss at every step; full gradients and parameters at the last).

Pieces of `contiguous` cannot be compared with torch's, whose ranks hold other rows. So what is compared
is what all ranks hold together, with `ours`, which is `torchs`, and with `alone`: each step's losses, full
gradients and parameters at the last; what an earlier gradient was is in those parameters. Sums over two
ranks have one order, so where at most two ranks are added at a time (also 2 x 2, where two sums of two are)
and the optimizer is elementwise, every bit must be the same. Over three or four ranks gloo adds in an order
that depends on where an element lies in its buffer, which is the layout's business; there the case's
rounding applies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from inspect import signature
from types import ModuleType
from typing import Any, Literal
from unittest import mock
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_api as torch_fsdp_api
from torch.distributed.fsdp._fully_shard import _fsdp_common as torch_fsdp_common
from torch.distributed.tensor import DTensor, Shard
from torch.func import functional_call

import shardwise
import shardwise.comm
from fsdp.parity.models import ROWS, Batch, Task
from ranks import RankPool
from shardwise.sharded_tensor.rows import ShardedParameter, ShardedRows

ZERO2, ONE_AXIS, TWO_AXES = ("zero2",), ("zero2", "ddp", "zero1"), ("hierarchical_fsdp",)
Tensors = Mapping[str, Tensor | None]
STEPS = 3  # the first finds the order, the second follows it, the third begins from what that left
OURS: ModuleType = shardwise
TORCHS: ModuleType = torch_fsdp


def protocols(api: ModuleType) -> ModuleType:
    """Where `api` keeps its `AllGather` and `ReduceScatter`."""
    return shardwise.comm if api is OURS else torch_fsdp_api


def mesh_names(api: ModuleType) -> ModuleType:
    """Where `api` keeps `ShardPlacementResult` and the mesh infos it takes."""
    return shardwise if api is OURS else torch_fsdp_common


@dataclass(frozen=True)
class Rounding:
    """How far apart two runs of the same mathematics may be, and why."""

    relative: float
    absolute: float
    reason: str


FP32 = Rounding(1e-4, 1e-6, "fp32 sums of 24 rows grouped by rank, through 3 optimizer steps")
BF16 = Rounding(5e-2, 5e-3, "activations and gradients keep 8 bits; each rank rounds its own slice's")
FP16 = Rounding(5e-3, 5e-4, "gradients are rounded to 11 bits before they are summed")


def one_axis(world: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))


def two_axes(replicas: int, shards: int) -> Callable[[int], DeviceMesh]:
    return lambda world: init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


REPLICAS: dict[str, Any] = {"mesh": two_axes(2, 2), "ranks": 4}


def one_pass(model: nn.Module, task: Task, batch: Batch) -> Tensor:
    loss = task.loss(model, batch)
    loss.backward()
    return loss.detach()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """The cheapest on DTensors, which find out anew in each test what an operation does to placements."""
    return torch.optim.SGD(trained_parameters(model), lr=0.1, foreach=True)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with an eps that keeps a gradient's last bit from deciding the sign of an update."""
    return torch.optim.AdamW(trained_parameters(model), lr=1e-2, eps=1e-3, foreach=True)


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def nothing(*_: Any) -> None:
    return None


@dataclass(frozen=True)
class Case:
    """One way of training; see the module's docstring for who runs it."""

    task: Task
    shard: Callable[[ModuleType, nn.Module, DeviceMesh], None]  # applies api.fully_shard in place
    mesh: Callable[[int], DeviceMesh] = one_axis
    slices: Callable[[DeviceMesh], tuple[int, int]] | None = None  # (which, of how many); by rank if None
    step: Callable[[nn.Module, Task, Batch], Tensor] = one_pass  # sharded runs: forward and backward
    alone: Callable[[nn.Module, Task, Batch], Tensor] = one_pass  # the reference's forward and backward
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd
    after_backward: Callable[[nn.Module], None] = nothing  # every run, e.g. clipping
    after_step: Callable[[nn.Module, Task, Batch], Tensor | None] = nothing  # sharded runs, e.g. evaluation
    compute_dtype: torch.dtype | None = None  # of the reference's forward and backward
    cast_inputs: bool = True
    rounding: Rounding = FP32
    steps: int = STEPS
    contiguous: Literal["bits", "rounding", "no"] = "bits"  # how near torch's; "no" has a test elsewhere
    torchs: bool = True  # can the installed torch's FSDP2 run it?
    ranks: int | tuple[int, ...] = 2
    strategies: tuple[str, ...] = ()  # which others of rows it is trained with, in `contiguous`


@dataclass
class Record:
    """What one run left behind; pieces are this rank's own memory, full tensors are whole."""

    losses: list[Tensor] = field(default_factory=list)
    observed: list[Tensor | None] = field(default_factory=list)
    gradient_pieces: list[dict[str, Tensor | None]] = field(default_factory=list)
    parameter_pieces: list[dict[str, Tensor | None]] = field(default_factory=list)
    full_gradients: dict[int, dict[str, Tensor | None]] = field(default_factory=dict)
    full_parameters: dict[int, dict[str, Tensor | None]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    placements: dict[str, str] = field(default_factory=dict)
    state_dict: dict[str, tuple[Any, ...]] = field(default_factory=dict)


def plain(tensor: Tensor) -> Tensor:
    """A copy that later steps do not change, without any subclass around it."""
    tensor = tensor.detach()
    held = getattr(tensor, "held", tensor)  # the subclass of the extension tests
    return held.clone()


def piece(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    return plain(tensor.to_local() if isinstance(tensor, DTensor) else tensor)


def full(tensor: Tensor | None) -> Tensor | None:
    """Collective over the ranks that hold the tensor's parts."""
    if tensor is None:
        return None
    return plain(tensor.full_tensor() if isinstance(tensor, (DTensor, ShardedRows)) else tensor)


def each(
    model: nn.Module, of: Callable[[Tensor | None], Tensor | None], *, gradient: bool
) -> dict[str, Tensor | None]:
    return {name: of(p.grad if gradient else p) for name, p in model.named_parameters()}


def wholes_of(model: nn.Module, *, gradient: bool) -> dict[str, Tensor | None]:
    """Full tensors: those that all ranks cut along one dim in one exchange, which `full` makes each for 3 ms.

    Collective over all ranks.
    """
    held = each(model, lambda tensor: tensor, gradient=gradient)
    cut = {
        name: tensor.placements[0].dim
        for name, tensor in held.items()
        if isinstance(tensor, DTensor)
        and tensor.device_mesh.shape == (dist.get_world_size(),)
        and isinstance(tensor.placements[0], Shard)
    }
    of_ranks: list[Any] = [None] * dist.get_world_size()
    if cut:
        dist.all_gather_object(of_ranks, {name: piece(held[name]) for name in cut})
    return {
        name: torch.cat([pieces[name] for pieces in of_ranks], cut[name]) if name in cut else full(tensor)
        for name, tensor in held.items()
    }


_ranks: WeakKeyDictionary[DeviceMesh, str] = WeakKeyDictionary()


def ranks_of(mesh: DeviceMesh) -> str:
    if mesh not in _ranks:
        _ranks[mesh] = str(mesh.mesh.tolist())  # a millisecond
    return _ranks[mesh]


def describe(tensor: Tensor) -> str:
    placed = f"{tensor.placements} of {ranks_of(tensor.device_mesh)}" if isinstance(tensor, DTensor) else ""
    return f"{tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad} {placed}"


def run_training(
    api: ModuleType, case: Case, mesh: DeviceMesh, *, pieces: bool = True, wholes: bool = True
) -> Record:
    """Trains `case` sharded by `api.fully_shard`. Collective over all ranks.

    `api` offers the names of `torch.distributed.fsdp`; `pieces` records this rank's, `wholes` full tensors.
    """
    which, count = case.slices(mesh) if case.slices else (dist.get_rank(), dist.get_world_size())
    model = case.task.build()
    case.shard(api, model, mesh)
    optimizer = case.optimizer(model)
    rows = slice(which * ROWS // count, (which + 1) * ROWS // count)
    record = Record()
    record.names = {n: f"{tuple(p.shape)} {p.dtype} {p.requires_grad}" for n, p in model.named_parameters()}
    record.placements = {name: describe(p) for name, p in model.named_parameters()}
    for step in range(case.steps):
        batch = tuple(tensor[rows] for tensor in case.task.batch(step))
        record.losses.append(case.step(model, case.task, batch))
        case.after_backward(model)
        last = step == case.steps - 1  # what differs at any step shows in the losses, and at the end
        if pieces:
            record.gradient_pieces.append(each(model, piece, gradient=True))
        if wholes and last:
            record.full_gradients[step] = wholes_of(model, gradient=True)
        optimizer.step()
        if pieces:
            record.parameter_pieces.append(each(model, piece, gradient=False))
        if wholes and last:
            record.full_parameters[step] = wholes_of(model, gradient=False)
        optimizer.zero_grad()
        record.observed.append(case.after_step(model, case.task, batch))
    record.state_dict = {name: describe_state(value) for name, value in model.state_dict().items()}
    return record


@contextmanager
def contiguous_by_default(**options: Any) -> Iterator[None]:
    """Let `shardwise.fully_shard` mean the contiguous layout to callers that do not say."""
    fully_shard = partial(shardwise.fully_shard, layout="contiguous", **options)
    with mock.patch.object(shardwise, "fully_shard", fully_shard):
        yield


def run_contiguous(case: Case, mesh: DeviceMesh, **options: Any) -> Record:
    """Trains `case` with our contiguous layout. Collective over all ranks."""
    made: list[ShardedParameter] = []

    def shard(api: ModuleType, model: nn.Module, mesh: DeviceMesh) -> None:
        case.shard(api, model, mesh)
        made.extend(p for p in model.parameters() if isinstance(p, ShardedParameter))

    with contiguous_by_default(**options):
        record = run_training(OURS, replace(case, shard=shard), mesh, pieces=False)
    assert made, "nothing was sharded by rows"
    return record


def describe_state(value: Tensor) -> tuple[Any, ...]:
    return (type(value).__name__, describe(value))


class Cast:
    """Calls a module with its parameters and float inputs in another dtype; gradients come back in
    the parameters' own, as they do under mixed precision."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, cast_inputs: bool) -> None:
        self.model, self.dtype, self.cast_inputs = model, dtype, cast_inputs

    def __call__(self, *inputs: Any) -> Any:
        parameters = {name: p.to(self.dtype) for name, p in self.model.named_parameters()}
        if self.cast_inputs:
            inputs = tuple(self.cast(value) for value in inputs)
        return functional_call(self.model, parameters, inputs)

    def cast(self, value: Any) -> Any:
        return value.to(self.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def run_alone(case: Case) -> Record:
    """Trains `case` in this process on whole batches, without sharding or communication."""
    model = case.task.build()
    run: Any = Cast(model, case.compute_dtype, case.cast_inputs) if case.compute_dtype else model
    optimizer = case.optimizer(model)
    record = Record()
    for step in range(case.steps):
        record.losses.append(case.alone(run, case.task, case.task.batch(step)))
        case.after_backward(model)
        if step == case.steps - 1:
            record.full_gradients[step] = each(model, full, gradient=True)
        optimizer.step()
        optimizer.zero_grad()
    record.full_parameters[case.steps - 1] = each(model, full, gradient=False)
    return record


def same_bits(ours: Tensor | None, theirs: Tensor | None) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    return bool(((ours == theirs) | (ours.isnan() & theirs.isnan())).all())


def assert_bits(where: str, ours: Tensors, theirs: Tensors) -> None:
    where = f"{where}, rank {dist.get_rank()}"
    assert list(ours) == list(theirs), f"{where}: names"
    apart = {n: difference(ours[n], theirs[n]) for n in ours if not same_bits(ours[n], theirs[n])}
    assert not apart, f"{where} differs: {apart}"


def difference(ours: Tensor | None, theirs: Tensor | None) -> str:
    if ours is None or theirs is None:
        return "ours is absent" if ours is None else "torch's is absent"
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return f"{ours.dtype} {tuple(ours.shape)} against torch's {theirs.dtype} {tuple(theirs.shape)}"
    apart = (ours.double() - theirs.double()).abs().nan_to_num(torch.inf)
    return f"{int((ours != theirs).sum())} of {ours.numel()} elements, by up to {float(apart.max()):.3g}"


def assert_bit_equal(ours: Record, torchs: Record) -> None:
    """Every loss, gradient and parameter the same to the last bit, under the same names."""
    assert ours.placements == torchs.placements
    assert ours.state_dict == torchs.state_dict
    for step in range(len(torchs.losses)):
        assert_bits(f"loss of step {step}", {"": ours.losses[step]}, {"": torchs.losses[step]})
        for kind in ("gradient", "parameter"):
            mine, theirs = (getattr(one, f"{kind}_pieces")[step] for one in (ours, torchs))
            assert_bits(f"{kind} of step {step}", mine, theirs)
        assert_bits(f"observed in step {step}", {"": ours.observed[step]}, {"": torchs.observed[step]})


def assert_same_run(ours: Record, theirs: Record, *, rounding: Rounding | None) -> None:
    """Losses and full tensors: to the last bit, or within `rounding`.

    Rounding is stated for the first and the last step, as against one process.
    """
    assert ours.names == theirs.names
    assert list(ours.state_dict) == list(theirs.state_dict)
    last = len(theirs.losses) - 1
    for step in range(last + 1):
        found = [("loss", {"": ours.losses[step]}, {"": theirs.losses[step]})]
        found.append(("observed", {"": ours.observed[step]}, {"": theirs.observed[step]}))
        for kind in ("gradient", "parameter"):
            mine, other = (getattr(one, f"full_{kind}s") for one in (ours, theirs))
            found += [(kind, mine[step], other[step])] if step in other else []
        for kind, mine, other in found:
            if rounding is None:
                assert_bits(f"{kind} of step {step}", mine, other)
            elif step in (0, last):
                assert_close(f"{kind} of step {step}", mine, other, rounding)


def assert_close_to_single_process(runs: Mapping[str, Record], case: Case) -> None:
    """Mean loss over ranks, full gradients and full parameters within the case's rounding. Collective.

    `runs` are sharded runs of the case, by what to call them.
    """
    losses = torch.stack([loss.double() for record in runs.values() for loss in record.losses])
    dist.all_reduce(losses)
    if dist.get_rank() != 0:
        return  # what follows is the same everywhere
    reference = run_alone(case)
    means = (losses / dist.get_world_size()).split(case.steps)
    for (name, record), mean in zip(runs.items(), means, strict=True):
        assert_close(f"{name}: mean loss", {"": mean}, {"": torch.stack(reference.losses)}, case.rounding)
        for step, expected in reference.full_gradients.items():
            what = f"{name}: gradient at step {step}"
            assert_close(what, record.full_gradients[step], expected, case.rounding)
        last = case.steps - 1
        expected = reference.full_parameters[last]
        assert_close(f"{name}: parameter", record.full_parameters[last], expected, case.rounding)


def assert_close(
    what: str, ours: dict[str, Tensor | None], alone: dict[str, Tensor | None], rounding: Rounding
) -> None:
    assert list(ours) == list(alone), f"names of {what}"
    for name, expected in alone.items():
        found = ours[name]
        assert (found is None) == (expected is None), f"{what} {name}: present in one run only"
        if found is not None and expected is not None:
            torch.testing.assert_close(
                found.float(),
                expected.float(),
                rtol=rounding.relative,
                atol=rounding.absolute,
                equal_nan=True,
                msg=lambda text, name=name: f"{what} {name}: more than '{rounding.reason}': {text}",
            )


def compare(case: Case) -> None:
    """Both layouts against torch's and against one process. Collective over all ranks."""
    mesh = case.mesh(dist.get_world_size())
    ours = run_training(OURS, case, mesh)
    if case.torchs:
        assert_bit_equal(ours, run_training(TORCHS, case, mesh, wholes=False))
    runs = {"interleaved": ours}
    if case.contiguous != "no":
        exact = max(mesh.shape) <= 2 and case.contiguous == "bits"  # at most two ranks are added at a time
        runs["contiguous"] = run_contiguous(case, mesh)
        assert_same_run(runs["contiguous"], ours, rounding=None if exact else case.rounding)
    assert_close_to_single_process(runs, case)


def each_of(cases: Mapping[str, Case]) -> Callable[[Callable[[str], None]], Callable[..., None]]:
    """Run a test of a case's name, as `on_ranks` does, on each number of ranks that each of `cases` has."""

    def decorate(body: Callable[[str], None]) -> Callable[..., None]:
        @wraps(body)
        def test(ranks: RankPool, name: str, world_size: int) -> None:
            ranks(test, name, world_size=world_size)

        test.body_on_ranks = body  # type: ignore[attr-defined]
        test.__signature__ = signature(test, follow_wrapped=False)  # type: ignore[attr-defined]
        pairs = [(name, world) for name, case in cases.items() for world in worlds_of(case)]
        return pytest.mark.parametrize(("name", "world_size"), pairs)(test)

    return decorate


def worlds_of(case: Case) -> tuple[int, ...]:
    return case.ranks if isinstance(case.ranks, tuple) else (case.ranks,)


def has(method: str) -> bool:
    """Is it among the module methods of the installed torch?"""
    return hasattr(torch_fsdp.FSDPModule, method)


def no_options(api: ModuleType) -> dict[str, Any]:
    return {}


def by_block(
    options: Callable[[ModuleType], dict[str, Any]] = no_options, each: Callable[[Any], None] = nothing
) -> Callable[[ModuleType, nn.Module, DeviceMesh], None]:
    """A group for every module in `.blocks`, and one for the rest; `each` is done to them then."""

    def shard(api: ModuleType, model: nn.Module, mesh: DeviceMesh) -> None:
        modules = [*model.blocks, model]
        for module in modules:
            api.fully_shard(module, mesh=mesh, **options(api))
        for module in modules:
            each(module)

    return shard


def micro_batches(batch: Batch, count: int) -> list[Batch]:
    assert len(batch[0]) % count == 0, "the mean of the micro-batches' means must be the batch's"
    return list(zip(*(tensor.chunk(count) for tensor in batch), strict=True))


def accumulate(count: int, prepare: Callable[[nn.Module, int, bool], None]) -> Any:
    """A step of `count` micro-batches; `prepare` gets each one's number, and whether it is the last."""

    def step(model: nn.Module, task: Task, batch: Batch) -> Tensor:
        total = torch.zeros(())
        for i, part in enumerate(micro_batches(batch, count)):
            prepare(model, i, i == count - 1)
            loss = task.loss(model, part) / count
            loss.backward()
            total += loss.detach()
        return total

    return step


def reduce_last(model: nn.Module, i: int, last: bool) -> None:
    model.set_requires_gradient_sync(last)
