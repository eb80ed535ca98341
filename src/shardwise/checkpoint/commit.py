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

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import torch.distributed as dist

from shardwise.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = 1
_COMPLETE = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_MOST_LINES = 20  # of problems in one error message

T = TypeVar("T")


def rank_and_size() -> tuple[int, int]:
    """Of the default process group; (0, 1) without one."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def together(what: str, action: Callable[[], T]) -> list[T]:
    """Run `action` on every rank; every rank's result in rank order.

    Collective over the default process group. If it raised on any rank, every rank raises
    CheckpointError with the problems of all of them.
    """
    result: T | None = None
    problem = None
    try:
        result = action()
    except Exception as error:
        problem = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    _, size = rank_and_size()
    outcomes: list[Any] = [(result, problem)]
    if dist.is_initialized():
        outcomes = [None] * size
        dist.all_gather_object(outcomes, (result, problem))
    problems = {rank: problem for rank, (_, problem) in enumerate(outcomes) if problem is not None}
    if problems:
        raise CheckpointError(f"{what} failed\n{by_ranks(problems)}")
    return [result for result, _ in outcomes]


def by_ranks(problems: dict[int, str]) -> str:
    """One line per distinct problem line, led by the ranks that have it."""
    ranks: dict[str, list[int]] = {}
    for rank, problem in sorted(problems.items()):
        for line in problem.splitlines():
            ranks.setdefault(line, []).append(rank)
    lines = [f"  rank {', '.join(map(str, found))}: {line.strip()}" for line, found in ranks.items()]
    more = [f"  and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else []
    return "\n".join(lines[:_MOST_LINES] + more)


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


def find(path: Path, step: int | None) -> Path:
    """The directory of `step` (newest version), or of the newest step for None."""
    found = checkpoints(path)
    fitting = [folder for number, _, folder in found if step in (None, number)]
    if fitting:
        return fitting[-1]
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


def digest(file: Path) -> dict[str, Any]:
    """Size in bytes and sha256 of a file."""
    with file.open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"bytes": file.stat().st_size, "sha256": sha256}


def sync(path: Path) -> None:
    """Return once a file's bytes, or a directory's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(staging: Path, step: int, manifest: dict[str, Any]) -> Path:
    """Write the manifest and rename `staging` to a checkpoint's name. One rank calls it."""
    body = {**manifest, "sha256": _own_digest(manifest)}
    with (staging / MANIFEST).open("w") as stream:
        json.dump(body, stream, indent=1)
    sync(staging / MANIFEST)
    sync(staging)
    path = staging.parent
    taken = [version for number, version, _ in checkpoints(path) if number == step]
    version = f".{max(taken) + 1}" if taken else ""
    final = path / f"step-{step:08d}{version}"
    os.rename(staging, final)
    sync(path)
    return final


def prune(path: Path, keep: int | None, *, written: Path) -> None:
    """Remove older versions of a step, and all but `written` and the newest `keep` steps. By one rank."""
    newest = {step: folder for step, _, folder in checkpoints(path)}
    kept = [newest[step] for step in sorted(newest)][-keep if keep else 0 :]
    for _, _, folder in checkpoints(path):
        if folder not in kept and folder != written:
            doomed = folder.with_name(f"{folder.name}.tmp-{uuid4().hex[:6]}")
            os.rename(folder, doomed)
            shutil.rmtree(doomed)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, whose own digest must fit."""
    file = folder / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(file.read_text())
        expected = manifest.pop("sha256")
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{file}: unreadable manifest ({error}). Load another step") from error
    if _own_digest(manifest) != expected:
        raise CheckpointError(f"{file}: its content does not fit its own sha256. Load another step")
    if manifest["format"] != FORMAT:
        raise CheckpointError(
            f"{file}: expected format {FORMAT}, found {manifest['format']}. Use another release"
        )
    return manifest


def _own_digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
