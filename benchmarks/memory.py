"""Peak memory of a training step on one rank, to the byte, beside torch's FSDP2 and a computed floor.

    python benchmarks/memory.py
    python benchmarks/memory.py --world 8 --sequence 512 --shape small

The real libraries shard a Llama of 8 billion parameters and train it on fake tensors, as rank 0 of a no-op
group of any size, while `Storages` counts. Parameters, gradients and AdamW's two states are float32,
computation is bfloat16, reduction is float32, blocks are recomputed in backward. The embedding, every block
and the head (with the last norm) are a group each. Figures are of the second step: AdamW has its states.

The floor is computed, not run, from a whole bfloat16 model's timeline (which storage lives when), for N ranks
and P parameters. At every moment of that timeline it needs

    12 P/N         float32 parameters and both AdamW states
    activations    everything alive that is neither a parameter nor a parameter's gradient
    2 p            for the group that is computing, of p parameters, and for `ahead` groups gathered ahead:
                   the next of forward, the next of backward; none past the end
    2 g            for gradients of g elements that the group in backward has made so far
    4 p/N          for each group whose gradients are complete: they are reduced at once, without staging

and each phase's floor is the maximum over its moments. With `ahead=0` nothing overlaps, and no library that
gathers and reduces group by group can use less. With `ahead=1` it is the least in which communication
overlaps computation; a forward that gathers nothing ahead may be under it. The optimizer's floor is 16 P/N:
it changes everything in place.
"""

import argparse
import gc
import itertools
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import torch
from llama import LLAMA_8B, SMALL, Llama, Shape
from results import Table, add_output_arguments, machine_facts, ratio, report
from subjects import IMPLEMENTATIONS, PEER, available, shard
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.planner.noop_group import noop_world
from shardwise.planner.storages import Life, Storages

SHAPES = {"8b": LLAMA_8B, "small": SMALL}
FLOORS = {"floor, nothing ahead": 0, "floor": 1}  # name: groups gathered ahead
FORWARD, BACKWARD, FUSED, FOREACH = PHASES = ("forward", "backward", "AdamW fused", "AdamW foreach")
GOAL = f"{FORWARD} <= 1.01 floor; {BACKWARD} <= 1.05 floor; nothing over {PEER}"
STATE_BYTES, GRADIENT_BYTES, COMPUTE_BYTES = 12, 4, 2  # a parameter


def measure(name: str, shape: Shape, *, world: int, sequence: int) -> dict[str, int]:
    """Peak bytes of each phase, on rank 0 of `world`, with the implementation called `name`."""
    policy = IMPLEMENTATIONS[name].load().policy
    assert policy is not None
    with noop_world(world) as mesh, FakeTensorMode(), Storages() as storages:
        model = Llama(shape)
        tokens = torch.zeros(1, sequence, dtype=torch.int64)
        precision = policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        library = shard(name, model, model.units(), mesh=mesh, mp_policy=precision)
        gc.collect()
        optimizer = library.adamw(model, lr=1e-3, fused=True)
        for step in range(2):
            if step:
                optimizer.zero_grad()
            with storages.peak(FORWARD):
                loss = model(tokens)
            with storages.peak(BACKWARD):
                loss.backward()
                del loss
            with storages.peak(FUSED):
                optimizer.step()
        del optimizer
        gc.collect()
        optimizer = library.adamw(model, lr=1e-3, foreach=True)
        for _ in range(2):  # with the gradients that are there
            with storages.peak(FOREACH):
                optimizer.step()
        return storages.peaks


# ---------------------------------------------------------------- the floor


@dataclass
class Unit:
    """One group of the unsharded model's timeline. Times are those of `Storages.now`."""

    numel: int
    forward: tuple[int, int] = (0, 0)  # begins, ends; recomputation is part of backward
    backward: tuple[int, int] = (0, 0)
    gradients: Sequence[Life] = ()


@dataclass
class Timeline:
    units: list[Unit]  # in the order of forward
    activations: list[Life]
    backward_begins: int
    end: int


def record(shape: Shape, *, sequence: int) -> Timeline:
    """Forward and backward of the whole model in bfloat16, once."""
    fake = FakeTensorMode()
    with fake:
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = Llama(shape)
        finally:
            torch.set_default_dtype(torch.float32)
    with fake, Storages() as storages:
        storages.see(list(model.parameters()))
        tokens = torch.zeros(1, sequence, dtype=torch.int64)
        modules = list(model.units())
        units = [Unit(sum(p.numel() for p in module.parameters())) for module in modules]
        whole = [storages.life(p) for p in model.parameters()]
        for module, unit in zip(modules, units, strict=True):
            _watch(module, unit, storages)
        loss = model(tokens)
        backward_begins = storages.now
        loss.backward()
        del loss
        for module, unit in zip(modules, units, strict=True):
            unit.gradients = [storages.life(p.grad) for p in module.parameters() if p.grad is not None]
            unit.backward = (unit.backward[0], max(life.times[0] for life in unit.gradients))
        known = {id(life) for life in whole} | {id(life) for unit in units for life in unit.gradients}
        activations = [life for life in storages.lives if id(life) not in known]
        return Timeline(units, activations, backward_begins, storages.now)


def _watch(module: nn.Module, unit: Unit, storages: Storages) -> None:
    def on_enter(*_: Any) -> None:
        if unit.forward == (0, 0):
            unit.forward = (storages.now, 0)

    def on_exit(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        if unit.forward[1]:
            return
        unit.forward = (unit.forward[0], storages.now)

        def on_gradient(gradient: torch.Tensor) -> None:
            unit.backward = (storages.now, 0)

        output.register_hook(on_gradient)

    module.register_forward_pre_hook(on_enter)
    module.register_forward_hook(on_exit)


def floor(timeline: Timeline, *, world: int, ahead: int) -> dict[str, int]:
    """Fewest bytes of each phase, from a timeline, as the module's docstring derives them."""
    units, count = timeline.units, len(timeline.units)
    total = sum(unit.numel for unit in units)
    changes: list[tuple[int, float]] = [(0, STATE_BYTES * total / world)]
    for life in timeline.activations:
        grown = [after - before for before, after in itertools.pairwise([0, *life.sizes])]
        changes += zip(life.times, grown, strict=True)
    for i, unit in enumerate(units):
        # Gathered from when the group `ahead` before it begins until its own end.
        for begins, end in (
            (units[max(0, i - ahead)].forward[0], unit.forward[1]),
            (units[min(count - 1, i + ahead)].backward[0], unit.backward[1]),
        ):
            changes += [(begins, COMPUTE_BYTES * unit.numel), (end, -COMPUTE_BYTES * unit.numel)]
        for life in unit.gradients:
            changes += [(life.times[0], life.sizes[0]), (unit.backward[1], -life.sizes[0])]
        changes.append((unit.backward[1], GRADIENT_BYTES * unit.numel / world))
    peaks = {
        FORWARD: _peak(changes, 0, timeline.backward_begins),
        BACKWARD: _peak(changes, timeline.backward_begins, timeline.end),
    }
    stepping = round((STATE_BYTES + GRADIENT_BYTES) * total / world)
    return {**peaks, FUSED: stepping, FOREACH: stepping}


def _peak(changes: Sequence[tuple[int, float]], begin: int, end: int) -> int:
    """The highest running sum of `changes` (time, by how much) from time `begin` to time `end`."""
    by_time: dict[int, float] = {}
    for when, amount in changes:
        at = max(when, begin)
        by_time[at] = by_time.get(at, 0.0) + amount
    return round(max(itertools.accumulate(by_time[when] for when in sorted(by_time) if when <= end)))


# ---------------------------------------------------------------- the command line


def _floors(shape: Shape, *, world: int, sequence: int) -> dict[str, dict[str, int]]:
    timeline = record(shape, sequence=sequence)
    return {name: floor(timeline, world=world, ahead=ahead) for name, ahead in FLOORS.items()}


def measure_cases(
    names: Sequence[str], shape: Shape, *, worlds: Sequence[int], sequences: Sequence[int], jobs: int
) -> list[dict[str, Any]]:
    """A case for each sequence and world: `bytes[floor or implementation][phase]`."""
    cases = []
    # In several processes: the counts do not depend on what else the machine does.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        started = []
        for sequence, world in itertools.product(sequences, worlds):
            where = {"world": world, "sequence": sequence}
            runs = {name: pool.submit(measure, name, shape, **where) for name in names}
            started.append((where, pool.submit(_floors, shape, **where), runs))
        for where, floors, runs in started:
            found: dict[str, dict[str, int]] = floors.result()
            for name, run in runs.items():
                error = run.exception()
                if error is None:
                    found[name] = run.result()
                elif name == PEER:
                    raise error
                else:
                    print(f"leaving out {name}: {type(error).__name__}: {error}", file=sys.stderr)
            cases.append({**where, "bytes": found})
    return cases


def tables(figures: dict[str, Any]) -> list[Table]:
    """One table a case, in GB (10^9 bytes), with ratios to the floor and to the peer."""
    floor_name = list(FLOORS)[-1]
    header = ["implementation", *(f"{phase} GB" for phase in PHASES)]
    header += [f"{phase} / floor" for phase in (FORWARD, BACKWARD)]
    header += [f"{phase} / {PEER}" for phase in PHASES]
    header += [f"peak, fused / {PEER}", "goal"]
    result = []
    for case in figures["cases"]:
        found, peer, least = case["bytes"], case["bytes"][PEER], case["bytes"][floor_name]
        rows = []
        for name, peaks in found.items():
            row = [name, *(f"{peaks[phase] / 1e9:.3f}" for phase in PHASES)]
            row += [ratio(peaks[phase], least[phase]) for phase in (FORWARD, BACKWARD)]
            row += [ratio(peaks[phase], peer[phase]) for phase in PHASES]
            row += [ratio(_fused_peak(peaks), _fused_peak(peer))]
            rows.append([*row, GOAL if name.startswith("contiguous") else "-"])
        title = f"{figures['shape']}, {case['world']} ranks, sequence {case['sequence']}: peak bytes alive"
        result.append(Table(title, header, rows))
    return result


def _fused_peak(peaks: dict[str, int]) -> int:
    return max(peaks[FORWARD], peaks[BACKWARD], peaks[FUSED])


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, nargs="+", default=[8, 64], help="world sizes")
    parser.add_argument(
        "--sequence", type=int, nargs="+", default=[512, 2048], help="tokens, in batches of 1"
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="8b", help="of the model")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="cases measured at a time")
    add_output_arguments(parser)
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    names = [name for name in available(list(IMPLEMENTATIONS)) if name != "bare"]
    shape = SHAPES[options.shape]
    cases = measure_cases(names, shape, worlds=options.world, sequences=options.sequence, jobs=options.jobs)
    figures = {"facts": machine_facts(), "peer": PEER, "shape": f"Llama {options.shape}", "cases": cases}
    report("memory", figures, tables(figures), options)


if __name__ == "__main__":
    main()
