"""`python -m fuzz`: draw cases and run them; `--replay FILE` runs kept ones. Exits with 1 on any failure."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from fuzz.campaign import Runner, campaign, parts_named
from fuzz.parts import PARTS
from ranks import RankPool


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", default="all", choices=["all", *PARTS])
    parser.add_argument("--mode", default="numbers", choices=["numbers", "disagree"])
    parser.add_argument("--replay", nargs="+", help="files of cases, or a case as JSON")
    parser.add_argument("--shrink-seconds", type=float, default=60.0)
    parser.add_argument("--no-write", action="store_true")
    given = parser.parse_args()
    pool = RankPool()
    try:
        if given.replay:
            return replay(pool, given.replay)
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


def replay(pool: RankPool, given: list[str]) -> int:
    failed = 0
    for one in given:
        case = json.loads(one if one.lstrip().startswith("{") else Path(one).read_text())
        result = next(Runner(pool).run([case]))[1]
        print(f"{one}: {result.kind} ({result.seconds:.2f} s) {result.notes}\n{result.text}")
        failed += result.bad
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
