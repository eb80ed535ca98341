"""Fills a program's shards from a checkpoint; each rank reads only its own parts.

    a mapping                          whole tensors by name, as `module.state_dict()`
    a .safetensors file                read by slices
    a folder of them                   by its index json if it has one, and only files of that folder; they
                                       are opened when needed
    several of these, as a list        such as the files of a folder of links
    a .pt, .pth or .bin file           a state dict from `torch.save`, mapped into memory and never executed
    a function                         takes a name; returns the whole's shape and a function that reads a
                                       part, or None

The program's record (`state.record_of`) says which parts a rank holds, so a loaded program is filled like a
new one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from shardwise.errors import CheckpointError
from shardwise.files.stores import on_disk
from shardwise.files.tensors import StoredTensor, TensorFiles
from shardwise.tensor_parallel.device import storage_device, wrap_like
from shardwise.tensor_parallel.placement import Split
from shardwise.tensor_parallel.state import placement_from_json, rank_intervals, record_of

Part = Callable[[int, int, int], Tensor]  # of a dim, from begin to end; all of it if the end is negative
Entry = tuple[Iterable[int], Part]  # the whole's shape, and its parts
Source = Callable[[str], Entry | None]
Checkpoint = Mapping[str, Tensor] | str | Path | Sequence[str | Path] | Source
_PICKLED = (".pt", ".pth", ".bin")


@torch.no_grad()
def materialize(
    program: ExportedProgram,
    checkpoint: Checkpoint,
    *,
    device: torch.device | str | None = None,
    rename: Callable[[str], str] | None = None,
    values: Mapping[str, Tensor] | None = None,
) -> ExportedProgram:
    """Fill one rank's program with its shards from a checkpoint of the whole model. Local.

    Args:
        program: from `tensor_parallel_transformation`, or loaded; changed in place.
        checkpoint: whole tensors, in one of the forms that the module docstring lists. Cast to the program's
            dtypes.
        device: where to put them; by default the device that the program was made for, if available.
        rename: maps a parameter's name to the checkpoint's; by default the same. For names that share a
            tensor, any one suffices.
        values: whole tensors that the checkpoint lacks, such as buffers not saved; they take precedence.

    Returns:
        `program`.

    Raises:
        ShardingError: a program that `tensor_parallel_transformation` did not make.
        CheckpointError: missing names or other shapes, all listed; the program is unchanged. Parameters
            and buffers that already have memory may be missing, and stay as they are.
    """
    record = record_of(program)
    device = device or storage_device(record.get("device", "cpu"))
    entries = record["parameters"]
    stored_names = {name: (rename or str)(name) for name in entries}
    shards: dict[str, Tensor] = {}
    mismatched, missing = [], []
    overrides = _in_memory(values or {})
    with _open_checkpoint(checkpoint) as source:
        for name, entry in entries.items():
            first = entry["tied"] or name
            if first in shards:
                shards[name] = shards[first]
                continue
            current = _store(program, name)[name]
            names = dict.fromkeys([name, *(x for x in entries if (entries[x]["tied"] or x) == first)])
            candidates = chain(map(overrides, names), (source(stored_names[x]) for x in names))
            stored = next(filter(None, candidates), None)
            if stored is None:
                if current.is_meta:
                    missing.append(name)
                continue
            shape, read = stored
            if list(shape) != entry["shape"]:
                mismatched.append(f"{name} has shape {tuple(shape)}, expected {tuple(entry['shape'])}")
                continue
            if not missing and not mismatched:
                cut = placement_from_json(entry["placement"])
                dim = cut.dim if isinstance(cut, Split) else 0
                intervals = rank_intervals(cut, record["rank"]) if isinstance(cut, Split) else ((0, -1),)
                parts = [read(dim, begin, end) for begin, end in intervals]
                shard = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
                local = shard.to(device=device, dtype=current.dtype, copy=True).contiguous()
                shards[name] = wrap_like(current, local)
    if missing or mismatched:
        subject = f"the checkpoint {checkpoint}" if not isinstance(checkpoint, Mapping) else "the checkpoint"
        texts = [f"{subject} does not match the program", *mismatched[:5]]
        if missing:
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            texts.append(
                f"it lacks {', '.join(missing[:5])}{more}; pass buffers that it does not store as values=,"
                " map names by rename="
            )
        raise CheckpointError("; ".join(texts))
    for name, tensor in shards.items():
        _store(program, name)[name] = tensor
    return program


def _store(program: ExportedProgram, name: str) -> dict[str, Any]:
    store: dict[str, Any] = program.state_dict if name in program.state_dict else program.constants
    return store


def _in_memory(tensors: Mapping[str, Tensor]) -> Source:
    def read(whole: Tensor, dim: int, begin: int, end: int) -> Tensor:
        return whole if end < 0 else whole.narrow(dim, begin, end - begin)

    return lambda name: (tensors[name].shape, partial(read, tensors[name])) if name in tensors else None


@contextmanager
def _open_checkpoint(checkpoint: Checkpoint) -> Iterator[Source]:
    """Open tensors by name; files stay open as long as the context lasts."""
    if callable(checkpoint):
        yield checkpoint
        return
    if isinstance(checkpoint, Mapping):
        yield _in_memory(checkpoint)
        return
    paths = [*map(on_disk, [checkpoint] if isinstance(checkpoint, (str, Path)) else checkpoint)]
    pickled = [path for path in paths if path.suffix in _PICKLED and path.is_file()]
    loaded = _in_memory({name: tensor for path in pickled for name, tensor in _map_file(path).items()})

    def read(stored: StoredTensor, dim: int, begin: int, end: int) -> Tensor:
        begins, ends = [0] * len(stored.shape), list(stored.shape)
        if end >= 0:
            begins[dim], ends[dim] = begin, end
        return stored.read(begins, ends)

    with TensorFiles(path for path in reversed(paths) if path not in pickled) as files:  # later ones count

        def find(name: str) -> Entry | None:
            entry = loaded(name)
            stored = None if entry else files.find(name)
            return entry if stored is None else (stored.shape, partial(read, stored))

        yield find


def _map_file(path: Path) -> Mapping[str, Tensor]:
    """Return the tensors that `torch.save` wrote, as views of the file."""
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a damaged file may raise anything
        raise CheckpointError(
            f"{path} is damaged, or not a state dict of tensors only: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"{path}: expected a state dict, found {type(loaded).__name__}")
    return {name: value for name, value in loaded.items() if isinstance(value, Tensor)}


def missing_weights(program: ExportedProgram) -> list[str]:
    """Return parameters, buffers and constants of `program` that have no memory yet."""
    stores = (program.state_dict, program.constants)
    return [name for store in stores for name, x in store.items() if isinstance(x, Tensor) and x.is_meta]
