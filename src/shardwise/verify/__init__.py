"""Verification that a sharded run is the same training as the unsharded one, step by step, by parameter.

case.py finds a script's `Case`; reference.py runs it on one process, sharded.py on N ranks, both
started by processes.py; compare.py says what is allowed and what is beyond; result.py reports.
"""

from .case import Case, CaseError, load_case
from .compare import START, Difference, Tolerance
from .result import VerifyResult, describe, table, verdict, write_json
from .run import verify

__all__ = [
    "START",
    "Case",
    "CaseError",
    "Difference",
    "Tolerance",
    "VerifyResult",
    "describe",
    "load_case",
    "table",
    "verdict",
    "verify",
    "write_json",
]
