"""`python -m fuzz`: draw cases and run them; `--replay FILE` runs kept ones. Exits with 1 on any failure."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from fuzz.campaign import Case, Runner, campaign, draw_cases, parts_named, shrunk
from fuzz.parts import PARTS
from ranks import RankPool


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", default="all", choices=["all", *PARTS])
    parser.add_argument("--mode", default="numbers", choices=["numbers", "disagree"])
    parser.add_argument("--replay", nargs="+", help="files of cases, or a case as JSON")
    parser.add_argument("--drawn", help="replay case SEED:NUMBER of the part")
    parser.add_argument("--shrink", action="store_true", help="make a replayed case that fails smaller")
    parser.add_argument("--shrink-seconds", type=float, default=60.0)
    parser.add_argument("--no-write", action="store_true")
    given = parser.parse_args()
    pool = RankPool()
    try:
        if given.replay or given.drawn:
            return replay(pool, cases_of(given), given.shrink_seconds if given.shrink else 0.0)
        failed = 0
        for part in parts_named(given.part, given.mode):
            summary = campaign(
                pool,
                part,
                seed=given.seed,
                count=given.cases,
                shrink_seconds=given.shrink_seconds,
                say=lambda text: print(text, flush=True),
                write=not given.no_write,
            )
            print("\n".join(summary.lines()), flush=True)
            failed += len(summary.failures)
        return 1 if failed else 0
    finally:
        pool.close()


def cases_of(given: argparse.Namespace) -> list[Case]:
    if given.drawn:
        seed, number = map(int, given.drawn.split(":"))
        part = parts_named(given.part, given.mode)[0]
        return [draw_cases(part, seed, number + 1)[number]]
    return [
        json.loads(one if one.lstrip().startswith("{") else Path(one).read_text()) for one in given.replay
    ]


def replay(pool: RankPool, cases: list[Case], shrink_seconds: float) -> int:
    failed = 0
    runner = Runner(pool)
    for case in cases:
        result = next(runner.run([case]))[1]
        print(f"{json.dumps(case)}: {result.kind} ({result.seconds:.2f} s) {result.notes}\n{result.text}")
        failed += result.bad
        if result.bad and shrink_seconds:
            print(json.dumps(shrunk(runner, case, seconds=shrink_seconds)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
