"""Merges ranks' descriptions of what they write; raises where two describe one thing differently."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.comm.agree import raise_all


def alike(
    what: str, told: Sequence[Mapping[str, Any]], kinds: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Merge the entries of each of `kinds`, by name, that ranks gave. Local.

    Args:
        what: is being done, for the error.
        told: by rank, for each kind what it has by name, as JSON; equal on every rank.
        kinds: and how to fix a difference.

    Raises:
        CheckpointError: on every rank, naming the higher of two ranks whose entries differ.
    """
    found: dict[str, dict[str, Any]] = {kind: {} for kind in kinds}
    problems: dict[int, str | None] = {}
    for rank, tale in enumerate(told):
        wrong = []
        for kind, fix in kinds.items():
            for name, entry in tale[kind].items():
                expected = found[kind].setdefault(name, entry)
                if json.dumps(expected) != json.dumps(entry):
                    wrong.append(
                        f"{name}: expected {expected!r:.200} as on a lower rank, found {entry!r:.200}. {fix}"
                    )
        problems[rank] = "\n".join(wrong) or None
    raise_all(what, problems)
    return found
