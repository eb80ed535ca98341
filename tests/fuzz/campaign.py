"""Draws cases, runs them on the pool of ranks, confirms and shrinks what fails, and sums up."""

from __future__ import annotations

import collections
import hashlib
import json
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fuzz.parts import PARTS, part_named
from fuzz.rank_side import MOST_BUSY, run_batch, stacks_of
from fuzz.shrink import shrink
from ranks import RankFailure, RankPool

Case = dict[str, Any]
REGRESSIONS = Path(__file__).parent / "regressions"
START_SECONDS = 60.0  # that a call may take beside its cases
TELL_SECONDS = 60.0  # between lines about progress
BAD = ("wrong", "silent", "hung", "raised", "died")


@dataclass
class Result:
    """The worst of the ranks' verdicts."""

    kind: str
    text: str = ""
    seconds: float = 0.0
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def bad(self) -> bool:
        return self.kind in BAD

    @property
    def signature(self) -> str:
        """What two failures of the same cause probably share."""
        first = next((line for line in self.text.splitlines() if line.strip()), "")
        first = re.sub(r"blocks?\S*|'[^']*'|\d+(\.\d+)?(e[-+]?\d+)?|\([\d, ]*\)", "_", first)
        return f"{self.kind}: {first[:70]}"


def draw_cases(part: str, seed: int, count: int) -> list[Case]:
    """Case i of a seed does not depend on `count`."""
    draw = part_named(part).draw
    return [draw(random.Random(f"{part} {seed} {i}")) | {"drawn": f"{seed}:{i}"} for i in range(count)]


class Runner:
    """Runs cases on a pool; a case that kills or hangs its batch costs that case, not the batch."""

    def __init__(self, pool: RankPool) -> None:
        self.pool = pool

    def run(self, cases: Sequence[Case]) -> Iterator[tuple[Case, Result]]:
        """Every case with its result, those with as many ranks together."""
        for world in sorted({case["world"] for case in cases}):
            alike = [case for case in cases if case["world"] == world]
            size = part_named(alike[0]["part"]).batch
            for start in range(0, len(alike), size):
                yield from self.batch(alike[start : start + size], world)

    def batch(self, cases: list[Case], world: int) -> Iterator[tuple[Case, Result]]:
        while cases:
            results = self.call(cases, world)
            for case, result in zip(cases, results, strict=False):
                if result.bad and len(cases) > 1:
                    result = self.alone(case) or Result(result.kind, result.text + "\n(only in its batch)")
                yield case, result
            cases = cases[len(results) :]

    def alone(self, case: Case) -> Result | None:
        """The result of the case by itself, if that is bad too."""
        result = self.call([case], case["world"])[0]
        return result if result.bad else None

    def call(self, cases: list[Case], world: int) -> list[Result]:
        """Results of the first cases, at least one; the last may be the one that ended the call."""
        file = self.pool.folder / "verdicts"
        for old in [file, *(stacks_of(str(file), rank) for rank in range(world))]:
            old.unlink(missing_ok=True)
        ended = ""
        limits = [case.get("limit", part_named(case["part"]).limit) for case in cases]
        try:  # ranks watch each case; the limit of the whole is for what they cannot see
            most = START_SECONDS + MOST_BUSY * sum(limits)
            self.pool(run_batch, cases, str(file), world_size=world, timeout=most)
        except RankFailure as failure:
            ended = str(failure)
        lines = file.read_text().splitlines() if file.exists() else []
        results = [worst(json.loads(line)) for line in lines]
        if ended and len(results) < len(cases):
            results.append(hung(str(file), world) or Result(*named(ended)))
        return results


def hung(file: str, world: int) -> Result | None:
    """What ranks wrote whose case ran out of time; the first line says where each was."""
    places, stacks = [], []
    for rank in range(world):
        path = stacks_of(file, rank)
        for thread in path.read_text().split("\n\n") if path.exists() else []:
            if " in run_batch" in thread:
                calls = [line for line in thread.splitlines() if line.lstrip().startswith("File")]
                ours = [line for line in calls if "/shardwise/" in line] or calls
                places.append(f"rank {rank} in {ours[0].rpartition(' in ')[2]}")
                stacks.append(f"rank {rank}:\n{thread.partition(' in run_one')[0]}")
    return Result("hung", "\n".join([", ".join(places), *stacks])) if places else None


def named(ended: str) -> tuple[str, str]:
    """The kind of failure of which the pool says this."""
    if "hung for" in ended or "still running" in ended:
        return "hung", ended
    return "died" if "died with" in ended else "raised", ended


def worst(line: dict[str, Any]) -> Result:
    order = ["right", "refused", *BAD]
    kinds = [verdict[0] for verdict in line["verdicts"]]
    which = max(range(len(kinds)), key=lambda rank: order.index(kinds[rank]))
    kind, text, notes = line["verdicts"][which]
    if kind == "refused" and len(set(kinds)) > 1:
        kind, text = "wrong", f"only some ranks refused it: {kinds}: {text}"
    prefix = f"rank {which}: " if kind in BAD else ""
    return Result(kind, prefix + text, line["seconds"], notes)


# ---------------------------------------------------------------- a campaign


@dataclass
class Summary:
    part: str
    cases: int = 0
    seconds: float = 0.0
    kinds: collections.Counter[str] = field(default_factory=collections.Counter)
    drawn: collections.Counter[str] = field(default_factory=collections.Counter)
    notes: collections.Counter[str] = field(default_factory=collections.Counter)
    failures: dict[str, list[tuple[Case, Result]]] = field(default_factory=dict)

    def add(self, case: Case, result: Result) -> None:
        self.cases += 1
        self.kinds[result.kind] += 1
        self.drawn.update(set(part_named(case["part"]).features(case)))
        self.notes.update(f"{name}: {value}" for name, value in result.notes.items())
        if result.bad:
            self.failures.setdefault(result.signature, []).append((case, result))

    def lines(self) -> Iterator[str]:
        rate = self.cases / self.seconds if self.seconds else 0.0
        yield f"{self.part}: {self.cases} cases in {self.seconds:.0f} s ({rate:.1f} a second)"
        wrong = self.kinds["wrong"] + self.kinds["raised"]
        hung = self.kinds["hung"] + self.kinds["died"]
        yield f"  {wrong} wrong, {self.kinds['silent']} silent, {hung} hung"
        yield f"  {self.kinds['right']} right, {self.kinds['refused']} refused by an error that says why"
        for name, counts in (("drawn", self.drawn), ("notes", self.notes)):
            if counts:
                yield f"  {name}: " + ", ".join(f"{what} {n}" for what, n in counts.most_common())


def campaign(
    pool: RankPool,
    part: str,
    *,
    seed: int,
    count: int,
    shrink_seconds: float = 60.0,
    say: Callable[[str], None] = print,
    write: bool = True,
) -> Summary:
    """Runs `count` cases of one part; writes the shrunk case of each kind of failure to the regressions."""
    runner, summary = Runner(pool), Summary(part)
    begin = told = time.monotonic()
    for case, result in runner.run(draw_cases(part, seed, count)):
        known = result.signature in summary.failures
        summary.add(case, result)
        if time.monotonic() > told + TELL_SECONDS:
            told = time.monotonic()
            say(f"{part}: {summary.cases} of {count} after {told - begin:.0f} s")
        if result.bad:
            say(f"FAILED {part} {case['drawn']} ({result.signature})")
        if result.bad and not known:
            say(json.dumps(case))
            say(result.text[:2500])
    summary.seconds = time.monotonic() - begin
    for signature, found in summary.failures.items():
        smallest = min((case for case, _ in found), key=lambda case: len(json.dumps(case)))
        small = shrunk(runner, smallest, seconds=shrink_seconds) if shrink_seconds else smallest
        say(f"{len(found)} x {signature}\n  {json.dumps(small)}")
        if write:
            say(f"  kept in {keep(small, signature)}")
    return summary


def shrunk(runner: Runner, case: Case, *, seconds: float) -> Case:
    first = runner.alone(case)
    if first is None:
        return case

    def fails(smaller: Case) -> bool:
        again = runner.alone(smaller)
        return again is not None and again.signature == first.signature

    return shrink(case, fails, seconds=seconds)


def keep(case: Case, signature: str) -> Path:
    REGRESSIONS.mkdir(exist_ok=True)
    text = json.dumps(case | {"found": signature}, indent=1, sort_keys=True)
    path = REGRESSIONS / f"{case['part']}_{hashlib.sha256(text.encode()).hexdigest()[:8]}.json"
    path.write_text(text + "\n")
    return path


def parts_named(name: str, mode: str) -> list[str]:
    if mode == "disagree":
        return ["disagree"]
    return [part for part in PARTS if part != "disagree"] if name == "all" else [name]
