"""Trains with one rank that differs, and judges what every rank was told.

Ranks tell each other what happened through the store, as their process group may be beyond use. All
must have raised, naming a rank, a module and the difference, within seconds of the last rank's arrival; ranks
that were only late must have raised nothing.
"""

from __future__ import annotations

import json
import re
import time
import traceback
import warnings
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fuzz.fsdp_part.check import far_from_alone
from fuzz.fsdp_part.model import Planned, Spec
from fuzz.fsdp_part.shard import OURS, mesh_of
from fuzz.fsdp_part.train import Run
from fuzz.verdict import Verdict
from shardwise import ShardwiseError

LIMIT_SECONDS = 5.0
HUNG_SECONDS = 30.0
MODULE = re.compile(r"blocks\.\d|head|Model|module|model")
HARMLESS = (
    "order of fully_shard",
)  # groups stand in the order of modules: no error, if the numbers are right
# What a message must say, of what differs. The sequence of modules stands for what changes it.
SAYS = {
    "reduce_dtype": r"reduce|bfloat16",
    "param_dtype": r"param_dtype|bfloat16|gather",
    "divide factor": r"factor|divid",
    "reshard_after_forward": r"reshard|gather",
    "reshard_after_backward": r"reshard|gather",
    "strategy": r"zero1|zero2|ddp|strategy",
    "layout": r"layout|interleaved|contiguous|row block",
    "gradient sync": r"sync|reduc",
    "frozen later": r"requires_grad|frozen|train|gradient",
    "frozen": r"requires_grad|frozen|train",
    "force sum": r"sum",
    "unused": r"unused",
    "order of fully_shard": r"blocks|order",
    "order of modules": r"blocks\.\d",
    "shape": r"blocks\.\d",
    "group": r"blocks\.\d",
    "skips a module": r"blocks\.\d",
    "calls twice": r"blocks\.\d",
    "raises in forward": r"rais|fail|block",
    "raises in backward": r"rais|fail|block",
}


class Timed(Run):
    """A run that notes when this rank last did something."""

    arrived = 0.0

    def one_pass(self, step: Spec, rank: int, record: bool) -> None:
        self.control.raises = step.get("fails", {})
        if not self.alone:
            Timed.arrived = time.monotonic()
        super().one_pass(step, rank, record)
        if not self.alone:
            Timed.arrived = time.monotonic()


def run(case: Spec, meshes: dict[Any, DeviceMesh]) -> Verdict:
    """Collective; the process group is of no more use after it."""
    rank = dist.get_rank()
    differs = case["differs"]
    own = case | (differs["patch"] if rank == differs["rank"] else {})
    own = own | {"steps": [step | ({"delay": {}} if not own.get("late") else {}) for step in own["steps"]]}
    if own.get("late"):
        own["steps"] = [with_rank(step, rank) for step in own["steps"]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mesh = mesh_of(case, meshes)
        Timed.arrived = time.monotonic()
        kind, text, record = "none", "", None
        try:
            record = Timed(own, OURS, mesh).train()
        except Planned:
            kind = "planned"
            Timed.arrived = time.monotonic()
        except ShardwiseError as error:
            kind, text = "named", f"{type(error).__name__}: {error}"
        except Exception as error:
            kind, text = "raw", f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-6)}"
    everyone = told(rank, [kind, text, time.monotonic(), Timed.arrived])
    if everyone is None:
        return Verdict("hung", f"{differs['what']}: rank {rank} ended with {kind} {text}, others never")
    return judged(case, own, record, everyone)


def with_rank(step: Spec, rank: int) -> Spec:
    return step | {"delay": step["delay"] | {"rank": rank}} if step.get("delay") else step


def told(rank: int, mine: list[Any]) -> list[list[Any]] | None:
    """What every rank says, or None if some rank says nothing."""
    store = dist.distributed_c10d._get_default_store()
    keys = [f"outcome/{one}" for one in range(dist.get_world_size())]
    store.set(keys[rank], json.dumps(mine))
    try:
        store.wait(keys, timedelta(seconds=HUNG_SECONDS))
    except Exception:
        return None
    return [json.loads(store.get(key)) for key in keys]


def judged(case: Spec, own: Spec, record: Any, everyone: list[list[Any]]) -> Verdict:
    what = case["differs"]["what"]
    kinds = [kind for kind, *_ in everyone]
    if what == "late" or (what in HARMLESS and set(kinds) == {"none"}):
        if set(kinds) != {"none"}:
            return Verdict("wrong", f"late, but ranks ended with {kinds}: {everyone}")
        alone = Run({key: value for key, value in case.items() if key != "late"}, None, None).train()
        problems = far_from_alone(case, record, alone)
        return Verdict("wrong" if problems else "right", "; ".join(problems[:3]))
    if set(kinds) == {"none"}:
        return Verdict("silent", f"{what}: no rank raised")
    problems = []
    last = max(arrived for *_, arrived in everyone)
    for rank, (kind, text, ended, _) in enumerate(everyone):
        if kind == "planned":
            continue
        if kind == "none":
            problems.append(f"rank {rank} raised nothing")
        elif kind == "raw":
            problems.append(f"rank {rank} raised {text}")
        elif not re.search(r"rank \d", text):
            problems.append(f"rank {rank} names no rank: {text}")
        elif not MODULE.search(text):
            problems.append(f"rank {rank} names no module: {text}")
        elif not re.search(SAYS[what], text):
            problems.append(f"rank {rank} does not say what differs: {text}")
        if ended - last > LIMIT_SECONDS:
            problems.append(f"rank {rank} waited {ended - last:.1f} s after the last arrival")
    silent = any("raised nothing" in problem for problem in problems)
    kind = "silent" if silent else "wrong" if problems else "right"
    return Verdict(kind, f"{what}: " + "; ".join(problems) if problems else "")
