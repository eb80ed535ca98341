"""Memory and time of a rank's step on this device: ours, FSDP2's, and what the planner forecasts.

    python benchmarks/gpu_beside.py --out build/gpu/beside.json

This process is rank 0 of a no-op group: it holds, gathers into and frees what a rank of so many does, on the
device's streams and by its allocator, and nothing is sent. Times are those of computation, copies and host.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path
from typing import Any

import torch
from beside_fsdp2 import HARDWARE, LIBRARIES, figures_of, hardware_of, recorded
from torch import nn

from shardwise.planner.models import model_of
from shardwise.planner.noop_group import noop_world
from shardwise.planner.setup import Setup

DEVICE = "cuda"
FULL: dict[str, Any] = {"checkpointing": "full", "optimizer": "AdamW fused"}
ROWS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "small": ("llama3-8b", 2, FULL | {"ranks": 8, "sequence": 256}),
    "8B": ("llama3-8b", 0, FULL | {"ranks": 8, "sequence": 8192}),
    "8B, 4 reduced once": (
        "llama3-8b",
        0,
        FULL | {"ranks": 8, "sequence": 8192, "accumulation": 4, "reduce_once": True},
    ),
    "8B, 2048 tokens": ("llama3-8b", 0, FULL | {"ranks": 8, "sequence": 2048}),
    "8B, 2048 tokens, kept": ("llama3-8b", 0, {"optimizer": "AdamW fused", "ranks": 8, "sequence": 2048}),
    "8B, 64 ranks": ("llama3-8b", 0, FULL | {"ranks": 64, "sequence": 8192}),
}


def shorter(model: Any, layers: int) -> int:
    return min(model.layers, layers) if layers else model.layers


def forecast(row: str, way: str) -> dict[str, Any]:
    """What the planner's models say of it; needs no device."""
    name, layers, how = ROWS[row]
    library, more = LIBRARIES[way]
    setup = Setup(**(how | more))
    model = model_of(name, sequence=setup.sequence)
    (recording,) = recorded(model, setup, library, (shorter(model, layers),))
    figures = figures_of(recording, setup, hardware_of(HARDWARE))
    return {
        "reserved": figures.reserved_bytes,
        "alive": figures.alive_bytes,
        "step": figures.step,
        "computing": figures.model,
        "copies": figures.copies,
    }


def measured(row: str, way: str, steps: int) -> dict[str, Any]:
    """What the device says."""
    name, layers, how = ROWS[row]
    library, more = LIBRARIES[way]
    setup = Setup(**(how | more))
    model = model_of(name, sequence=setup.sequence)
    device = torch.get_device_module(DEVICE)
    gc.collect()
    device.empty_cache()
    device.reset_peak_memory_stats()
    before = device.memory_allocated()
    with noop_world(setup.ranks, device_type=DEVICE) as mesh:
        with torch.device("meta"):
            module = model.build(shorter(model, layers))
        library.shard(module, model, setup, mesh)
        module.to_empty(device=DEVICE)
        _fill(module)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)
        size = (setup.micro_batch, setup.sequence)
        tokens = torch.randint(30_000, size, device=DEVICE)  # equal ones multiply faster: less power
        rested = device.memory_allocated() - before
        wall, host = [], []
        gc.collect()
        gc.disable()
        for _ in range(steps):
            device.synchronize()
            begin = time.perf_counter()
            _step(module, model, optimizer, tokens, setup)
            host.append(time.perf_counter() - begin)
            device.synchronize()
            wall.append(time.perf_counter() - begin)
        gc.enable()
        found = {
            "reserved": device.max_memory_reserved(),
            "allocated": device.max_memory_allocated(),
            "at rest": rested,
            "retries": device.memory_stats()["num_alloc_retries"],
            "step": min(wall[1:]),
            "host": min(host[1:]),
            "steps": wall,
        }
        del module, optimizer
    gc.collect()
    device.empty_cache()
    return found


def _fill(module: nn.Module) -> None:
    """Give sharded parameters small values, and buffers theirs."""
    with torch.no_grad():
        for p in module.parameters():
            getattr(p, "_local_tensor", p).normal_(std=0.01)
        for buffer in module.buffers():
            buffer.zero_()


def _step(module: Any, model: Any, optimizer: Any, tokens: torch.Tensor, setup: Setup) -> None:
    """One step as the planner records it."""
    optimizer.zero_grad()
    for micro in range(setup.accumulation):
        if setup.reduce_once:
            module.set_requires_gradient_sync(micro == setup.accumulation - 1)
        loss = model.loss(module, tokens, tokens)
        loss.backward()
        del loss
    optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="*", default=list(ROWS)[1:])
    parser.add_argument("--ways", nargs="*", default=list(LIBRARIES))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--forecast", action="store_true", help="by the planner instead, without a device")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    for row in options.rows:
        for way in options.ways:
            begin = time.monotonic()
            try:
                one = forecast(row, way) if options.forecast else measured(row, way, options.steps)
            except Exception as error:
                one = {"raised": f"{type(error).__name__}: {error}"[:300]}
            found.setdefault(row, {})[way] = one
            words = {k: round(v / 2**30, 3) if isinstance(v, int) and v > 1000 else v for k, v in one.items()}
            print(row, way, words, f"({time.monotonic() - begin:.0f} s)", flush=True)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
