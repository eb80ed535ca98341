"""What a plan takes of the machine that makes it, for up to 100,000 ranks; and a search.

    python benchmarks/plan_ranks.py
    python benchmarks/plan_ranks.py --ranks 10000 --write

Each in a process of its own, on one thread, with imports. It fails where a plan for 10,000 ranks takes more
than 10 CPU seconds or 2 GiB.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from typing import Any

from results import Table, machine_facts, write_section

MOST_RANKS, MOST_SECONDS, MOST_BYTES = 10_000, 10.0, 2 * 2**30
LAYOUTS = ("interleaved", "contiguous")


def measured(case: dict[str, Any]) -> dict[str, float]:
    """In a process of its own."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", __file__, "--case", json.dumps(case)]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def run(case: dict[str, Any]) -> None:
    begin = time.perf_counter()
    from shardwise import planner

    others = {"search", "model"} | ({"layout"} if case["search"] else set())  # a search compares layouts
    setup = {name: value for name, value in case.items() if name not in others}
    make = planner.search if case["search"] else planner.plan
    made = make(case["model"], hardware="h100", sequence=8192, **setup)
    figures = {
        "recordings": getattr(made, "recordings", 2),
        "cpu_s": time.process_time(),
        "wall_s": time.perf_counter() - begin,
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }
    print(json.dumps(figures))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 1000, 10_000, 100_000])
    parser.add_argument("--write", action="store_true", help="replace the section of TABLES.md")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        run(json.loads(options.case))
        return
    cases: list[dict[str, Any]] = [
        {"model": "llama3-8b", "ranks": ranks, "layout": layout, "search": False}
        for ranks in options.ranks
        for layout in LAYOUTS
    ]
    for model, ranks in (("llama3-70b", 256), ("llama3-405b", 512)):
        large: dict[str, Any] = {"model": model, "ranks": ranks, "tensor": 8, "checkpointing": "full"}
        cases.append(large | {"layout": LAYOUTS[0], "search": False})
    cases.append({"model": "llama3-8b", "ranks": 64, "layout": LAYOUTS[0], "search": True})
    cases.append({"model": "llama3-8b", "ranks": 1024, "layout": LAYOUTS[0], "search": True})
    rows, failed = [], []
    for case in cases:
        what = f"{'search' if case['search'] else 'plan'} {case['model']}, {case['layout']}"
        what += f", tensor {case['tensor']}" if "tensor" in case else ""
        figures = measured(case)
        told = [
            f"{figures['cpu_s']:.1f}",
            f"{figures['wall_s']:.1f}",
            f"{figures['peak_bytes'] / 2**20:,.0f}",
        ]
        rows.append([what, f"{case['ranks']:,}", f"{figures['recordings']:.0f}", *told])
        print(*rows[-1], sep="  ", flush=True)
        over = figures["cpu_s"] > MOST_SECONDS or figures["peak_bytes"] > MOST_BYTES
        checked = case["ranks"] <= MOST_RANKS and not case["search"]
        failed += [f"{what} on {case['ranks']:,}"] if over and checked else []
    title = "Llama 3, sequences of 8,192: what making a plan takes"
    table = Table(title, ["what", "ranks", "recordings", "CPU s", "wall s", "peak MiB"], rows)
    table.show()
    if options.write:
        facts = "; ".join(f"{name} {value}" for name, value in machine_facts().items())
        write_section("plan_ranks", f"## plan_ranks\n\n{facts}\n\n{table.markdown()}")
    if failed:
        sys.exit(f"more than {MOST_SECONDS:.0f} CPU s or 2 GiB: {', '.join(failed)}")


if __name__ == "__main__":
    main()
