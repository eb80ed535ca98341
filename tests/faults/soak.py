"""`make soak STEPS=1000`: does a long run with saves in the background hold more and more?

Memory, file handles and threads of each rank, every 20th of the way. The first fifth is warming up; after it
handles and threads must stay as they are, and memory within a twentieth. `--write` leaves a table and
a picture.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from benchmarks.results import RESULTS, machine_facts, write_section
from examples import train_gpt
from torch.distributed.device_mesh import init_device_mesh

from shardwise.checkpoint import StopSignals, save_async
from shardwise.verify.processes import run_ranks

POINTS, WARM_UP = 20, 4
COLOURS = ("#2563c9", "#0f7b5f", "#b58900", "#c98a6b")
Points = list[tuple[int, int, int]]


def held() -> tuple[int, int, int]:
    """KiB of memory, open files and threads of this process."""
    status = Path("/proc/self/status").read_text()
    kib = int(status.partition("VmRSS:")[2].split()[0])
    return kib, len(list(Path("/proc/self/fd").iterdir())), threading.active_count()


def soak(alive: Callable[[], None], steps: int, out: str) -> Points:
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


def table(found: Sequence[Points]) -> str:
    """One row a rank: its first and last point after the warm-up, and the most of all."""
    rows = ["| rank | MiB: after warm-up, at the end, most | files | threads |", "| --- | --- | --- | --- |"]
    for rank, points in enumerate(found):
        columns = []
        for kind, unit in enumerate((1024, 1, 1)):
            values = [point[kind] / unit for point in points]
            columns.append(f"{values[WARM_UP]:.0f}, {values[-1]:.0f}, {max(values):.0f}")
        rows.append(f"| {rank} | {' | '.join(columns)} |")
    return "\n".join(rows)


def picture(found: Sequence[Points], steps: int) -> str:
    """Memory, open files and threads over steps, a line a rank, as SVG; each scale begins at 0."""
    shapes = []
    for panel, (title, unit) in enumerate((("MiB", 1024), ("open files", 1), ("threads", 1))):
        left, most = 16 + 250 * panel, max(point[panel] for points in found for point in points)
        shapes.append(f'<text x="{left}" y="20">{title}: at most {most / unit:.0f}</text>')
        shapes.append(f'<path d="M{left} 30V150H{left + 220}" fill="none" stroke="#b3b9c1"/>')
        shapes.append(f'<text x="{left + 220}" y="166" text-anchor="end">{steps} steps</text>')
        for rank, points in enumerate(found):
            places = [
                f"{left + 220 * (at + 1) / len(points):.1f},{150 - 110 * point[panel] / most:.1f}"
                for at, point in enumerate(points)
            ]
            colour = COLOURS[rank % len(COLOURS)]
            shapes.append(f'<polyline points="{" ".join(places)}" fill="none" stroke="{colour}"/>')
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 176" font-family="sans-serif"'
    head += ' font-size="12">'
    return "\n".join([head, '<rect width="760" height="176" fill="white"/>', *shapes, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="a section of --results, and soak.svg beside it")
    parser.add_argument("--results", type=Path, default=RESULTS)
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
    if args.write:
        facts = ", ".join(f"{name} {value}" for name, value in machine_facts().items())
        body = f"{facts}\n\n`make soak STEPS={args.steps}`, with a save in the background every 10 steps.\n\n"
        body += f"![memory, open files and threads](soak.svg)\n\n{table(found)}"
        write_section("soak", f"## A long run\n\n{body}", path=args.results)
        args.results.with_name("soak.svg").write_text(picture(found, args.steps))
    sys.exit(f"grew after {WARM_UP} of {POINTS} points" if grew else 0)


if __name__ == "__main__":
    main()
