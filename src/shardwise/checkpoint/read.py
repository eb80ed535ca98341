"""Read a checkpoint into a state that already exists, whatever number of ranks wrote it.

Everything that can be wrong is found before the first tensor is read, on every rank: a file
that is missing or whose bytes changed (each rank hashes its part of the files), and every name,
shape and dtype that does not fit.

Trust: a checkpoint may come from elsewhere, so nothing in it is unpickled freely. Plain values
are JSON. Tensor files are read by torch with `weights_only=True`. torch's `.metadata` index is a
pickle; it is read by an unpickler that knows only the index's own record types. The manifest's
digests guard against damage; they do not say who wrote the checkpoint.
"""

from __future__ import annotations

import copyreg
import dataclasses
import enum
import os
import pickle
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.filesystem as dcp_filesystem
import torch.distributed.checkpoint.metadata as dcp_metadata
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader

from shardwise.checkpoint.commit import (
    by_ranks,
    digest,
    find,
    rank_and_size,
    read_manifest,
    together,
)
from shardwise.checkpoint.state import Leaf, describe, flatten, from_json
from shardwise.errors import CheckpointError


def load(path: str | os.PathLike[str], state: dict[str, Any], *, step: int | None = None) -> int:
    """Load a checkpoint's content into `state`, in place; returns its step.

    Collective over the default process group; the number of ranks, the mesh and the placements
    may differ from those that saved. Tensors are copied into the state's tensors, so shapes
    (of whole tensors) and dtypes must be equal; plain values replace the state's.

    step: which checkpoint under `path`; None takes the newest complete one.

    Raises CheckpointError on every rank, with the state untouched, if a file is missing or
    damaged on disk or if the names, shapes or dtypes of state and checkpoint differ.
    """
    rank, _ = rank_and_size()
    what = f"loading from {path}"
    folder = together(what, lambda: find(Path(path), step) if rank == 0 else None)[0]
    assert folder is not None

    what = f"loading {folder}"
    leaves: dict[str, Leaf] = {}
    manifest: dict[str, Any] = {}
    index: list[dcp_metadata.Metadata] = []

    def check() -> list[str]:
        manifest.update(read_manifest(folder))
        _check_files(folder, manifest["files"])
        leaves.update(flatten(state))
        _check_leaves(leaves, manifest)
        index.append(_read_index(folder, manifest["files"]))
        return list(leaves)

    known = {name for names in together(what, check) for name in names}
    unexpected = [name for kind in ("tensors", "values") for name in manifest[kind] if name not in known]
    if unexpected:
        lines = "\n".join(f"{n}: in the checkpoint, expected by no rank. {_FIX_NAMES}" for n in unexpected)
        raise CheckpointError(f"{what} failed\n{by_ranks({rank: lines})}")

    tensors = {name: leaf.value for name, leaf in leaves.items() if leaf.is_tensor}
    try:
        reader = _CheckedReader(folder, index[0])
        state_dict_loader.load(tensors, storage_reader=reader, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        failures = {rank: f"{type(e).__name__}: {e}" for rank, (e, _) in error.failures.items()}
        raise CheckpointError(f"{what} failed\n{by_ranks(failures)}") from error
    for name, leaf in leaves.items():
        if name in manifest["values"]:
            leaf.container[leaf.key] = from_json(manifest["values"][name])
    return int(manifest["step"])


_FIX_NAMES = "Load into a state made of the same parts as the one saved"
_FIX_SHAPE = "Build the model with the sizes and dtypes it was saved with"


def _check_files(folder: Path, files: dict[str, dict[str, Any]]) -> None:
    """This rank's part of the files is there and unchanged."""
    rank, size = rank_and_size()
    problems = []
    for name in sorted(files)[rank::size]:
        file, expected = folder / name, files[name]
        if not file.is_file():
            problems.append(f"{file}: missing. Load another step")
            continue
        found = digest(file)
        if found != expected:
            problems.append(f"{file}: damaged, expected {expected}, found {found}. Load another step")
    if problems:
        raise CheckpointError("\n".join(problems))


def _check_leaves(leaves: dict[str, Leaf], manifest: dict[str, Any]) -> None:
    """Every entry of this rank's state is in the checkpoint, of the same kind, shape and dtype."""
    problems = []
    for name, leaf in leaves.items():
        kind, other = ("tensors", "values") if leaf.is_tensor else ("values", "tensors")
        if name in manifest[other]:
            problems.append(
                f"{name}: expected one of the {kind}, found among the checkpoint's {other}. {_FIX_NAMES}"
            )
        elif name not in manifest[kind]:
            problems.append(f"{name}: expected by the state, not in the checkpoint. {_FIX_NAMES}")
        elif leaf.is_tensor and (expected := describe(leaf)) != (found := manifest["tensors"][name]):
            problems.append(f"{name}: expected {_show(expected)}, found {_show(found)}. {_FIX_SHAPE}")
    if problems:
        raise CheckpointError("\n".join(problems))


def _show(tensor: dict[str, Any]) -> str:
    return f"{tensor['dtype']} {tuple(tensor['shape'])}"


def _read_index(folder: Path, files: dict[str, Any]) -> dcp_metadata.Metadata:
    """Which bytes of which file hold which box of which tensor: torch's `.metadata`, checked."""
    with (folder / ".metadata").open("rb") as stream:
        index = _IndexUnpickler(stream).load()
    if not isinstance(index, dcp_metadata.Metadata):
        raise CheckpointError(f".metadata: expected an index, found {type(index).__name__}")
    for name, entry in index.state_dict_metadata.items():
        if not isinstance(entry, dcp_metadata.TensorStorageMetadata):
            raise CheckpointError(f"{name}: expected a tensor, found {type(entry).__name__}; not read")
    for place in index.storage_data.values():
        if place.relative_path not in files:
            raise CheckpointError(f"{place.relative_path}: named by .metadata, not in the manifest; not read")
    return index


class _CheckedReader(FileSystemReader):
    """Reads tensors by an index that was checked before."""

    def __init__(self, folder: Path, index: dcp_metadata.Metadata) -> None:
        super().__init__(folder)
        self.index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp_metadata.Metadata:
        return self.index


class _IndexUnpickler(pickle.Unpickler):
    """Makes records (dataclasses, enums) of torch's index modules, sizes, dtypes, paths; refuses the rest."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return torch.Size
        if module.split(".")[0] == "pathlib" and name.endswith("Path"):
            return PurePath
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == _LAYOUT_BY_NAME:
            return {str(torch.strided): torch.strided}.__getitem__
        for known in (dcp_metadata, dcp_filesystem):
            found = getattr(known, name, None)
            if module == known.__name__ == getattr(found, "__module__", None) and _is_record(found):
                return found
        raise CheckpointError(f".metadata: names {module}.{name}, which an index has no use for; not read")


def _is_record(found: Any) -> bool:
    return isinstance(found, type) and (dataclasses.is_dataclass(found) or issubclass(found, enum.Enum))


def _pickled_layout() -> tuple[str, str]:
    """Module and name of the function that torch's pickles of a layout call."""
    function: Any = copyreg.dispatch_table[torch.layout](torch.strided)[0]
    return function.__module__, function.__name__


_LAYOUT_BY_NAME = _pickled_layout()
