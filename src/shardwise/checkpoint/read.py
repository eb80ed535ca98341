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
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
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
from shardwise.files.stores import Location, StrPath, location


def load(path: StrPath, state: dict[str, Any], *, step: int | None = None) -> int:
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
    operation = f"loading from {path}"
    wait_for_saving()

    def ask() -> dict[str, Any]:
        check_count("step", step, 0, optional=True)
        folders, torn = find(location(path), step) if rank == 0 else ([], "")
        return {"call": {"step": step}, "found": [str(folder) for folder in folders], "torn": torn}

    by_rank = together(operation, ask)
    merge_or_raise(operation, by_rank, {"call": "Load the same step on every rank"})
    if by_rank[0]["torn"]:
        warnings.warn(by_rank[0]["torn"], stacklevel=2)
    return fill(_open_newest(by_rank[0]["found"]), state)


def fill(checkpoint: Checkpoint, state: dict[str, Any]) -> int:
    """Load a checkpoint whose files are whole into `state`; return its step. Collective; raises as `load`."""
    operation = f"loading {checkpoint.folder}"
    checked: list[tuple[Flat, list[_Read]]] = []

    def check() -> tuple[str, list[str]]:
        flat, tensors = _match_leaves(checkpoint.manifest, state)
        checked.append((flat, _plan_reads(tensors, checkpoint.index)))
        return checkpoint.digest, [*flat.leaves, *flat.lists]

    by_rank = together(operation, check)
    raise_all(operation, _differences(by_rank, checkpoint.manifest))
    half = f"{operation}: the state is half written, load again; reading"
    with torch.no_grad():
        together(half, lambda: _write(*checked[0], checkpoint.manifest["values"]))
    return int(checkpoint.manifest["step"])


_FIX_NAMES = "Load into a state made of the same parts as the one saved"
_Read = tuple[Location, Stored, Sequence[int], Tensor]  # file, chunk, offsets within it, memory to fill


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files all exist, unchanged since they were written."""

    folder: Location
    manifest: dict[str, Any]
    digest: str  # of the manifest
    index: Index


def _write(flat: Flat, reads: list[_Read], values: Mapping[str, Any]) -> None:
    if any(target.is_cpu and target.is_pinned() for *_, target in reads):
        torch.accelerator.synchronize()  # copies from it to the device, for gathers, that nothing waited for
    for path, file_reads in itertools.groupby(reads, key=itemgetter(0)):
        with path.open("rb") as file:
            for _, stored, offsets, target in file_reads:
                stored.read(file, offsets, target)
    for name, leaf in flat.leaves.items():
        if not leaf.is_tensor:
            leaf.put(from_json(values[name]))
    for leaf in flat.absent:
        del leaf.container[leaf.key]


def _open_newest(folders: Sequence[str]) -> Checkpoint:
    """Return the first of `folders` that is whole. Collective."""
    damaged: list[str] = []
    for folder in folders:
        try:
            path = location(folder)
            checkpoint = each_its_own(f"loading {path}", lambda: open_checkpoint(path, _check_files))  # noqa: B023
        except CheckpointError as error:
            damaged.append(str(error))
            continue
        for problem in damaged:
            warnings.warn(f"{problem}\nContinuing from {folder} instead", stacklevel=3)
        return checkpoint
    raise CheckpointError("\n".join(damaged))


def open_checkpoint(folder: Location, check: Callable[[Any, Mapping[str, Any]], object]) -> Checkpoint:
    """Read a checkpoint's manifest and index, after `check` has passed its files. Local."""
    manifest = manifest_of(folder)
    sha256 = digest(folder / MANIFEST)["sha256"]
    check(folder, manifest["files"])
    return Checkpoint(folder, manifest, sha256, read_index(folder, manifest["tensors"], manifest["files"]))


def files_for(checkpoint: Checkpoint, state: dict[str, Any]) -> list[str]:
    """Return the names of the files from which this rank's state is filled. Local; raises as `load`."""
    _, tensors = _match_leaves(checkpoint.manifest, state)
    items = create_default_local_load_plan(tensors, checkpoint.index.metadata).items
    keys = [(item.storage_index.fqn, tuple(item.storage_index.offset or ())) for item in items]
    return sorted({checkpoint.index.places[key].file.name for key in keys})


def _match_leaves(manifest: Mapping[str, Any], state: dict[str, Any]) -> tuple[Flat, dict[str, Any]]:
    """Return the state's leaves, all of which the checkpoint has alike, and the tensors among them."""
    rank, size = rank_and_size()
    flat = flatten(state, rank=rank, ranks=size)
    saved_names = [name for kind in ("tensors", "values", "lists") for name in manifest[kind]]
    for name in flat.optional:
        entry = f"{name}.rank-{rank}-of-{size}"
        if not any(saved == entry or saved.startswith(f"{entry}.") for saved in saved_names):
            flat.leave_out(f"{name}.rank-")
    params = _params_of_optimizers(manifest)
    for prefix, optimizer in flat.optimizers.items():
        for name in _stateless(f"{prefix}state.", optimizer["state"], params.get(prefix, set()), manifest):
            flat.leave_out(f"{prefix}state.{name}.")
            flat.absent.append(Leaf(optimizer["state"], name))
    kinds = {name: kind for kind in ("lists", "tensors", "values") for name in manifest[kind]}
    problems = [
        *(_list_problem(name, length, manifest) for name, length in flat.lists.items()),
        *(_leaf_problem(name, leaf, kinds.get(name), manifest) for name, leaf in flat.leaves.items()),
    ]
    if any(problems):
        raise CheckpointError("\n".join(filter(None, problems)))
    return flat, {name: leaf.value for name, leaf in flat.leaves.items() if leaf.is_tensor}


def _params_of_optimizers(manifest: Mapping[str, Any]) -> dict[str, set[int | str]]:
    """Return the names of each saved optimizer's parameters, by the prefix of its state's names."""
    by_prefix: dict[str, set[int | str]] = {}
    for name, value in manifest["values"].items():
        prefix, separator, rest = name.rpartition("param_groups")
        if not separator or (prefix and not prefix.endswith(".")):
            continue
        lists: list[Any] = []
        if rest.endswith(".params"):
            lists = [from_json(value)]
        elif not rest and isinstance(groups := from_json(value), list):
            lists = [group.get("params") for group in groups if isinstance(group, dict)]
        params = (param for names in lists if isinstance(names, list) for param in names)
        by_prefix.setdefault(prefix, set()).update(param for param in params if isinstance(param, (int, str)))
    return by_prefix


def _stateless(
    prefix: str, state: Mapping[Any, Any], params: set[int | str], manifest: Mapping[str, Any]
) -> list[Any]:
    """Return the parameters in `state` for which the saved optimizer, over `params`, had none, if others had.

    They had no gradient yet, which a new optimizer, whose state lists all, cannot know.
    """
    names = [name for name in (*manifest["tensors"], *manifest["values"]) if name.startswith(prefix)]
    saved = {entry for name in names for entry in (name, *_parents(name))}
    if not saved:
        return []
    return [name for name, own in state.items() if own and name in params and f"{prefix}{name}" not in saved]


def _differences(by_rank: list[Any], manifest: Mapping[str, Any]) -> dict[int, str | None]:
    """Return errors, by rank, for entries that only the checkpoint has; the same on every rank."""
    rank = next((rank for rank, (sha256, _) in enumerate(by_rank) if sha256 != by_rank[0][0]), None)
    if rank is not None:
        return {rank: "found another checkpoint here than rank 0; PATH is a file system that all ranks see"}
    _, size = rank_and_size()
    state_names = {name for _, names in by_rank for name in names}
    prefixes = tuple(f"{name}.rank-" for name in manifest["per_rank"] if manifest["world_size"] != size)
    unexpected = [
        name
        for kind in ("tensors", "values", "lists")
        for name in manifest[kind]
        if name not in state_names and not name.startswith(prefixes)
    ]
    if not unexpected:
        return {}
    state_parents = {parent for name in state_names for parent in _parents(name)}
    trained = {
        f"{prefix}state.{param}": f": where {param} is frozen, build the optimizer over it and load first,"
        " then freeze it"
        for prefix, params in _params_of_optimizers(manifest).items()
        if f"{prefix}state" in state_parents
        for param in params
        if f"{prefix}state.{param}" not in state_parents
    }
    lines = [
        f"{name}: in the checkpoint, expected by no rank. {_FIX_NAMES}"
        + next((trained[parent] for parent in _parents(name) if parent in trained), "")
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


def _list_problem(name: str, length: int, manifest: Mapping[str, Any]) -> str:
    saved_length = manifest["lists"].get(name)
    if saved_length == length:
        return ""
    which = "a list without tensors or none" if saved_length is None else f"one of {saved_length}"
    return (
        f"{name}: expected a list of {length} with tensors, found {which}. Make it as long as the one saved"
    )


def _leaf_problem(name: str, leaf: Leaf, saved_kind: str | None, manifest: Mapping[str, Any]) -> str:
    kind = "tensors" if leaf.is_tensor else "values"
    if saved_kind == "lists":
        return (
            f"{name}: expected one of the {kind}, found a list of {manifest['lists'][name]} with"
            " tensors. Give a list of tensors like them"
        )
    if saved_kind is not None and saved_kind != kind:
        return f"{name}: expected one of the {kind}, found among the checkpoint's {saved_kind}. {_FIX_NAMES}"
    if saved_kind is None:
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
        return (
            f"{name}: expected {_show(expected)}, found {_show(stored)}. Build the model with the"
            " sizes and dtypes it was saved with"
        )
    return ""


def _show(tensor: dict[str, Any]) -> str:
    return f"{tensor['dtype']} {tuple(tensor['shape'])}"


def _plan_reads(tensors: dict[str, Any], index: Index) -> list[_Read]:
    """List this rank's reads for `tensors`, each chunk checked in its file; sorted by file and place."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(tensors, index.metadata)
    reads: list[_Read] = []
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
            reads.append((place.file, located[key], item.storage_offsets, target))
    return sorted(reads, key=lambda read: (str(read[0]), read[1].begin))


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
