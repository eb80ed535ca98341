"""All-gather and reduce-scatter over gloo: c10d's own beside shardwise's direct exchange.

    python benchmarks/gloo_transport.py            show the tables
    python benchmarks/gloo_transport.py --write    and replace their section of TABLES.md

Ranks are local processes with one thread each. All cases run in turns, so that other load on the machine
meets them alike; c10d's with gloo's threads as they start, shardwise's with them as shardwise sets them.
CPU time is the process's, gloo's own threads included: the mean over ranks. Wall time is the slowest rank's.
Bytes are what the loopback device carried, acknowledgements and headers included, in a network namespace of
our own; where the system does not allow one, what the algorithms hand to it.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from results import RESULTS, Table, machine_facts, write_section

from shardwise.comm import (
    DefaultAllGather,
    DefaultReduceScatter,
    GlooAllGather,
    GlooReduceScatter,
)
from shardwise.comm.count import CommCounter
from shardwise.comm.gloo import set_batch_scheduling

SECTION = "gloo_transport"
SIZES = [33_600_000, 8_000_000, 4_000_000, 2_000_000, 1_000_000, 500_000, 250_000]
MIN_ROUND_BYTES = 2_000_000  # small buffers are moved several times a round, for the clock's sake
WARM_UP_ROUNDS = 2
OPERATIONS = ("all-gather", "all-gather in place", "reduce-scatter")
IMPLEMENTATIONS = ("c10d", "shardwise")


def cases(numel: int, ranks: int, rank: int) -> dict[tuple[str, str], Callable[[], Any]]:
    """What is measured, by operation and implementation, on buffers of `numel` fp32 elements a shard."""
    group, average = dist.group.WORLD, dist.ReduceOp.AVG
    whole, shard = torch.ones(numel * ranks), torch.ones(numel)
    own = whole.narrow(0, numel * rank, numel)
    made: dict[tuple[str, str], Callable[[], Any]] = {}
    for name, gather, reduce in (
        ("c10d", DefaultAllGather(), DefaultReduceScatter()),
        ("shardwise", GlooAllGather(), GlooReduceScatter()),
    ):
        made["all-gather", name] = lambda gather=gather: gather(whole, shard, group)
        made["all-gather in place", name] = lambda gather=gather: gather(whole, own, group)
        made["reduce-scatter", name] = lambda reduce=reduce: reduce(shard, whole, group, average)
    return made


def set_input_threads(*, ours: bool) -> None:
    """Let gloo's threads run as it starts them, or as shardwise has them."""
    if sys.platform == "linux":
        for thread in os.listdir("/proc/self/task"):
            if os.sched_getscheduler(int(thread)) == os.SCHED_BATCH:
                os.sched_setscheduler(int(thread), os.SCHED_OTHER, os.sched_param(0))
    if ours:
        set_batch_scheduling()


def loopback_bytes() -> int:
    """What this network namespace's loopback device has carried."""
    line = next(x for x in Path("/proc/net/dev").read_text().splitlines() if x.strip().startswith("lo:"))
    return int(line.split()[1])


def wire_bytes(case: Callable[[], Any], *, ranks: int, times: int, own_loopback: bool) -> float:
    """Bytes a rank sends for one call of `case`."""
    if not own_loopback:
        with CommCounter() as counter:
            case()
        return float(counter.wire_bytes())
    dist.barrier()
    before = loopback_bytes()
    dist.barrier()  # no rank begins before all have read
    for _ in range(times):
        case()
    dist.barrier()
    after = loopback_bytes()
    dist.barrier()
    return (after - before) / ranks / times


def on_rank(
    rank: int, ranks: int, store: str, out: str, sizes: Sequence[int], rounds: int, own_loopback: bool
) -> None:
    """One rank's measurements; rank 0 writes everyone's to `out`."""
    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    found = []
    for size in sizes:
        numel = max(1, size // 4 // ranks)
        times = max(1, MIN_ROUND_BYTES // size)
        measured = cases(numel, ranks, rank)
        spent: dict[str, Any] = {f"{op}/{name}": {"cpu": [], "wall": []} for op, name in measured}
        for turn in range(rounds + WARM_UP_ROUNDS):
            for (op, name), case in measured.items():
                set_input_threads(ours=name == "shardwise")
                dist.barrier()
                cpu, wall = time.process_time(), time.perf_counter()
                for _ in range(times):
                    case()
                cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
                if turn >= WARM_UP_ROUNDS:
                    spent[f"{op}/{name}"]["cpu"].append(cpu / times * 1e3)
                    spent[f"{op}/{name}"]["wall"].append(wall / times * 1e3)
        for (op, name), case in measured.items():
            sent = wire_bytes(case, ranks=ranks, times=max(3, times), own_loopback=own_loopback)
            spent[f"{op}/{name}"]["bytes"] = sent
        found.append({"bytes": numel * ranks * 4, "cases": spent})
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, found)
    if rank == 0:
        Path(out).write_text(json.dumps(everyone))
    dist.barrier()
    dist.destroy_process_group()


def measure(out: Path, *, worlds: Sequence[int], sizes: Sequence[int], rounds: int, own: bool) -> None:
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for ranks in worlds:
            store, found = Path(folder, f"store{ranks}"), Path(folder, f"found{ranks}")
            mp.spawn(on_rank, (ranks, str(store), str(found), sizes, rounds, own), nprocs=ranks)
            figures[ranks] = json.loads(found.read_text())
    out.write_text(json.dumps(figures))


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} [{min(values):.2f}..{max(values):.2f}]"


def table(ranks: int, by_rank: list[Any], *, own_loopback: bool) -> Table:
    """`by_rank[rank]` is one rank's record per size: its bytes, and by case the times of each round."""
    rows = []
    for index, record in enumerate(by_rank[0]):
        for op in OPERATIONS:
            cpu, wall, sent = {}, {}, {}
            for name in IMPLEMENTATIONS:
                of_case = [rank[index]["cases"][f"{op}/{name}"] for rank in by_rank]
                cpu[name] = [statistics.mean(x) for x in zip(*(case["cpu"] for case in of_case), strict=True)]
                wall[name] = [max(x) for x in zip(*(case["wall"] for case in of_case), strict=True)]
                sent[name] = of_case[0]["bytes"]
            least = record["bytes"] * (ranks - 1) / ranks
            row = [op, f"{record['bytes'] / 1e6:.3f}"]
            for spent in (cpu, wall):
                ratio = statistics.median(spent["shardwise"]) / statistics.median(spent["c10d"])
                row += [*(_spread(spent[name]) for name in IMPLEMENTATIONS), f"{ratio:.2f}"]
            row += [f"{least / 1e6:.3f}", *(f"{sent[name] / least:.3f}" for name in IMPLEMENTATIONS)]
            rows.append(row)
    bytes_by = "over loopback" if own_loopback else "counted"
    header = ["operation", "buffer MB"]
    for what in ("CPU ms", "wall ms"):
        header += [f"{what}, c10d", f"{what}, shardwise", "ratio"]
    header += ["least MB sent by a rank", *(f"{bytes_by} / least, {name}" for name in IMPLEMENTATIONS)]
    return Table(f"{ranks} ranks: median [min..max]", header, rows)


def in_own_namespace() -> list[str]:
    """What to put before a command so that it has a loopback device to itself; empty if not allowed."""
    prefix = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    if not shutil.which("unshare"):
        return []
    allowed = subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0
    return prefix if allowed else []


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--bytes", type=int, nargs="+", default=SIZES, help="whole buffers")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--write", action="store_true", help="replace the section of the results file")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the Markdown file to update")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--own-loopback", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    if options.measure:
        how = {"worlds": options.ranks, "sizes": options.bytes, "rounds": options.rounds}
        return measure(options.measure, **how, own=options.own_loopback)
    facts = machine_facts()
    prefix = in_own_namespace()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "figures.json")
        command = [*prefix, "env", "GLOO_SOCKET_IFNAME=lo", "OMP_NUM_THREADS=1", sys.executable, __file__]
        command += [*sys.argv[1:], "--measure", str(out), *(["--own-loopback"] if prefix else [])]
        subprocess.run(command, check=True)
        figures = json.loads(out.read_text())
    tables = [table(int(ranks), found, own_loopback=bool(prefix)) for ranks, found in figures.items()]
    for shown in tables:
        shown.show()
    if options.write:
        described = "; ".join(f"{name} {value}" for name, value in facts.items())
        body = "\n\n".join([f"## {SECTION}", described, *(shown.markdown() for shown in tables)])
        write_section(SECTION, body, path=options.results)
    return None


if __name__ == "__main__":
    main()
