"""Verify, step by step and by parameter, that a sharded run trains as the unsharded one does.

case.py finds a script's `Case`. reference.py runs it on one process and sharded.py on N ranks, both
started by processes.py. compare.py decides which differences are beyond tolerance; result.py reports them.
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
