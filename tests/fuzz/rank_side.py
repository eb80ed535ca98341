"""What ranks run: a batch of cases, one after another, in one process group.

After each case ranks tell each other their verdicts, and rank 0 writes them to a file, so that a batch that
a case kills or hangs says how far it came. Where our code raised, the exchange goes through the store, which
no collective that the case left behind can disturb; so too where cases break their process group.
"""

from __future__ import annotations

import gc
import json
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


def run_batch(cases: list[dict[str, Any]], file: str) -> None:
    """Collective. Appends a line for each case to `file` on rank 0: the verdicts by rank, as JSON."""
    meshes: dict[Any, Any] = {}
    for number, case in enumerate(cases):
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
        store.wait(keys, timedelta(seconds=ALONE_SECONDS))
    except RuntimeError:
        raise RuntimeError(f"rank {dist.get_rank()} alone: {json.loads(said)[1]}") from None
    return [store.get(key).decode() for key in keys]
