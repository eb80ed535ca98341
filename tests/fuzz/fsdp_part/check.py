"""Runs a case of `fully_shard` on this rank and says what is wrong.

Ours is compared with one process in float64, within a rounding stated by dtype, and with torch's FSDP2
bit for bit where that can run the case: pieces in the interleaved layout; whole tensors in the contiguous
one, where at most two ranks are added at a time. Where torch's raises, or is itself far from one process,
one process is the only judge.
"""

from __future__ import annotations

import logging
import traceback
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp.parity.harness import difference, same_bits
from fuzz.fsdp_part.model import Spec
from fuzz.fsdp_part.shard import OURS, TORCHS, mesh_of
from fuzz.fsdp_part.train import Record, Run, Tensors
from fuzz.verdict import Verdict
from shardwise import ShardwiseError

# Relative to the tensor, plus a part of the largest tensor of its kind: a small gradient may be the
# difference of large ones.
ROUNDING = {"float64": 2e-5, "float32": 2e-4, "bfloat16": 0.25, "float16": 0.02}
OF_LARGEST = 0.1
BY_ROWS = ("losses", "outputs", "input_gradients")  # of a record, by micro-batch
LARGEST = 1e12  # of a loss, whose square and gradients float32 still has


def run(case: Spec, meshes: dict[Any, DeviceMesh]) -> Verdict:
    """Collective over the default group."""
    if any(block.get("shard") is None for block in case.get("blocks", [])):
        case = {"root": {}} | case  # what no call shards would be plain
    logging.getLogger("torch.distributed.fsdp").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mesh = mesh_of(case, meshes)
        try:
            ours = Run(case, OURS, mesh).train()
        except ShardwiseError as error:
            if may_refuse(case):
                return Verdict("refused", str(error))
            return raised(case, error, mesh)
        except Exception as error:
            return raised(case, error, mesh)
        torchs, why = torchs_run(case, mesh)
        alone = run_alone(case, ours)
        far_off = far_from_alone(case, ours, alone)
        if far_off and far_from_alone(case, of_rank(run_alone(case, ours, perturbed=True)), alone):
            return Verdict("right", "", {"reference": "grows a rounding of its parameters beyond bounds"})
    if diverged(alone):
        return Verdict("right", "", {"reference": "diverged"})
    problems = [] if torchs is None else list(apart_from_torch(case, ours, torchs, mesh))
    if problems and far_from_alone(case, torchs, alone):
        problems, why = [], "torch's is far from one process"
    problems += far_off
    notes = {"torch": "no oracle: " + why.partition(":")[0] if torchs is None or why else "oracle"}
    return Verdict("wrong" if problems else "right", "; ".join(problems[:4]), notes)


def run_alone(case: Spec, ours: Record, *, perturbed: bool = False) -> Record:
    """One process; `perturbed`, from parameters that were rounded once to the case's shortest dtype."""
    reference = Run(case, None, None)
    if case.get("unused"):
        reference.present = [{n for n, g in step.items() if g is not None} for step in ours.gradient_pieces]
    if perturbed:
        shortest = max(
            (getattr(torch, name) for name in dtypes(case)), key=lambda dtype: torch.finfo(dtype).eps
        )
        with torch.no_grad():
            for param in reference.params.values():
                param.copy_(param.to(shortest))
    return reference.train()


def of_rank(alone: Record) -> Record:
    """What a run of one process has of this rank's rows."""
    rows = slice(dist.get_rank(), None, dist.get_world_size())
    return replace(alone, **{what: getattr(alone, what)[rows] for what in BY_ROWS})


def diverged(alone: Record) -> bool:
    """Has training left the numbers that float32 has?"""
    return not all(float(loss.abs().max()) < LARGEST for loss in alone.losses)


def raised(case: Spec, error: Exception, mesh: DeviceMesh) -> Verdict:
    """Refused, if torch's cannot run the case either and ours says why; else an error too many."""
    where = "".join(traceback.format_exception(error)[-5:])
    text = f"{type(error).__name__}: {error}"
    torchs = torchs_run(case, mesh)[1]
    if torchs == text:
        return Verdict("right", text, {"raised": "as torch's"})
    kind = "refused" if torchs and isinstance(error, ShardwiseError) else "raised"
    return Verdict(kind, f"{text}\ntorch's: {torchs or 'trains it'}\n{where}")


def may_refuse(case: Spec) -> bool:
    """Outputs that escape the hooks may be refused, by name, instead of trained right."""
    return any(escapes(block) for block in blocks_of(case))


def escapes(block: Spec) -> bool:
    return block.get("out") in ("object", "attribute", "dataclass") or (
        bool(block.get("change")) and block.get("out") == "view"
    )


def blocks_of(case: Spec) -> Iterator[Spec]:
    for block in case.get("blocks", []):
        yield block
        yield from blocks_of({"blocks": block.get("inner", [])})


# ---------------------------------------------------------------- torch's


def torchs_run(case: Spec, mesh: DeviceMesh) -> tuple[Record | None, str]:
    if (why := no_torch(case)) is not None:
        return None, why
    try:
        return Run(case | {"layout": "interleaved"}, TORCHS, mesh).train(), ""
    except Exception as error:  # it is only an oracle
        return None, f"{type(error).__name__}: {error}"


def no_torch(case: Spec) -> str | None:
    """Why torch's FSDP2 does not run the case, or None."""
    if may_refuse(case):
        return "output that escapes hooks"
    steps = case.get("steps", [])
    if any(step.get("raises", {}).get("where", "forward") != "forward" for step in steps):
        return "keeps gradients of a backward that raised"
    if case.get("together") and any(block.get("around") == "reentrant" for block in blocks_of(case)):
        return "dies of a list with a reentrant checkpoint"
    acts = [act for step in steps for act in (*step.get("before", []), step.get("between"))]
    if case.get("keep_after_backward") or "reshard_after_backward:0" in acts:
        return "uses old values after a step"
    if case.get("notes"):
        return "blocks write to copies of what they share"
    if case.get("factor"):
        return "divide factor on gloo"
    if case.get("layout") == "contiguous" and not adds_in_pairs(case):
        return "sums in another order"
    if case.get("layout") == "contiguous" and any(s.get("sync") == "all_reduce" for s in steps):
        return "accumulates elsewhere"
    if case.get("optimizer") == "adamw_fused" and case.get("layout") == "contiguous":
        return "rounds the elements beside whole vectors in another way"
    if case.get("clip") and case.get("layout") == "contiguous":
        return "norms in another order"
    if len({block.get("dtype") for block in blocks_of(case)}) > 1:
        return "several stored dtypes"
    return None


def adds_in_pairs(case: Spec) -> bool:
    return dist.get_world_size() <= 2 or case.get("mesh") == "two"


def apart_from_torch(case: Spec, ours: Record, torchs: Record, mesh: DeviceMesh) -> Iterator[str]:
    for what in BY_ROWS:
        for i, (mine, theirs) in enumerate(zip(getattr(ours, what), getattr(torchs, what), strict=True)):
            if not same_bits(mine, theirs):
                yield f"{what} {i} are not torch's: {difference(mine, theirs)}"
    if case.get("layout") == "contiguous":
        pairs = [(f"gradient at step {i}", ours.gradients[i], torchs.gradients[i]) for i in torchs.gradients]
        pairs.append(("parameter", ours.parameters, torchs.parameters))
    else:
        pairs = [
            (f"{what} at step {i}", mine, theirs)
            for what, all_mine, all_theirs in (
                ("gradient", ours.gradient_pieces, torchs.gradient_pieces),
                ("parameter", ours.parameter_pieces, torchs.parameter_pieces),
            )
            for i, (mine, theirs) in enumerate(zip(all_mine, all_theirs, strict=True))
        ]
    for what, mine, theirs in pairs:
        if list(mine) != list(theirs):
            yield f"{what}: names are not torch's"
        for name in mine:
            if not same_bits(mine[name], theirs[name]):
                yield f"{what} {name} is not torch's: {difference(mine[name], theirs[name])}"
    if case.get("layout") != "contiguous" and ours.log != torchs.log:
        yield f"hooks saw {ours.log}, torch's {torchs.log}"


# ---------------------------------------------------------------- one process


def rounding(case: Spec) -> float:
    return max(ROUNDING[name] for name in dtypes(case))


def dtypes(case: Spec) -> set[str]:
    """Those that anything of a case is computed in."""
    names = {"float32"} | {block.get("dtype", "float32") for block in blocks_of(case)}
    policies = [case, *([case["root"]] if case.get("root") else [])]
    policies += [block["shard"] for block in blocks_of(case) if block.get("shard")]
    names |= {name for one in policies for name in one.get("mp", {}).values() if isinstance(name, str)}
    return names


def far_from_alone(case: Spec, found: Record | None, alone: Record) -> list[str]:
    """What is further from one process than rounding explains. This rank's rows, and whole tensors."""
    assert found is not None
    allowed, rows = rounding(case), of_rank(alone)
    problems = []
    for what in BY_ROWS:
        mine, expected = getattr(found, what), getattr(rows, what)
        pairs = {str(i): one for i, one in enumerate(mine)}, {str(i): one for i, one in enumerate(expected)}
        problems += far(what, *pairs, allowed)
    for step, expected in alone.gradients.items():
        problems += far(f"gradient at step {step}", found.gradients[step], expected, allowed)
    problems += far("parameter", found.parameters, alone.parameters, allowed)
    return problems


def far(what: str, found: Mapping[str, Any], expected: Tensors, allowed: float) -> list[str]:
    largest = max((float(e.norm()) for e in expected.values() if e is not None), default=0.0)
    problems = []
    if list(found) != list(expected):
        return [f"{what}: {list(found)} in place of {list(expected)}"]
    for name, right in expected.items():
        one = found[name]
        if one is None or right is None:
            if one is not right:
                problems.append(f"{what} {name} is {'None' if one is None else 'present'}, alone it is not")
            continue
        if one.shape != right.shape:
            problems.append(f"{what} {name} has shape {tuple(one.shape)}, alone {tuple(right.shape)}")
            continue
        apart = float((one.double() - right).norm())
        if not apart <= allowed * (float(right.norm()) + OF_LARGEST * largest) + 1e-9:
            problems.append(f"{what} {name} is off by {apart:.3g} of {float(right.norm()):.3g}")
    return problems
