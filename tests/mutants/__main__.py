"""`make mutants`: waits, events, stream contexts and keep-alives left out in turn; a table of what saw it."""

from __future__ import annotations

import argparse
import collections
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from benchmarks.results import RESULTS, machine_facts, write_section

from mutants.campaign import WORST, Verdict, campaign
from mutants.cases import CASES
from mutants.places import HOST, Place, places

ABOUT = (
    "`make mutants` leaves out each wait, event, stream context and keep-alive of the package by itself,"
    " and each call that gives gathered memory back. It runs the {cases} cases of `tests/mutants/cases.py`"
    " until one *raced* on the simulated device. Where none does: *other numbers*, results differ;"
    " *raised*, an error, or ranks that wait for ever; *held memory*, it is given back later; *other"
    " streams*, correct, but no longer beside the rest. Not counted: `verify` and `planner`; and waits of"
    " the host for threads, files and words of other processes ({host})."
)


def rows(verdicts: dict[Place, Verdict]) -> Iterator[tuple[str, ...]]:
    yield "file", "function", "left out", "kind", "seen", "by case"
    yield ("---",) * 6
    for place, verdict in verdicts.items():
        text = place.text if len(place.text) < 80 else f"{place.text[:77]}..."
        yield place.file, place.function, f"`{text}`", place.kind, verdict.kind, verdict.case


def counts(verdicts: dict[Place, Verdict]) -> Iterator[tuple[str, ...]]:
    """By kind of place, how many ended how."""
    seen = [kind for kind in reversed(WORST) if any(v.kind == kind for v in verdicts.values())]
    yield "what is left out", "places", *seen
    yield ("---",) * (2 + len(seen))
    for kind in (*dict.fromkeys(place.kind for place in verdicts), "all"):
        found = collections.Counter(v.kind for p, v in verdicts.items() if kind in (p.kind, "all"))
        yield kind, str(found.total()), *(str(found[each]) for each in seen)


def markdown(lines: Iterator[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", nargs="*", help="places whose file, line, function or text has one of these"
    )
    parser.add_argument("--write", action="store_true", help="replace the table in --results")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)  # a fork has no threads of OpenMP, and waits for them
    chosen = [p for p in places() if args.only is None or any(text in str(p) for text in args.only)]
    verdicts = campaign(CASES, chosen, say=lambda text: print(text, flush=True))
    print(markdown(counts(verdicts)))
    if args.write:
        facts = ", ".join(f"{name} {value}" for name, value in machine_facts().items())
        about = ABOUT.format(cases=len(CASES), host=", ".join(f"`{one}`" for one in HOST))
        parts = ("## Mutants", facts, about, markdown(counts(verdicts)), markdown(rows(verdicts)))
        write_section("mutants", "\n\n".join(parts), path=args.results)
    return int(any(verdict.kind == "nothing" for verdict in verdicts.values()))


if __name__ == "__main__":
    sys.exit(main())
