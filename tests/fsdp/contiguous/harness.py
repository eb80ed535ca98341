"""Trains the parity suite's cases with `layout="contiguous"` and compares whole tensors.

Pieces cannot be compared with torch's, whose ranks hold other rows. So what is compared is what all
ranks hold together: each step's losses, and at the first and the last step full gradients and full
parameters, against torch's FSDP2 and against one process.

Sums over two ranks have one order, so where at most two ranks are added at a time (also 2 x 2, where
two sums of two are) and the optimizer is elementwise, every bit must be torch's. Over three or four
ranks gloo adds in an order that depends on where an element lies in its buffer, which is the layout's
business; there the case's rounding applies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import shardwise
from fsdp.parity.harness import (
    OURS,
    TORCHS,
    Case,
    Record,
    Rounding,
    assert_close,
    assert_close_to_single_process,
    difference,
    plain,
    same_bits,
)
from fsdp.parity.models import ROWS
from shardwise.sharded_parameter import ShardedParameter, ShardedRows


@dataclass
class WholeRecord(Record):
    """A run in whole tensors, of the first and the last step."""

    parameters: dict[int, dict[str, Tensor | None]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    state_names: list[str] = field(default_factory=list)


@contextmanager
def contiguous_by_default(**options: Any) -> Iterator[None]:
    """Let `shardwise.fully_shard` mean the contiguous layout to callers that do not say."""
    fully_shard = partial(shardwise.fully_shard, layout="contiguous", **options)
    with mock.patch.object(shardwise, "fully_shard", fully_shard):
        yield


def whole(tensor: Tensor | None) -> Tensor | None:
    """The full tensor. Collective over the ranks that hold its parts."""
    if tensor is None:
        return None
    return plain(tensor.full_tensor() if isinstance(tensor, (DTensor, ShardedRows)) else tensor)


def wholes(model: nn.Module, *, gradient: bool = False) -> dict[str, Tensor | None]:
    """Full parameters, or their full gradients, by name. Collective."""
    return {name: whole(p.grad if gradient else p) for name, p in model.named_parameters()}


def run(api: ModuleType, case: Case, mesh: DeviceMesh) -> WholeRecord:
    """Trains `case` sharded by `api.fully_shard`. Collective over all ranks."""
    which, count = case.slices(mesh) if case.slices else (dist.get_rank(), dist.get_world_size())
    model = case.task.build()
    case.shard(api, model, mesh)
    optimizer = case.optimizer(model)
    rows = slice(which * ROWS // count, (which + 1) * ROWS // count)
    record = WholeRecord()
    record.names = {n: f"{tuple(p.shape)} {p.dtype} {p.requires_grad}" for n, p in model.named_parameters()}
    for step in range(case.steps):
        batch = tuple(tensor[rows] for tensor in case.task.batch(step))
        record.losses.append(case.step(model, case.task, batch))
        case.after_backward(model)
        ends = step in (0, case.steps - 1)  # what differs at any step shows in the losses, and at the end
        if ends:
            record.full_gradients[step] = wholes(model, gradient=True)
        optimizer.step()
        if ends:
            record.full_parameters = record.parameters[step] = wholes(model)
        optimizer.zero_grad()
        record.observed.append(case.after_step(model, case.task, batch))
    record.state_names = list(model.state_dict())
    return record


def run_contiguous(case: Case, mesh: DeviceMesh, **options: Any) -> WholeRecord:
    """Trains `case` with our contiguous layout. Collective over all ranks."""
    made: list[ShardedParameter] = []

    def shard(api: ModuleType, model: nn.Module, mesh: DeviceMesh) -> None:
        case.shard(api, model, mesh)
        made.extend(p for p in model.parameters() if isinstance(p, ShardedParameter))

    with contiguous_by_default(**options):
        record = run(OURS, replace(case, shard=shard), mesh)
    assert made, "nothing was sharded by rows"
    return record


def assert_same_run(ours: WholeRecord, torchs: WholeRecord, *, rounding: Rounding | None) -> None:
    """Losses, full gradients and full parameters: to the last bit, or within `rounding`.

    Rounding is stated for the first and the last step, as against one process.
    """
    assert ours.names == torchs.names
    assert ours.state_names == torchs.state_names
    for step in range(len(torchs.losses)):
        found: list[tuple[str, dict[str, Tensor | None], dict[str, Tensor | None]]] = [
            ("loss", {"": ours.losses[step]}, {"": torchs.losses[step]}),
            ("observed", {"": ours.observed[step]}, {"": torchs.observed[step]}),
        ]
        if step in torchs.parameters:
            found.append(("gradient", ours.full_gradients[step], torchs.full_gradients[step]))
            found.append(("parameter", ours.parameters[step], torchs.parameters[step]))
        for kind, mine, theirs in found:
            if rounding is not None:
                if step in (0, len(torchs.losses) - 1):
                    assert_close(f"{kind} at step {step}", mine, theirs, rounding)
                continue
            apart = {n: difference(mine[n], theirs[n]) for n in mine if not same_bits(mine[n], theirs[n])}
            assert not apart, f"step {step}, rank {dist.get_rank()}: {kind} differs: {apart}"


def adds_in_pairs(mesh: DeviceMesh) -> bool:
    """Are at most two ranks added at a time?"""
    return max(mesh.shape) <= 2


def compare_whole(case: Case, *, exact: Callable[[DeviceMesh], bool] = adds_in_pairs) -> None:
    """Contiguous against torch's FSDP2 and against one process. Collective over all ranks."""
    mesh = case.mesh(dist.get_world_size())
    ours = run_contiguous(case, mesh)
    assert_same_run(ours, run(TORCHS, case, mesh), rounding=None if exact(mesh) else case.rounding)
    assert_close_to_single_process(ours, case)
