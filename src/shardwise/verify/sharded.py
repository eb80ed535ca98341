"""The sharded run, on one of N ranks: shard, step, and compare each step with the reference.

Sharded tensors are gathered one parameter at a time, which is collective. The ranks therefore first
exchange which parameters and gradients they hold, so that a gradient missing on one rank is reported
instead of causing a hang. Gathered tensors are equal within a shard group, so one rank of each replica
compares; tensors that are not sharded are compared on every rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.comm.agree import together
from shardwise.comm.differences import named as named_ranks
from shardwise.dimensions import Dimensions, share_of_batch

from .case import apply_shard, load_case, local_batch
from .compare import START, Difference, Kind, Tolerance, compare_losses, compare_tensors, merge_ranks
from .reference import Parameters, Plan, named, read_step, take_batch, take_gradients

ABSENT, EMPTY, PRESENT = 0, 1, 2  # no such parameter; parameter without this tensor; with it
DESCRIBED = {ABSENT: "no such parameter", EMPTY: "none", PRESENT: "present"}


def run_sharded(alive: Callable[[], None], plan: Plan, tolerance: Tolerance) -> list[Difference]:
    """Run and compare every step; return all differences in order on rank 0, and none on other ranks.

    Collective over the default process group.
    """
    torch.manual_seed(plan.seed)
    case = load_case(plan.spec)
    mesh = Dimensions(plan.mesh).mesh("cpu") if plan.mesh else mesh_of("cpu", plan.ranks, plan.replicas)
    module = apply_shard(case, case.build(), mesh, layout=plan.layout)
    parameters, tied = named(module)
    optimizer = case.optimizer(module)
    start = read_step(plan.folder, START)
    shards = [name for name in mesh.mesh_dim_names or () if name in ("shard", "dp", "sp", "ep")]
    compares = all(mesh.get_local_rank(name) == 0 for name in shards)
    places = map(Dimensions(plan.mesh or "dp1").place, range(plan.ranks))
    stages = [place.get("pp", 0) for place in places]
    compare = partial(
        _compare_all,
        parameters=parameters,
        tolerance=tolerance,
        compares=compares,
        tied=tied,
        stages=stages,
    )
    differences = compare("parameter", START, expected=start)
    index, shares = share_of_batch(mesh) if plan.mesh else (dist.get_rank(), plan.ranks)
    for step in range(plan.steps):
        alive()
        torch.manual_seed(plan.seed + step)
        batch = local_batch(take_batch(case, step), step, shares, index)
        optimizer.zero_grad()
        loss = take_gradients(case, module, batch)
        expected = read_step(plan.folder, step) | {"tied": start["tied"]}
        found = _mean_over_ranks(loss)
        differences.append(compare_losses(found, expected["loss"], step=step, tolerance=tolerance.at(step)))
        differences += compare("gradient", step, expected=expected)
        optimizer.step()
        differences += compare("parameter", step, expected=expected)
    return differences if dist.get_rank() == 0 else []


def mesh_of(device: str, ranks: int, replicas: int) -> DeviceMesh:
    """Return the mesh of a run whose dimensions have no names of their own."""
    shape = (ranks,) if replicas == 1 else (replicas, ranks // replicas)
    return init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def _mean_over_ranks(loss: torch.Tensor | None) -> float:
    held = (0.0, 0.0) if loss is None else (float(loss.detach()), 1.0)
    total = torch.tensor(held, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total[0] / total[1])


@torch.no_grad()
def _compare_all(
    kind: Kind,
    step: int,
    parameters: Parameters,
    expected: dict[str, Any],
    *,
    tolerance: Tolerance,
    compares: bool,
    tied: dict[str, str],
    stages: list[int],
) -> list[Difference]:
    """Compare all tensors of one kind. Collective; every rank passes the same `kind` and `step`."""
    start_names = list(expected["parameters"])
    wanted: dict[str, torch.Tensor] = expected[f"{kind}s"]
    slack = expected.get("slack", {}) if kind == "parameter" else {}
    by_rank = _held_by_rank(kind, parameters, start_names)
    differences: list[Difference] = []
    for index, name in enumerate(start_names):
        reference = PRESENT if name in wanted else EMPTY
        held = _on_its_stages([states[index] for states in by_rank], stages)
        if problem := _presence_problem(held, reference):
            differences.append(Difference(kind=kind, step=step, name=name, problem=problem))
            continue
        if reference == EMPTY or name not in parameters:
            continue
        source = parameters[name] if kind == "parameter" else parameters[name].grad
        assert source is not None
        is_sharded = hasattr(source, "full_tensor")
        whole = source.full_tensor() if is_sharded else source  # type: ignore[attr-defined]
        if compares or not is_sharded:
            differences.append(
                compare_tensors(
                    whole,
                    wanted[name],
                    kind=kind,
                    step=step,
                    name=name,
                    scale=expected[f"{kind}_scales"][name],
                    tolerance=tolerance.at(step),
                    slack=slack.get(name),
                    rank=dist.get_rank(),
                )
            )
    if step == START:
        differences += _name_problems(parameters, tied, start_names, expected["tied"])
    return _gather_differences(differences)


def _held_by_rank(kind: Kind, parameters: Parameters, names: list[str]) -> list[list[int]]:
    def state(name: str) -> int:
        if name not in parameters:
            return ABSENT
        return PRESENT if kind == "parameter" or parameters[name].grad is not None else EMPTY

    return together(f"comparing the {kind}s", lambda: list(map(state, names)))


def _on_its_stages(held: list[int], stages: list[int]) -> dict[int, int]:
    """Return states by rank, for the stages that have the parameter, or for all if none has it."""
    having = {stage for stage, state in zip(stages, held, strict=True) if state != ABSENT} or set(stages)
    return {rank: state for rank, state in enumerate(held) if stages[rank] in having}


def _presence_problem(held: dict[int, int], reference: int) -> str:
    """Describe how a tensor's states by rank differ from the reference's; "" if they do not."""
    found = sorted(set(held.values()))
    if found == [reference]:
        return ""
    if len(found) == 1:
        return f"{DESCRIBED[found[0]]} on the ranks, {DESCRIBED[reference]} in the reference"
    states = [
        f"{DESCRIBED[state]} on {named_ranks([rank for rank, each in held.items() if each == state])}"
        for state in found
    ]
    return f"{'; '.join(states)}; {DESCRIBED[reference]} in the reference"


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
    return [Difference(kind="parameter", step=START, name=name, problem=text) for name, text in problems]


def _gather_differences(differences: list[Difference]) -> list[Difference]:
    """Gather and merge the differences of all ranks on rank 0; return none on other ranks."""
    by_rank = together(
        "merging all ranks' findings", lambda: [dataclasses.asdict(difference) for difference in differences]
    )
    if dist.get_rank() != 0:
        return []
    return merge_ranks([Difference(**fields) for fields in each] for each in by_rank)
