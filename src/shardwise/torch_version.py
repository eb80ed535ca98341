"""Checks that shardwise runs on the installed torch, when the package is first imported.

If it does not, a shardwise command exits with one line that says why, and `import shardwise` raises that line
as an ImportError. A torch newer than supported is refused only if it lacks a name that shardwise needs.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path

SUPPORTED = ((2, 12), (2, 15))  # first and last minor version of torch
WANTED = "{}.{} to {}.{}".format(*SUPPORTED[0], *SUPPORTED[1])
_FIX = "pip install 'torch>={}.{},<{}.{}'".format(*SUPPORTED[0], SUPPORTED[1][0], SUPPORTED[1][1] + 1)


def minor_version(version: str) -> tuple[int, int] | None:
    """Return (2, 13) for "2.13.0+cpu"; None if `version` does not begin with two numbers."""
    parts = version.split("+")[0].split(".")
    if len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()):
        return None
    return int(parts[0]), int(parts[1])


def problem() -> str:
    """Return why shardwise cannot run on the installed torch, or "". Imports only a torch that is too new."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return f"shardwise needs torch {WANTED}, and {sys.executable} has none: {_FIX}"
    version = str(runpy.run_path(str(Path(spec.origin).with_name("version.py")))["__version__"])
    found = minor_version(version)
    if found is None or found < SUPPORTED[0]:
        return f"shardwise needs torch {WANTED}, found {version} ({spec.origin}): {_FIX}"
    if found > SUPPORTED[1]:
        try:
            import shardwise._compat  # noqa: F401
        except (ImportError, AttributeError) as missing:
            return f"shardwise needs torch {WANTED}, and {version} is too new ({missing}): {_FIX}"
    return ""


if _problem := problem():
    if sys.argv[0] == "-m" or Path(sys.argv[0]).stem == "shardwise":  # `python -m shardwise`, `shardwise`
        sys.exit(_problem)
    raise ImportError(_problem)
