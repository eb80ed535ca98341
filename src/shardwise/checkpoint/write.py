"""Write a sharded state: each rank its own shards, in torch's distributed-checkpoint format.

    tell       every rank says what it has, as text; all find the same faults in what all say
    plan       from that alone, so equally on every rank: who writes which chunk
    write      tensor files by torch's writer; the index by one rank
    commit     the files' digests, the manifest, one rename (`commit.py`); then older checkpoints go

A problem on one rank, say a full disk, ends the save on every rank with one error and leaves no trace.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from shardwise import _compat
from shardwise.checkpoint.commit import FORMAT, open_staging, prune, publish, rank_and_size
from shardwise.checkpoint.state import Flat, Leaf, as_bytes, describe, flatten, to_json
from shardwise.checkpoint.told import alike
from shardwise.comm.agree import together
from shardwise.errors import CheckpointError, ShardingError
from shardwise.files.manifest import digest, sync
from shardwise.layout import Box, cover


def save(
    path: str | os.PathLike[str],
    state: dict[str, Any],
    *,
    step: int,
    keep: int | None = None,
    keep_every: int | None = None,
) -> Path:
    """Save `state` as the checkpoint of `step` under `path`; returns its directory.

    Collective over the default process group: every rank calls it with the same path, step and
    structure. Without a process group one process saves alone.

    state: nested dicts and lists of tensors and plain values. A DTensor is saved as its shards;
        a plain tensor counts as replicated, and one rank's copy is saved. What every rank has its
        own of is marked by `PerRank`.
    step: 0 or more. Saving a step again replaces it, without a moment in between.
    keep: how many newest steps stay afterwards, beside the one saved; None keeps all.
    keep_every: of which number's multiples stay too, however old.

    Raises CheckpointError on every rank when any rank fails, or where plain values or plain tensors
    differ between ranks; earlier checkpoints are untouched.
    """
    rank, size = rank_and_size()
    what = f"saving step {step} to {path}"
    flat = Flat()

    def tell() -> dict[str, Any]:
        _check_arguments(path, step, keep, keep_every)
        found = flatten(state, rank=rank, ranks=size)
        flat.leaves, flat.lists, flat.per_rank = found.leaves, found.lists, found.per_rank
        return {
            "call": {"path": os.fspath(path), "step": step, "keep": keep, "keep_every": keep_every},
            **_told(flat, compare=size > 1),
        }

    contents = _agreed(what, together(what, tell))
    tensors = {name: leaf.value for name, leaf in flat.leaves.items() if leaf.is_tensor}
    staging = Path(together(what, lambda: str(open_staging(Path(path), step)) if rank == 0 else "")[0])
    try:
        _write_tensors(what, tensors, staging)
        digests = together(what, lambda: _digests(staging, rank, size))
        files = {name: digest for part in digests for name, digest in part.items()}
        manifest = {"format": FORMAT, "step": step, "world_size": size, **contents, "files": files}
        final = together(what, lambda: str(publish(staging, step, manifest)) if rank == 0 else "")[0]
    except CheckpointError:
        if rank == 0:
            shutil.rmtree(staging, ignore_errors=True)
        raise
    together(what, lambda: prune(Path(path), keep, keep_every, written=Path(final)) if rank == 0 else None)
    return Path(final)


def _check_arguments(path: Any, step: Any, keep: Any, keep_every: Any) -> None:
    Path(path)
    for name, value, least in (("step", step, 0), ("keep", keep, 1), ("keep_every", keep_every, 1)):
        optional = name != "step" and value is None
        if not optional and (type(value) is not int or value < least):
            raise CheckpointError(f"expected {name} >= {least}{' or None' if least else ''}, found {value!r}")


# ------------------------------------------------------------ what ranks tell


def _told(flat: Flat, *, compare: bool) -> dict[str, Any]:
    tensors = {name: leaf for name, leaf in flat.leaves.items() if leaf.is_tensor}
    return {
        "tensors": {name: describe(leaf) for name, leaf in tensors.items()},
        "values": {n: to_json(n, leaf.value) for n, leaf in flat.leaves.items() if not leaf.is_tensor},
        "lists": flat.lists,
        "per_rank": flat.per_rank,
        "contents": {n: _content(leaf) for n, leaf in tensors.items() if compare and _is_plain(leaf)},
    }


def _is_plain(leaf: Leaf) -> bool:
    return not isinstance(leaf.value, DTensor) and not hasattr(leaf.value, "__create_write_items__")


def _content(leaf: Leaf) -> str:
    return f"a plain tensor of numbers {hashlib.sha256(as_bytes(leaf.value)).hexdigest()}"


_FIX = "Give the same on every rank"
_FIX_CONTENT = (
    "Make it equal (a tensor say by dist.broadcast from rank 0), or wrap it in"
    " shardwise.checkpoint.PerRank, which keeps every rank's own"
)
_KINDS = {"call": _FIX, "tensors": _FIX, "values": _FIX_CONTENT, "lists": _FIX, "contents": _FIX_CONTENT}


def _agreed(what: str, told: list[dict[str, Any]]) -> dict[str, Any]:
    """The manifest's contents over all ranks. Raises on every rank where they differ."""
    found = alike(what, told, _KINDS)
    mixed = sorted(set(found["tensors"]) & set(found["values"]))
    if mixed:
        raise CheckpointError(f"{what} failed: {mixed[0]}: a tensor on one rank, a plain value on another")
    per_rank = list(dict.fromkeys(name for tale in told for name in tale["per_rank"]))
    return {**{kind: found[kind] for kind in ("tensors", "values", "lists")}, "per_rank": per_rank}


# ------------------------------------------------------------ tensors


def _write_tensors(what: str, tensors: dict[str, Any], staging: Path) -> None:
    """All ranks' chunks in files, and the index. Collective."""
    rank, _ = rank_and_size()
    planner = _Planner()
    writer = _Writer(staging, sync_files=True)
    metadata: list[Metadata] = []

    def tell() -> list[Any]:
        planner.set_up_planner(tensors, is_coordinator=rank == 0)
        writer.set_up_storage_writer(rank == 0)
        return [_as_text(item) for item in planner.create_local_plan().items]

    items = together(what, tell)

    def write() -> list[Any]:
        plans, found = create_default_global_save_plan(_shared_out(items))
        _check_covered(found)
        by_name = {name: (name,) for name in found.state_dict_metadata}
        metadata.append(dataclasses.replace(found, planner_data=by_name))
        plan = planner.finish_plan(writer.prepare_global_plan(plans)[rank])
        written = writer.write_data(plan, planner)
        written.wait()
        return [_result_as_text(result) for result in written.value()]

    results = together(what, write)

    def finish() -> None:
        if rank == 0:
            writer.finish(metadata[0], [[_result_of(text) for text in told] for told in results])

    together(what, finish)


def _as_text(item: WriteItem) -> list[Any]:
    """What JSON can hold of a chunk to be written."""
    data = item.tensor_data
    assert data is not None
    dtype = str(data.properties.dtype).removeprefix("torch.")
    return [item.index.fqn, item.type.name, data.chunk.offsets, data.chunk.sizes, data.size, dtype]


def _item_of(text: list[Any]) -> WriteItem:
    name, kind, offsets, sizes, size, dtype = text
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    properties = TensorProperties(dtype=getattr(torch, dtype))
    data = TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(size))
    return WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType[kind], tensor_data=data)


def _shared_out(items: list[list[Any]]) -> list[SavePlan]:
    """Every rank's plan: of the ranks that have a chunk, the one with the fewest bytes so far writes it."""
    holders: dict[tuple[str, tuple[int, ...]], dict[int, WriteItem]] = {}
    for rank, own in enumerate(items):
        for item in map(_item_of, own):
            assert item.index.offset is not None
            holders.setdefault((item.index.fqn, tuple(item.index.offset)), {})[rank] = item
    plans: list[list[WriteItem]] = [[] for _ in items]
    written = [0] * len(items)
    for by_rank in holders.values():
        rank = min(by_rank, key=lambda rank: (written[rank], rank))
        data = by_rank[rank].tensor_data
        assert data is not None
        written[rank] += data.chunk.sizes.numel() * data.properties.dtype.itemsize
        plans[rank].append(by_rank[rank])
    return [SavePlan(plan) for plan in plans]


def _check_covered(metadata: Metadata) -> None:
    entry: Any
    for name, entry in metadata.state_dict_metadata.items():
        try:
            cover([Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks], entry.size)
        except ShardingError as error:
            raise CheckpointError(f"{name}: the ranks' shards are not the tensor: {error}") from error


def _result_as_text(result: WriteResult) -> list[Any]:
    place = result.storage_data
    return [result.index.fqn, result.index.offset, place.relative_path, place.offset, place.length]


def _result_of(text: list[Any]) -> WriteResult:
    name, offset, path, begin, length = text
    place = _compat.StorageInfo(relative_path=path, offset=begin, length=length)
    return WriteResult(MetadataIndex(name, offset), length, place)


class _Planner(DefaultSavePlanner):
    """Writes plain tensors as they are; refuses what could not be read again."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def transform_object(self, write_item: WriteItem, object: Any) -> Tensor:
        tensor = object.detach()
        if type(tensor) is not Tensor or tensor.layout != torch.strided:
            raise CheckpointError(
                f"{write_item.index.fqn}: a {type(tensor).__name__} of {tensor.layout} cannot be saved;"
                " convert it to a dense plain tensor"
            )
        plain: Tensor = tensor.resolve_conj().resolve_neg()
        return plain


class _Writer(FileSystemWriter):
    """Names what the system refused, which torch's own message buries."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except CheckpointError:
            raise
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
