"""Check the training of a `Case` for missing waits, in this process, as rank 0 of any number of ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import init_device_mesh

from shardwise.planner.noop_group import noop_world
from shardwise.verify.case import CaseError, apply_shard, load_case
from shardwise.verify.reference import take_batch, take_loss
from shardwise.verify.streams.check import Finding, simulated
from shardwise.verify.streams.device import NAME


@dataclass(frozen=True)
class StreamsResult:
    """What was found, and how much was looked at."""

    findings: tuple[Finding, ...]
    operations: int
    streams: int

    @property
    def ok(self) -> bool:
        return not self.findings

    def describe(self) -> str:
        """The findings, one a line, and how many."""
        looked = f"{self.operations} operations on {self.streams} streams"
        if self.ok:
            return f"No operation of {looked} reads or writes what another may still use."
        return "\n".join([*map(str, self.findings), f"{len(self.findings)} missing waits among {looked}."])


def check_streams(
    case_spec: str,
    *,
    ranks: int = 2,
    steps: int = 3,
    replicas: int = 1,
    layout: str | None = None,
    seed: int = 0,
) -> StreamsResult:
    """Train a case on the simulated device, and say which operations lack a wait.

    Arguments as of `verify`; the model, its hooks, communication and optimizer are the case's own, sharded by
    whatever its `shard` calls. Starts no processes: collectives are those of a group that has this rank only,
    whose results are as if all ranks were alike.

    Raises:
        CaseError: no such case; one whose batch cannot be cut.
    """
    if ranks % replicas:
        raise CaseError(f"{ranks} ranks cannot be cut into {replicas} replicas of equal size.")
    case = load_case(case_spec)
    with simulated() as found, noop_world(ranks):
        torch.manual_seed(seed)
        shape = (ranks,) if replicas == 1 else (replicas, ranks // replicas)
        mesh = init_device_mesh(NAME, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        module = case.build().to(NAME)
        found.models.append(module)
        apply_shard(case, module, mesh, layout=layout)
        optimizer = case.optimizer(module)
        for step in range(steps):
            batch = tuple(entry[: max(1, len(entry) // ranks)].to(NAME) for entry in take_batch(case, step))
            loss = take_loss(case, module, batch)
            torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        torch.accelerator.synchronize()
    timeline = found.simulation.timeline
    return StreamsResult(tuple(found.findings), found.operations, len(timeline.lines) - 1)
