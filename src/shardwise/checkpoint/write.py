"""Write a sharded state: each rank its own shards, in torch's distributed-checkpoint format.

    tell       every rank describes its state, as text; all check all descriptions
    plan       from the descriptions, so equally on every rank: which rank writes which chunk
    write      each rank writes its part: now, or from a copy while the run continues (`background.py`)
    commit     index, manifest, one rename (`commit.py`); then remove older checkpoints

A problem on one rank, such as a full disk, ends the save on every rank with the same error and leaves nothing
behind.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from torch import Tensor

from shardwise.checkpoint import commit
from shardwise.checkpoint.background import Saving, wait_for_saving
from shardwise.checkpoint.commit import FORMAT, check_count, rank_and_size
from shardwise.checkpoint.part import Part, stage, write_index, write_part, write_values
from shardwise.checkpoint.plan import Chunk, Held, Plan, held_chunks, plan
from shardwise.checkpoint.state import Flat, as_bytes, describe, flatten, to_json
from shardwise.comm.agree import each_its_own, merge_or_raise, together
from shardwise.errors import CheckpointError
from shardwise.files.stores import Location, StorePath, StrPath, location, write_whole

_MARK = "shared"  # exists until all ranks have seen it


def save(
    path: StrPath, state: dict[str, Any], *, step: int, keep: int | None = None, keep_every: int | None = None
) -> Location:
    """Save `state` as the checkpoint of `step` under `path`; returns its directory.

    Collective over the default process group: every rank calls it with the same path, step and
    structure. Without a process group, a single process saves.

    path: a folder that all ranks see, or an `fsspec` URL of one in a store, "s3://bucket/run". For a URL, the
        result has the URL as its text, and those methods of a `Path` that read.
    state: nested dicts and lists of tensors and plain values. A DTensor is saved as its shards;
        a plain tensor counts as replicated, and one rank's copy is saved. Mark values that differ
        between ranks by `PerRank`.
    step: 0 or more. Saving a step again replaces it atomically.
    keep: the number of newest steps to keep besides the one saved; None keeps all.
    keep_every: also keep multiples of this number, however old.

    Raises CheckpointError on every rank if any rank fails, or if plain values or plain tensors differ
    between ranks; earlier checkpoints are untouched.
    """
    rank, _ = rank_and_size()
    wait_for_saving()
    job = prepare_save("saving", path, state, step=step, keep=keep, keep_every=keep_every)
    with job.cleaning():
        parts = together(job.operation, lambda: write_part(job.staging, rank, job.local_chunks()))
        return location(together(job.operation, lambda: str(job.commit(parts)) if rank == 0 else "")[0])


def save_async(
    path: StrPath, state: dict[str, Any], *, step: int, keep: int | None = None, keep_every: int | None = None
) -> Saving:
    """Save as `save` does, but return once this rank's part is copied to CPU memory.

    A thread writes the copy while the run continues and changes `state`. One save is in flight at a time: the
    next waits for it. If it fails, the next save, load, `Saving.wait` or `StopSignals.asked` raises, on
    every rank. A process waits for it before it ends, unless it ends with an error.
    """
    wait_for_saving()
    job = prepare_save("save_async of", path, state, step=step, keep=keep, keep_every=keep_every)
    with job.cleaning():
        copies = each_its_own(job.operation, lambda: [(chunk, stage(t)) for chunk, t in job.local_chunks()])
    return Saving(job.operation, job.staging, copies, job.commit)


@dataclass(frozen=True)
class Job:
    """A save that all ranks have agreed on."""

    operation: str
    contents: dict[str, Any]  # the manifest's
    held: Held
    plan: Plan
    staging: Location
    step: int
    keep: int | None
    keep_every: int | None
    keeper: int  # the rank that makes and removes the folder

    def local_chunks(self) -> Iterator[tuple[Chunk, Tensor]]:
        """Yield the chunks that this rank writes, one by one."""
        for chunk in self.plan.of(rank_and_size()[0]):
            _, tensor = self.held[chunk[0], tuple(chunk[1])]
            yield chunk, tensor.detach().resolve_conj().resolve_neg()

    def index(self, parts: list[Part]) -> dict[str, Any]:
        """Write the index of all ranks' parts; return its digest, by name. One rank calls it."""
        return write_index(self.staging, self.plan.chunks, parts)

    def publish(self, parts: list[Part], index: dict[str, Any]) -> Location:
        """Make the folder a checkpoint, after index and parts are in it. One rank calls it."""
        _, size = rank_and_size()
        files = {name: digest for part in parts for name, digest in part["files"].items()} | index
        manifest = {"format": FORMAT, "step": self.step, "world_size": size, **self.contents, "files": files}
        return commit.publish(self.staging, self.step, manifest)

    def commit(self, parts: list[Part]) -> Location:
        """Make the checkpoint from all ranks' parts, and remove old ones. One rank calls it."""
        if self.contents["values"]:
            parts = [*parts, write_values(self.staging, self.contents["values"])]
        final = self.publish(parts, self.index(parts))
        commit.tidy(final.parent, self.keep, self.keep_every, written=final)
        if isinstance(final, Path):
            commit.unlock(final.parent)
        return final

    @contextmanager
    def cleaning(self) -> Iterator[None]:
        """Leave nothing behind if the save fails."""
        try:
            yield
        except CheckpointError:
            if rank_and_size()[0] == self.keeper:
                commit.discard(self.staging)
            raise


def prepare_save(
    call: str,
    path: StrPath,
    state: dict[str, Any],
    *,
    step: int,
    keep: int | None = None,
    keep_every: int | None = None,
    hosts: Sequence[int] | None = None,
    check_room: Callable[[Plan], None] = lambda plan: None,
) -> Job:
    """Agree on a save among all ranks, and make a folder to write in. Collective. Errors begin with `call`.

    `check_room` raises if this rank has no room for a plan. If `path` is not the same folder on all ranks,
    `hosts` has, by rank, the rank that makes its folder.
    """
    rank, size = rank_and_size()
    operation = f"{call} step {step} to {path}"
    held: list[Held] = []

    def tell() -> dict[str, Any]:
        location(path)
        check_count("step", step, 0)
        for name, value in (("keep", keep), ("keep_every", keep_every)):
            check_count(name, value, 1, optional=True)
        flat = flatten(state, rank=rank, ranks=size)
        tensors = {name: leaf.value for name, leaf in flat.leaves.items() if leaf.is_tensor}
        held.append(held_chunks(tensors))
        call: dict[str, Any] = {"step": step, "keep": keep, "keep_every": keep_every}
        call |= {"path": os.fspath(path)} if hosts is None else {}
        chunks = [chunk for chunk, _ in held[0].values()]
        return {"call": call, "chunks": chunks, **_describe_state(flat, compare=size > 1)}

    by_rank = together(operation, tell)
    contents = _merge_contents(operation, by_rank)
    keeper = hosts[rank] if hosts else 0
    plans: list[Plan] = []

    def make_room() -> str:
        plans.append(plan([entry["chunks"] for entry in by_rank]))
        check_room(plans[0])
        if rank != keeper:
            return ""
        folder = location(path)
        if isinstance(folder, Path) and hosts is None:
            folder.mkdir(parents=True, exist_ok=True)
            commit.lock(folder)
        opened.append(commit.open_staging(folder, step))
        if isinstance(opened[0], StorePath) and size > 1:
            write_whole(opened[0] / _MARK, b"")
        return str(opened[0])

    opened: list[Location] = []
    try:
        staging = location(together(operation, make_room)[keeper])
    except CheckpointError:
        for folder in opened:
            commit.discard(folder)
        raise
    if isinstance(staging, StorePath) and size > 1:
        _check_shared(operation, staging, is_keeper=rank == keeper)
    return Job(operation, contents, held[0], plans[0], staging, step, keep, keep_every, keeper)


def _check_shared(operation: str, staging: StorePath, *, is_keeper: bool) -> None:
    """Raise on every rank unless all see a file that rank 0 has written. Collective."""

    def check() -> None:
        if not (staging / _MARK).is_file():
            raise CheckpointError(
                f"{staging.parent}: this store is not shared by all ranks: a file that rank 0 wrote is not"
                " visible here. Give a store that all ranks reach"
            )

    try:
        together(operation, check)
    finally:
        if is_keeper:
            with suppress(Exception):  # a store that removes nothing keeps it
                (staging / _MARK).unlink()


# ------------------------------------------------------------ descriptions that ranks exchange


def _describe_state(flat: Flat, *, compare: bool) -> dict[str, Any]:
    tensors = {name: leaf for name, leaf in flat.leaves.items() if leaf.is_tensor}
    return {
        "tensors": {name: describe(leaf) for name, leaf in tensors.items()},
        "values": {
            # A list is filled in place, so a subclass stays what it is.
            name: to_json(name, [*leaf.value] if isinstance(leaf.value, list) else leaf.value)
            for name, leaf in flat.leaves.items()
            if not leaf.is_tensor
        },
        "lists": flat.lists,
        "per_rank": flat.per_rank,
        "contents": {
            name: f"a plain tensor of numbers {xxhash.xxh3_128_hexdigest(as_bytes(leaf.value))}"
            for name, leaf in tensors.items()
            if compare and leaf.is_plain
        },
    }


_FIX = "Give the same on every rank"
_FIX_CONTENT = (
    "Make it equal (a tensor say by dist.broadcast from rank 0), or wrap it in"
    " shardwise.checkpoint.PerRank, which keeps every rank's own"
)
_KINDS = {"call": _FIX, "tensors": _FIX, "values": _FIX_CONTENT, "lists": _FIX, "contents": _FIX_CONTENT}


def _merge_contents(operation: str, by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the manifest's contents over all ranks; raises if they differ."""
    merged = merge_or_raise(operation, by_rank, _KINDS)
    if mixed := sorted(set(merged["tensors"]) & set(merged["values"])):
        raise CheckpointError(
            f"{operation} failed: {mixed[0]}: a tensor on one rank, a plain value on another"
        )
    per_rank = list(dict.fromkeys(name for entry in by_rank for name in entry["per_rank"]))
    return {**{kind: merged[kind] for kind in ("tensors", "values", "lists")}, "per_rank": per_rank}
