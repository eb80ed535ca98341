"""Commits of checkpoints: all of a checkpoint becomes visible, or nothing.

    PATH/step-00000050/                 complete: tensor files, .metadata, manifest.json
    PATH/step-00000100.tmp-5f1c09/      being written, or left by a save that was killed
    PATH/step-00000050.1/               step 50 saved again; the older version is removed afterwards
    URL/step-00000050.0-5f1c09/         in a store: a checkpoint once manifest.json exists

Files are written and fsynced in a `.tmp-` directory, then the manifest, then one rename makes the
directory a checkpoint. Only then are older ones removed, which also begins with a rename, so every
directory with a checkpoint's name is whole at any moment.

A store has no rename. There the manifest, one small object, is written last and removed first: without it a
folder is no checkpoint. Unique names keep late writes of a killed save out of later saves. Only one job may
save to a PATH at a time; in a file system, a lock ensures this: PATH/.saving, which gives other jobs its
holder. A killed process leaves the file but no lock. Without file locks (Windows, some file systems), nothing
is locked. All ranks must see the file system or store of PATH.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import torch
import torch.distributed as dist

from shardwise.checkpoint.index import INDEX
from shardwise.checkpoint.state import from_json
from shardwise.errors import CheckpointError
from shardwise.files.manifest import MANIFEST, Types, all_in, is_count, read_manifest, write_manifest
from shardwise.files.stores import At, Location, StorePath, StrPath, location, remove_folder, sync

FORMAT = 4
_READ = (4, 3, 2)  # 3 has no plain values in the index; 2 hashes files by sha256
_LOCK = ".saving"
_locks: dict[Path, int] = {}  # open files, by folder
_COMPLETE = re.compile(r"step-(\d{8,})(?:\.(\d+)(-[0-9a-f]{6})?)?")  # the suffix only in stores


def rank_and_size() -> tuple[int, int]:
    """Return rank and size of the default process group; (0, 1) without one."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def checkpoints(path: At) -> list[tuple[int, int, At]]:
    """Return (step, version, directory) of every complete checkpoint under `path`, oldest first."""
    return _complete(_list_folders(path))


def _complete(folders: list[tuple[int, int, At]]) -> list[tuple[int, int, At]]:
    return [entry for entry in folders if (entry[2] / MANIFEST).is_file()]


def _list_folders(path: At) -> list[tuple[int, int, At]]:
    """Return the same of all folders with a checkpoint's name, complete or not."""
    folders: list[tuple[int, int, At]] = []
    for folder in path.iterdir() if path.is_dir() else ():
        if match := _COMPLETE.fullmatch(folder.name):
            folders.append((int(match[1]), int(match[2] or 0), cast(At, folder)))
    return sorted(folders, key=lambda entry: (*entry[:2], entry[2].name))


def check_count(name: str, value: Any, least: int, *, optional: bool = False) -> None:
    """Raise CheckpointError unless an argument is an int of `least` or more, or None if `optional`."""
    if not (optional and value is None) and (type(value) is not int or value < least):
        expected = f"{name} to be an int of {least} or more{', or None' * optional}"
        raise CheckpointError(f"expected {expected}, found {value!r} of type {type(value).__name__}")


def latest_step(path: StrPath) -> int | None:
    """Return the newest complete checkpoint's step, or None. Reads only this rank's file system or store."""
    complete = checkpoints(location(path))
    return complete[-1][0] if complete else None


def find(path: Location, step: int | None) -> tuple[list[Location], str]:
    """Return the directories of `step`, newest version first; for None, those of all steps, newest first.

    Also returns a warning about newer ones without a manifest, which in a file system are damaged, or "".
    """
    folders = _list_folders(path)
    complete = _complete(folders)
    matches = [folder for number, _, folder in complete if step in (None, number)]
    torn = [] if isinstance(path, StorePath) else [entry for entry in folders if entry not in complete]
    if matches:
        newer = [folder for *at, folder in torn if step is None and at > [*complete[-1][:2]]]
        lost = ", ".join(folder.name for folder in newer)
        warning = f"{path}: {lost} without {MANIFEST}: damaged, an older one is taken" if newer else ""
        return matches[::-1], warning
    steps = sorted({number for number, _, _ in complete})
    expected = "any checkpoint" if step is None else f"step {step}"
    hint = "Check the path and the step"
    if torn:
        lost = ", ".join(folder.name for *_, folder in torn)
        hint = f"{lost} without {MANIFEST}: damaged, or of another library"
    elif (path / MANIFEST).is_file():
        hint = "This is a checkpoint itself: give the folder around it, and its step"
    elif (path / INDEX).is_file():
        hint = "This was saved by torch.distributed.checkpoint, which loads it"
    raise CheckpointError(f"{path}: expected {expected}, found steps {steps}. {hint}")


def open_staging(path: Location, step: int) -> Location:
    """Return a new directory to write in, and remove those that killed saves left. One rank calls it."""
    if isinstance(path, StorePath):
        complete = checkpoints(path)
        for folder in set(path.iterdir()).difference(folder for *_, folder in complete):
            if (name := _COMPLETE.fullmatch(folder.name)) and name[3]:
                remove_folder(folder)
        return path / f"step-{step:08d}.{_next_version(complete, step)}-{uuid4().hex[:6]}"
    path.mkdir(parents=True, exist_ok=True)
    for leftover in path.glob("step-*.tmp-*"):
        remove_folder(leftover)
    staging = path / f"step-{step:08d}.tmp-{uuid4().hex[:6]}"
    staging.mkdir()
    return staging


def _next_version(complete: Sequence[tuple[int, int, Location]], step: int) -> int:
    return max((version + 1 for number, version, _ in complete if number == step), default=0)


def lock(folder: Path) -> None:
    """Lock a folder for this process, unless it already has; raises if another process holds the lock."""
    if sys.platform == "win32" or folder in _locks:
        return
    import fcntl

    file = folder / _LOCK
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if file.exists() and os.path.samestat(os.fstat(descriptor), file.stat()):
                break
        except (BlockingIOError, PermissionError) as error:  # which one depends on the system
            raise CheckpointError(f"{folder}: {_holder(descriptor)}") from error
        except OSError:
            break
        os.close(descriptor)  # its holder has since removed the file
    since = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    me = {"host": socket.gethostname(), "process": os.getpid(), "since": since}
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(me).encode(), 0)
    _locks[folder] = descriptor


def unlock(folder: Path) -> None:
    """Release the lock of a folder, if this process holds it."""
    descriptor = _locks.pop(folder, None)
    if descriptor is not None:
        with suppress(OSError):
            (folder / _LOCK).unlink()
        os.close(descriptor)


def _holder(descriptor: int) -> str:
    owner: dict[str, object] = {}
    with suppress(ValueError):
        owner = json.loads(os.pread(descriptor, 4096, 0))
    os.close(descriptor)
    return (
        f"process {owner.get('process', '?')} on host {owner.get('host', '?')} has been saving there since"
        f" {owner.get('since', '?')}. Use a separate folder for each run, or wait until that process is done"
    )


def publish(staging: Location, step: int, manifest: dict[str, Any]) -> Location:
    """Make `staging` a checkpoint: write the manifest and, in a file system, rename. One rank calls it."""
    write_manifest(staging, manifest)
    if isinstance(staging, StorePath):
        return staging
    path = staging.parent
    version = _next_version(checkpoints(path), step)
    final = path / (f"step-{step:08d}.{version}" if version else f"step-{step:08d}")
    os.rename(staging, final)
    sync(path)
    return final


def discard(staging: Location) -> None:
    """Remove the files of a failed save, unless it has become a checkpoint. One rank calls it."""
    with suppress(Exception):  # the earlier error is reported
        if isinstance(staging, Path):
            shutil.rmtree(staging, ignore_errors=True)
            unlock(staging.parent)
        elif not (staging / MANIFEST).is_file():
            remove_folder(staging)


def tidy(path: Location, keep: int | None, keep_every: int | None, *, written: Location) -> None:
    """Remove older versions of a step, and all checkpoints that `save` does not keep. One rank calls it.

    Errors only warn, since the save is complete.
    """
    try:
        newest = {step: folder for step, _, folder in checkpoints(path)}
        retained = [newest[step] for step in sorted(newest)][-keep if keep else 0 :]
        retained += [folder for step, folder in newest.items() if keep_every and step % keep_every == 0]
        for _, _, folder in checkpoints(path):
            if folder not in retained and folder != written:
                remove(folder)
    except Exception as error:  # whatever a store raises
        warnings.warn(
            f"{written} is complete, but older checkpoints could not be removed"
            f" ({type(error).__name__}: {error}); the next save tries again",
            stacklevel=2,
        )


def remove(folder: Location) -> None:
    """Remove a checkpoint so that it is whole, or no checkpoint, at any moment. One rank calls it."""
    if isinstance(folder, StorePath):
        (folder / MANIFEST).unlink()
        remove_folder(folder)
    else:
        doomed = folder.with_name(f"{folder.name}.tmp-{uuid4().hex[:6]}")
        os.rename(folder, doomed)
        remove_folder(doomed)


def manifest_of(folder: Location) -> dict[str, Any]:
    """Return the manifest of a checkpoint, checked: see `files.manifest`. This format adds

    step, world_size             int
    tensors                      {name: {"shape": [int], "dtype": name of a torch dtype}}
    values                       {name: result of `to_json`}
    lists                        {name: length} of lists that contain tensors
    per_rank                     [name] of `PerRank` entries
    """
    try:
        return read_manifest(folder, formats=_READ, types=_TYPES)
    except CheckpointError as error:
        raise CheckpointError(f"{error}. Load another step, or use another release") from error


def _is_tensor(value: Any) -> bool:
    is_dtype = isinstance(getattr(torch, value["dtype"], None), torch.dtype)
    return is_dtype and isinstance(value["shape"], list) and all(map(is_count, value["shape"]))


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
