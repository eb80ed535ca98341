"""Boxes of a tensor out of safetensors files: which file has it, and what of it each rank needs."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.agree import fingerprint, together
from shardwise.errors import CheckpointError
from shardwise.files.stores import on_disk
from shardwise.files.tensors import StoredTensor, TensorFiles
from shardwise.layout import Box
from shardwise.sharded_tensor.group import cut_by, group_or_default
from shardwise.sharded_tensor.metadata import Shard, TensorProperties
from shardwise.sharded_tensor.move import describe
from shardwise.sharded_tensor.spec import ShardingSpec
from shardwise.sharded_tensor.tensor import ShardedTensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # dtypes that any copy knows
_Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@torch.no_grad()
def load_slices(
    path_or_paths: _Paths,
    name: str,
    sharding_spec: ShardingSpec,
    *,
    dtype: torch.dtype | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> ShardedTensor:
    """Load the tensor `name` of safetensors files, cut by `sharding_spec`; each rank reads only its boxes.

    Collective over the group: descriptions of what was read, no tensors.

    Args:
        path_or_paths: a file, files, an index (`*.safetensors.index.json`), or a folder with one or files.
        name: as the files have it.
        sharding_spec: where each shard goes.
        dtype: to convert to after reading; by default that of the file.
        process_group: the ranks that take part; by default all.

    Raises:
        CheckpointError: on every rank, naming the ranks: no such file or tensor (with names that are near), a
            damaged file, a spec that cannot cut the tensor, or files that differ between ranks.
    """
    group = group_or_default(process_group)
    what = f"loading {name}"
    made: list[ShardedTensor] = []

    def read() -> list[Any]:
        made.append(_read(_paths(path_or_paths), name, sharding_spec, dtype=dtype, group=group))
        metadata = made[0].metadata()
        return [list(metadata.size), str(metadata.tensor_properties.dtype), fingerprint(describe(metadata))]

    told = together(what, read, group=group)
    for rank, found in enumerate(told):
        if found != told[0]:
            raise CheckpointError(
                f"{what} failed: found {told[0][1]} {tuple(told[0][0])} in group rank 0's cut, but {found[1]}"
                f" {tuple(found[0])} on group rank {rank}, maybe in another cut; give all ranks the"
                " same files, spec and dtype"
            )
    return made[0]


def _read(
    paths: Sequence[Path],
    name: str,
    spec: ShardingSpec,
    *,
    dtype: torch.dtype | None,
    group: dist.ProcessGroup,
) -> ShardedTensor:
    with TensorFiles(paths) as files:
        stored = files.find(name)
        if stored is None:
            raise CheckpointError(_not_there(name, paths, list(files.known)))
        properties = TensorProperties(dtype=dtype or stored.dtype)
        metadata = cut_by(spec, stored.shape, properties, group)
        shards = []
        for place in metadata.held_by(dist.get_rank()):
            assert place.placement is not None
            found = _copied(stored, place.box)
            shards.append(Shard(found.to(place.placement.device(), properties.dtype), place))
    return ShardedTensor.wrap(shards, metadata, process_group=group, sharding_spec=spec)


def _copied(stored: StoredTensor, box: Box) -> Tensor:
    """Return the elements in `box`, in memory of their own."""
    if box.is_empty:
        return torch.empty(box.sizes, dtype=stored.dtype)
    bits = stored.read(box.offsets, box.ends).view(_BITS[stored.dtype.itemsize])
    return bits.clone(memory_format=torch.contiguous_format).view(stored.dtype)


def _paths(path_or_paths: _Paths) -> list[Path]:
    paths = [path_or_paths] if isinstance(path_or_paths, (str, os.PathLike)) else path_or_paths
    return [*map(on_disk, paths)]


def _not_there(name: str, paths: Sequence[Path], known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"near names: {', '.join(near)}" if near else f"it has {len(known)} others, such as {known[:3]}"
    return f"{name!r} is not in {', '.join(map(str, paths))}; {hint}"
