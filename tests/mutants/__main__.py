"""`make mutants`: every wait, event, stream context and keep-alive left out in turn, and one table of who noticed."""

from __future__ import annotations

import argparse
import collections
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.results import RESULTS, machine_facts, write_section

from mutants.campaign import WORST, Verdict, campaign
from mutants.cases import CASES
from mutants.places import HOST, Place, places

ABOUT = (
    "`make mutants`: each wait, event, stream context and keep-alive of the package is left out by itself (none of"
    " `verify` and `planner`, which run nothing on a device), and the {cases} cases of `tests/mutants/cases.py` are run"
    " until one sees a race on the simulated device. Where none does: *other numbers* means that results differ,"
    " *raised* that an error says so, *held memory* that memory is only given back later, *other streams* that what"
    " runs is right but no longer beside the rest. Waits of the host for threads, files and words of other processes"
    " ({host}) are left out of this."
)


def rows(verdicts: dict[Place, Verdict]) -> Iterator[tuple[str, ...]]:
    for place, verdict in verdicts.items():
        text = place.text if len(place.text) < 80 else f"{place.text[:77]}..."
        yield place.file, place.function, f"`{text}`", place.kind, verdict.kind, verdict.case


def markdown(header: tuple[str, ...], lines: Iterator[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, ("---",) * len(header), *lines))


def summary(verdicts: dict[Place, Verdict]) -> Iterator[tuple[str, ...]]:
    """By kind of place, how many ended how."""
    seen = [kind for kind in reversed(WORST) if any(v.kind == kind for v in verdicts.values())]
    yield "what is left out", "places", *seen
    yield ("---",) * (2 + len(seen))
    kinds = dict.fromkeys(place.kind for place in verdicts)
    for kind in (*kinds, "all"):
        counts = collections.Counter(v.kind for p, v in verdicts.items() if kind in (p.kind, "all"))
        yield kind, str(counts.total()), *(str(counts[each]) for each in seen)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", nargs="*", help="places whose file, line, function or text has one of these"
    )
    parser.add_argument("--write", action="store_true", help="replace the tables in --results")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    chosen = [p for p in places() if args.only is None or any(text in str(p) for text in args.only)]
    verdicts = campaign(CASES, chosen, say=lambda text: print(text, flush=True))
    counts = "\n".join(f"| {' | '.join(line)} |" for line in summary(verdicts))
    print(counts)
    if args.write:
        facts = ", ".join(f"{name} {value}" for name, value in machine_facts().items())
        about = ABOUT.format(cases=len(CASES), host=", ".join(f"`{one}`" for one in HOST))
        table = markdown(("file", "function", "left out", "kind", "seen", "by case"), rows(verdicts))
        body = "\n\n".join(["## Mutants", facts, about, counts, table])
        write_section("mutants", body, path=args.results)
    return int(any(verdict.kind == "nothing" for verdict in verdicts.values()))


if __name__ == "__main__":
    sys.exit(main())
