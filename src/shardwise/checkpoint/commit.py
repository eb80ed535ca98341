"""How a checkpoint becomes visible: all of it, or not at all.

    PATH/step-00000050/                 complete: tensor files, .metadata, manifest.json
    PATH/step-00000100.tmp-5f1c09/      being written, or left by a save that was killed
    PATH/step-00000050.1/               step 50 saved again; the older version goes afterwards

Files are written and fsynced in a `.tmp-` directory, then the manifest, then one rename makes
the directory a checkpoint. Only after that do older ones go, and they too leave by a rename
first, so that every directory with a checkpoint's name is whole at any moment.
One job saves to a PATH at a time; PATH is a file system that all ranks see.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist

from shardwise.checkpoint.state import from_json
from shardwise.errors import CheckpointError
from shardwise.files.manifest import MANIFEST, Types, all_in, is_count, read_manifest, sync, write_manifest

FORMAT = 3
_READ = (3, 2)  # 2 has files hashed by sha256
_COMPLETE = re.compile(r"step-(\d{8,})(?:\.(\d+))?")


def rank_and_size() -> tuple[int, int]:
    """Of the default process group; (0, 1) without one."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def checkpoints(path: Path) -> list[tuple[int, int, Path]]:
    """(step, version, directory) of every complete checkpoint under `path`, oldest first."""
    found = []
    for folder in path.iterdir() if path.is_dir() else ():
        match = _COMPLETE.fullmatch(folder.name)
        if match and (folder / MANIFEST).is_file():
            found.append((int(match[1]), int(match[2] or 0), folder))
    return sorted(found)


def latest_step(path: str | os.PathLike[str]) -> int | None:
    """The newest complete checkpoint's step, or None. Reads this rank's file system only."""
    found = checkpoints(Path(path))
    return found[-1][0] if found else None


def find(path: Path, step: int | None) -> list[Path]:
    """The directories of `step`, newest version first; of all steps, newest first, for None."""
    found = checkpoints(path)
    fitting = [folder for number, _, folder in found if step in (None, number)]
    if fitting:
        return fitting[::-1]
    steps = sorted({number for number, _, _ in found})
    wanted = "any checkpoint" if step is None else f"step {step}"
    raise CheckpointError(f"{path}: expected {wanted}, found steps {steps}. Check the path and the step")


def open_staging(path: Path, step: int) -> Path:
    """A fresh directory to write in. Also removes what killed saves left. One rank calls it."""
    path.mkdir(parents=True, exist_ok=True)
    for leftover in path.glob("step-*.tmp-*"):
        shutil.rmtree(leftover)
    staging = path / f"step-{step:08d}.tmp-{uuid4().hex[:6]}"
    staging.mkdir()
    return staging


def publish(staging: Path, step: int, manifest: dict[str, Any]) -> Path:
    """Write the manifest and rename `staging` to a checkpoint's name. One rank calls it."""
    write_manifest(staging, manifest)
    path = staging.parent
    taken = [version for number, version, _ in checkpoints(path) if number == step]
    version = f".{max(taken) + 1}" if taken else ""
    final = path / f"step-{step:08d}{version}"
    os.rename(staging, final)
    sync(path)
    return final


def prune(path: Path, keep: int | None, keep_every: int | None, *, written: Path) -> None:
    """Remove older versions of a step, and all but what `save` says is kept. By one rank."""
    newest = {step: folder for step, _, folder in checkpoints(path)}
    kept = [newest[step] for step in sorted(newest)][-keep if keep else 0 :]
    kept += [folder for step, folder in newest.items() if keep_every and step % keep_every == 0]
    for _, _, folder in checkpoints(path):
        if folder not in kept and folder != written:
            remove(folder)


def remove(folder: Path) -> None:
    """Remove a checkpoint, which is whole or not one at any moment. One rank calls it."""
    doomed = folder.with_name(f"{folder.name}.tmp-{uuid4().hex[:6]}")
    os.rename(folder, doomed)
    shutil.rmtree(doomed)


def manifest_of(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, checked: see `files.manifest`. Of this format are

    step, world_size             int
    tensors                      {name: {"shape": [int], "dtype": name of a torch dtype}}
    values                       {name: what `to_json` makes}
    lists                        {name: length} of the lists that tensors are in
    per_rank                     [name] of what every rank has its own of
    """
    try:
        return read_manifest(folder, format=_READ, types=_TYPES)
    except CheckpointError as error:
        raise CheckpointError(f"{error}. Load another step, or use another release") from error


def _is_tensor(value: Any) -> bool:
    known = isinstance(getattr(torch, value["dtype"], None), torch.dtype)
    return known and isinstance(value["shape"], list) and all(map(is_count, value["shape"]))


def _is_value(value: Any) -> bool:
    from_json(value)
    return True


_TYPES: Types = {
    "step": (is_count, "an int of at least 0"),
    "world_size": (is_count, "an int of at least 0"),
    "tensors": (all_in(dict, _is_tensor), "shapes and dtypes by name"),
    "values": (all_in(dict, _is_value), "plain values by name"),
    "lists": (all_in(dict, is_count), "lengths by name"),
    "per_rank": (all_in(list, lambda name: isinstance(name, str)), "a list of names"),
}
