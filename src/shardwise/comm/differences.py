"""Say in words what ranks disagree about."""

from __future__ import annotations

from collections.abc import Mapping

_SHOWN_LINES = 20
_SHOWN_CHARACTERS = 400  # of a line


def differences(texts: Mapping[int, str]) -> str:
    """Which lines only some ranks have. Ranks of equal text stand together; the largest side comes first.

    Args:
        texts: by rank, of which at least two differ.
    """
    sides: dict[str, list[int]] = {}
    for rank in sorted(texts):
        sides.setdefault(texts[rank], []).append(rank)
    ordered = sorted(sides.items(), key=lambda side: -len(side[1]))
    common = set.intersection(*[set(text.splitlines()) for text, _ in ordered])
    found = []
    for text, ranks in ordered:
        own = [line for line in text.splitlines() if line not in common]
        found.append(f"Only on {named(ranks)}:")
        found += [f"  {line[:_SHOWN_CHARACTERS]}" for line in own[:_SHOWN_LINES] or ["nothing"]]
        if len(own) > _SHOWN_LINES:
            found.append(f"  ... and {len(own) - _SHOWN_LINES} more lines")
    if all(line == "  nothing" for line in found[1::2]) and len(found) == 2 * len(ordered):
        return f"Between {' and '.join(named(ranks) for _, ranks in ordered)} only the order differs."
    return "\n".join(found)


def named(ranks: list[int]) -> str:
    """`rank 1`, or `ranks 0, 2`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
