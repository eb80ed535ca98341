"""Run a script that uses torch's FSDP2 with shardwise instead."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from shardwise.adapters.fsdp2 import install, sharded_classes
from shardwise.errors import ShardwiseError
from shardwise.fsdp.fully_shard import sharded_modules
from shardwise.launch import note, report_errors


def check_script(target: str, *, is_module: bool = False) -> None:
    """Raise if there is no such script or module."""
    if is_module:
        sys.path.insert(0, "")
        try:
            exists = importlib.util.find_spec(target) is not None
        except ModuleNotFoundError:
            exists = False
        finally:
            del sys.path[0]
        if not exists:
            raise ShardwiseError(f"No such module: {target}")
    elif not (path := Path(target)).exists() or (path.is_dir() and not (path / "__main__.py").is_file()):
        raise ShardwiseError(f"No such script: {target} (in {Path.cwd()})")


def run_script(target: str, arguments: list[str], *, is_module: bool = False, **defaults: Any) -> None:
    """Run a script or module as `python` would, after `install(**defaults)`.

    Uncaught errors are shown as by `launch`. If the script ends without one, a line on stderr counts the
    modules that it sharded in each layout, or warns that it sharded none, or none of a class to interleave.
    """
    report_errors()
    install(**defaults)
    sharded_modules.clear()
    sharded_classes.clear()
    sys.argv = [target, *arguments]
    try:
        if is_module:
            sys.path.insert(0, "")
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(target).resolve().parent))
            runpy.run_path(target, run_name="__main__")
    except SystemExit as ended:
        if not ended.code:
            note(sharding_summary(**defaults))
        raise
    note(sharding_summary(**defaults))


def sharding_summary(*, interleave: Collection[str] = (), **_: Any) -> str:
    """Return one line with the number of modules that this process sharded in each layout."""
    if not sharded_modules:
        return (
            "shardwise: WARNING: nothing was sharded: the script never called shardwise's fully_shard, nor"
            " torch's by a public name, which shardwise replaces (private modules such as"
            " torch.distributed.fsdp._fully_shard keep torch's); did it train with DDP, or on one device?"
        )
    counts = ", ".join(f"{count} {layout}" for layout, count in sorted(sharded_modules.items()))
    unused = ", ".join(sorted(set(interleave) - sharded_classes))
    known = ", ".join(sorted(sharded_classes))
    warning = f"; WARNING: --interleave met none of class {unused}, only {known}" if unused else ""
    return f"shardwise: modules sharded: {counts}{warning}"
