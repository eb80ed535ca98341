"""Resharding a ShardedTensor, beside torch's own; and how long it takes to plan one over many ranks.

    python benchmarks/reshard.py                  show the tables
    python benchmarks/reshard.py --vs torch       with torch's deprecated ShardedTensor, where it works
    python benchmarks/reshard.py --write          and replace their section of TABLES.md

Torch's reshards even chunks of one dim only, in place; a round there and back is measured, so that both
begin equally each time. Ranks are local processes with one thread each, the two libraries take turns. CPU
time is the mean over ranks, wall time the slowest rank's. Bytes are what all ranks send, counted.

A plan is the list of messages of `shardwise.layout.transfer`: for all ranks, or for those that one rank
sends or receives, which is what a reshard makes. Memory is the peak of what Python allocates for it.
"""

import argparse
import heapq
import json
import math
import random
import statistics
import tempfile
import time
import tracemalloc
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from results import RESULTS, Table, machine_facts, write_section

from shardwise.comm.count import CommCounter
from shardwise.layout import Box, cover, transfer
from shardwise.sharded_tensor import ChunkShardingSpec, GridShardingSpec, shard_tensor

SECTION = "reshard"
SHAPES = [(4096, 4096), (2048, 1024), (256, 256)]
WARM_UP_ROUNDS = 3


def specs(ranks: int) -> dict[str, tuple[Any, Any]]:
    """From, to, by name of the case."""
    order = [f"rank:{rank}/cpu" for rank in range(ranks)]
    turned = order[1:] + order[:1]
    cases = {
        "rows to columns": (ChunkShardingSpec(0, order), ChunkShardingSpec(1, order)),
        "rows to the mirrored rank": (ChunkShardingSpec(0, order), ChunkShardingSpec(0, order[::-1])),
        "rows to the next rank": (ChunkShardingSpec(0, order), ChunkShardingSpec(0, turned)),
    }
    if ranks == 4:
        cases["rows to a 2 x 2 grid"] = (ChunkShardingSpec(0, order), GridShardingSpec([2, 2], order))
    return cases


def theirs(whole: torch.Tensor, ours: tuple[Any, Any]) -> Callable[[], Any] | None:
    """The same round trip with torch's ShardedTensor; None where it has no such spec, or aborts.

    Over gloo torch's aborts where the order of ranks is not its own inverse: on 4 ranks "to the next" is not.
    """
    from torch.distributed._shard.api import _shard_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec as TorchChunks

    if not all(isinstance(spec, ChunkShardingSpec) for spec in ours):
        return None
    if ours[0].dim == ours[1].dim and ours[1].placements != ours[0].placements[::-1]:
        return None
    there, back = (TorchChunks(spec.dim, [str(place) for place in spec.placements]) for spec in ours)
    sharded = _shard_tensor(whole.clone(), there)

    def round_trip() -> None:
        sharded.reshard(back)
        sharded.reshard(there)

    return round_trip


def on_rank(rank: int, ranks: int, store: str, out: str, rounds: int, versus: bool) -> None:
    """One rank's measurements; rank 0 writes everyone's to `out`."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    found = []
    for shape in SHAPES:
        whole = torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape)
        for name, (there, back) in specs(ranks).items():
            sharded = shard_tensor(whole, there)

            def ours(sharded: Any = sharded, there: Any = there, back: Any = back) -> None:
                sharded.reshard(back).reshard(there)

            cases = {"shardwise": ours}
            if versus and (peer := theirs(whole, (there, back))) is not None:
                cases["torch"] = peer
            spent: dict[str, Any] = {which: {"cpu": [], "wall": []} for which in cases}
            for turn in range(rounds + WARM_UP_ROUNDS):
                for which, case in cases.items():
                    dist.barrier()
                    cpu, wall = time.process_time(), time.perf_counter()
                    case()
                    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
                    if turn >= WARM_UP_ROUNDS:
                        spent[which]["cpu"].append(cpu * 1e3)
                        spent[which]["wall"].append(wall * 1e3)
            for which, case in cases.items():
                with CommCounter() as counter:
                    case()
                spent[which]["bytes"] = counter.wire_bytes()
            found.append({"case": name, "shape": shape, "cases": spent})
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, found)
    if rank == 0:
        Path(out).write_text(json.dumps(everyone))
    dist.barrier()
    dist.destroy_process_group()


def moved_table(ranks: int, by_rank: list[Any]) -> Table:
    rows = []
    for index, record in enumerate(by_rank[0]):
        row = [record["case"], " x ".join(map(str, record["shape"]))]
        middle: dict[tuple[str, str], float] = {}
        for kind, of_ranks in (("wall", max), ("cpu", statistics.mean)):
            for which in ("shardwise", "torch"):
                if which not in record["cases"]:
                    row.append("-")
                    continue
                of_case = [rank[index]["cases"][which][kind] for rank in by_rank]
                times = [of_ranks(turn) for turn in zip(*of_case, strict=True)]
                middle[kind, which] = statistics.median(times)
                row.append(f"{statistics.median(times):.2f} [{min(times):.2f}..{max(times):.2f}]")
            both = (kind, "torch") in middle
            row.append(f"{middle[kind, 'shardwise'] / middle[kind, 'torch']:.2f}" if both else "-")
        sent = sum(rank[index]["cases"]["shardwise"]["bytes"] for rank in by_rank)
        rows.append([*row, f"{sent / 1e6:.3f}"])
    header = ["case", "shape, fp32", "wall ms, shardwise", "wall ms, torch", "ratio"]
    header += ["CPU ms, shardwise", "CPU ms, torch", "ratio", "MB sent, shardwise"]
    return Table(f"There and back on {ranks} ranks: median [min..max]", header, rows)


def cut(shape: tuple[int, int], *, grid: tuple[int, int], shift: int = 0) -> list[list[Box]]:
    """One chunk of an even grid for each rank, the ranks turned by `shift`."""
    sizes = (shape[0] // grid[0], shape[1] // grid[1])
    boxes = [
        Box((row * sizes[0], column * sizes[1]), sizes) for row in range(grid[0]) for column in range(grid[1])
    ]
    return [[boxes[(rank + shift) % len(boxes)]] for rank in range(len(boxes))]


def plans(ranks: int = 4096) -> dict[str, tuple[list[list[Box]], list[list[Box]], bool]]:
    """Source, target, and whether the plan of all ranks is of a size to make."""
    side, side_rows, shape = round(ranks**0.5), round(ranks**0.5 / 2), (ranks * 16, ranks * 16)
    rows = cut(shape, grid=(ranks, 1))
    return {
        "rows to rows of other ranks": (rows, cut(shape, grid=(ranks, 1), shift=1), True),
        "square grid to oblong grid": (
            cut(shape, grid=(side, side)),
            cut(shape, grid=(side_rows, ranks // side_rows), shift=7),
            True,
        ),
        "rows to columns": (rows, cut(shape, grid=(1, ranks)), False),
    }


def plan_table(ranks: int) -> Table:
    result = []
    for name, (source, target, whole) in plans(ranks).items():
        for which in [None, ranks // 2] if whole else [ranks // 2]:
            begin = time.perf_counter()
            count = len(transfer(source, target, rank=which))
            spent = time.perf_counter() - begin
            tracemalloc.start()
            transfer(source, target, rank=which)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            row = [name, "all ranks" if which is None else "one rank", f"{count:,}"]
            result.append([*row, f"{spent * 1e3:.0f}", f"{peak / 1e6:.1f}"])
    header = ["boxes", "plan of", "messages", "wall ms", "peak MB"]
    return Table(f"Planning over {ranks:,} ranks, {ranks:,} x {ranks:,} boxes", header, result)


def tiles(count: int, shape: tuple[int, int], *, seed: int) -> list[list[Box]]:
    """Boxes of any sizes that cover a matrix, one for each rank: the largest is cut, again and again."""
    chance = random.Random(seed)
    largest = [(-math.prod(shape), 0, Box((0, 0), shape))]
    while len(largest) < count:
        box = heapq.heappop(largest)[-1]
        dim = int(box.sizes[0] < box.sizes[1])
        first = chance.randint(1, box.sizes[dim] - 1)
        for begin, size in ((0, first), (first, box.sizes[dim] - first)):
            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[dim], sizes[dim] = offsets[dim] + begin, size
            part = Box(tuple(offsets), tuple(sizes))
            heapq.heappush(largest, (-part.numel, len(largest) + begin * count, part))
    boxes = [[box] for *_, box in largest]
    chance.shuffle(boxes)
    return boxes


def many_boxes_table(count: int) -> Table:
    """What the plan of all ranks' messages costs where there are that many boxes on either side."""
    side, rows, shape = round(count**0.5), (count, 4), (1 << 20, 1 << 20)
    cases = {
        "rows to rows of other ranks": (
            rows,
            cut(rows, grid=(count, 1)),
            cut(rows, grid=(count, 1), shift=1),
        ),
        "square grid to the same of other ranks": (
            (side * 8, side * 8),
            cut((side * 8, side * 8), grid=(side, side)),
            cut((side * 8, side * 8), grid=(side, side), shift=7),
        ),
        "random boxes to random boxes": (shape, *(tiles(count, shape, seed=seed) for seed in (0, 1))),
    }
    result = []
    for name, (whole, source, target) in cases.items():
        begin = time.process_time()
        messages = len(transfer(source, target))
        planned = time.process_time()
        cover([box for held in target for box in held], whole)
        spent = [planned - begin, time.process_time() - planned]
        result.append([name, f"{len(target):,}", f"{messages:,}", *(f"{seconds:.2f}" for seconds in spent)])
    header = [
        "boxes",
        "boxes on either side",
        "messages of all ranks",
        "CPU s",
        "CPU s to check that they cover",
    ]
    return Table("Planning many boxes (goal: 100,000 within 5 CPU s)", header, result)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vs", choices=["torch"], help="the peer to run beside")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--plan-ranks", type=int, default=4096)
    parser.add_argument("--plan-boxes", type=int, default=100_000)
    parser.add_argument("--write", action="store_true", help="replace the section of the results file")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the Markdown file to update")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    tables = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in options.ranks:
            store, out = Path(folder, f"store{ranks}"), Path(folder, f"out{ranks}")
            arguments = (ranks, str(store), str(out), options.rounds, options.vs == "torch")
            mp.spawn(on_rank, arguments, nprocs=ranks)
            tables.append(moved_table(ranks, json.loads(out.read_text())))
    tables += [plan_table(options.plan_ranks), many_boxes_table(options.plan_boxes)]
    for table in tables:
        table.show()
    if options.write:
        facts = "; ".join(f"{name} {value}" for name, value in machine_facts().items())
        body = "\n\n".join([f"## {SECTION}", facts, *(table.markdown() for table in tables)])
        write_section(SECTION, body, path=options.results)


if __name__ == "__main__":
    main()
