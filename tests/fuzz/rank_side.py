"""What ranks run: a batch of cases, one after another, in one process group.

After each case ranks tell each other their verdicts, and rank 0 writes them to a file, so that a batch that
a case kills says how far it came. A rank whose case runs out of time writes its stacks and ends. Where our
code raised, the exchange goes through the store, which no collective that the case left behind can disturb;
so too where cases break their process group.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fuzz.parts import part_named
from fuzz.verdict import Verdict

ALONE_SECONDS = 10  # how long a rank that raised waits for the others to raise too
MOST_BUSY = 4.0  # by how much a busy machine may make limits longer


def run_batch(cases: list[dict[str, Any]], file: str) -> None:
    """Collective. Appends a line for each case to `file` on rank 0: the verdicts by rank, as JSON.

    The stacks of a rank whose case is hung go to a file of its own: `stacks_of(file, rank)`.
    """
    meshes: dict[Any, Any] = {}
    with stacks_of(file, dist.get_rank()).open("w") as stacks:
        for number, case in enumerate(cases):
            limit = case.get("limit", part_named(case["part"]).limit) * busy()
            faulthandler.dump_traceback_later(limit, exit=True, file=stacks)
            run_one(number, case, meshes, file)
            faulthandler.cancel_dump_traceback_later()


def stacks_of(file: str, rank: int) -> Path:
    return Path(f"{file}.stacks{rank}")


def busy() -> float:
    """How many processes there are to one processor, at least 1."""
    return min(MOST_BUSY, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


def run_one(number: int, case: dict[str, Any], meshes: dict[Any, Any], file: str) -> None:
    begin = time.monotonic()
    torch.default_generator.manual_seed(0)
    verdict = one(case, meshes)
    said = json.dumps([verdict.kind, verdict.text[:3000], verdict.notes])
    apart = verdict.kind == "raised" or part_named(case["part"]).breaks_group
    everyone = by_store(number, said) if apart else by_collective(said)
    if dist.get_rank() == 0:
        line = {"verdicts": [json.loads(text) for text in everyone], "seconds": time.monotonic() - begin}
        with Path(file).open("a") as lines:
            lines.write(json.dumps(line) + "\n")
    if number % 10 == 9:
        gc.collect()


def one(case: dict[str, Any], meshes: dict[Any, Any]) -> Verdict:
    try:
        return part_named(case["part"]).run(case, meshes)
    except Exception as error:
        where = traceback.format_exc(limit=-4)
        return Verdict("raised", f"{type(error).__name__}: {error}\n{where}")


def by_collective(said: str) -> list[str]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, said)
    return everyone


def by_store(number: int, said: str) -> list[str]:
    store = dist.distributed_c10d._get_default_store()
    keys = [f"case{number}/{rank}" for rank in range(dist.get_world_size())]
    store.set(keys[dist.get_rank()], said)
    try:
        store.wait(keys, timedelta(seconds=ALONE_SECONDS * busy()))
    except RuntimeError:
        raise RuntimeError(f"rank {dist.get_rank()} alone: {json.loads(said)[1]}") from None
    return [store.get(key).decode() for key in keys]
