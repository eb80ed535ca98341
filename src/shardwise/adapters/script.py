"""A script that asks torch for FSDP2, run with shardwise in its place."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

from shardwise.adapters.fsdp2 import install


def run_script(target: str, arguments: list[str], *, is_module: bool = False, **defaults: Any) -> None:
    """Run a script or module as `python` would, after `install(**defaults)`."""
    install(**defaults)
    sys.argv = [target, *arguments]
    if is_module:
        sys.path.insert(0, "")
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(target).resolve().parent))
        runpy.run_path(target, run_name="__main__")
