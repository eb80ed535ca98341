"""Write a sharded state: each rank its own shards, in torch's distributed-checkpoint format.

Tensors (DTensors, sharded tensors, plain replicated tensors) go through
`torch.distributed.checkpoint`; plain values go into the manifest as JSON. The order is: tensor
files, their digests, manifest, rename (`commit.py`), then older checkpoints go. A problem on one
rank, say a full disk, ends the save on every rank with one error and leaves no trace.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from shardwise.checkpoint.commit import (
    FORMAT,
    by_ranks,
    digest,
    open_staging,
    prune,
    publish,
    rank_and_size,
    sync,
    together,
)
from shardwise.checkpoint.state import describe, flatten, to_json
from shardwise.errors import CheckpointError


def save(path: str | os.PathLike[str], state: dict[str, Any], *, step: int, keep: int | None = None) -> Path:
    """Save `state` as the checkpoint of `step` under `path`; returns its directory.

    Collective over the default process group: every rank calls it with the same path, step and
    structure. Without a process group one process saves alone.

    state: nested dicts and lists of tensors and plain values. A DTensor is saved as its shards;
        a plain tensor counts as replicated, and one rank's copy is saved.
    step: 0 or more. Saving a step again replaces it, without a moment in between.
    keep: how many newest steps stay afterwards, beside the one saved; None keeps all.

    Raises CheckpointError on every rank when any rank fails; earlier checkpoints are untouched.
    """
    path = Path(path)
    if step < 0 or (keep is not None and keep < 1):
        raise CheckpointError(f"expected step >= 0 and keep >= 1 or None, found step={step}, keep={keep}")
    rank, size = rank_and_size()
    what = f"saving step {step} to {path}"

    tensors, contents = _contents(what, state)
    staging = together(what, lambda: open_staging(path, step) if rank == 0 else None)[0]
    assert staging is not None
    try:
        _write_tensors(what, tensors, staging)
        digests = together(what, lambda: _digests(staging, rank, size))
        files = {name: digest for part in digests for name, digest in part.items()}
        manifest = {"format": FORMAT, "step": step, "world_size": size, **contents, "files": files}
        final = together(what, lambda: publish(staging, step, manifest) if rank == 0 else None)[0]
    except CheckpointError:
        if rank == 0:
            shutil.rmtree(staging, ignore_errors=True)
        raise
    assert final is not None
    together(what, lambda: prune(path, keep, written=final) if rank == 0 else None)
    return final


def _contents(what: str, state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """This rank's tensors by name, and the manifest's tensors and values over all ranks. Collective."""
    leaves: dict[str, Any] = {}

    def local() -> dict[str, dict[str, Any]]:
        leaves.update(flatten(state))
        values = {name: to_json(name, leaf.value) for name, leaf in leaves.items() if not leaf.is_tensor}
        return {
            "tensors": {n: describe(leaf) for n, leaf in leaves.items() if leaf.is_tensor},
            "values": values,
        }

    contents: dict[str, dict[str, Any]] = {"tensors": {}, "values": {}}
    problems: dict[int, str] = {}
    for rank, part in enumerate(together(what, local)):
        for kind, known in contents.items():
            for name, entry in part[kind].items():
                if known.setdefault(name, entry) != entry and kind == "tensors":
                    problems[rank] = f"{name}: expected {known[name]} as on a lower rank, found {entry}"
    if problems:
        raise CheckpointError(f"{what} failed\n{by_ranks(problems)}")
    return {name: leaf.value for name, leaf in leaves.items() if leaf.is_tensor}, contents


def _write_tensors(what: str, tensors: dict[str, Any], staging: Path) -> None:
    writer = _Writer(staging, sync_files=True)
    try:
        state_dict_saver.save(tensors, storage_writer=writer, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        failures = {rank: f"{type(e).__name__}: {e}" for rank, (e, _) in error.failures.items()}
        raise CheckpointError(f"{what} failed\n{by_ranks(failures)}") from error


class _Writer(FileSystemWriter):
    """Names what the system refused, which torch's own message buries."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            raise CheckpointError(f"{_first_cause(error)}; check the space and rights there") from error


def _first_cause(error: BaseException) -> str:
    """The system error at the start of a chain of errors, else the error itself."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    found = cause or error
    return f"{type(found).__name__}: {found}"


def _digests(staging: Path, rank: int, size: int) -> dict[str, dict[str, Any]]:
    """Digests of this rank's part of the files, whoever wrote them, once they are on disk."""
    mine = sorted(staging.iterdir())[rank::size]
    for file in mine:
        sync(file)
    return {file.name: digest(file) for file in mine}
