"""Trains a case on its mesh and in one process, four steps each, and says what differs."""

from __future__ import annotations

import logging
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fuzz.meshes_part.train import OnMesh, Record, differences, in_one_process, settings
from fuzz.verdict import Verdict
from shardwise import ShardwiseError

STEPS = 4
ABOUT_THE_MESH = ("part", "world", "drawn", "found", "limit", "goes_on", "then")


def run(case: dict[str, Any], meshes: dict[Any, Any]) -> Verdict:
    """Collective over the default group."""
    logging.getLogger("torch").setLevel(logging.ERROR)
    chosen = {name: value for name, value in case.items() if name not in ABOUT_THE_MESH}
    args = settings(**chosen)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = trained(case, args, chosen, meshes)
        except ShardwiseError as error:
            return Verdict("refused", str(error), {"refused": type(error).__name__})
        alone = [in_one_process(args, STEPS) if dist.get_rank() == 0 else None]  # the same on every rank
        dist.broadcast_object_list(alone)
        problems = differences(found, alone[0])
    return Verdict("wrong" if problems else "right", "; ".join(problems))


def trained(case: dict[str, Any], args: Any, chosen: dict[str, Any], meshes: dict[Any, Any]) -> Record:
    found = Record()
    first = OnMesh(args, meshes)
    if "goes_on" not in case:
        first.train(STEPS, found)
        return found
    first.train(2, found)
    folder = [tempfile.mkdtemp(prefix="meshes-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    try:
        path = Path(str(folder[0]))
        first.save(path)
        layout = case.get("then", args.layout)
        other = {"mesh": case["goes_on"], "layout": layout, "flat": args.layout == layout and first.is_flat}
        second = OnMesh(settings(**chosen | other), meshes)
        second.load(path)
        gradients = found.gradients
        second.train(STEPS - 2, found)
        found.gradients = gradients
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(str(folder[0]))
    return found
