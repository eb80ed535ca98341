"""`make faults TRIALS=300 SEED=0`: faults drawn at random, and one table of what they did."""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from faults.campaign import HEADER, run_all, table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of trials to run again")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no trial after so long")
    parser.add_argument(
        "--workers", type=int, default=2, help="campaigns side by side: most of a trial is waiting"
    )
    args = parser.parse_args()
    numbers = args.only if args.only is not None else range(args.trials)
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    with ProcessPoolExecutor(args.workers) as workers:
        shares = [
            workers.submit(run_all, folder / str(n), args.seed, numbers[n :: args.workers], args.seconds)
            for n in range(args.workers)
        ]
        trials = [trial for share in shares for trial in share.result()]
    for row in [HEADER, ["---"] * len(HEADER), *table(trials)]:
        print(f"| {' | '.join(row)} |")
    sys.exit(any(trial.lost or trial.differs for trial in trials))


if __name__ == "__main__":
    main()
