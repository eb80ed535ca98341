"""Check a `Case`'s training for missing waits, in this process, as one of any number of ranks."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise import _compat
from shardwise.planner.noop_group import noop_world
from shardwise.sharded_tensor.kinds import holding_of
from shardwise.verify.case import Case, CaseError, apply_shard, load_case, local_batch
from shardwise.verify.reference import take_batch, take_gradients
from shardwise.verify.sharded import mesh_of
from shardwise.verify.streams.check import Finding, Findings, simulated
from shardwise.verify.streams.device import NAME, running


@dataclass(frozen=True)
class StreamsResult:
    """The findings, and how much was checked."""

    findings: tuple[Finding, ...]
    operations: int
    streams: int
    layout: str | None = None

    @property
    def ok(self) -> bool:
        return not self.findings

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "verdict": "ordered" if self.ok else "waits are missing",
            "layout": self.layout,
            "operations": self.operations,
            "streams": self.streams,
            "findings": [
                {"what": x.what, "earlier": str(x.earlier), "later": str(x.later)}
                | {"again": x.again, "text": str(x)}
                for x in self.findings
            ],
        }

    def describe(self) -> str:
        """Return the findings, one per line, and their number."""
        checked = f"{self.operations} operations on {self.streams} streams"
        if self.ok:
            return f"No missing waits among {checked}."
        return "\n".join([*map(str, self.findings), f"Missing waits among {checked}: {len(self.findings)}."])


def check_streams(
    case_spec: str,
    *,
    ranks: int = 2,
    steps: int = 3,
    replicas: int = 1,
    layout: str | None = None,
    seed: int = 0,
) -> StreamsResult:
    """Train a case on the simulated device, and report which operations lack a wait.

    Takes the arguments of `verify`. The model, its hooks, communication and optimizer are the case's own, as
    sharded by its `shard`. Starts no processes: collectives run in a group with this rank only, with results
    as if all ranks were equal. The rank is 0; if rank 0 holds no part of a parameter, as in the contiguous
    layout, training is repeated as a rank that does.

    Raises:
        CaseError: if there is no such case, its batch cannot be split, it raises or exits, it does not use
            the device, or it uses what cannot be followed: other threads, `DistributedDataParallel`.
    """
    if ranks % replicas:
        raise CaseError(f"{ranks} ranks cannot be divided into {replicas} replicas of equal size.")
    # The script sets its own arguments.
    with mock.patch.object(sys, "argv", sys.argv), _blame_case(case_spec, "when it was loaded"):
        case = load_case(case_spec)

    def receive(*args: Any, **kwargs: Any) -> None:
        raise running().refuse(
            "the case receives objects from another rank, as pipeline stages do to learn shapes, but the"
            " simulation has only this rank. Run it on real ranks (gloo), inside `simulated()`"
        )

    receives = mock.patch.object(dist, "recv_object_list", receive)
    findings: dict[str, Finding] = {}  # by text, as several ranks may find the same
    operations = streams = 0
    seen: set[str] = set()  # names of parameters of which a rank tried so far has a part
    rank: int | None = 0
    while rank is not None:
        blame = _blame_case(case_spec, "on the simulated device")
        with blame, simulated() as findings_of_rank, noop_world(ranks, rank=rank), receives:
            torch.manual_seed(seed)
            mesh = mesh_of(NAME, ranks, replicas)
            rank = _rank_of_uncovered(_train(case, mesh, findings_of_rank, steps, layout), seen)
        findings |= {str(finding): finding for finding in findings_of_rank.findings}
        operations += findings_of_rank.operations
        streams = max(streams, len(findings_of_rank.simulation.timeline.lines) - 1)
    return StreamsResult(tuple(findings.values()), operations, streams, layout)


def _rank_of_uncovered(module: nn.Module, seen: set[str]) -> int | None:
    """Add this rank's parameters to `seen`; return a rank that holds part of a parameter not seen so far."""
    params = dict(module.named_parameters())
    seen |= {name for name, param in params.items() if not param.numel() or _compat.local_of(param).numel()}
    for name in [name for name in params if name not in seen]:
        seen.add(name)  # each is looked at once
        sharding = holding_of(params[name]).over_one_group()
        if sharding is not None and sharding[0] is not None:
            ranks = dist.get_process_group_ranks(sharding[0])
            return next(rank for rank, box in zip(ranks, sharding[1], strict=True) if not box.is_empty)
    return None


@contextmanager
def _blame_case(case_spec: str, moment: str) -> Iterator[None]:
    """Raise an error of the case as a `CaseError` that names it."""
    try:
        yield
    except CaseError:
        raise
    except (Exception, SystemExit) as error:
        message = f"{case_spec} raised {type(error).__name__} {moment}: {error}"
        raise CaseError(message, traceback=traceback.format_exc()) from error


def _train(case: Case, mesh: DeviceMesh, findings: Findings, steps: int, layout: str | None) -> nn.Module:
    module = apply_shard(case, case.build().to(NAME), mesh, layout=layout)
    findings.models.append(module)
    optimizer = case.optimizer(module)
    computed: set[str] = set()
    findings.simulation.timeline.listener = lambda operation, _: computed.add(operation.name)
    for step in range(steps):
        batch = local_batch(take_batch(case, step), step, mesh.size(), dist.get_rank())
        # As a fast loop copies it: the host continues, even into the next step.
        take_gradients(case, module, tuple(t.pin_memory().to(NAME, non_blocking=True) for t in batch))
        optimizer.step()
        optimizer.zero_grad()
    torch.accelerator.synchronize()
    if computed <= {"copy_", "_to_copy"}:
        raise CaseError(
            "no operation of the case ran on the simulated device, so nothing was checked: its model or its"
            f" loss moves to the CPU. Keep both on the device that they are given ('{NAME}')."
        )
    return module
