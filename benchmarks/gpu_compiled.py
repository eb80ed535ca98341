"""Eager and compiled steps on this device, one rank: losses beside eager's, and time.

python benchmarks/gpu_compiled.py --out build/gpu/compiled.json
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_figures import Subject
from gpu_place import Place, Shape
from results import spread
from subjects import PEER

import shardwise

STEPS, WARM_UP, TIMED = 6, 3, 15
SHAPE = Shape(width=2048, blocks=8, heads=16, vocabulary=32_000, length=1024, batch=2)


def _by_block(model: Any) -> Any:
    for block in model.blocks:
        block.compile()
    return model


WAYS: dict[str, tuple[str, Callable[[Any], Any] | None]] = {
    "torch": (PEER, None),
    "torch, by block": (PEER, _by_block),
    "interleaved": ("interleaved", None),
    "interleaved, by block": ("interleaved", _by_block),
    "interleaved, shardwise.compile": ("interleaved", shardwise.compile),
    "interleaved, regional": ("interleaved", lambda model: shardwise.compile(model, mode="regional")),
    "contiguous": ("contiguous", None),
    "contiguous, shardwise.compile": ("contiguous", shardwise.compile),
    "contiguous, regional": ("contiguous", lambda model: shardwise.compile(model, mode="regional")),
}


def run(way: str, place: Place, *, low: bool) -> dict[str, Any]:
    name, compile_ = WAYS[way]
    gc.collect()
    torch.compiler.reset()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    subject = Subject(name, SHAPE, place, low=low)
    if compile_ is not None:
        subject.model = compile_(subject.model)
    begin = time.perf_counter()
    losses = [subject.step().item() for _ in range(STEPS)]
    found: dict[str, Any] = {"losses": losses, "first steps s": time.perf_counter() - begin}
    if not low:
        return found
    wall, host = [], []
    for _ in range(TIMED):
        place.wait()
        begin = time.perf_counter()
        subject.step()
        host.append(1e3 * (time.perf_counter() - begin))
        place.wait()
        wall.append(1e3 * (time.perf_counter() - begin))
    return found | {
        "ms": spread(wall),
        "host ms": spread(host),
        "GiB": torch.cuda.max_memory_allocated() / 2**30,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", nargs="*", default=list(WAYS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kinds", nargs="*", default=["bf16", "fp32"])
    options = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1, store=dist.HashStore())
    place = Place(torch.device("cuda", 0))
    found: dict[str, Any] = {}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for kind in options.kinds:
        low = kind == "bf16"
        for way in options.ways:
            try:
                one = run(way, place, low=low)
                first = found.get(f"{WAYS[way][0]} {kind}", one)["losses"]
                one["apart"] = max(abs(a - b) / abs(b) for a, b in zip(one["losses"], first, strict=True))
            except Exception as error:
                one = {"raised": f"{type(error).__name__}: {error}"[:400]}
            found[f"{way} {kind}"] = one
            print(way, kind, {k: v for k, v in one.items() if k != "losses"}, flush=True)
            options.out.write_text(json.dumps(found, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
