"""Save a sharded transformers model as a folder that `from_pretrained` reads; each rank writes its shards.

The conversions of loading run in reverse on `Boxes`, so every tensor of the checkpoint records which boxes
of which parameters it consists of. Each rank writes the boxes that it holds. Only a tensor that a conversion
computes rather than moves is gathered, one at a time.

Everything is written to a temporary folder next to the destination, and one rename publishes it.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.checkpoint import save_slices
from shardwise.comm.agree import agree, each_its_own, together
from shardwise.errors import CheckpointError, ShardingError, from_extra, here
from shardwise.files.stores import StrPath, on_disk, sync
from shardwise.hf.adapters import adapters_in
from shardwise.hf.boxes import Boxes
from shardwise.hf.load import library
from shardwise.layout import Box
from shardwise.sharded_tensor.dtensor import of_boxes
from shardwise.sharded_tensor.group import group_or_default
from shardwise.sharded_tensor.kinds import to_sharded, whole_of
from shardwise.sharded_tensor.metadata import RemoteDevice
from shardwise.sharded_tensor.rows.piece import even_boxes
from shardwise.sharded_tensor.tensor import ShardedTensor


@torch.no_grad()
def save(model: nn.Module, path: StrPath, *, max_shard_size: int | str = "5GB") -> Path:
    """Write a sharded model's weights, config and generation config, and return the path.

    Collective over all ranks. Weights have the names and form of the checkpoint that the model came from, or
    of those that its family publishes. `from_pretrained` loads the same model, bit for bit.

    Args:
        model: a transformers model without adapters; merge them first with `hf.merge`.
        path: a path that all ranks see: new, or an empty folder. What appears there is always complete.
        max_shard_size: largest size of a file, in bytes or as "5GB"; several files get an index.

    Raises:
        CheckpointError: on every rank, if the path is taken, the size is invalid, the disk is full or
            adapters are not merged. Nothing is left at the path.
        RankMismatchError: if ranks pass different arguments.
    """
    operation = f"hf.save to {path}"
    path = each_its_own(operation, lambda: on_disk(path))
    agree(f"{operation} in files of {max_shard_size}", group=group_or_default(None), subject="what to save")

    def begin() -> str:
        if not isinstance(model, library().PreTrainedModel):
            raise ShardingError(
                f"{here()}: expected a model of transformers, found {type(model).__name__}; merge adapters"
                " first, with hf.merge"
            )
        if adapters := list(adapters_in(model)):
            names = ", ".join(adapters[:5]) + (", ..." if len(adapters) > 5 else "")
            raise ShardingError(
                f"{here()}: expected a model without adapters, found {names}; merge them first, with hf.merge"
            )
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise CheckpointError(f"{path} exists and is not empty; save to a new folder, or empty it")
        _assign_files({}, max_shard_size)  # raises if the size is invalid
        staging = path.with_name(f"{path.name}.tmp-{uuid4().hex[:6]}")
        if dist.get_rank() == 0:
            staging.mkdir(parents=True)
        return str(staging)

    staging = Path(together(operation, begin)[0])
    try:
        weights = _checkpoint_weights(model)
        index = _write(weights, staging, max_shard_size)
        together(operation, lambda: _publish(model, index, staging, path) if dist.get_rank() == 0 else None)
    except BaseException:
        if dist.get_rank() == 0:
            shutil.rmtree(staging, ignore_errors=True)
        raise
    return path


class _Parameter:
    """A parameter or buffer, as a source of saved tensors."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()

    def read(self, begins: Sequence[int], ends: Sequence[int]) -> Tensor:
        """Read from the gathered tensor, for a conversion that computes. Collective."""
        return whole_of(self.tensor)[tuple(map(slice, begins, ends))]

    @cached_property
    def sharded(self) -> ShardedTensor:
        return cast(ShardedTensor, to_sharded(self.tensor, cast(dist.ProcessGroup, dist.group.WORLD)))


def _checkpoint_weights(model: Any) -> dict[str, Boxes]:
    """Return the weights by their names in files; of weights that loading ties, only one."""
    tied, ignored = model.all_tied_weights_keys, model._keys_to_ignore_on_save or ()
    names: dict[int, str] = {}
    state = {n: t for n, t in model.state_dict(keep_vars=True).items() if n not in ignored}
    for name in sorted(state, key=lambda name: name in tied):
        names.setdefault(id(state[name]), name)
    unique = {n: t for n, t in state.items() if n not in tied or names[id(t)] == n}
    boxes = {name: Boxes.of(_Parameter(t), t.shape, t.dtype) for name, t in unique.items()}
    loading = from_extra("hf", "transformers.core_model_loading", feature="shardwise.hf")
    weights: dict[str, Boxes] = loading.revert_weight_conversion(model, boxes)
    return weights


def _write(weights: Mapping[str, Boxes], folder: Path, max_shard_size: int | str) -> dict[str, Any] | None:
    """Write the files, all ranks in parallel; return the index if there are several."""
    plan = _assign_files({name: tensor.like for name, tensor in weights.items()}, max_shard_size)
    for file, names in plan.filename_to_tensors.items():
        save_slices({n: _as_sharded(weights[n]) for n in names}, folder / file, metadata={"format": "pt"})
    return {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename} if plan.is_sharded else None


def _assign_files(tensors: Mapping[str, Tensor], max_shard_size: int | str) -> Any:
    return from_extra("hf", "huggingface_hub", feature="shardwise.hf").split_torch_state_dict_into_shards(
        dict(tensors), filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
    )


def _as_sharded(value: Boxes) -> ShardedTensor | Tensor:
    """Return a tensor of a file as the boxes that ranks hold."""
    sources = [piece.source for piece in value.pieces]
    tensors = [source.tensor for source in sources if isinstance(source, _Parameter)]
    if len(tensors) < len(sources) or not all(isinstance(tensor, DTensor) for tensor in tensors):
        return _cut_evenly(value)
    placed: list[tuple[Box, int]] = []
    shards: list[Tensor] = []
    for piece in value.pieces:
        sharded = cast(_Parameter, piece.source).sharded
        local = iter(sharded.tensors)
        for place in sharded.metadata().shards_metadata:
            rank = cast(RemoteDevice, place.placement).rank()
            shard = next(local) if rank == dist.get_rank() else None
            common = piece.source_box.intersect(place.box)
            if common is None:
                continue
            placed.append((piece.to_tensor_box(common), cast(int, rank)))
            if shard is not None:
                begins = [o - first for o, first in zip(common.offsets, place.box.offsets, strict=True)]
                ends = [begin + size for begin, size in zip(begins, common.sizes, strict=True)]
                shards.append(piece.arrange(shard[tuple(map(slice, begins, ends))]).to(value.dtype))
    group: Any = dist.group.WORLD
    return of_boxes(placed, shards, shape=value.shape, like=torch.empty(0, dtype=value.dtype), group=group)


def _cut_evenly(value: Boxes) -> ShardedTensor | Tensor:
    """Cut a value that is computed, or whole on every rank, evenly over the ranks. Collective."""
    full, group = value.read(), cast(dist.ProcessGroup, dist.group.WORLD)
    if not full.ndim:
        return full
    cuts = even_boxes(tuple(full.shape), group, 0)
    box = cuts[group.rank()]
    local = full[box.offsets[0] : box.ends[0]].clone()
    return of_boxes(
        zip(cuts, range(len(cuts)), strict=True), [local], shape=full.shape, like=local, group=group
    )


def _publish(model: Any, index: dict[str, Any] | None, staging: Path, path: Path) -> None:
    """Write the folder's remaining files and rename it. Called on one rank."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.save_pretrained(staging)
    if model.can_generate():
        model.generation_config.save_pretrained(staging)
    if index is not None:
        (staging / "model.safetensors.index.json").write_text(
            json.dumps(index, indent=2, sort_keys=True) + "\n"
        )
    for file in (*staging.iterdir(), staging):
        sync(file)
    os.rename(staging, path)
    sync(path.parent)
