"""Run a case on one process, then on N ranks, and compare the runs."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shardwise.dimensions import Dimensions
from shardwise.errors import ShardingError

from .case import CaseError, split_spec
from .compare import Tolerance, first_beyond, fixed_tolerance
from .processes import RankError, run_ranks
from .reference import Plan, run_reference
from .result import VerifyResult, describe
from .sharded import run_sharded


def verify(
    case_spec: str,
    *,
    ranks: int = 2,
    steps: int = 5,
    tolerance: float | None = None,
    dtype: torch.dtype | None = None,
    replicas: int = 1,
    mesh: str | None = None,
    layout: str | None = None,
    seed: int = 0,
    timeout: float = 120.0,
) -> VerifyResult:
    """Compare `steps` training steps on one process with the same steps on `ranks` local ranks.

    `case_spec` is `script.py`, `script.py:function`, `package.module` or `package.module:function`;
    the function, `verify_case` unless named, returns a `Case`. `tolerance` is relative to each
    tensor's scale and holds for losses, gradients and parameters at every step; without it, one is
    derived from `dtype` (by default the coarsest among parameters and gradients) and the batch.
    `replicas` > 1 gives a mesh ("replicate", "shard") of shape (replicas, ranks / replicas).
    `mesh`, such as "pp2,dp2,tp2" (see `shardwise.dimensions`), replaces `ranks` and `replicas`: it has the
    product of its sizes as ranks. If a run is beyond tolerance, each dimension is tried alone to find the one
    at fault. `layout` is passed to the case's shard function. `timeout` is in seconds without progress.

    Starts `ranks` + 1 processes (never more than `ranks` at once) and needs room in the temporary folder
    for 3 x `steps` copies of the parameters. Raises `CaseError` if the case cannot be run, with the traceback
    of the process that failed. Call it under `if __name__ == "__main__":`, as with every function that
    starts Python processes.
    """
    if mesh is not None:
        try:
            ranks = Dimensions(mesh).ranks
        except ShardingError as error:
            raise CaseError(str(error)) from None
        if replicas != 1:
            raise CaseError(
                f"mesh={mesh!r} replaces replicas={replicas}; in a mesh, write replicate{replicas}."
            )
    target, _ = split_spec(case_spec)
    if target.endswith(".py") and not Path(target).is_file():
        raise CaseError(f"No such file: {target}")
    if ranks < 1 or steps < 1:
        raise CaseError(f"ranks and steps must be at least 1, got ranks={ranks}, steps={steps}.")
    if replicas < 1 or ranks % replicas:
        raise CaseError(f"{ranks} ranks cannot be divided into {replicas} replicas of equal size.")
    if tolerance is not None:
        fixed_tolerance(tolerance)
    arguments: dict[str, Any] = {"spec": case_spec, "ranks": ranks, "replicas": replicas}
    arguments |= {"steps": steps, "seed": seed, "layout": layout, "mesh": mesh}
    with tempfile.TemporaryDirectory(prefix="shardwise-verify-") as folder:
        plan = Plan(**arguments, folder=folder, tolerance=tolerance, dtype=dtype)
        try:
            [derived] = run_ranks(run_reference, plan, world_size=1, timeout=timeout, name="reference")
            differences, *_ = run_ranks(run_sharded, plan, derived, world_size=ranks, timeout=timeout)
        except RankError as failure:
            raise CaseError(f"{case_spec} could not be run: {failure}", traceback=failure.traceback) from None
        result = VerifyResult(**arguments, tolerance=derived, differences=tuple(differences))
        return result if result.ok else replace(result, alone=_run_dimensions(plan, derived, timeout))


def _run_dimensions(plan: Plan, tolerance: Tolerance, timeout: float) -> dict[str, str]:
    """Train on each mesh dimension alone; return its first difference beyond tolerance, or ""."""
    sizes = Dimensions(plan.mesh).sizes if plan.mesh else {}
    results = {}
    for name, size in sizes.items():
        if 1 < size < plan.ranks:
            subplan = replace(plan, mesh=f"{name}{size}", ranks=size)
            try:
                differences, *_ = run_ranks(run_sharded, subplan, tolerance, world_size=size, timeout=timeout)
                first = first_beyond(differences)
                results[f"{name}{size}"] = describe(first) if first else ""
            except RankError as failure:
                results[f"{name}{size}"] = f"could not be run: {failure}"
    return results
