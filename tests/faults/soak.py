"""`make soak STEPS=1000`: does a long run with saves in the background hold more and more?

Memory, file handles and threads of each rank, every 20th of the way. The first fifth is warming up; after it
handles and threads must stay as they are, and memory within a twentieth.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from examples import train_gpt
from torch.distributed.device_mesh import init_device_mesh

from shardwise.checkpoint import StopSignals, save_async
from shardwise.verify.processes import run_ranks

POINTS, WARM_UP = 20, 4


def held() -> tuple[int, int, int]:
    """KiB of memory, open files and threads of this process."""
    status = Path("/proc/self/status").read_text()
    kib = int(status.partition("VmRSS:")[2].split()[0])
    return kib, len(list(Path("/proc/self/fd").iterdir())), threading.active_count()


def soak(alive: Callable[[], None], steps: int, out: str) -> list[tuple[int, int, int]]:
    torch.set_num_threads(1)
    text, _ = train_gpt.read_text(None, 32)
    model = train_gpt.GPT(width=64, depth=2, heads=2, seq=32)
    train_gpt.shard(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = train_gpt.make_optimizer(model, over_flat_memory=False)
    points, saving = [], None
    with StopSignals() as stop:
        for step in range(steps):
            batch = train_gpt.training_batch(text, position=8 * step, batch=8, seq=32, seed=0)
            train_gpt.backward(model, train_gpt.my_rows(batch, torch.device("cpu")))
            optimizer.step()
            optimizer.zero_grad()
            if step % 10 == 0:
                saving = save_async(out, train_gpt.training_state(model, optimizer, {}), step=step, keep=2)
            stop.asked()
            if (step + 1) % max(1, steps // POINTS) == 0:
                assert saving is not None
                saving.wait()
                points.append(held())
                alive()
    return points


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as out:
        found = run_ranks(soak, args.steps, out, world_size=args.ranks, timeout=300)
    grew = False
    for rank, points in enumerate(found):
        print(f"rank {rank}, MiB: {' '.join(f'{kib / 1024:.0f}' for kib, _, _ in points)}")
        handles = " ".join(f"{files}+{threads}" for _, files, threads in points)
        print(f"rank {rank}, files and threads: {handles}")
        (kib, files, threads), *later = points[WARM_UP:]
        grew |= any(f > files or t > threads or k > 1.05 * kib for k, f, t in later)
    sys.exit(f"grew after {WARM_UP} of {POINTS} points" if grew else 0)


if __name__ == "__main__":
    main()
