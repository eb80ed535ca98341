"""The same tensors plain, as DTensors, sharded and in rows; checkpoints that one form saves, others load."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from sharded_tensor.covers import boxes
from sharded_tensor.rows import pieces
from shardwise.sharded_tensor import ShardedTensor, ShardingSpec

WHOLE = {
    "weight": torch.arange(35.0).view(7, 5),
    "bias": torch.arange(3.0).bfloat16(),
    "cube": torch.arange(24).view(2, 3, 4),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "one": torch.ones(1, 2, dtype=torch.bool),
    "none": torch.empty(0, 3),
}
CUTS: dict[str, pieces.Cut] = {cut.__name__: cut for cut in pieces.FOUR_RANKS}


def names(form: str) -> list[str]:
    """Of the tensors that this form can hold."""
    lacking = ["scalar"] if form in CUTS else []
    lacking += ["none"] if form in ("rowwise", "columnwise") else []
    return [name for name in WHOLE if name not in lacking]


def drawn_spec(shape: tuple[int, ...], seed: int) -> ShardingSpec:
    """Boxes anywhere, some empty, several on a rank; the last of several ranks has none."""
    return boxes(shape, random.Random(seed), cuts=7, ranks=range(max(1, dist.get_world_size() - 1)))


def sharded(whole: Tensor, seed: int) -> ShardedTensor:
    return drawn_spec(tuple(whole.shape), seed).shard(whole, src_rank=None)


def state(form: str, *, empty: bool, seed: int = 0) -> dict[str, Any]:
    """All tensors that this form can hold, in it: "plain", "dtensor", "sharded" or a cut of rows."""
    wholes = {name: torch.zeros_like(WHOLE[name]) if empty else WHOLE[name].clone() for name in names(form)}
    if form == "plain":
        return wholes
    if form == "dtensor":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        return {
            name: distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None) if whole.ndim else whole
            for name, whole in wholes.items()
        }
    if form in CUTS:
        return {name: pieces.sharded(whole, CUTS[form]) for name, whole in wholes.items()}
    return {name: sharded(whole, seed + i) for i, (name, whole) in enumerate(wholes.items())}


def check(found: dict[str, Any]) -> None:
    for name, value in found.items():
        whole = value.full_tensor() if isinstance(value, (DTensor, ShardedTensor)) else value
        assert torch.equal(whole, WHOLE[name]), name
        assert whole.dtype == WHOLE[name].dtype


def save(form: str, path: Path) -> None:
    dcp.save(state(form, empty=False), checkpoint_id=path)


def load(saved: str, path: Path, forms: Sequence[str]) -> None:
    """Load what the form `saved` has saved, in each of `forms`."""
    for seed, form in enumerate(forms):
        target = state(form, empty=True, seed=10 * seed)
        target = {name: value for name, value in target.items() if name in names(saved)}
        dcp.load(target, checkpoint_id=path)
        check(target)
