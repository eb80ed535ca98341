"""Describe what ranks disagree about, grouping ranks with equal text.

differences    {rank: text}       the lines that only some ranks have
by_ranks       {rank: problems}   each problem once, after the ranks that have it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

from shardwise.errors import placed

_SHOWN_LINES = 20
_SHOWN_CHARACTERS = 400  # of a line
_BEFORE = 100  # of these, characters before the first difference


def differences(texts: Mapping[int, str]) -> str:
    """Return the lines that only some ranks have, the largest set of equal ranks first; some texts differ."""
    sides: dict[str, list[int]] = {}
    for rank in sorted(texts):
        sides.setdefault(texts[rank], []).append(rank)
    ordered = sorted(sides.items(), key=lambda side: -len(side[1]))
    common = set.intersection(*[set(text.splitlines()) for text, _ in ordered])
    own = [[line for line in text.splitlines() if line not in common] for text, _ in ordered]
    if not any(own):
        return "\n".join(["Only the order differs; where it does first, there is", *_first_apart(ordered)])
    report = []
    for (_, ranks), lines in zip(ordered, own, strict=True):
        other = next(candidate for candidate in own if candidate is not lines)
        report.append(f"Only on {named(ranks)}:")
        parts = [_excerpt(line, against or "") for line, against in zip_longest(lines, other[: len(lines)])]
        report += _listed(parts or ["nothing"])
    return "\n".join(report)


def by_ranks(problems: Mapping[int, str]) -> str:
    """List each line of the ranks' problems once."""
    ranks: dict[str, list[int]] = {}
    for rank, problem in sorted(problems.items()):
        for line in dict.fromkeys(problem.splitlines()) or ["an error without text"]:
            ranks.setdefault(line.strip(), []).append(rank)
    return "\n".join(_listed([f"{named(reporters)}: {line}" for line, reporters in ranks.items()]))


def named(ranks: Sequence[int]) -> str:
    """Return `rank 1`, or `ranks 0, 2`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(placed, ranks))}"


def _first_apart(sides: Sequence[tuple[str, list[int]]]) -> list[str]:
    rows = zip_longest(*[text.splitlines() for text, _ in sides], fillvalue="nothing")
    row = next(row for row in rows if len(set(row)) > 1)
    return [
        f"  {line[:_SHOWN_CHARACTERS]} on {named(ranks)}" for line, (_, ranks) in zip(row, sides, strict=True)
    ]


def _listed(lines: Sequence[str]) -> list[str]:
    remainder = [f"  ... and {len(lines) - _SHOWN_LINES} more lines"] if len(lines) > _SHOWN_LINES else []
    return [f"  {line}" for line in lines[:_SHOWN_LINES]] + remainder


def _excerpt(line: str, other: str) -> str:
    """Return `line`; if it is long, the part around its first difference from `other`."""
    if len(line) <= _SHOWN_CHARACTERS:
        return line
    length = min(len(line), len(other))
    first = next((i for i in range(length) if line[i] != other[i]), length)
    begin = max(0, first - _BEFORE)
    end = begin + _SHOWN_CHARACTERS
    return ("..." if begin else "") + line[begin:end] + ("..." if end < len(line) else "")
