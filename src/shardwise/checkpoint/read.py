"""Read a checkpoint into an existing state, whatever number of ranks wrote it.

    verify    on every rank: the manifest, every file's bytes (each rank hashes its part), the index, every
              name, shape and dtype, and the dtype, shape and place of every chunk that this rank is to read
    write     only then: bytes into tensors, values into the state

An error on any rank raises on all, before anything is written. Files are read only as text and numbers, and
never cause larger allocations than the files' own size.

Trust: a checkpoint may come from elsewhere. Nothing in it is executed, and no file outside its folder is
read. The manifest's digests guard against damage; they do not show who wrote the checkpoint.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem

from shardwise.checkpoint.background import wait_for_saving
from shardwise.checkpoint.commit import check_count, find, manifest_of, rank_and_size
from shardwise.checkpoint.index import Index, read_index
from shardwise.checkpoint.state import Flat, Leaf, check_dense, describe, flatten, from_json
from shardwise.checkpoint.stored import Stored, locate
from shardwise.comm.agree import each_its_own, merge_or_raise, raise_all, together
from shardwise.errors import CheckpointError
from shardwise.files.manifest import MANIFEST, digest, inside, regular, whole_file
from shardwise.files.stores import Location, location


def load(path: str | os.PathLike[str], state: dict[str, Any], *, step: int | None = None) -> int:
    """Load a checkpoint's content into `state`, in place; returns its step.

    Collective over the default process group; the number of ranks, the mesh and the placements
    may differ from those of the save. Tensors are copied into the state's tensors, so shapes
    (of whole tensors) and dtypes must be equal; plain values replace the state's. Each rank finds
    its own values in `PerRank`s, if the number of ranks is the same.

    path: a folder, or an `fsspec` URL.
    step: which checkpoint under `path`; None takes the newest whole one, with a warning on every
        rank about each newer one that is damaged.

    Raises CheckpointError on every rank, with the state untouched, if a file is missing or
    damaged on disk, or if the names, shapes or dtypes of state and checkpoint differ. If another
    run saves to `path` with `keep`, files may disappear while they are read: the error then says
    whether the state is half written. Load again, or load a step that stays.
    """
    rank, _ = rank_and_size()
    what = f"loading from {path}"
    wait_for_saving()

    def ask() -> dict[str, Any]:
        check_count("step", step, 0, optional=True)
        found, torn = find(location(path), step) if rank == 0 else ([], "")
        return {"call": {"step": step}, "found": [str(folder) for folder in found], "torn": torn}

    asked = together(what, ask)
    merge_or_raise(what, asked, {"call": "Load the same step on every rank"})
    if asked[0]["torn"]:
        warnings.warn(asked[0]["torn"], stacklevel=2)
    return fill(_newest_whole(asked[0]["found"]), state)


def fill(whole: Whole, state: dict[str, Any]) -> int:
    """Load a checkpoint whose files are whole into `state`; return its step. Collective; raises as `load`."""
    what = f"loading {whole.folder}"
    checked: list[tuple[Flat, list[_Read]]] = []

    def check() -> tuple[str, list[str]]:
        flat, tensors = _fitting(whole.manifest, state)
        checked.append((flat, _reads(tensors, whole.index)))
        return whole.digest, [*flat.leaves, *flat.lists]

    by_rank = together(what, check)
    raise_all(what, _differences(by_rank, whole.manifest))
    half = f"{what}: the state is half written, load again; reading"
    with torch.no_grad():
        together(half, lambda: _write(*checked[0], whole.manifest["values"]))
    return int(whole.manifest["step"])


_FIX_NAMES = "Load into a state made of the same parts as the one saved"
_FIX_FROZEN = "build the optimizer over it and load first, then freeze it"
_FIX_SHAPE = "Build the model with the sizes and dtypes it was saved with"


@dataclass(frozen=True)
class _Read:
    """A box of a chunk in a file, and the memory to read it into."""

    file: Location
    stored: Stored
    offsets: Sequence[int]
    target: Tensor


@dataclass(frozen=True)
class Whole:
    """A checkpoint whose files all exist, unchanged since they were written."""

    folder: Location
    manifest: dict[str, Any]
    digest: str  # of the manifest
    index: Index


def _write(flat: Flat, reads: list[_Read], values: Mapping[str, Any]) -> None:
    for path, those in itertools.groupby(reads, key=lambda read: read.file):
        with path.open("rb") as file:
            for read in those:
                read.stored.read(file, read.offsets, read.target)
    for name, leaf in flat.leaves.items():
        if not leaf.is_tensor:
            leaf.put(from_json(values[name]))
    for leaf in flat.absent:
        del leaf.container[leaf.key]


def _newest_whole(folders: Sequence[str]) -> Whole:
    """Return the first of `folders` that is whole. Collective."""
    damaged: list[str] = []
    for folder in folders:
        try:
            at = location(folder)
            found = each_its_own(f"loading {at}", lambda: open_checkpoint(at, _check_files))  # noqa: B023
        except CheckpointError as error:
            damaged.append(str(error))
            continue
        for problem in damaged:
            warnings.warn(f"{problem}\nContinuing from {folder} instead", stacklevel=3)
        return found
    raise CheckpointError("\n".join(damaged))


def open_checkpoint(folder: Location, check: Callable[[Any, Mapping[str, dict[str, Any]]], object]) -> Whole:
    """Read a checkpoint's manifest and index, after `check` has passed its files. Local."""
    manifest = manifest_of(folder)
    own = digest(folder / MANIFEST)["sha256"]
    check(folder, manifest["files"])
    return Whole(folder, manifest, own, read_index(folder, manifest["tensors"], manifest["files"]))


def files_for(whole: Whole, state: dict[str, Any]) -> list[str]:
    """Return the names of the files from which this rank's state is filled. Local; raises as `load`."""
    _, tensors = _fitting(whole.manifest, state)
    items = create_default_local_load_plan(tensors, whole.index.metadata).items
    keys = [(item.storage_index.fqn, tuple(item.storage_index.offset or ())) for item in items]
    return sorted({whole.index.places[key].file.name for key in keys})


def _fitting(manifest: Mapping[str, Any], state: dict[str, Any]) -> tuple[Flat, dict[str, Any]]:
    """Return the state's leaves, all of which the checkpoint has, and the tensors among them."""
    rank, size = rank_and_size()
    flat = flatten(state, rank=rank, ranks=size)
    saved = [name for kind in ("tensors", "values", "lists") for name in manifest[kind]]
    for name in flat.optional:
        own = f"{name}.rank-{rank}-of-{size}"
        if not any(each == own or each.startswith(f"{own}.") for each in saved):
            flat.leave_out(f"{name}.rank-")
    params = _params_of_optimizers(manifest)
    for begin, optimizer in flat.optimizers.items():
        for name in _stateless(f"{begin}state.", optimizer["state"], params.get(begin, set()), manifest):
            flat.leave_out(f"{begin}state.{name}.")
            flat.absent.append(Leaf(optimizer["state"], name))
    _check_leaves(flat, manifest)
    return flat, {name: leaf.value for name, leaf in flat.leaves.items() if leaf.is_tensor}


def _params_of_optimizers(manifest: Mapping[str, Any]) -> dict[str, set[int | str]]:
    """Return the names of each saved optimizer's parameters, by the prefix of its state's names."""
    found: dict[str, set[int | str]] = {}
    for name, value in manifest["values"].items():
        begin, groups, rest = name.rpartition("param_groups")
        if not groups or (begin and not begin.endswith(".")):
            continue
        known: list[Any] = []
        if rest.endswith(".params"):
            known = [from_json(value)]
        elif not rest and isinstance(saved := from_json(value), list):
            known = [group.get("params") for group in saved if isinstance(group, dict)]
        named = (each for own in known if isinstance(own, list) for each in own)
        found.setdefault(begin, set()).update(each for each in named if isinstance(each, (int, str)))
    return found


def _stateless(
    begin: str, state: Mapping[Any, Any], params: set[int | str], manifest: Mapping[str, Any]
) -> list[Any]:
    """Return the parameters in `state` for which the saved optimizer, over `params`, had no state.

    They had no gradient yet, which a new optimizer, whose state lists all, cannot know. Returns none if the
    saved optimizer had no state at all.
    """
    known = [name for name in (*manifest["tensors"], *manifest["values"]) if name.startswith(begin)]
    saved = {each for name in known for each in (name, *_parents(name))}
    if not saved:
        return []
    return [name for name, own in state.items() if own and name in params and f"{begin}{name}" not in saved]


def _differences(by_rank: list[Any], manifest: Mapping[str, Any]) -> dict[int, str | None]:
    """Return errors, by rank, for entries that only the checkpoint has; the same on every rank."""
    other = next((rank for rank, (own, _) in enumerate(by_rank) if own != by_rank[0][0]), None)
    if other is not None:
        return {other: "found another checkpoint here than rank 0; PATH is a file system that all ranks see"}
    _, size = rank_and_size()
    known = {name for _, names in by_rank for name in names}
    left_out = tuple(f"{name}.rank-" for name in manifest["per_rank"] if manifest["world_size"] != size)
    unexpected = [
        name
        for kind in ("tensors", "values", "lists")
        for name in manifest[kind]
        if name not in known and not name.startswith(left_out)
    ]
    if not unexpected:
        return {}
    expected = {each for name in known for each in _parents(name)}
    trained = {
        f"{begin}state.{param}": f": where {param} is frozen, {_FIX_FROZEN}"
        for begin, params in _params_of_optimizers(manifest).items()
        if f"{begin}state" in expected
        for param in params
        if f"{begin}state.{param}" not in expected
    }
    lines = [
        f"{name}: in the checkpoint, expected by no rank. {_FIX_NAMES}"
        + next((trained[each] for each in _parents(name) if each in trained), "")
        for name in unexpected
    ]
    return {0: "\n".join(lines)}


def _parents(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _check_files(folder: Location, files: Mapping[str, dict[str, Any]]) -> None:
    """Check that all files are inside the folder, and that this rank's part of them is unchanged."""
    rank, size = rank_and_size()
    problems = []
    for number, name in enumerate(sorted(files)):
        try:
            inside(folder, name)
            if number % size == rank:
                whole_file(folder, name, files[name])
        except CheckpointError as error:
            problems.append(f"{error}. Load another step")
    if problems:
        raise CheckpointError("\n".join(problems))


def _check_leaves(flat: Flat, manifest: Mapping[str, Any]) -> None:
    """Check that every entry of this rank's state is in the checkpoint, of equal kind, shape and dtype."""
    found = {name: kind for kind in ("lists", "tensors", "values") for name in manifest[kind]}
    problems = [
        *(_wrong_list(name, length, manifest) for name, length in flat.lists.items()),
        *(_wrong_leaf(name, leaf, found.get(name), manifest) for name, leaf in flat.leaves.items()),
    ]
    if any(problems):
        raise CheckpointError("\n".join(filter(None, problems)))


def _wrong_list(name: str, length: int, manifest: Mapping[str, Any]) -> str:
    found = manifest["lists"].get(name)
    if found == length:
        return ""
    which = "a list without tensors or none" if found is None else f"one of {found}"
    return (
        f"{name}: expected a list of {length} with tensors, found {which}. Make it as long as the one saved"
    )


def _wrong_leaf(name: str, leaf: Leaf, found: str | None, manifest: Mapping[str, Any]) -> str:
    kind = "tensors" if leaf.is_tensor else "values"
    if found == "lists":
        return (
            f"{name}: expected one of the {kind}, found a list of {manifest['lists'][name]} with"
            " tensors. Give a list of tensors like them"
        )
    if found is not None and found != kind:
        return f"{name}: expected one of the {kind}, found among the checkpoint's {found}. {_FIX_NAMES}"
    if found is None:
        own = next((own for own in manifest["per_rank"] if name.startswith(f"{own}.rank-")), None)
        if own is not None:
            return (
                f"{own}: saved once for each of {manifest['world_size']} ranks, of which none is this one."
                " Load on as many ranks with the same parts in it, or leave it out of the state"
            )
        return f"{name}: expected by the state, not in the checkpoint. {_FIX_NAMES}"
    if not leaf.is_tensor:
        return ""
    expected, stored = describe(leaf), manifest["tensors"][name]
    if expected != stored:
        return f"{name}: expected {_show(expected)}, found {_show(stored)}. {_FIX_SHAPE}"
    return ""


def _show(tensor: dict[str, Any]) -> str:
    return f"{tensor['dtype']} {tuple(tensor['shape'])}"


def _reads(tensors: dict[str, Any], index: Index) -> list[_Read]:
    """List what this rank reads for `tensors`, each chunk checked in its file; sorted by file and place."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(tensors, index.metadata)
    found: list[_Read] = []
    with ExitStack() as stack:
        opened = cache(lambda file: stack.enter_context(regular(file).open("rb")))
        located: dict[MetadataIndex, Stored] = {}
        for item in create_default_local_load_plan(tensors, index.metadata).items:
            key = item.storage_index
            name, offsets = key.fqn, tuple(key.offset or ())
            place = index.places[name, offsets]
            target = planner.resolve_tensor(item).detach()
            check_dense(name, target)
            try:
                if key not in located:
                    located[key] = locate(opened(place.file), place.begin, place.length)
                    _check_stored(located[key], index, key)
                _check_target(target, located[key], item)
            except CheckpointError as error:
                raise CheckpointError(f"{name}: {place.file} at {place.begin}: {error}") from error
            found.append(_Read(place.file, located[key], item.storage_offsets, target))
    return sorted(found, key=lambda read: (str(read.file), read.stored.begin))


def _check_stored(stored: Stored, index: Index, key: MetadataIndex) -> None:
    entry: Any = index.metadata.state_dict_metadata[key.fqn]
    sizes = next(tuple(chunk.sizes) for chunk in entry.chunks if chunk.offsets == key.offset)
    if (stored.dtype, stored.shape) != (entry.properties.dtype, sizes):
        raise CheckpointError(
            f"expected a chunk of {entry.properties.dtype} {sizes}, found {stored.dtype} {stored.shape}. Load"
            " another step"
        )


def _check_target(target: Tensor, stored: Stored, item: ReadItem) -> None:
    if target.dtype != stored.dtype or tuple(target.shape) != tuple(item.lengths):
        raise CheckpointError(
            f"expected memory for {stored.dtype} {tuple(item.lengths)}, found {target.dtype}"
            f" {tuple(target.shape)}"
        )
    if _overlaps(target):
        raise CheckpointError("elements of the state's tensor share memory; clone it")
    if target.is_inference() and not torch.is_inference_mode_enabled():
        raise CheckpointError("the state's tensor was made in inference mode; clone it, or load in that mode")


def _overlaps(tensor: Tensor) -> bool:
    """Return whether elements of a tensor may overlap: some stride is within the reach of smaller ones."""
    reached = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reached:
            return True
        reached += (size - 1) * stride
    return False
