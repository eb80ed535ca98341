"""The sharded run, on one of N ranks: shard, step, and compare each step with the reference.

Sharded tensors are gathered one parameter at a time, which is collective. The ranks therefore first
exchange which parameters and gradients they hold, so that a gradient missing on one rank is reported
instead of causing a hang. Gathered tensors are equal within a shard group, so one rank of each replica
compares; tensors that are not sharded are compared on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.comm.agree import together
from shardwise.comm.differences import named as named_ranks
from shardwise.dimensions import Dimensions, share_of_batch

from .case import apply_shard, load_case, local_batch
from .compare import START, Difference, Kind, Tolerance, compare_losses, compare_tensors, merge_ranks
from .reference import Parameters, Plan, parameters_by_name, read_step, take_batch, take_gradients

ABSENT, EMPTY, PRESENT = "no such parameter", "none", "present"  # a parameter, or its tensor of a kind


def run_sharded(alive: Callable[[], None], plan: Plan, tolerance: Tolerance) -> list[Difference]:
    """Run and compare every step; return all differences in order on rank 0, and none on other ranks.

    Collective over the default process group.
    """
    torch.manual_seed(plan.seed)
    case = load_case(plan.spec)
    mesh = Dimensions(plan.mesh).mesh("cpu") if plan.mesh else mesh_of("cpu", plan.ranks, plan.replicas)
    module = apply_shard(case, case.build(), mesh, layout=plan.layout)
    parameters, tied = parameters_by_name(module)
    optimizer = case.optimizer(module)
    start = read_step(plan.folder, START)
    shards = [name for name in mesh.mesh_dim_names or () if name in ("shard", "dp", "sp", "ep")]
    compares = all(mesh.get_local_rank(name) == 0 for name in shards)
    places = map(Dimensions(plan.mesh or "dp1").place, range(plan.ranks))
    stages = [place.get("pp", 0) for place in places]

    @torch.no_grad()
    def compare(kind: Kind, step: int, expected: dict[str, Any]) -> list[Difference]:
        """Compare all tensors of one kind; rank 0 returns what all ranks found. Collective."""
        start_names = list(expected["parameters"])
        values, scales = expected[f"{kind}s"], expected[f"{kind}_scales"]
        slack = expected.get("slack", {}) if kind == "parameter" else {}
        tensors: dict[str, Any] = {n: p if kind == "parameter" else p.grad for n, p in parameters.items()}
        local_states = [
            ABSENT if name not in tensors else EMPTY if tensors[name] is None else PRESENT
            for name in start_names
        ]
        by_rank = together(f"comparing the {kind}s", lambda: local_states)
        differences: list[Difference] = []
        for name, *states in zip(start_names, *by_rank, strict=True):
            reference = PRESENT if name in values else EMPTY
            states_by_rank = _on_its_stages(states, stages)
            if problem := _presence_problem(states_by_rank, reference):
                differences.append(Difference(kind, step, name, problem=problem))
                continue
            if reference == EMPTY or name not in tensors:
                continue
            is_sharded = hasattr(tensors[name], "full_tensor")
            full = tensors[name].full_tensor() if is_sharded else tensors[name]
            if compares or not is_sharded:
                at = Difference(kind, step, name, rank=dist.get_rank())
                scale, allowed, extra = scales[name], tolerance.at(step), slack.get(name)
                diff = compare_tensors(full, values[name], at, scale=scale, tolerance=allowed, slack=extra)
                differences.append(diff)
        if step == START:
            differences += _name_problems(parameters, tied, start_names, expected["tied"])
        found = together("merging all ranks' findings", lambda: list(map(asdict, differences)))
        if dist.get_rank() != 0:
            return []
        return merge_ranks([Difference(**fields) for fields in entries] for entries in found)

    differences = compare("parameter", START, start)
    index, shares = share_of_batch(mesh) if plan.mesh else (dist.get_rank(), plan.ranks)
    for step in range(plan.steps):
        alive()
        torch.manual_seed(plan.seed + step)
        batch = local_batch(take_batch(case, step), step, shares, index)
        optimizer.zero_grad()
        loss = take_gradients(case, module, batch)
        expected = read_step(plan.folder, step)
        total = torch.tensor((0.0, 0.0) if loss is None else (float(loss.detach()), 1.0), dtype=torch.float64)
        dist.all_reduce(total)
        mean = float(total[0] / total[1])  # over ranks that have a loss
        differences.append(compare_losses(mean, expected["loss"], step=step, tolerance=tolerance.at(step)))
        differences += compare("gradient", step, expected)
        optimizer.step()
        differences += compare("parameter", step, expected)
    return differences if dist.get_rank() == 0 else []


def mesh_of(device: str, ranks: int, replicas: int) -> DeviceMesh:
    """Return the mesh of a run whose dimensions have no names of their own."""
    shape = (ranks,) if replicas == 1 else (replicas, ranks // replicas)
    return init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def _on_its_stages(states: list[str], stages: list[int]) -> dict[int, str]:
    """Return states by rank, for the stages that have the parameter, or for all if none has it."""
    having = {stage for stage, state in zip(stages, states, strict=True) if state != ABSENT} or set(stages)
    return {rank: state for rank, state in enumerate(states) if stages[rank] in having}


def _presence_problem(by_rank: dict[int, str], reference: str) -> str:
    """Describe how a tensor's states by rank differ from the reference's; "" if they do not."""
    distinct = sorted(set(by_rank.values()))
    if distinct == [reference]:
        return ""
    if len(distinct) == 1:
        return f"{distinct[0]} on the ranks, {reference} in the reference"
    states = [
        f"{state} on {named_ranks([rank for rank, s in by_rank.items() if s == state])}" for state in distinct
    ]
    return f"{'; '.join(states)}; {reference} in the reference"


def _name_problems(
    parameters: Parameters, tied: dict[str, str], expected: list[str], expected_tied: dict[str, str]
) -> list[Difference]:
    """Return parameters that the reference does not have, and names tied on one side only."""
    problems = []
    for name in parameters:
        if name in expected_tied:
            problems.append((name, f"tied to {expected_tied[name]} in the reference, separate on the ranks"))
        elif name not in expected:
            problems.append((name, "present on the ranks, missing from the reference"))
    for name, first in tied.items():
        if name in expected:
            problems.append((name, f"tied to {first} on the ranks, separate in the reference"))
    return [Difference("parameter", START, name, problem=text) for name, text in problems]
