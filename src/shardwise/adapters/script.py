"""A script that asks torch for FSDP2, run with shardwise in its place."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path
from typing import Any

from shardwise.adapters.fsdp2 import install
from shardwise.errors import ShardwiseError
from shardwise.launch import report_errors


def check_script(target: str, *, is_module: bool = False) -> None:
    """Raise where there is no such script or module."""
    if is_module:
        sys.path.insert(0, "")
        try:
            found = importlib.util.find_spec(target) is not None
        except ModuleNotFoundError:
            found = False
        finally:
            del sys.path[0]
        if not found:
            raise ShardwiseError(f"No such module: {target}")
    elif not (found_at := Path(target)).exists() or (
        found_at.is_dir() and not (found_at / "__main__.py").is_file()
    ):
        raise ShardwiseError(f"No such script: {target} (in {Path.cwd()})")


def run_script(target: str, arguments: list[str], *, is_module: bool = False, **defaults: Any) -> None:
    """Run a script or module as `python` would, after `install(**defaults)`.

    Errors that nothing catches are shown as `launch` says.
    """
    report_errors()
    install(**defaults)
    sys.argv = [target, *arguments]
    if is_module:
        sys.path.insert(0, "")
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(target).resolve().parent))
        runpy.run_path(target, run_name="__main__")
