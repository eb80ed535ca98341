"""Train one model twice, eager and compiled, on the same ranks and data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from shardwise import fully_shard

WORDS = 13


@dataclass
class Run:
    """How to train."""

    model: Callable[[], nn.Module]  # the same on each call after the same seed
    shard: Callable[..., nn.Module]  # shard(model, **options)
    options: dict[str, Any] = field(default_factory=dict)  # of `fully_shard`
    mesh: dict[str, int] | None = None  # axes' sizes and names; None is all ranks
    compile: Callable[[nn.Module], Callable[..., Any]] = torch.compile  # makes what is trained
    sizes: tuple[tuple[int, int], ...] = ((4, 5),)  # of the batches, (rows, words), in turn
    microbatches: int = 1  # the last one synchronises
    steps: int = 3


def compiled(backend: Any, *, fullgraph: bool = True, **options: Any) -> Callable[[nn.Module], Any]:
    return partial(torch.compile, backend=backend, fullgraph=fullgraph, **options)


def by_block(model: nn.Module, **options: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def batch(step: int, rows: int, words: int) -> Tensor:
    made = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    return torch.randint(0, WORDS, (rows, words), generator=made)


def loss_of(model: Callable[..., Any], words: Tensor) -> Tensor:
    output = model(words)
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits.float().flatten(0, 1), words.flatten())


@dataclass
class Trained:
    losses: list[Tensor]
    gradients: list[list[Tensor | None]]
    parameters: list[Tensor]
    model: nn.Module


def train(run: Run, *, eager: bool) -> Trained:
    torch.manual_seed(0)
    model, options = run.model(), dict(run.options)
    if run.mesh is not None:
        mesh: DeviceMesh = init_device_mesh("cpu", tuple(run.mesh.values()), mesh_dim_names=tuple(run.mesh))
        options["mesh"] = mesh
    run.shard(model, **options)
    call = model if eager else run.compile(model)
    # Adam would make a whole step of the rounding of a gradient of zero, as those of keys' biases are.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    trained = Trained([], [], [], model)
    for step in range(run.steps):
        for micro in range(run.microbatches):
            if run.microbatches > 1:
                model.set_requires_gradient_sync(micro == run.microbatches - 1)
            words = batch(step * run.microbatches + micro, *run.sizes[step % len(run.sizes)])
            loss = loss_of(call, words)
            loss.backward()
            trained.losses.append(loss.detach())
        grads = [param.grad for param in model.parameters()]
        trained.gradients.append([None if grad is None else local(grad).clone() for grad in grads])
        optimizer.step()
        optimizer.zero_grad()
    trained.parameters = [local(param.detach()).clone() for param in model.parameters()]
    return trained


def compare(run: Run, *, graphs: int | None = 1, breaks: int | None = 0, tolerance: float = 0.0) -> Trained:
    """Train both ways; the compiled one made `graphs` graphs and `breaks` breaks, and has the same numbers.

    Args:
        graphs, breaks: None where the count does not matter.

    Returns:
        The compiled run.
    """
    expected = train(run, eager=True)
    torch.compiler.reset()
    counters.clear()
    found = train(run, eager=False)
    assert graphs in (None, counters["stats"]["unique_graphs"]), counters["stats"]
    assert breaks in (None, sum(counters["graph_break"].values())), counters["graph_break"]
    assert_close(found.losses, expected.losses, tolerance)
    for step, (ours, theirs) in enumerate(zip(found.gradients, expected.gradients, strict=True)):
        assert_close(ours, theirs, tolerance, f"step {step}: ")
    assert_close(found.parameters, expected.parameters, tolerance)
    return found


def assert_close(
    found: list[Tensor | None], expected: list[Tensor | None], tolerance: float, where: str = ""
) -> None:
    for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert (ours is None) == (theirs is None), f"{where}{index}"
        if ours is None or theirs is None or not ours.numel():
            continue
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), f"{where}{index}"
        difference = (ours - theirs).abs().max().item()
        assert difference <= tolerance, f"{where}{index}: {difference} > {tolerance}"
