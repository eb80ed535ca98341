"""What sharding costs the host: each phase of a step, and start-up, beside the bare model and a peer.

    python benchmarks/host_cost.py --vs torch --world 8 64
    python benchmarks/host_cost.py --vs torch --instructions
    python benchmarks/host_cost.py --profile interleaved

Runs in one process under a no-op process group (`shardwise.planner.noop_group`). CPU time is the process's
own (user and system, all threads), interleaved step by step between the implementations, garbage collector
off. Calls are what `sys.setprofile` sees: Python functions and builtins; torch runs a CPU backward in the
calling thread, so its Python callbacks are among them. Ops are what reaches a `TorchDispatchMode`, also from
inside a tensor subclass such as DTensor. Calls, ops and instructions do not depend on the machine's load.
"""

import argparse
import cProfile
import gc
import pstats
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import callgrind
import torch
from report import instruction_tables, startup_tables, step_tables
from results import add_output_arguments, machine_facts, report, spread
from subjects import (
    IMPLEMENTATIONS,
    PEER,
    PHASES,
    StartupCase,
    Subject,
    available,
    build,
    linear_layers,
    llama_70b,
    startup,
)
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise import _compat
from shardwise.planner.noop_group import noop_world
from shardwise.planner.storages import runs_its_own_ops

INSTRUCTION_BLOCKS, INSTRUCTION_STEPS, WARM_UP = 8, 3, 3
INSTRUCTION_TIMEOUT_S = 900.0
STARTUP_ROUNDS, STARTUP_WARM_UP = 3, partial(linear_layers, 2)


class _OpCount(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        if any(runs_its_own_ops(kind) for kind in types):
            return NotImplemented  # on to the subclass, whose ops on what it wraps then come through here
        return func(*args, **(kwargs or {}))


def count_ops(work: Callable[[], None]) -> int:
    """Operators dispatched while `work` runs."""
    with _OpCount() as counter:
        work()
    return counter.count


def count_calls(work: Callable[[], None]) -> int:
    """Python functions and builtins called while `work` runs, `work` itself included."""
    count = 0

    def on_event(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        if event in ("call", "c_call"):
            count += 1

    sys.setprofile(on_event)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count - 1  # the last is setprofile's own


def cpu_ms(work: Callable[[], None]) -> float:
    begin = time.process_time()
    work()
    return (time.process_time() - begin) * 1e3


def heap_bytes(work: Callable[[], Any]) -> int:
    """Bytes of Python objects that `work` leaves behind, while its result is held."""
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        result = work()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        del result
    finally:
        tracemalloc.stop()
    return after - before


def _step(subject: Subject) -> None:
    for phase in PHASES.values():
        phase(subject)


def _settle(subject: Subject) -> None:
    """Let DTensor's caches hold this subject's tensors, as they do where it is alone in its process.

    They keep the descriptions of whoever came first, and compare everybody else's field by field. Filling
    them takes seconds, so only the counts are taken settled; CPU times charge it to the later subjects.
    """
    _clear_sharding_prop_cache()
    _step(subject)


def measure_steps(names: Sequence[str], *, world: int, blocks: int, steps: int) -> dict[str, Any]:
    """`{phase: {implementation: {"cpu_ms": [median, min, max], "calls": n, "ops": n}}}`."""
    with noop_world(world) as mesh:
        subjects = {name: build(name, mesh, blocks=blocks) for name in names}
        for subject in subjects.values():
            for _ in range(WARM_UP):
                _step(subject)
        if PEER in subjects:  # beside a model that we shard, optimizers step on local memory of any DTensors
            for optimizer in (subjects[PEER].fused, subjects[PEER].foreach):
                _compat.restore_step_methods(optimizer)
        times: dict[tuple[str, str], list[float]] = {}
        for _ in range(steps):
            gc.collect()
            for name, subject in subjects.items():
                for phase, run in PHASES.items():
                    times.setdefault((phase, name), []).append(cpu_ms(partial(run, subject)))
        result: dict[str, Any] = {phase: {} for phase in PHASES}
        for name, subject in subjects.items():
            _settle(subject)
            calls = {phase: count_calls(partial(run, subject)) for phase, run in PHASES.items()}
            ops = {phase: count_ops(partial(run, subject)) for phase, run in PHASES.items()}
            for phase in PHASES:
                result[phase][name] = {
                    "cpu_ms": spread(times[phase, name]),
                    "calls": calls[phase],
                    "ops": ops[phase],
                }
    return result


def measure_startup(names: Sequence[str], *, case: StartupCase) -> dict[str, Any]:
    """`{implementation: {"cpu_ms": [median, min, max], "calls": n, "heap_bytes": n}}` of sharding a model.

    The heap is Python's own objects, in a separate pass: what is allocated in sharding and still there.
    """
    sharders = [name for name in names if name != "bare" and not name.endswith("+flat")]
    times: dict[str, list[float]] = {name: [] for name in sharders}
    result: dict[str, Any] = {}
    with noop_world(case.world) as mesh:
        for name in sharders:
            startup(name, mesh, STARTUP_WARM_UP)()  # lazy imports
        for _ in range(STARTUP_ROUNDS):
            for name in sharders:
                work = startup(name, mesh, case.make)
                gc.collect()
                times[name].append(cpu_ms(work))
        for name in sharders:
            result[name] = {
                "cpu_ms": spread(times[name]),
                "calls": count_calls(startup(name, mesh, case.make)),
                "heap_bytes": heap_bytes(startup(name, mesh, case.make)),
            }
    return result


def run_under_callgrind(name: str, *, world: int, blocks: int) -> None:
    """The program that `measure_instructions` starts: some steps of one implementation, phase by phase."""
    client = callgrind.Client()
    with noop_world(world) as mesh:
        subject = build(name, mesh, blocks=blocks)
        for _ in range(WARM_UP):
            _step(subject)
        client.start()
        for _ in range(INSTRUCTION_STEPS):
            with client.measured("nothing"):
                pass
            for phase, run in PHASES.items():
                with client.measured(phase):
                    run(subject)


def measure_instructions(names: Sequence[str], *, world: int, blocks: int) -> dict[str, Any]:
    """`{phase: {implementation: [median, min, max] instructions of one step}}`."""
    result: dict[str, Any] = {phase: {} for phase in PHASES}
    for name in names:
        arguments = ["--under-callgrind", name, "--world", str(world), "--blocks", str(blocks)]
        counts = callgrind.run([__file__, *arguments], timeout=INSTRUCTION_TIMEOUT_S)
        nothing = statistics.median(counts["nothing"])
        for phase in PHASES:
            result[phase][name] = spread([count - nothing for count in counts[phase]])
    return result


def profile(name: str, *, world: int, blocks: int, steps: int) -> None:
    """Print the functions that forward and backward spend their CPU time in."""
    with noop_world(world) as mesh:
        subject = build(name, mesh, blocks=blocks)
        for _ in range(WARM_UP):
            _step(subject)
        profiler = cProfile.Profile(time.process_time)
        for _ in range(steps):
            profiler.enable()
            subject.forward_backward()
            profiler.disable()
            subject.zero_grad()
    print(f"{name}: forward+backward, {steps} steps of {blocks} blocks, {world} ranks")
    for order in ("tottime", "cumulative", "ncalls"):
        pstats.Stats(profiler).sort_stats(order).print_stats(30)


def startup_cases(modules: int) -> list[StartupCase]:
    linear = f"{modules:,} linear layers and their root, 8 ranks"
    return [
        StartupCase(linear, partial(linear_layers, modules), world=8),
        StartupCase(
            "Llama 70B on the meta device, 80 blocks and their root, 512 ranks", llama_70b, world=512
        ),
    ]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    others = [name for name in IMPLEMENTATIONS if name != "bare"]
    parser.add_argument("--vs", choices=others, default=PEER, help="the peer that ratios are against")
    parser.add_argument("--world", type=int, nargs="+", default=[8, 64], help="world sizes")
    parser.add_argument("--blocks", type=int, help=f"default 32, with --instructions {INSTRUCTION_BLOCKS}")
    parser.add_argument("--steps", type=int, default=24, help="timed steps")
    parser.add_argument(
        "--modules", type=int, default=1000, help="linear layers sharded in the start-up case"
    )
    parser.add_argument(
        "--instructions", action="store_true", help="count instructions with valgrind instead"
    )
    parser.add_argument("--profile", choices=list(IMPLEMENTATIONS), help="print one implementation's profile")
    add_output_arguments(parser)
    parser.add_argument("--under-callgrind", choices=list(IMPLEMENTATIONS), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.blocks = options.blocks or (INSTRUCTION_BLOCKS if options.instructions else 32)
    return options


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # the no-op group leaves rubbish in parameters, and denormals are slow
    gc.collect()
    gc.disable()
    world, blocks = options.world[0], options.blocks
    if options.under_callgrind:
        return run_under_callgrind(options.under_callgrind, world=world, blocks=blocks)
    if options.profile:
        return profile(options.profile, world=world, blocks=blocks, steps=options.steps)
    names = available(list(IMPLEMENTATIONS))
    figures: dict[str, Any] = {"facts": machine_facts(), "blocks": blocks, "worlds": {}, "peer": options.vs}
    if options.instructions:
        for world in options.world:
            figures["worlds"][world] = measure_instructions(names, world=world, blocks=blocks)
        section, tables = "host_cost instructions", instruction_tables(figures)
    else:
        for world in options.world:
            figures["worlds"][world] = measure_steps(names, world=world, blocks=blocks, steps=options.steps)
        figures["startup"] = {
            case.title: measure_startup(names, case=case) for case in startup_cases(options.modules)
        }
        section, tables = "host_cost", [*step_tables(figures), *startup_tables(figures)]
    report(section, figures, tables, options)
    return None


if __name__ == "__main__":
    main()
