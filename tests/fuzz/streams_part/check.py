"""Runs a case on the simulated device, and says what races. Most cases are of one process."""

from __future__ import annotations

from typing import Any

from fuzz.streams_part.train import Case, findings
from fuzz.verdict import Verdict
from shardwise import ShardwiseError


def run(case: Case, meshes: dict[Any, Any]) -> Verdict:
    try:
        found = findings(case)
    except ShardwiseError as error:
        return Verdict("refused", str(error))
    return Verdict("wrong" if found else "right", "\n".join(found[:4]))
