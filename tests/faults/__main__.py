"""`make faults TRIALS=300 SEED=0`: faults drawn at random, and one table of what they did."""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks.results import RESULTS, machine_facts, write_section

from faults.campaign import line, markdown, run_all

TRIAL = (
    "A trial is a tiny GPT on 2 or 3 ranks, in either layout, with saves in the foreground or background;"
    " then the same command again, to the end. Seconds to a verdict count from the fault, for a stopped rank"
    " from the process group's timeout."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of trials to run again")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no trial after so long")
    parser.add_argument(
        "--workers", type=int, default=2, help="campaigns side by side: most of a trial is waiting"
    )
    parser.add_argument("--write", action="store_true", help="replace the table in --results")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    numbers = args.only if args.only is not None else range(args.trials)
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    with ProcessPoolExecutor(args.workers) as workers:
        shares = [
            workers.submit(run_all, folder / str(n), args.seed, numbers[n :: args.workers], args.seconds)
            for n in range(args.workers)
        ]
        trials = [trial for share in shares for trial in share.result()]
    shown = markdown(trials)
    print(shown)
    wrong = [
        line(trial, args.seed) for trial in trials if trial.lost or trial.differs or trial.named is False
    ]
    print(*wrong, sep="\n")
    if args.write:
        facts = ", ".join(f"{name} {value}" for name, value in machine_facts().items())
        what = f"`make faults TRIALS={args.trials} SEED={args.seed}`: {len(trials)} trials, of which"
        what += f" {sum(trial.struck for trial in trials)} came to their fault. {TRIAL}"
        missed = "\n".join(f"- {each}" for each in wrong)
        write_section("faults", f"## Faults\n\n{facts}\n\n{what}\n\n{shown}\n\n{missed}", path=args.results)
    sys.exit(any(trial.lost or trial.differs for trial in trials))


if __name__ == "__main__":
    main()
