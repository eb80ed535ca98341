"""The reference run: one process, no sharding, the whole batch.

It writes files to a folder, from which the ranks read one tensor at a time:

    start.pt      parameters before the first step, names tied to them, scales
    step<i>.pt    loss, gradients, parameters after the step, scales, slack

The files hold only tensors, numbers and strings; loading them executes no code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .case import Case, CaseError, load_case
from .compare import (
    START,
    Tolerance,
    coarsest,
    derived_tolerance,
    fixed_tolerance,
    floored_scales,
    optimizer_slack,
)

Parameters = dict[str, nn.Parameter]


@dataclass(frozen=True)
class Plan:
    """A run to verify; the same object goes to every process."""

    spec: str
    ranks: int
    steps: int
    seed: int
    folder: str
    tolerance: float | None  # None: derived
    dtype: torch.dtype | None  # None: taken from the reference
    replicas: int  # 1: a mesh of one axis
    layout: str | None  # None: the case's own choice
    mesh: str | None = None  # a spec of `Dimensions`, which then sets ranks and replicas


def file_of(folder: str, step: int) -> Path:
    """Return the file of one step of the reference; `START` is the state before the first."""
    return Path(folder) / ("start.pt" if step == START else f"step{step}.pt")


def read_step(folder: str, step: int) -> dict[str, Any]:
    """Read one step of the reference; the file is memory-mapped, so tensors are read when used."""
    loaded: dict[str, Any] = torch.load(
        file_of(folder, step), map_location="cpu", weights_only=True, mmap=True
    )
    return loaded


def parameters_by_name(module: nn.Module) -> tuple[Parameters, dict[str, str]]:
    """Return parameters by name, each once, and {other name: first name} for tied ones."""
    parameters: Parameters = {}
    tied: dict[str, str] = {}
    names: dict[int, str] = {}
    for raw, parameter in module.named_parameters(remove_duplicate=False):
        name = raw.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")
        if id(parameter) in names:
            tied[name] = names[id(parameter)]
        else:
            names[id(parameter)] = name
            parameters[name] = parameter
    return parameters, tied


def take_batch(case: Case, step: int) -> tuple[torch.Tensor, ...]:
    """Return a step's global batch. Raises `CaseError` unless it consists of tensors of one length."""
    batch = case.batch(step)
    batch = (batch,) if isinstance(batch, torch.Tensor) else tuple(batch)
    for index, entry in enumerate(batch):
        if not isinstance(entry, torch.Tensor) or entry.dim() == 0:
            raise CaseError(
                f"batch({step})[{index}] is {_kind(entry)}; expected a tensor whose dim 0 is the batch."
            )
    if len({entry.shape[0] for entry in batch}) != 1:
        raise CaseError(
            f"batch({step}) has tensors of lengths {[e.shape[0] for e in batch]}; expected equal lengths."
        )
    return batch


def _kind(value: object) -> str:
    """Describe a tensor by its shape, a number by its value, anything else by its type."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return repr(value) if isinstance(value, (int, float)) else f"of type {type(value).__name__}"


def take_loss(case: Case, module: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the scalar loss. Raises `CaseError` for anything else."""
    loss = case.loss(module, batch)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise CaseError(f"loss() returned {_kind(loss)}; expected a tensor with one element.")
    return loss


def take_gradients(case: Case, module: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
    """Run the case's forward and backward; return the loss, or None if another rank has it."""
    if case.backward is not None:
        return case.backward(module, batch)
    loss = take_loss(case, module, batch)
    torch.autograd.backward(loss)
    return loss


def run_reference(alive: Callable[[], None], plan: Plan) -> Tolerance:
    """Run every step unsharded, write the files to `plan.folder`, and return the tolerance."""
    torch.manual_seed(plan.seed)
    case = load_case(plan.spec)
    module = case.build()
    parameters, tied = parameters_by_name(module)
    if not parameters:
        raise CaseError("build() returned a module without parameters; there is nothing to compare.")
    optimizer = case.optimizer(module)
    before = _copies(parameters)
    slack = {name: torch.zeros_like(value) for name, value in before.items()}
    start = {"parameters": before, "parameter_scales": floored_scales(before), "tied": tied}
    torch.save(start, file_of(plan.folder, START))
    tolerance: Tolerance | None = None
    for step in range(plan.steps):
        alive()
        torch.manual_seed(plan.seed + step)
        batch = take_batch(case, step)
        optimizer.zero_grad()
        loss = take_loss(case, module, batch)
        torch.autograd.backward(loss)
        gradients = {name: p.grad.detach() for name, p in parameters.items() if p.grad is not None}
        if tolerance is None and plan.tolerance is not None:
            tolerance = fixed_tolerance(plan.tolerance)
        elif tolerance is None:
            dtypes = [tensor.dtype for tensor in (*parameters.values(), *gradients.values())]
            terms, layers = max(entry.numel() for entry in batch), len(parameters)
            tolerance = derived_tolerance(plan.dtype or coarsest(dtypes), terms=terms, layers=layers)
        gradient_scales = floored_scales(gradients)
        if step == 0 and not any(bool(gradient.any()) for gradient in gradients.values()):  # NaN is not zero
            raise CaseError(
                f"{plan.spec}: all gradients of the first step are zero in the unsharded run, so any sharded"
                " run would match it. Return a loss that depends on the parameters"
            )
        saved = {name: gradient.clone() for name, gradient in gradients.items()}  # step() may change them
        optimizer.step()
        after = _copies(parameters)
        for name, value in slack.items():
            allowed = tolerance.at(step) * gradient_scales.get(name, 0.0)
            value += optimizer_slack(before[name], after[name], saved.get(name), allowed_gradient=allowed)
        record = {
            "loss": float(loss.detach()),
            "gradients": saved,
            "gradient_scales": gradient_scales,
            "parameters": after,
            "parameter_scales": floored_scales(after),
            "slack": slack,
        }
        torch.save(record, file_of(plan.folder, step))
        before = after
    assert tolerance is not None
    return tolerance


def _copies(parameters: Parameters) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}
