"""The example of several dimensions at a tiny size, on a mesh and in one process, in fp64.

In one process there is no mesh, nothing is sharded, the batch is whole, and the norm is torch's.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from examples import train_dimensions as example
from examples import train_gpt
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise
from shardwise.checkpoint import save
from shardwise.dimensions import Dimensions, part
from shardwise.nn import ExpertCut
from shardwise.optim import flat

TINY = {"width": 8, "seq": 7, "depth": 4, "heads": 4, "experts": 4, "batch": 16, "micro_batches": 2}
# Of the largest number of a tensor. Sums run in other orders, and five steps of AdamW make that no larger.
ROUNDING = 1e-9
OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {"lr": 1.0, "momentum": 0.9}),
}


def settings(**chosen: Any) -> Namespace:
    """The example's arguments: tiny, in fp64, and what is chosen."""
    args = example.parse_arguments([])
    vars(args).update(TINY | {"dtype": "float64", "optimizer": "adamw"} | chosen)
    return args


@dataclass
class Record:
    """What training came to; tensors by name, those of the whole model or of a rank's stages."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)  # of the first step, clipped
    parameters: dict[str, Tensor] = field(default_factory=dict)


def batch(args: Namespace, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * args.seed + step)
    rows = torch.randint(example.VOCABULARY, (args.batch, args.seq + 1), generator=generator)
    return rows[:, :-1], rows[:, 1:]


def in_one_process(args: Namespace, steps: int = 5) -> Record:
    model = example.build(args)
    for module in model.modules():
        if isinstance(module, example.MixtureOfExperts):
            module.cut = ExpertCut(None, args.experts)
    kind, options = OPTIMIZERS[args.optimizer]
    optimizer = kind(model.parameters(), **options)
    record = Record()
    for step in range(steps):
        inputs, targets = batch(args, step)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        record.losses.append(loss.item())
        record.norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        if step == 0:
            record.gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    record.parameters = {name: p.detach() for name, p in model.named_parameters()}
    return record


@contextmanager
def known_to_pipelines() -> Iterator[None]:
    shardwise.install()
    try:
        yield
    finally:
        shardwise.uninstall()


class OnMesh:
    """The example's step on a mesh. Collective, as are its methods."""

    def __init__(self, args: Namespace, meshes: dict[Any, Any]) -> None:
        if args.mesh not in meshes:
            meshes[args.mesh] = Dimensions(args.mesh).mesh("cpu")
        self.args = args
        self.step = example.Step(args, meshes[args.mesh], torch.device("cpu"))
        kind, options = OPTIMIZERS[args.optimizer]
        model = self.step.model
        if getattr(args, "compiled", False):
            for block in self.step.model.blocks.values():
                block.compile(backend="aot_eager")
        if getattr(args, "reshards", False):
            for module in model.modules():
                if isinstance(module, shardwise.FSDPModule):
                    module.set_reshard_after_forward(True)
        self.is_flat = getattr(args, "flat", False)
        self.optimizer: torch.optim.Optimizer = (
            flat(kind, model, **options) if self.is_flat else kind(model.parameters(), **options)
        )
        self.done = 0

    def train(self, steps: int, record: Record) -> None:
        with known_to_pipelines():
            for step in range(self.done, self.done + steps):
                loss, norm = self.step.backward(batch(self.args, step))
                record.losses.append(loss)
                record.norms.append(norm)
                if step == 0:
                    record.gradients = {name: p.grad.full_tensor() for name, p in self.named()}
                self.optimizer.step()
                self.optimizer.zero_grad()
        self.done += steps
        record.parameters = {name: p.detach().full_tensor() for name, p in self.named()}

    def named(self) -> list[tuple[str, Any]]:
        return list(self.step.model.named_parameters())

    def moments(self) -> dict[str, Tensor]:
        states = [(name, self.optimizer.state[param]) for name, param in self.named()]
        return {
            f"{name}.{key}": value.full_tensor()
            for name, state in states
            for key, value in state.items()
            if hasattr(value, "full_tensor")
        }

    def save(self, folder: Path) -> None:
        stages, progress = part(self.step.mesh, "pp"), {"step": self.done}
        state = example.training_state(self.step.model, self.optimizer, progress, stages)
        save(folder, state, step=self.done)

    def load(self, folder: Path) -> None:
        stages, progress = part(self.step.mesh, "pp"), {"step": 0}
        train_gpt.resume(folder, self.step.model, self.optimizer, progress, stages=stages)
        self.done = progress["step"]


def differences(found: Record, expected: Record) -> list[str]:
    """What is apart by more than a rounding, the worst of each kind."""
    problems = []
    for what in ("losses", "norms"):
        ours, theirs = torch.tensor(getattr(found, what)), torch.tensor(getattr(expected, what))
        if (apart := relative(ours, theirs)) > ROUNDING:
            problems.append(f"{what} {apart:.1e} apart: {ours.tolist()}, expected {theirs.tolist()}")
    for what in ("gradients", "parameters"):
        ours, theirs = getattr(found, what), getattr(expected, what)
        all_apart = {name: relative(tensor, theirs[name]) for name, tensor in ours.items()}
        worst = max(all_apart, key=lambda name: all_apart[name], default="")
        if worst and all_apart[worst] > ROUNDING:
            problems.append(f"{what} of {worst} {all_apart[worst]:.1e} apart")
    return problems


def relative(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:
        return float("inf")
    apart = ((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()
    return apart if apart == apart else float("inf")
