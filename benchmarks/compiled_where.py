"""Where the CPU time of a training step goes, uncompiled and compiled: communication, operators, Python.

    python benchmarks/compiled_where.py
    python benchmarks/compiled_where.py --blocks 24 --only contiguous "contiguous, shardwise.compile"

Every rank trains the GPT of steps.py as compiled_step.py does, each way in turns, step by step. Linux's
`perf` samples rank 0 while it takes steps of one way, and every sample counts for one of these, in ms of CPU
time a step:

    communication    gloo's threads, and what the main thread does in gloo and c10d
    kernels          matrix products, ATen's kernels, the code that inductor generated
    dispatch         of operators to kernels, autograd's engine, memory
    Python           the interpreter and torch's bindings: modules, hooks, wrappers, guards, the optimizer
    system           the operating system's part of the main thread, and what no name is known of
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from compiled_step import WAYS, _subject
from results import Table, add_output_arguments, machine_facts, report, spread
from steps import HEAD_WIDTH, TIMEOUT, Sizes, standard_library_text, windows
from torch.distributed.device_mesh import init_device_mesh

PARTS = ("communication", "kernels", "dispatch", "Python", "system")
_KERNELS = re.compile(r"mkl|gemm|dnnl|sleef|at::native", re.IGNORECASE)
_WARM_UP = 4


def part_of(thread: str, library: str, symbol: str) -> str:
    """Which of `PARTS` a sample counts for."""
    if "gloo" in thread or re.search(r"gloo|c10d", symbol):
        return "communication"
    if (
        library.endswith(".main.so")
        or ("torch_cpu" in library and _KERNELS.search(symbol))
        or "gomp" in library
    ):
        return "kernels"
    if "kernel" in library or library.startswith("[") or "unknown" in library:
        return "system"
    if "python" in library:
        return "Python"
    return "dispatch"


def shares(perf_data: str) -> dict[str, float]:
    """The share of each part in what `perf record` wrote."""
    command = ["perf", "report", "-i", perf_data, "--stdio", "-F", "overhead,comm,dso,sym", "-t", "|"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: Counter[str] = Counter()
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            overhead, thread, library, symbol = (word.strip() for word in line.split("|", 3))
            found[part_of(thread, library, symbol.partition("] ")[2])] += float(overhead.rstrip("%"))
    return {part: found[part] / found.total() for part in PARTS}


def run_rank(
    rank: int, world: int, names: Sequence[str], sizes: Sizes, steps: int, backend: str, folder: str
) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=TIMEOUT * 10)
    text = standard_library_text()
    mesh = init_device_mesh("cpu", (world,))
    subjects = {name: _subject(name, sizes, mesh, backend) for name in names}
    found: dict[str, Any] = {name: [] for name in names}
    for step in range(_WARM_UP + steps):
        batch = windows(text, count=sizes.batch, length=sizes.length, seed=step * world + rank)
        for name in names:
            dist.barrier()
            begin = time.process_time()
            subjects[name].step(batch)
            if step >= _WARM_UP:
                found[name].append(time.process_time() - begin)
    for name in names:
        dist.barrier()
        if rank == 0:
            command = ["perf", "record", "-F", "1999", "-o", f"{folder}/perf", "-p", str(os.getpid())]
            perf = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            time.sleep(1)  # until it samples; waiting costs no CPU time
        dist.barrier()
        for _ in range(5 * steps):
            subjects[name].step(batch)
        if rank == 0:
            perf.send_signal(signal.SIGINT)
            perf.wait()
            found[name] = {"cpu_s": spread(found[name]), "shares": shares(f"{folder}/perf")}
    if rank == 0:
        torch.save(found, f"{folder}/found")
    dist.barrier()
    dist.destroy_process_group()


def table(found: dict[str, Any], *, world: int, blocks: int, backend: str) -> Table:
    first = next(iter(found.values()))["cpu_s"][0]
    rows = []
    for name, one in found.items():
        total = one["cpu_s"][0]
        parts = [f"{1e3 * total * one['shares'][part]:.2f}" for part in PARTS]
        rows.append([name, f"{1e3 * total:.2f}", f"{total / first:.2f}", *parts])
    title = f"{world} ranks, {blocks} blocks, backend {backend}: ms of CPU time a step, rank 0, medians"
    return Table(title, ["way", "all", f"/ {next(iter(found))}", *PARTS], rows)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, default=2, help="ranks")
    parser.add_argument("--blocks", type=int, nargs="+", default=[4])
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--width", type=int, default=128, help=f"a multiple of {HEAD_WIDTH}")
    parser.add_argument("--steps", type=int, default=20, help="timed steps; five times as many are sampled")
    ways = ["contiguous", "contiguous, compiled", "contiguous, shardwise.compile"]
    parser.add_argument(
        "--only", nargs="+", choices=list(WAYS)[1:], default=ways, help="ratios are to the first"
    )
    add_output_arguments(parser)
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    if shutil.which("perf") is None:
        raise SystemExit("compiled_where.py needs Linux's perf")
    for blocks in options.blocks:
        sizes = Sizes(options.width, blocks, 2, 32)
        with tempfile.TemporaryDirectory() as folder:
            arguments = (options.world, options.only, sizes, options.steps, options.backend, folder)
            mp.start_processes(run_rank, arguments, nprocs=options.world, start_method="spawn")
            found = torch.load(Path(folder, "found"))
        figures = {"facts": machine_facts(), "found": found}
        made = table(found, world=options.world, blocks=blocks, backend=options.backend)
        report(f"compiled_where: {options.world} ranks, {blocks} blocks", figures, [made], options)


if __name__ == "__main__":
    main()
