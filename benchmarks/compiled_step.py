"""Training steps, eager and compiled, on local gloo ranks: CPU time, compile time, graphs, breaks and memory.

    python benchmarks/compiled_step.py
    python benchmarks/compiled_step.py --world 2 --blocks 4 --backend aot_eager

Every rank trains the GPT of steps.py on its own text with fused AdamW. Each way has processes of its own, as
compiled code is shared by code object, and in them takes turns, step by step, with eager FSDP2: ratios are to
that one, and those to compiled FSDP2 are ratios of ratios. "compiled" is `torch.compile` of the whole sharded
model, `fullgraph=True` for shardwise; FSDP2's hooks break its graph. "shardwise.compile" does the same and
gathers one group ahead. "by block" compiles each block in place inside the eager model, with its gather.
"regional" is `shardwise.compile(mode="regional")`: what lies between a block's gather and its reductions.

CPU time is a rank's own, mean over ranks; a step is forward, loss, backward, optimizer and zero_grad. Compile
time is the CPU time of the first two steps with the compiler's child processes, less two steps as they are
later, in processes that have compiled something before; caches between processes are off. Peak memory is what
the third step allocates at most beyond what was there before it, from the allocator's own events
(torch.profiler), on rank 0 of a fake group that moves nothing: over gloo it would count gloo's buffers too,
for as long as gloo's threads happen to keep them.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from results import Table, add_output_arguments, machine_facts, ratio, report, spread, with_spread
from steps import GPT, HEAD_WIDTH, TIMEOUT, Sizes, standard_library_text, windows
from subjects import PEER, shard
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwise


@dataclass(frozen=True)
class Way:
    sharder: str
    compile: Callable[[nn.Module, str], Any] | None = None


def _whole(model: nn.Module, backend: str, *, fullgraph: bool = True) -> Any:
    return torch.compile(model, backend=backend, fullgraph=fullgraph)


def _with_breaks(model: nn.Module, backend: str) -> Any:
    return _whole(model, backend, fullgraph=False)


def _by_block(model: Any, backend: str) -> Any:
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)
    return model


def _ahead(model: nn.Module, backend: str) -> Any:
    return shardwise.compile(model, backend=backend)


def _regional(model: nn.Module, backend: str) -> Any:
    return shardwise.compile(model, backend=backend, mode="regional")


def _by_block_inside(model: Any, backend: str) -> Any:
    for block in model.blocks:
        block.compile(backend=backend)
    return model


EAGER, PEER_COMPILED, BESIDE = PEER, f"{PEER}, compiled", f"{PEER}, beside"
WAYS: dict[str, Way] = {
    BESIDE: Way(PEER),
    EAGER: Way(PEER),
    PEER_COMPILED: Way(PEER, _with_breaks),
    f"{PEER}, by block": Way(PEER, _by_block_inside),
    "interleaved": Way("interleaved"),
    "interleaved, compiled": Way("interleaved", _whole),
    "interleaved, by block": Way("interleaved", _by_block),
    "interleaved, regional": Way("interleaved", _regional),
    "contiguous": Way("contiguous"),
    "contiguous, compiled": Way("contiguous", _whole),
    "contiguous, shardwise.compile": Way("contiguous", _ahead),
    "contiguous, by block": Way("contiguous", _by_block),
    "contiguous, regional": Way("contiguous", _regional),
}


@dataclass
class Subject:
    call: Any
    optimizer: torch.optim.Optimizer
    losses: list[float]

    def step(self, batch: Tensor) -> None:
        loss = self.call(batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())


def _cpu() -> float:
    """CPU seconds of this process and of the children it waited for."""
    found = os.times()
    return found.user + found.system + found.children_user + found.children_system


def _peak_bytes(work: Callable[[], None]) -> int:
    """The most bytes allocated at a time during `work`, beyond what was there."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        work()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    now = peak = 0
    for event in events:
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def run_rank(
    rank: int, world: int, names: Sequence[str], sizes: Sizes, steps: int, backend: str, folder: str
) -> None:
    import torch._dynamo
    import torch._inductor.config
    from torch._dynamo.utils import counters

    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1
    torch.compiler.config.force_disable_caches = True
    torch._dynamo.config.recompile_limit = 64
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=TIMEOUT * 10)
    text = standard_library_text()

    def batch(step: int) -> Tensor:
        return windows(text, count=sizes.batch, length=sizes.length, seed=step * world + rank)

    mesh = init_device_mesh("cpu", (world,))
    torch.compile(torch.sin, backend=backend)(torch.ones(4, requires_grad=True)).sum().backward()
    subjects: dict[str, Subject] = {}
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        subject = subjects[name] = _subject(name, sizes, mesh, backend)
        counters.clear()
        dist.barrier()
        begin = _cpu()
        subject.step(batch(0))
        first_graphs = counters["stats"]["unique_graphs"]
        subject.step(batch(1))
        found[name] = {"first_s": _cpu() - begin, "cpu_s": [], "wall_s": []}
        subject.step(batch(2))
        found[name]["graphs"] = counters["stats"]["unique_graphs"]
        found[name]["recompiled"] = counters["stats"]["unique_graphs"] - first_graphs
        found[name]["breaks"] = sum(counters["graph_break"].values())
    for number in range(3, 3 + steps):
        for name in names:
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            subjects[name].step(batch(number))
            found[name]["cpu_s"].append(time.process_time() - cpu)
            dist.barrier()
            found[name]["wall_s"].append(time.perf_counter() - wall)
    everything: list[Any] = [None] * world
    dist.all_gather_object(everything, (found, {name: subjects[name].losses for name in names}))
    if rank == 0:
        Path(folder, "figures.json").write_text(json.dumps({n: _figures(n, everything) for n in names}))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # FSDP2's processes, compiled, abort now and then while the interpreter ends


def peak_bytes(name: str, sizes: Sizes, world: int, backend: str, file: str) -> None:
    """In a process of its own: write the most bytes that a step of rank 0 allocates at a time to `file`."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    subject = _subject(name, sizes, init_device_mesh("cpu", (world,)), backend)
    batch = torch.randint(256, (sizes.batch, sizes.length + 1))
    for _ in range(2):
        subject.step(batch)
    Path(file).write_text(str(_peak_bytes(lambda: subject.step(batch))))
    dist.destroy_process_group()


def _subject(name: str, sizes: Sizes, mesh: DeviceMesh, backend: str) -> Subject:
    torch.manual_seed(0)
    model = GPT(width=sizes.width, blocks=sizes.blocks, length=sizes.length)
    library = shard(WAYS[name].sharder, model, model.blocks, mesh=mesh)
    how = WAYS[name].compile
    call = model if how is None else how(model, backend)
    return Subject(call, library.adamw(model, lr=3e-4, fused=True), [])


def _figures(name: str, ranks: Sequence[Any]) -> dict[str, Any]:
    first, _ = ranks[0]
    cpu = [
        sum(times) / len(ranks) for times in zip(*(found[name]["cpu_s"] for found, _ in ranks), strict=True)
    ]
    begun = sum(found[name]["first_s"] for found, _ in ranks) / len(ranks)
    one = {key: first[name][key] for key in ("graphs", "recompiled", "breaks")}
    return {
        **one,
        "cpu_s": spread(cpu),
        "wall_s": spread(first[name]["wall_s"]),
        "compile_s": begun - 2 * spread(cpu)[0],
        "losses": [
            sum(each) / len(ranks) for each in zip(*(losses[name] for _, losses in ranks), strict=True)
        ],
    }


def measure(name: str, *, world: int, sizes: Sizes, steps: int, backend: str) -> dict[str, Any]:
    """Figures of a way, with those of eager FSDP2 beside it as "beside"."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world, (BESIDE, name), sizes, steps, backend, folder)
        mp.start_processes(run_rank, arguments, nprocs=world, start_method="spawn")
        found = json.loads(Path(folder, "figures.json").read_text())
        file = Path(folder, "peak")
        mp.start_processes(
            _first_peak, ((name, sizes, world, backend, str(file)),), nprocs=1, start_method="spawn"
        )
        return {**found[name], "peak_bytes": int(file.read_text()), "beside": found[BESIDE]}


def _first_peak(_: int, arguments: tuple[str, Sizes, int, str, str]) -> None:
    peak_bytes(*arguments)


def table(case: dict[str, Any]) -> Table:
    header = ["way", "CPU s/step/rank", f"/ {EAGER}", f"/ {PEER_COMPILED}", "compile CPU s", "graphs"]
    header += ["compiled again", "breaks", "peak MB", f"/ {EAGER}", f"largest loss difference from {EAGER}"]
    found = case["found"]
    over = {name: one["cpu_s"][0] / one["beside"]["cpu_s"][0] for name, one in found.items()}
    rows = []
    for name, one in found.items():
        beside, compiles = one["beside"], WAYS[name].compile is not None
        apart = max(abs(a - b) / abs(b) for a, b in zip(one["losses"], beside["losses"], strict=True))
        row = [name, with_spread(one["cpu_s"], digits=4), f"{over[name]:.2f}"]
        row += [ratio(over[name], over[PEER_COMPILED]) if PEER_COMPILED in over else "-"]
        row += [f"{one['compile_s']:.1f}" if compiles else "-"]
        row += [str(one[key]) if compiles else "-" for key in ("graphs", "recompiled", "breaks")]
        row += [f"{one['peak_bytes'] / 1e6:.2f}"]
        row += [ratio(one["peak_bytes"], found[EAGER]["peak_bytes"]) if EAGER in found else "-"]
        rows.append([*row, f"{apart:.1e}"])
    title = f"{case['world']} ranks, {case['blocks']} blocks, backend {case['backend']}: median [min..max]"
    return Table(title, header, rows)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    parser.add_argument("--blocks", type=int, nargs="+", default=[4, 24])
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--width", type=int, default=128, help=f"a multiple of {HEAD_WIDTH}")
    parser.add_argument("--batch", type=int, default=2, help="windows per rank")
    parser.add_argument("--length", type=int, default=32, help="bytes per window")
    parser.add_argument("--steps", type=int, default=10, help="timed steps")
    parser.add_argument("--only", nargs="+", choices=list(WAYS)[1:], default=list(WAYS)[1:])
    add_output_arguments(parser)
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    figures: dict[str, Any] = {"facts": machine_facts(), "cases": []}
    for world in options.world:
        for blocks in options.blocks:
            sizes = Sizes(options.width, blocks, options.batch, options.length)
            how = {"world": world, "sizes": sizes, "steps": options.steps, "backend": options.backend}
            case = {"world": world, "blocks": blocks, "backend": options.backend}
            case["found"] = {name: measure(name, **how) for name in options.only}
            figures["cases"].append(case)
            name = f"compiled_step: {world} ranks, {blocks} blocks, {options.backend}"
            report(name, figures, [table(case)], options)


if __name__ == "__main__":
    main()
