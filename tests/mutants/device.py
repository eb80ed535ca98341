"""What the simulated device says of waits, tried on a real one.

    make mutants DEVICE=cuda

The cases run on the accelerator, as rank 0 of a no-op group whose collectives copy as if all ranks were
equal, on a stream of their own where they are asynchronous, as NCCL's are. Kernels that only spin are put
between the operations, on streams and for times that a seed chooses. Two claims are tried:

    every case        has the same numbers, bit by bit, whatever is delayed
    FSDP2             computes them too, in the cases of `benchmarks/gpu_checks.py`, interleaved
    each place left   that raced on the simulated device has other numbers here under some delay, or raises;
    out               where it has not, the race was not seen to matter on this device

Each case and each place has a process of its own, forked before the device is used.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import gpu_checks
import torch
import torch.distributed as dist
from benchmarks.results import RESULTS
from gpu_place import Place as OneDevice
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.verify import streams

DEVICE = "cuda"
streams.DEVICE = DEVICE  # before the cases are imported, which take it from there

from fuzz.streams_part import train  # noqa: E402
from mutants import campaign  # noqa: E402
from mutants.cases import CASES, AnyCase, OnRanks, Own, Program  # noqa: E402
from mutants.places import Place, Switch, instrumented, places  # noqa: E402
from shardwise.comm.count import tensors_in  # noqa: E402
from shardwise.planner.noop_group import COLLECTIVES, NoopGroup, noop_world  # noqa: E402
from shardwise.verify.streams.collectives import _as_equal_ranks, asks_async  # noqa: E402

SPINS = 1_500_000  # cycles, about a millisecond
SHARES = (0.0, 0.0, 0.05, 0.3)  # of a stream's operations that are delayed
BASELINE_SEEDS, SEEDS, SECONDS = 3, 6, 60.0
MOST_CASES = 5  # for one place


class Delays(TorchDispatchMode):
    """Puts kernels that only spin before operators, on streams that a seed chooses."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.chance, self.shares = random.Random(seed), dict[int, float]()

    def pause(self) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        if stream not in self.shares:
            self.shares[stream] = self.chance.choice(SHARES)
        if self.chance.random() < self.shares[stream]:
            torch.cuda._sleep(self.chance.randrange(SPINS // 10, SPINS))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.pause()
        return func(*args, **(kwargs or {}))


class _Work(dist.Work):
    """Work of an asynchronous collective, which keeps its tensors until it is waited for."""

    def __init__(self, stream: torch.cuda.Stream, tensors: list[Tensor]) -> None:
        super().__init__()
        self._event, self._tensors = torch.Event(DEVICE), tensors
        self._event.record(stream)

    def wait(self, timeout: Any = None) -> bool:
        torch.accelerator.current_stream().wait_event(self._event)
        self._tensors = []
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._event.query()

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future(devices=[torch.device(DEVICE, 0)])
        self.wait()
        future.set_result([])
        return future


@dataclass
class Found:
    """Stands in for the findings of a simulation."""

    findings: list[Any] = field(default_factory=list)
    differences: list[Any] = field(default_factory=list)
    models: list[Any] = field(default_factory=list)


SEED: list[int | None] = [None]  # of the delays; none


@contextmanager
def really(order: Any = None) -> Iterator[Found]:
    """Stand in for `simulated`: on the device that is there, with delays by `SEED`."""
    del order  # the device's own
    lines: dict[int, torch.cuda.Stream] = {}
    delays = None if SEED[0] is None else Delays(SEED[0])

    def method(name: str) -> Callable[..., dist.Work]:
        def call(group: NoopGroup, *args: Any, **kwargs: Any) -> dist.Work:
            tensors = [one for one in tensors_in((args, tuple(kwargs.values()))) if one.is_cuda]
            if not tensors:
                return group._finished
            asynchronous = asks_async(args, kwargs)
            current = torch.cuda.current_stream()
            stream = lines.setdefault(id(group), torch.cuda.Stream()) if asynchronous else current
            stream.wait_stream(current)
            with torch.cuda.stream(stream), torch.no_grad():
                if delays is not None:
                    delays.pause()
                _as_equal_ranks(name, args, group.size())
            if not asynchronous:
                return group._finished
            return _Work(stream, tensors)

        return call

    with ExitStack() as stack:
        for name in COLLECTIVES:
            stack.enter_context(mock.patch.object(NoopGroup, name, method(name)))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        if delays is not None:
            stack.enter_context(delays)
        yield Found()
        torch.cuda.synchronize()


train.simulated = really


def numbers(case: AnyCase, seed: int | None) -> str:
    """A digest of what a case computes, under these delays."""
    SEED[0] = seed
    gc.collect()
    torch.manual_seed(0)
    if isinstance(case, Program):
        with noop_world(case.ranks), really():
            tensors = case.run()
            torch.cuda.synchronize()
            return campaign._digest(tensors)
    assert not isinstance(case, OnRanks)
    with train.running(case.case if isinstance(case, Own) else case) as (_, trained):
        more = case.train(trained) if isinstance(case, Own) else trained.train()
        torch.cuda.synchronize()
        return campaign._digest([*trained.model.parameters(), *(more or ())])


SWITCH = Switch()


def look(name: str) -> dict[str, Any]:
    """Run a case with everything in its place, under no delay and some."""
    warnings.simplefilter("ignore")
    begin = time.monotonic()
    case = CASES[name]
    found: dict[str, Any] = {"case": name}
    try:
        first, again = numbers(case, None), numbers(case, None)
        found["numbers"] = first if first == again else ""
        found["differ"] = [seed for seed in range(BASELINE_SEEDS) if numbers(case, seed) != first]
    except Exception as error:
        found["raised"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return found | {"reached": sorted(SWITCH.reached), "seconds": time.monotonic() - begin}


def leave_out(number: int, names: list[str]) -> dict[str, Any]:
    """Run cases with a place left out, until one has other numbers than with it."""
    warnings.simplefilter("ignore")
    begin = time.monotonic()
    verdict: dict[str, Any] = {"number": number, "seen": "the same numbers", "case": ""}
    for name in names:
        expected = numbers(CASES[name], None)
        for seed in range(100, 100 + SEEDS):
            SWITCH.place = number
            try:
                same = numbers(CASES[name], seed) == expected
            except Exception as error:
                text = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                verdict |= {"seen": "raised", "case": name, "text": text}
                same = True
                break
            finally:
                SWITCH.place = None
            if not same:
                verdict |= {"seen": "other numbers", "case": name, "seed": seed}
                break
        if verdict["seen"] != "the same numbers":
            break
    return verdict | {"seconds": time.monotonic() - begin}


def beside_fsdp2(name: str, ranks: int) -> dict[str, Any]:
    """Train as `gpu_checks` does on so many equal ranks: with FSDP2, and with us under each delay."""
    warnings.simplefilter("ignore")
    case, found = gpu_checks.CASES[name], []
    ways = [("FSDP2", None), *(("interleaved", seed) for seed in (None, *range(BASELINE_SEEDS)))]
    try:
        for way, SEED[0] in ways:
            with noop_world(ranks), really(), mock.patch.object(DTensor, "full_tensor", DTensor.to_local):
                found.append(gpu_checks.train(way, case, OneDevice(torch.device(DEVICE, 0))))
    except Exception as error:
        return {"case": name, "ranks": ranks, "raised": f"{type(error).__name__}: {error}"[:300]}
    apart = [gpu_checks.difference(ours, found[0]) for ours in found[1:]]
    return {"case": name, "ranks": ranks, "apart": apart}


def simulated_verdicts(path: Path) -> dict[int, tuple[str, str]]:
    """By place: what the simulated device saw, and by which case; from the table of `make mutants`."""
    section = path.read_text().partition("\n## Mutants\n")[2].partition("\n## ")[0]
    rows = [line.strip("| \n").split(" | ") for line in section.splitlines() if line.count(" | ") == 5]
    told: dict[tuple[str, str, str], list[tuple[str, str]]] = {}
    for file, function, text, _, seen, case in rows:
        told.setdefault((file, function, text.strip("`")), []).append((seen, case))
    found = {}
    for place in places():
        text = place.text if len(place.text) < 80 else f"{place.text[:77]}..."
        if waiting := told.get((place.file, place.function, text)):
            found[place.number] = waiting.pop(0)
    return found


def in_forks(
    jobs: int, work: list[tuple[Callable[..., Any], tuple[Any, ...]]], until: float
) -> Iterator[Any]:
    """What each call returns in a fork of this process; one that takes too long is left out."""
    pool = multiprocessing.get_context("fork").Pool(jobs, maxtasksperchild=1)
    waiting = [pool.apply_async(function, args) for function, args in work]
    for one in waiting:
        with suppress(multiprocessing.TimeoutError):
            yield one.get(max(0.1, min(SECONDS, until - time.monotonic())))
    pool.terminate()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--only", nargs="*", help="cases whose names have one of these")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    until = time.monotonic() + args.seconds
    told = simulated_verdicts(RESULTS)
    names = [n for n, case in CASES.items() if not isinstance(case, OnRanks)]
    names = [n for n in names if args.only is None or any(text in n for text in args.only)]
    with instrumented(SWITCH):
        gc.collect()
        gc.freeze()
        each = [(name, n) for n in (2, 4, 8) for name, c in gpu_checks.CASES.items() if n >= c.ranks]
        beside = list(in_forks(args.jobs, [(beside_fsdp2, one) for one in each], until))
        for one in beside:
            if any(one.get("apart", [1])):
                print(one, flush=True)
        same = sum(not any(one.get("apart", [1])) for one in beside)
        print(f"{same} of {len(each)} trainings equal FSDP2's under every delay", flush=True)
        cases = list(in_forks(args.jobs, [(look, (name,)) for name in names], until))
        usable = {one["case"]: one for one in cases if one.get("numbers") and not one["differ"]}
        for one in cases:
            if one["case"] not in usable:
                print({k: v for k, v in one.items() if k != "reached"}, flush=True)
        print(f"{len(usable)} of {len(names)} cases have the same numbers under every delay", flush=True)
        work, raced = [], [p for p in places() if told.get(p.number, ("", ""))[0] == "raced"]
        for place in raced:
            by = told[place.number][1]
            able = [n for n, one in usable.items() if place.number in one["reached"]]
            able.sort(key=lambda n: (n != by, usable[n]["seconds"]))
            if able:
                work.append((leave_out, (place.number, able[:MOST_CASES])))
        by_number = {place.number: place for place in raced}
        verdicts = []
        for one in in_forks(args.jobs, work, until):
            place: Place = by_number[one["number"]]
            verdicts.append(one | {"kind": place.kind, "place": str(place)})
            print(f"{one['seen']}: {place.kind}: {place} [{one['case']}] {one.get('text', '')}", flush=True)
    counts = Counter(one["seen"] for one in verdicts)
    print(f"{len(raced)} places raced when simulated; {len(work)} tried here: {dict(counts)}", flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"beside": beside, "cases": cases, "verdicts": verdicts}, indent=1))
    return int(any(one.get("differ") for one in cases))


if __name__ == "__main__":
    sys.exit(main())
