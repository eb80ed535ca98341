"""Sharded tensors in safetensors files: each rank reads and writes only its own boxes.

    8 bytes      length of the header, little-endian
    header       JSON: dtype, shape and place of every tensor; spaces up to a multiple of 8 bytes
    data         tensors one after the other, each row by row; wide dtypes first, so that all are aligned

To write, every rank describes its tensors, and all check all descriptions. These determine the header and the
place of each tensor, equally on every rank. One rank makes a file beside the requested one, with its header
and all its space reserved; every rank writes its boxes at their places; and one rename publishes the file. So
no rank ever holds a whole tensor, and a file with the requested name is always whole. All ranks must see the
same file system.

These files contain no code, only JSON and numbers, whoever wrote them.
"""

from __future__ import annotations

import difflib
import errno
import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.checkpoint.commit import rank_and_size
from shardwise.checkpoint.state import as_bytes, check_dense
from shardwise.comm.agree import each_its_own, fingerprint, merge_or_raise, together
from shardwise.errors import CheckpointError
from shardwise.files.stores import StrPath, on_disk, sync
from shardwise.files.tensors import DTYPES, NAMES, StoredTensor, TensorFiles
from shardwise.layout import Box
from shardwise.sharded_tensor.group import cut_by, group_or_default
from shardwise.sharded_tensor.kinds import to_sharded
from shardwise.sharded_tensor.metadata import Shard, TensorProperties
from shardwise.sharded_tensor.move import describe
from shardwise.sharded_tensor.spec import ShardingSpec
from shardwise.sharded_tensor.tensor import ShardedTensor

_HEADER_LIMIT = 100_000_000  # bytes that readers of the format accept


def save_slices(
    tensors: Mapping[str, ShardedTensor | Tensor], path: StrPath, *, metadata: Mapping[str, str] | None = None
) -> Path:
    """Write one safetensors file of whole tensors, each rank its own shards; return the path.

    Collective over the default process group: every rank calls it with the same path and metadata, and with
    every tensor of which it holds a shard. Without a process group, a single process saves. An older file is
    replaced in one step; if any rank fails, it stays unchanged, and nothing else is left.

    Args:
        tensors: tensors by name. A DTensor is saved as its shards; a plain tensor counts as replicated, and
            one rank's copy is saved.
        path: the file, on a file system that all ranks see; its folder must exist.
        metadata: texts for the file's header; some readers require `{"format": "pt"}`.

    Raises:
        CheckpointError: on every rank, with the problems of all: a dtype that the format does not support,
            ranks that disagree, a full disk.
    """
    operation = f"save_slices to {path}"
    path = each_its_own(operation, lambda: on_disk(path))
    local: dict[str, ShardedTensor | Tensor] = {}

    def tell() -> dict[str, Any]:
        local.update({name: _to_writable(name, tensor) for name, tensor in tensors.items()})
        call = {"path": str(path), "metadata": sorted(_check_metadata(metadata).items())}
        return {"call": call, "tensors": {name: _describe_tensor(tensor) for name, tensor in local.items()}}

    by_rank = together(operation, tell)
    facts = merge_or_raise(operation, by_rank, {"call": _FIX, "tensors": _FIX})["tensors"]
    rank, _ = rank_and_size()

    def check() -> _Plan:
        problems = []
        for name, tensor in local.items():
            if isinstance(tensor, ShardedTensor):
                holders = {shard.rank for shard in tensor.metadata().shards_metadata}
                if missing := sorted(holder for holder in holders if name not in by_rank[holder]["tensors"]):
                    problems.append(
                        f"{name}: ranks {missing} hold shards of it, but do not save it; pass it there too"
                    )
        if problems:
            raise CheckpointError("\n".join(problems))
        return _plan_file(facts, by_rank, metadata)

    plan = each_its_own(operation, check)
    staging = Path(together(operation, lambda: _create(path, plan) if rank == 0 else "")[0])
    try:
        together(operation, lambda: _write(staging, local, plan, rank))
        together(operation, lambda: _publish(staging, path) if rank == 0 else None)
    except CheckpointError:
        if rank == 0:
            staging.unlink(missing_ok=True)
        raise
    return path


def _to_writable(name: Any, tensor: Any) -> ShardedTensor | Tensor:
    if not isinstance(name, str) or name == "__metadata__":
        raise CheckpointError(
            f"expected a str other than '__metadata__' as a tensor's name, found {name!r}; rename it"
        )
    tensor = to_sharded(tensor, cast(dist.ProcessGroup, dist.group.WORLD))
    if not isinstance(tensor, Tensor):
        raise CheckpointError(
            f"{name}: expected a ShardedTensor, DTensor or plain dense tensor, found {type(tensor).__name__};"
            " convert it"
        )
    for part in tensor.tensors if isinstance(tensor, ShardedTensor) else [tensor]:
        check_dense(name, part)
    if tensor.dtype not in NAMES or (tensor.dtype == torch.float4_e2m1fn_x2 and not tensor.ndim):
        raise CheckpointError(
            f"{name}: safetensors cannot store {tensor.dtype} of {tensor.ndim} dims; convert it to one of"
            f" {', '.join(NAMES.values())}"
        )
    return tensor


def _check_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    texts = dict(metadata or {})
    wrong = [key for key, value in texts.items() if not (isinstance(key, str) and isinstance(value, str))]
    if wrong:
        raise CheckpointError(f"metadata must map str to str, found others at {wrong}; use str(...) or JSON")
    return texts


def _describe_tensor(tensor: ShardedTensor | Tensor) -> list[Any]:
    cut = "not sharded"
    if isinstance(tensor, ShardedTensor):
        cut = f"cut {fingerprint(describe(tensor.metadata())):x}"
    return [NAMES[tensor.dtype], list(tensor.shape), cut]


_FIX = "Give the same on every rank"


@dataclass(frozen=True)
class _Plan:
    header: bytes
    size: int  # in bytes
    places: dict[str, tuple[int, int]]  # begin, in bytes, and the rank that writes one not sharded


def _plan_file(
    facts: Mapping[str, list[Any]], by_rank: Sequence[dict[str, Any]], metadata: Mapping[str, str] | None
) -> _Plan:
    names = sorted(facts, key=lambda name: (-DTYPES[facts[name][0]].itemsize, name))
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    savers, begins, begin = dict[str, int](), dict[str, int](), 0
    for number, name in enumerate(names):
        dtype, shape, _ = facts[name]
        holders = [rank for rank, answer in enumerate(by_rank) if name in answer["tensors"]]
        end = begin + math.prod(shape) * DTYPES[dtype].itemsize
        stored_shape = [*shape[:-1], 2 * shape[-1]] if dtype == "F4" else shape
        entries[name] = {"dtype": dtype, "shape": stored_shape, "data_offsets": [begin, end]}
        begins[name], savers[name], begin = begin, holders[number % len(holders)], end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _HEADER_LIMIT:
        raise CheckpointError(
            f"a header of {len(text)} bytes; readers accept {_HEADER_LIMIT}. Save several files"
        )
    header = len(text).to_bytes(8, "little") + text
    return _Plan(header, len(header) + begin, {n: (len(header) + begins[n], savers[n]) for n in names})


def _create(path: Path, plan: _Plan) -> str:
    """Make a file beside `path` with header and reserved space, so that a full disk is found at once."""
    staging = path.with_name(f"{path.name}.tmp-{uuid4().hex[:6]}")
    with staging.open("xb", buffering=0) as file:
        try:
            _write_at(file.fileno(), memoryview(plan.header), 0)
            _reserve(file.fileno(), plan.size)
            os.fsync(file.fileno())
        except Exception:
            staging.unlink()
            raise
    return str(staging)


def _reserve(descriptor: int, size: int) -> None:
    """Reserve space for `size` bytes, if the file system can."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except AttributeError:  # not every system has it
        os.ftruncate(descriptor, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        os.ftruncate(descriptor, size)


@torch.no_grad()
def _write(staging: Path, local: Mapping[str, ShardedTensor | Tensor], plan: _Plan, rank: int) -> None:
    """Write this rank's boxes; they are on disk when this returns."""
    with staging.open("r+b", buffering=0) as file:
        for name, tensor in local.items():
            begin, writer = plan.places[name]
            if isinstance(tensor, ShardedTensor):
                for box, shard in zip(tensor.boxes, tensor.tensors, strict=True):
                    _write_box(file.fileno(), begin, tensor.shape, box, shard)
            elif writer == rank:
                _write_box(file.fileno(), begin, tensor.shape, Box.whole(tensor.shape), tensor)
        os.fsync(file.fileno())


def _write_box(descriptor: int, begin: int, shape: Sequence[int], box: Box, tensor: Tensor) -> None:
    """Write the elements of `box` of a tensor that begins there, in as few runs as the file allows."""
    if box.is_empty:
        return
    itemsize = tensor.element_size()
    content = as_bytes(tensor)
    strides = [math.prod(shape[dim + 1 :]) * itemsize for dim in range(len(shape))]
    whole_from = len(shape)  # the box has dims from here on whole
    while whole_from and box.sizes[whole_from - 1] == shape[whole_from - 1]:
        whole_from -= 1
    outer = max(0, whole_from - 1)
    run = math.prod(box.sizes[outer:]) * itemsize
    first = begin + sum(o * stride for o, stride in zip(box.offsets, strides, strict=True))
    for number, index in enumerate(itertools.product(*map(range, box.sizes[:outer]))):
        at = first + sum(i * stride for i, stride in zip(index, strides, strict=False))
        _write_at(descriptor, content[number * run : (number + 1) * run], at)


def _write_at(descriptor: int, content: memoryview, at: int) -> None:
    while content:
        count = os.pwrite(descriptor, content, at)
        content, at = content[count:], at + count


def _publish(staging: Path, path: Path) -> None:
    os.replace(staging, path)
    sync(path.parent)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # dtypes that every copy supports


@torch.no_grad()
def load_slices(
    path_or_paths: StrPath | Sequence[StrPath],
    name: str,
    sharding_spec: ShardingSpec,
    *,
    dtype: torch.dtype | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> ShardedTensor:
    """Load the tensor `name` of safetensors files, cut by `sharding_spec`; each rank reads only its boxes.

    Collective over the group: ranks exchange descriptions of what they read, no tensors.

    Args:
        path_or_paths: a file, several files, an index (`*.safetensors.index.json`), or a folder with an index
            or files.
        name: the tensor's name in the files.
        sharding_spec: where each shard is placed.
        dtype: the dtype to convert to after reading; by default that of the file.
        process_group: the ranks that take part; by default all.

    Raises:
        CheckpointError: on every rank, naming the ranks: no such file or tensor (near names are listed), a
            damaged file, a spec that cannot cut the tensor, or files that differ between ranks.
    """
    group = group_or_default(process_group)
    operation = f"load_slices of {name}"
    tensors: list[ShardedTensor] = []
    given = [path_or_paths] if isinstance(path_or_paths, (str, os.PathLike)) else path_or_paths

    def read() -> list[Any]:
        paths = [*map(on_disk, given)]
        with TensorFiles(paths) as files:
            if (stored := files.find(name)) is None:
                raise CheckpointError(_describe_missing(name, paths, list(files.known)))
            properties = TensorProperties(dtype=dtype or stored.dtype)
            metadata = cut_by(sharding_spec, stored.shape, properties, group)
            shards = []
            for place in metadata.held_by(dist.get_rank()):
                assert place.placement is not None
                copy = _copy_box(stored, place.box).to(place.placement.device(), properties.dtype)
                shards.append(Shard(copy, place))
        wrapped = ShardedTensor.wrap(shards, metadata, process_group=group, sharding_spec=sharding_spec)
        tensors.append(wrapped)
        return [list(metadata.size), str(metadata.tensor_properties.dtype), fingerprint(describe(metadata))]

    by_rank = together(operation, read, group=group)
    for rank, answer in enumerate(by_rank):
        if answer != by_rank[0]:
            raise CheckpointError(
                f"{operation} failed: ranks differ in dtype, shape or cut: group rank 0 has {by_rank[0][1]}"
                f" {tuple(by_rank[0][0])}, group rank {rank} has {answer[1]} {tuple(answer[0])}; give all"
                " ranks the same files, spec and dtype"
            )
    return tensors[0]


def _copy_box(stored: StoredTensor, box: Box) -> Tensor:
    if box.is_empty:
        return torch.empty(box.sizes, dtype=stored.dtype)
    bits = stored.read(box.offsets, box.ends).view(_BITS[stored.dtype.itemsize])
    return bits.clone(memory_format=torch.contiguous_format).view(stored.dtype)


def _describe_missing(name: str, paths: Sequence[Path], names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f"near names: {', '.join(near)}" if near else f"it has {len(names)} others, such as {names[:3]}"
    return f"{name!r} is not in {', '.join(map(str, paths))}; {hint}"
