"""How much of the gathers' time computation hides, on CPU ranks over gloo.

    python benchmarks/overlap.py              # 2 ranks, 8 blocks of 2.1 M parameters: about a minute
    python benchmarks/overlap.py --write      # and replace the section of TABLES.md

What is measured is the time for which the training thread stands still for all-gathers: in the call that
makes one, and in waiting for one that was begun ahead. `nothing ahead` makes every gather when it is needed
and waits; by default backward begins the next module's gather; `forward too` asks for that in forward too.
The share hidden is what of the first does not remain. Settings take turns, step by step.
"""

import argparse
import json
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from results import RESULTS, Table, machine_facts, spread, with_spread, write_section
from torch import nn

from shardwise import FSDPModule, fully_shard
from shardwise.comm import AutoAllGather

SECTION = "overlap"
LAYOUTS = ("interleaved", "contiguous")
SETTINGS = ("nothing ahead", "default", "forward too")
WIDTH, WARM_UP = 512, 2


class Stopwatch(AutoAllGather):
    """Gathers as by default, and counts the seconds in which its caller cannot go on."""

    def __init__(self, *, ahead: bool) -> None:
        super().__init__()
        self.ahead, self.seconds = ahead, 0.0

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        begin = time.perf_counter()
        work = super().__call__(output_tensor, input_tensor, group, async_op and self.ahead)
        self.seconds += time.perf_counter() - begin
        return None if work is None else _Waited(work, self)


class _Waited:
    def __init__(self, work: dist.Work, watch: Stopwatch) -> None:
        self.work, self.watch = work, watch

    def wait(self) -> None:
        begin = time.perf_counter()
        self.work.wait()
        self.watch.seconds += time.perf_counter() - begin


def built(layout: Any, setting: str, blocks: int) -> tuple[nn.Module, Stopwatch]:
    parts = [
        nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        for _ in range(blocks)
    ]
    model = nn.Sequential(*parts)
    watch = Stopwatch(ahead=setting != "nothing ahead")
    sharded: list[FSDPModule] = [fully_shard(part, layout=layout) for part in (*parts, model)]
    for one in sharded:
        one.set_custom_all_gather(watch)
    if setting == "forward too":
        for one, after in pairwise(sharded[:-1]):
            one.set_modules_to_forward_prefetch([after])
    return model, watch


def on_rank(rank: int, ranks: int, store: str, out: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    x = torch.ones(options.tokens, WIDTH)
    found: dict[str, dict[str, list[float]]] = {}
    for layout in LAYOUTS:
        cases = {setting: built(layout, setting, options.blocks) for setting in SETTINGS}
        for turn in range(options.steps + WARM_UP):
            for setting, (model, watch) in cases.items():
                dist.barrier()
                watch.seconds, begin = 0.0, time.perf_counter()
                model(x).sum().backward()
                wall = time.perf_counter() - begin
                model.zero_grad()
                if turn >= WARM_UP:
                    spent = found.setdefault(f"{layout}/{setting}", {"still": [], "wall": []})
                    spent["still"].append(watch.seconds * 1e3)
                    spent["wall"].append(wall * 1e3)
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, found)
    if rank == 0:
        Path(out).write_text(json.dumps(everyone))
    dist.barrier()
    dist.destroy_process_group()


def table(by_rank: list[Any], options: argparse.Namespace) -> Table:
    rows = []
    for layout in LAYOUTS:
        alone = 0.0
        for setting in SETTINGS:
            of_ranks = [rank[f"{layout}/{setting}"] for rank in by_rank]
            still = [statistics.mean(one) for one in zip(*(rank["still"] for rank in of_ranks), strict=True)]
            wall = [max(one) for one in zip(*(rank["wall"] for rank in of_ranks), strict=True)]
            alone = alone or statistics.median(still)
            hidden = f"{1 - statistics.median(still) / alone:.0%}"
            rows.append([layout, setting, with_spread(spread(still)), hidden, with_spread(spread(wall))])
    title = f"{options.ranks} ranks, {options.blocks} blocks, {options.tokens} tokens: median [min..max]"
    header = ["layout", "gathers ahead", "ms a step that gathers take", "hidden", "wall ms of the step"]
    return Table(title, header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--write", action="store_true", help="replace the section of the results file")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the Markdown file to update")
    options = parser.parse_args()
    facts = "; ".join(f"{name} {value}" for name, value in machine_facts().items())
    with tempfile.TemporaryDirectory() as folder:
        store, out = Path(folder, "store"), Path(folder, "out")
        mp.spawn(on_rank, (options.ranks, str(store), str(out), options), nprocs=options.ranks)
        shown = table(json.loads(out.read_text()), options)
    shown.show()
    if options.write:
        write_section(SECTION, f"## {SECTION}\n\n{facts}\n\n{shown.markdown()}", path=options.results)


if __name__ == "__main__":
    main()
