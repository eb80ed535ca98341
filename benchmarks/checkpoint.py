"""Saving and loading, beside torch's distributed checkpoint on the same bytes; steps beside a save or copy.

    python benchmarks/checkpoint.py            show the tables
    python benchmarks/checkpoint.py --write    and replace their section of TABLES.md

The state is a model in either layout and its AdamW moments. Both libraries write to the same disk and take
turns; ours also hashes every byte, both ways, and syncs. Files are in the system's cache when they are
read. Times are the slowest rank's, medians. Steps are timed without a save, then while one is in flight.

Each rank has a host's memory of its own, a folder in /dev/shm, and copies itself to the next one's every
EVERY steps. Then one rank has lost what it had, and all load: from the copies, and from storage.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from results import RESULTS, Table, machine_facts, write_section
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from shardwise import fully_shard
from shardwise.checkpoint import HostMemory, load, save, save_async
from shardwise.verify.processes import run_ranks

SECTION = "checkpoint"
EVERY = 10  # steps between copies in memory
SHAPES = {"12 layers of 1024 x 1024": (12, 1024, 64), "200 layers of 64 x 64": (200, 64, 16)}


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def slowest(action: Callable[[], Any]) -> float:
    """Seconds of the slowest rank."""
    dist.barrier()
    begun = time.perf_counter()
    action()
    spent = torch.tensor([time.perf_counter() - begun])
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return float(spent)


def training(
    layout: str, shape: tuple[int, int, int]
) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """A model, its optimizer and a step, which has run."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    count, width, rows = shape
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))
    for layer in model:
        fully_shard(layer, layout=layout)
    fully_shard(model, layout=layout)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = torch.randn(rows, width)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    return model, optimizer, step


def on_rank(alive: Callable[[], None], layout: str, shape: tuple[int, int, int], turns: int, out: str) -> Any:
    """Seconds by what is done, and the state's bytes."""
    model, optimizer, step = training(layout, shape)
    spent: dict[str, list[float]] = {}

    def timed(name: str, action: Callable[[], Any]) -> None:
        spent.setdefault(name, []).append(slowest(action))
        alive()

    for turn in range(turns + 1):
        ours, theirs = Path(out, "ours"), Path(out, f"theirs{turn}")
        timed("save", lambda: save(ours, state_of(model, optimizer), step=turn, keep=1))  # noqa: B023
        timed("save, torch", lambda: dcp.save(state_of(model, optimizer), checkpoint_id=theirs))  # noqa: B023
        timed("load", lambda: load(ours, state_of(model, optimizer)))  # noqa: B023
        timed("load, torch", lambda: dcp.load(state_of(model, optimizer), checkpoint_id=theirs))  # noqa: B023
        if dist.get_rank() == 0:
            shutil.rmtree(theirs)
    spent = {name: times[1:] for name, times in spent.items()}
    for turn in range(turns):
        for _ in range(10):
            timed("step", step)
        pending = []
        timed("stage", lambda: pending.append(save_async(ours, state_of(model, optimizer), step=100 + turn)))  # noqa: B023
        begun, steps = time.perf_counter(), 0
        while not all_of(pending[0].done):
            timed("step while saving", step)
            steps += 1
        pending[0].wait()
        spent.setdefault("in flight", []).append(time.perf_counter() - begun)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    return spent, 12 * numbers


def with_copies(
    alive: Callable[[], None], layout: str, shape: tuple[int, int, int], turns: int, out: str
) -> Any:
    """Seconds by what is done."""
    model, optimizer, step = training(layout, shape)
    rank = dist.get_rank()
    host = Path("/dev/shm" if os.path.isdir("/dev/shm") else out, f"{Path(out).name}-{rank}")
    copies, spent = HostMemory(host), dict[str, list[float]]()

    def steps(save_at: int | None) -> None:
        for number in range(EVERY):
            step()
            if number == save_at:
                copies.save(state_of(model, optimizer), step=number)

    try:
        for turn in range(turns + 1):
            actions: dict[str, Callable[[], Any]] = {
                "steps": lambda: steps(None),
                "steps with a copy": lambda: steps(0),
                "wait": copies.wait,
                "save": lambda: save(Path(out, "stored"), state_of(model, optimizer), step=turn, keep=1),  # noqa: B023
                "lose": lambda: shutil.rmtree(host) if rank == 1 else None,
                "load from memory": lambda: copies.load(state_of(model, optimizer)),
                "load from storage": lambda: load(Path(out, "stored"), state_of(model, optimizer)),
            }
            for name, action in actions.items():
                spent.setdefault(name, []).append(slowest(action))
                alive()
        return {name: statistics.median(times[1:]) for name, times in spent.items()}
    finally:
        shutil.rmtree(host, ignore_errors=True)


def all_of(value: bool) -> bool:
    flag = torch.tensor([int(value)])
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="replace the section of --results")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows = []
    for name, shape in SHAPES.items():
        for layout in ("interleaved", "contiguous"):
            Path("runs").mkdir(exist_ok=True)
            with tempfile.TemporaryDirectory(dir="runs") as out:
                spent, size = run_ranks(
                    on_rank, layout, shape, args.turns, out, world_size=args.ranks, timeout=120
                )[0]
            middle = {what: statistics.median(times) for what, times in spent.items()}
            mib = [f"{size / 2**20:.0f} MiB"]
            for what in ("save", "load"):
                ours, theirs = middle[what], middle[f"{what}, torch"]
                mib += [f"{ours * 1e3:.0f} / {theirs * 1e3:.0f}", f"{ours / theirs:.2f}"]
            slower = middle["step while saving"] / middle["step"]
            mib += [f"{middle['stage'] * 1e3:.0f}", f"{middle['in flight'] * 1e3:.0f}"]
            mib += [f"{middle['step'] * 1e3:.1f}", f"{slower:.2f} ({len(spent['step while saving'])} steps)"]
            rows.append([name, layout, *mib])
    heads = ["state", "layout", "bytes", "save, ms: ours / torch", "ratio", "load, ms: ours / torch", "ratio"]
    heads += ["save_async returns, ms", "in flight, ms", "step, ms", "step while saving"]
    tables = [Table("Checkpoints", heads, rows), copies_table(args)]
    for table in tables:
        table.show()
    if args.write:
        facts = ", ".join(f"{name} {value}" for name, value in machine_facts().items())
        content = "\n\n".join(table.markdown() for table in tables)
        write_section(SECTION, f"{facts}\n\n{content}", path=args.results)


def copies_table(args: argparse.Namespace) -> Table:
    rows = []
    for name, shape in SHAPES.items():
        for layout in ("interleaved", "contiguous"):
            with tempfile.TemporaryDirectory(dir="runs") as out:
                spent = run_ranks(
                    with_copies, layout, shape, args.turns, out, world_size=args.ranks, timeout=120
                )[0]
            step, copying = spent["steps"] / EVERY, spent["steps with a copy"] / EVERY
            memory, storage = spent["load from memory"], spent["load from storage"]
            times = [f"{step * 1e3:.1f}", f"{copying * 1e3:.1f}", f"{copying / step:.2f}"]
            rows.append([name, layout, *times, f"{memory:.2f}", f"{storage:.2f}"])
    heads = ["state", "layout", "step, ms", f"with a copy every {EVERY} steps, ms", "ratio"]
    heads += ["one rank lost: load from memory, s", "from storage, s"]
    return Table("Copies in memory", heads, rows)


if __name__ == "__main__":
    main()
