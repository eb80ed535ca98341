"""Draw faults, run them, and judge: is anything lost, does the run come back to the same bits, who is blamed?

    case      number of ranks, layout, whether saves go on in the background
    fault     kind x place x rank x step, and which system call of a save
    trial     the run with its fault; then the same command again, on new processes, to the end

The same seed and number are the same trial. A run without faults, once for each case, is the reference.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import ranks as pool_module
from faults.rank_side import STEPS, TIMEOUT, train
from ranks import RankFailure, RankPool
from shardwise.checkpoint.commit import checkpoints

KINDS = ("kill", "host", "stop", "slow", "disconnect", "torn", "full", "flip")
PLACES = ("forward", "backward", "reduction", "optimizer", "save", "load")
GRACE_S = 30.0  # for the others to tell what they found


@dataclass
class Trial:
    """What was drawn, and what came of it."""

    number: int
    case: dict[str, Any]
    fault: dict[str, Any]
    struck: bool = False
    lost: bool = False  # a checkpoint that was committed is not there any more
    differs: bool = False
    named: bool | None = None  # None: nobody is to blame
    seconds: float | None = (
        None  # from the fault, or from the timeout where one must pass, to the last verdict
    )
    work_lost: float | None = None  # seconds from the last commit to the fault
    took: float = 0.0  # seconds of the trial
    notes: list[str] = field(default_factory=list)


def draw(seed: int, number: int) -> Trial:
    random = Random(f"{seed} {number}")
    case = {
        "ranks": random.choice([2, 3]),
        "layout": random.choice(["interleaved", "contiguous"]),
        "asynchronous": random.random() < 0.5,
        "hosts": None,
    }
    kind = random.choice(KINDS)
    if kind in ("torn", "full"):
        place = "save"
    elif kind == "flip":
        place = "rest"
    else:
        place = random.choice(PLACES)
    if kind in ("host", "disconnect"):  # of two ranks nobody else could say which of them it was
        case["ranks"] = 3
    rank, step = random.randrange(case["ranks"]), random.randrange(1, STEPS)
    call = random.randrange(16 if rank == 0 else 3)
    trial = Trial(number, case, {"kind": kind, "place": place, "rank": rank, "step": step, "call": call})
    if kind == "host":  # the ranks' copies in memory are on two
        case["hosts"] = [int(each in culprits(trial)) for each in range(case["ranks"])]
    return trial


def culprits(trial: Trial) -> set[int]:
    """The ranks that a fault strikes: a lost host has two."""
    rank = trial.fault["rank"]
    return {rank, (rank + 1) % trial.case["ranks"]} if trial.fault["kind"] == "host" else {rank}


class Campaign:
    """Runs trials in `folder`, on ranks of its own."""

    def __init__(self, folder: Path, pool: RankPool) -> None:
        self.folder, self.pool = folder, pool
        self._references: dict[str, tuple[Any, Any]] = {}

    def run(self, trial: Trial) -> Trial:
        folder = self.folder / f"trial-{trial.number}"
        reference = self._reference(trial.case)
        place = trial.fault["place"]
        if place in ("load", "rest"):  # something to load must be there
            shutil.copytree(self._reference_folder(trial.case) / "checkpoints", folder / "checkpoints")
            shutil.rmtree(next((folder / "checkpoints").glob(f"step-{STEPS:08d}*")))
        folder.mkdir(exist_ok=True)
        if place == "rest":
            trial.struck = True
            named = self._flip(folder, Random(trial.number))
        else:
            with self._stopped_until_others_told(folder, trial):
                self._attempt(folder, trial.case, 0, trial.fault)
            trial.struck = (folder / "struck.json").exists()
            shutil.rmtree(folder / "host-1", ignore_errors=True)  # a lost host's memory
            self._judge_verdicts(trial, folder)
        there = [step for step, _, _ in checkpoints(folder / "checkpoints")]
        committed = (
            json.loads((folder / "committed.json").read_text())
            if (folder / "committed.json").exists()
            else None
        )
        if trial.struck and committed and place != "rest":
            at = json.loads((folder / "struck.json").read_text())["at"]
            trial.work_lost = max(0.0, at - committed["at"])
        begun = self._attempt(folder, trial.case, 1, None)
        if begun is None:
            trial.differs = True
            trial.notes.append(self.said[-600:])
            return trial
        if place == "rest":
            warned = [file.read_text() for file in folder.glob("warned-1-*.json")]
            trial.named = len(warned) == trial.case["ranks"] and all(named in text for text in warned)
            trial.lost = begun != there[-2]
        else:
            trial.lost = begun < (there[-1] if there else 0) or bool(committed and begun < committed["step"])
        trial.differs = not same(self._seen(folder, trial.case), reference)
        if not trial.lost and not trial.differs:
            shutil.rmtree(folder, ignore_errors=True)  # a store may go by itself meanwhile
        return trial

    def _judge_verdicts(self, trial: Trial, folder: Path) -> None:
        if not trial.struck or trial.fault["kind"] == "slow":
            return
        at = json.loads((folder / "struck.json").read_text())["at"]
        guilty, told = culprits(trial), dict[int, Any]()
        for file in folder.glob("verdict-0-*.json"):
            told[int(file.stem.rpartition("-")[2])] = json.loads(file.read_text())
        expected = set(range(trial.case["ranks"])) - (guilty if trial.fault["kind"] != "full" else set())
        trial.named = told.keys() >= expected and all(blames(told[each]["says"], guilty) for each in expected)
        if not trial.named:
            trial.notes.append(
                " | ".join(f"{each}: {words['says'][:300]}" for each, words in sorted(told.items()))
            )
        if told:
            waited = TIMEOUT if trial.fault["kind"] == "stop" else 0.0
            trial.seconds = max(0.0, max(words["at"] for words in told.values()) - at - waited)

    @contextmanager
    def _stopped_until_others_told(self, folder: Path, trial: Trial) -> Iterator[None]:
        """End a rank that was stopped, which tells nothing, once all others have."""
        others = set(range(trial.case["ranks"])) - culprits(trial)
        ended = threading.Event()

        def look() -> None:
            while not all((folder / f"verdict-0-{rank}.json").exists() for rank in others):
                if ended.wait(0.05):
                    return
            os.kill(int((folder / f"pid-{trial.fault['rank']}").read_text()), signal.SIGKILL)

        watch = threading.Thread(target=look, daemon=True)
        if trial.fault["kind"] == "stop":
            watch.start()
        yield
        ended.set()
        if watch.is_alive():
            watch.join()

    def _attempt(self, folder: Path, case: dict[str, Any], attempt: int, fault: Any) -> int | None:
        self.said = ""
        pool_module.GRACE_SECONDS = GRACE_S
        try:
            found = self.pool(train, folder, case, attempt, fault, world_size=case["ranks"], timeout=60.0)
            return int(found[0])
        except RankFailure as failure:
            self.said = str(failure)
            return None

    def _flip(self, folder: Path, random: Random) -> str:
        newest = checkpoints(folder / "checkpoints")[-1][2]
        file = random.choice(sorted(newest.iterdir()))
        content = bytearray(file.read_bytes())
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
        file.write_bytes(content)
        return newest.name

    def _reference_folder(self, case: dict[str, Any]) -> Path:
        return self.folder / f"reference-{case['ranks']}-{case['layout']}"

    def _reference(self, case: dict[str, Any]) -> Any:
        folder = self._reference_folder(case)
        if not folder.exists():
            folder.mkdir(parents=True)
            if self._attempt(folder, case | {"asynchronous": False, "hosts": None}, 0, None) != 0:
                raise RuntimeError(f"the run without faults failed:\n{self.said}")
        return self._seen(folder, case)

    def _seen(self, folder: Path, case: dict[str, Any]) -> Any:
        """Each rank's losses by step, as last computed, and its parameters at the end."""
        seen = []
        for rank in range(case["ranks"]):
            lines = (folder / f"losses-{rank}.jsonl").read_text().splitlines()
            losses = dict(json.loads(line) for line in lines)
            seen.append((losses, (folder / f"final-{rank}.json").read_text()))
        return seen


def same(seen: Any, reference: Any) -> bool:
    """Are a run's losses, as far back as it went, and parameters those of the reference, to the bit?"""
    return all(
        losses.items() <= expected.items() and STEPS - 1 in losses and final == end
        for (losses, final), (expected, end) in zip(seen, reference, strict=True)
    )


def blames(text: str, ranks: set[int]) -> bool:
    """Do these words name these ranks, and no others, as those that failed, left or did not come?"""
    if silent := re.search(r"no sign of life from ranks? ([\d, ]+)", text):
        return {int(each) for each in re.findall(r"\d+", silent[1])} == ranks
    late = re.findall(r"rank (\d+) has (?:not (?:come|said where it is|written its part)|lost its)", text)
    late += re.findall(r"^  rank (\d+): OSError", text, flags=re.M)
    return {int(each) for each in late} == ranks


def line(trial: Trial, seed: int) -> str:
    """What a trial was and came to, and the command that runs it again."""
    fault = trial.fault
    where = f"{fault['place']} on rank {fault['rank']} of {trial.case['ranks']}, {trial.case['layout']}"
    where += ", in the background" if trial.case["asynchronous"] else ""
    wrong = trial.lost or trial.differs or trial.named is False
    came = f"WRONG {trial!r}" if wrong else "fine" if trial.struck else "never struck"
    came += f", {trial.took:.0f} s"
    again = f"python -m faults --seed {seed} --only {trial.number}"
    return f"{trial.number:4d} {fault['kind']} in {where}: {came}; {again}"


def table(trials: Iterable[Trial]) -> list[list[str]]:
    """One row a kind of fault, and one of all."""
    trials = list(trials)
    rows = []
    for kind in (*KINDS, "all"):
        of_kind = [trial for trial in trials if kind in ("all", trial.fault["kind"]) and trial.struck]
        judged = [trial.named for trial in of_kind if trial.named is not None]
        seconds = sorted(trial.seconds for trial in of_kind if trial.seconds is not None)
        work = [trial.work_lost for trial in of_kind if trial.work_lost is not None]
        rows.append(
            [
                kind,
                str(len(of_kind)),
                str(sum(trial.lost for trial in of_kind)),
                str(sum(trial.differs for trial in of_kind)),
                f"{sum(judged)} of {len(judged)}" if judged else "-",
                f"{seconds[len(seconds) // 2]:.1f} ({seconds[-1]:.1f})" if seconds else "-",
                f"{sum(work) / len(work):.2f}" if work else "-",
            ]
        )
    return rows


def markdown(trials: Iterable[Trial]) -> str:
    rows = [HEADER, ["---"] * len(HEADER), *table(trials)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


HEADER = [
    "fault",
    "trials",
    "checkpoints lost",
    "trajectories that differ",
    "culprit named",
    "s to verdict: median (most)",
    "s of work lost, mean",
]


def run_all(folder: Path, seed: int, numbers: Iterable[int], seconds: float) -> list[Trial]:
    """Trials of these numbers, until the time is over; each is printed."""
    pool, done, begun = RankPool(), [], time.monotonic()
    campaign = Campaign(folder, pool)
    try:
        for number in numbers:
            if time.monotonic() - begun > seconds:
                break
            at = time.monotonic()
            done.append(campaign.run(draw(seed, number)))
            done[-1].took = time.monotonic() - at
            print(line(done[-1], seed), flush=True)
    finally:
        pool.close()
    return done
