"""`make mutate`: small changes of the source, drawn from every package; which of them tests notice."""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from mutation.blocks import HITS, IMPORT, instrument, numbered
from mutation.changes import Mutant, mutants
from mutation.trial import SECONDS, Trial, Trials

ROOT = Path(__file__).parents[2]
SOURCE, KEPT = ROOT / "src/shardwise", ROOT / "build/mutation"
EQUIVALENT = Path(__file__).with_name("equivalent.txt")
FEWEST, MOST_TESTS, MOST_SECONDS = 10, 100, 60.0  # of a package; of a trial
NOT_RECORDED = ("faults", "fuzz", "mutants", "mutation", "benchmarks")  # no tests of a package
TOP = [f"tests/test_{name}.py" for name in ("cli", "compat", "doctor", "launch", "mesh", "verify")]
OWN_PROCESS = ("torch_version.py", "launch.py")  # which tests start programs for
# Where the tests of a package lie that has no folder of its own among them.
OWN = {"_compat": ("tests/",), "errors": ("tests/",), "files": ("tests/checkpoint/", "tests/hf/")}
ABOUT = (
    "`make mutate COUNT={count} SEED={seed}` changes one operator, comparison, condition, constant, statement"
    " or returned value at a time, drawn from every package, and runs the tests that come to it, at most"
    f" {MOST_TESTS}, until one fails or hangs. Equivalent: what no test could see, with the reason in"
    " `tests/mutation/equivalent.txt`."
)


def equivalent() -> dict[str, str]:
    """Changes that nothing could notice, with the reason that stands above them."""
    found, reason = {}, ""
    for line in filter(None, EQUIVALENT.read_text().splitlines()):
        if line.startswith(" "):
            found[line.strip()] = reason
        else:
            reason = line
    return found


def drawn(found: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """From each package its share, at least some. A smaller draw is the beginning of a larger one."""
    of = defaultdict(list)
    for mutant in found:
        of[mutant.package].append((hashlib.sha1(f"{seed} {mutant}".encode()).digest(), mutant))
    chosen = []
    for those in of.values():
        share = min(len(those), max(FEWEST, round(count * len(those) / len(found))))
        first = sorted(those, key=lambda one: one[0])[:share]
        chosen += [(place / share, mutant) for place, (_, mutant) in enumerate(first)]
    return [mutant for _, mutant in sorted(chosen, key=lambda one: one[0])]  # packages get equally far


# ---------------------------------------------------------------- which tests


@cache
def digest(path: str) -> str:
    return hashlib.sha1((ROOT / path).read_bytes()).hexdigest()


def digest_of(test: str) -> str:
    return digest(test.partition("::")[0])


def record(workers: int) -> None:
    """Run the test files that changed since the last time, and write which blocks each test comes to."""
    files = [*TOP, *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests").glob("*/**/test_*.py")))]
    known = KEPT / "recorded.json"
    recorded = json.loads(known.read_text()) if known.exists() else {}
    stale = [
        file
        for file in files
        if file.split("/")[1] not in NOT_RECORDED and recorded.get(file) != digest(file)
    ]
    if not stale:
        return
    run = KEPT / str(len(list(KEPT.glob("*/names.json"))))
    shutil.copytree(SOURCE, run / SOURCE.name, ignore=shutil.ignore_patterns("__pycache__"))
    names = instrument(run / SOURCE.name)
    for worker in ("", *(f"gw{number}" for number in range(workers))):
        (run / f"hits{worker}").write_bytes(bytes(len(names)))
    env = os.environ | {"PYTHONPATH": f"{run}:tests:.", HITS: str(run / "hits")}
    command = ["-m", "pytest", "-p", "mutation.blocks", "-p", "no:cacheprovider", "-n", str(workers)]
    subprocess.run([sys.executable, *command, *stale], env=env, cwd=ROOT)
    (run / "names.json").write_text(json.dumps(names))
    known.write_text(json.dumps(recorded | {file: digest(file) for file in stale}))


def recorded_tests() -> tuple[dict[str, float], dict[str, list[str]]]:
    """Seconds of each test that passed; which tests come to a block. The last record of a file counts."""
    seconds: dict[str, float] = {}
    reached: dict[str, list[str]] = {}
    for run in sorted(KEPT.glob("*/names.json"), key=lambda path: int(path.parent.name)):
        names = json.loads(run.read_text())
        lines = [json.loads(line) for path in run.parent.glob("*.jsonl") for line in path.open()]
        again = {test.partition("::")[0] for test, *_ in lines}
        seconds = {test: taken for test, taken in seconds.items() if test.partition("::")[0] not in again}
        for test, passed, taken, numbers in lines:
            if passed:
                seconds[test], reached[test] = taken, [names[number] for number in numbers]
    of = defaultdict(list)
    for test in seconds:
        for block in reached[test]:
            of[block].append(test)
    return seconds, of


def is_own(test: str, package: str) -> bool:
    return test.startswith(OWN.get(package, (f"tests/{package}/", f"tests/test_{package}.")))


@cache
def blocks_of(file: str) -> dict[str, list[ast.stmt]]:
    return numbered(file, ast.parse((SOURCE / file).read_text()))


def mentions() -> dict[str, list[str]]:
    """Blocks by the names that stand in them."""
    found = defaultdict(list)
    for path in SOURCE.rglob("*.py"):
        for block, run in blocks_of(path.relative_to(SOURCE).as_posix()).items():
            nodes = [node for statement in run for node in ast.walk(statement)]
            names = {node.id for node in nodes if isinstance(node, ast.Name)}
            for name in names | {node.attr for node in nodes if isinstance(node, ast.Attribute)}:
                found[name].append(block)
    return found


def trials(chosen: list[Mutant]) -> Iterator[Trial]:
    """Each with tests that come to it, at most so many: those of its package first, then a case of each
    before a second, one of each file before a second, the cheapest.
    """
    seconds, reached = recorded_tests()
    mentioned = mentions()
    for mutant in chosen:
        blocks = mutant.blocks or [block for name in mutant.names for block in mentioned[name]]
        if not mutant.blocks:  # a default of the function, say
            whose = f"{mutant.file}:{mutant.function}#"
            blocks = [*blocks, *(block for block in blocks_of(mutant.file) if block.startswith(whose))]
        if not any(map(reached.get, blocks)) and not mutant.blocks:
            blocks = list(blocks_of(mutant.file))
        cases: Counter[str] = Counter()
        files: Counter[tuple[str, int]] = Counter()
        order = []
        tests = {test for block in blocks for test in reached.get(block, ())}
        for test in sorted(tests - {IMPORT}, key=lambda test: (seconds[test], test)):
            name = test.partition("[")[0]
            cases[name] += 1
            place = name.partition("::")[0], cases[name]
            files[place] += 1
            order.append((not is_own(test, mutant.package), cases[name], files[place], len(order), test))
        picked: list[str] = []
        total = 0.0
        for *_, test in sorted(order)[:MOST_TESTS]:
            if not picked or total + seconds[test] <= MOST_SECONDS:
                picked.append(test)
                total += seconds[test]
        imported = not mutant.blocks or IMPORT in tests or mutant.file in OWN_PROCESS
        yield Trial(mutant, picked, total, imported, verdict="" if picked else "uncovered")


# ---------------------------------------------------------------- what came of them


class Verdicts:
    """Kept in a file, by the change and its surroundings: a block, or the file where an import runs it."""

    def __init__(self) -> None:
        self.path, self.sound_path = KEPT / "verdicts.jsonl", KEPT / "sound.json"
        lines = map(json.loads, self.path.open()) if self.path.exists() else ()
        self.known = {key: rest for key, *rest in lines}
        self.sound = set(json.loads(self.sound_path.read_text()) if self.sound_path.exists() else ())
        self.done: list[Trial] = []

    def is_known(self, trial: Trial) -> bool:
        """Take it from the file: what was killed stays so, what survived is tried by other tests only."""
        verdict, by, why, tests = self.known.get(self.key(trial), ("", "", "", []))
        asked = self.asked(trial)
        if verdict == "survived":
            trial.passed = [each for each in asked if each in tests]
            trial.tests = [test for test, _ in asked if [test, digest_of(test)] not in tests]
        if verdict == "killed" or (verdict and not trial.tests):
            trial.verdict, trial.by, trial.why = verdict, by, why
        return bool(trial.verdict)

    def finish(self, trial: Trial) -> None:
        if trial.verdict == "survived" and not trial.imported:  # so they pass where tests are run
            self.sound.update(trial.tests)
            self.sound_path.write_text(json.dumps(sorted(self.sound)))
        if trial.mutant is None:
            if trial.verdict != "survived":
                print(f"fails or hangs by itself: {trial.by} of {trial.tests}: {trial.why}", flush=True)
            return
        self.done.append(trial)
        with self.path.open("a") as file:
            line = [self.key(trial), trial.verdict, trial.by, trial.why, self.asked(trial)]
            print(json.dumps(line), file=file)
        print(f"{len(self.done)} {trial.verdict}: {trial.mutant}\n    {trial.by} {trial.why}", flush=True)

    def key(self, trial: Trial) -> str:
        mutant = trial.mutant
        assert mutant is not None
        around = (SOURCE / mutant.file).read_bytes()
        if mutant.blocks:
            around = "\n".join(map(ast.unparse, blocks_of(mutant.file)[mutant.blocks[0]])).encode()
        return mutant.key(around)

    def asked(self, trial: Trial) -> list[list[str]]:
        asked = [[test, digest_of(test)] for test in trial.tests]
        return [*trial.passed, *asked] or [[IMPORT, ""]]


def table(done: list[Trial], same: dict[str, str]) -> str:
    from mutants.__main__ import markdown  # which imports the package

    heads = "package", "changes", "killed", "by others' tests", "equivalent", "survived", "killed of the rest"
    rows = [heads, ("---", *("---:",) * 6)]
    of: dict[str, list[Trial]] = defaultdict(list)
    for trial in done:
        of[trial.mutant.package].append(trial)
    for package, those in [*sorted(of.items()), ("all", done)]:
        killed = [trial for trial in those if trial.verdict in ("killed", "hung")]
        others = sum(bool(trial.by) and not is_own(trial.by, trial.mutant.package) for trial in killed)
        alike = sum(str(trial.mutant) in same for trial in those if trial not in killed)
        rest = len(those) - alike
        share = f"{len(killed) / rest:.0%}" if rest else "-"
        rows.append((package, *map(str, (len(those), len(killed), others, alike, rest - len(killed))), share))
    return markdown(iter(rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--package", nargs="*", help="packages or top-level modules; else all")
    parser.add_argument("--count", type=int, default=600, help="changes of all packages together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="replace the table in benchmarks/TABLES.md")
    args = parser.parse_args()
    KEPT.mkdir(parents=True, exist_ok=True)
    if not os.environ.get("NO_RECORD"):
        record(args.workers)
    chosen = drawn(mutants(SOURCE), args.count, args.seed)
    verdicts, same, left = Verdicts(), equivalent(), []
    for trial in trials([one for one in chosen if not args.package or one.package in args.package]):
        if str(trial.mutant) in same:
            trial.verdict = "survived"
        if trial.verdict or verdicts.is_known(trial):
            verdicts.done.append(trial)
        else:
            left.append(trial)

    def unchanged() -> list[Trial]:
        by = sorted({trial.by for trial in verdicts.done if trial.by} - verdicts.sound)
        return [Trial(None, by[at : at + 20], SECONDS) for at in range(0, len(by), 20)]

    def batches() -> Iterator[list[Trial]]:
        """The changes; before and after them, with none, the tests that noticed one."""
        yield unchanged()
        yield sorted(left, key=lambda trial: verdicts.key(trial) in verdicts.known)  # new ones first
        yield unchanged()

    print(f"{len(left)} to try, {len(verdicts.done)} known", flush=True)
    if left:
        tests = {test for trial in left for test in trial.tests} | {trial.by for trial in verdicts.done}
        files = sorted({test.partition("::")[0] for test in tests - {""}})
        plugin = Trials(SOURCE, batches(), verdicts.finish, args.workers)
        pytest.main(
            ["-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-seed=0", *files], plugins=[plugin]
        )
    alive = [
        one
        for one in verdicts.done
        if one.verdict in ("survived", "uncovered") and str(one.mutant) not in same
    ]
    for trial in alive:
        print(f"{trial.verdict}: {trial.mutant} ({trial.mutant.file}:{trial.mutant.line})")
    print(table(verdicts.done, same))
    if args.write:
        from benchmarks.results import RESULTS, machine_facts, write_section

        facts = ", ".join(f"{name} {value}" for name, value in machine_facts().items())
        parts = (
            "## Mutation",
            facts,
            ABOUT.format(count=args.count, seed=args.seed),
            table(verdicts.done, same),
        )
        write_section("mutation", "\n\n".join(parts), path=RESULTS)
    return int(bool(alive))


if __name__ == "__main__":
    sys.exit(main())
