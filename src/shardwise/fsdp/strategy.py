"""The table of what data parallelism shards over a mesh axis, which determines the collectives.

    row      parameters   gradients   optimizer state    communication on that axis, per step
    ddp      replicate    replicate   replicate          all-reduce gradients
    zero1    replicate    replicate   shard              all-reduce gradients, all-gather parameters once
    zero2    replicate    shard       shard              reduce-scatter gradients, all-gather once
    fsdp     shard        shard       shard              reduce-scatter, all-gather in forward and backward

Gradients in the table are the results of reductions. Where gradients are replicated but optimizer state is
sharded, a rank keeps its part.

A 1-D mesh takes one row. On a 2-D mesh (replicate, shard) the inner axis is `fsdp` and the outer takes one
of the others: `hsdp` is (ddp, fsdp), `hierarchical_fsdp` is (zero2, fsdp).

ZeRO's stages are described in Rajbhandari et al., 2020 (arXiv 1910.02054).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

from shardwise.errors import ShardingError, here
from shardwise.mesh import DataParallelMeshInfo, DDPMeshInfo, FSDPMeshInfo, HSDPMeshInfo

StrategyName = Literal["ddp", "zero1", "zero2", "fsdp", "hsdp", "hierarchical_fsdp"]


@dataclass(frozen=True)
class AxisPlacement:
    """One row of the table: whether each state is sharded over one mesh axis between its uses."""

    parameter: bool
    gradient: bool
    optimizer: bool


_R, _S = False, True  # replicate, shard
ROWS: dict[StrategyName, AxisPlacement] = {
    "ddp": AxisPlacement(_R, _R, _R),
    "zero1": AxisPlacement(_R, _R, _S),
    "zero2": AxisPlacement(_R, _S, _S),
    "fsdp": AxisPlacement(_S, _S, _S),
}
NAMED: dict[StrategyName, tuple[AxisPlacement | None, AxisPlacement]] = {
    **{name: (None, row) for name, row in ROWS.items()},
    "hsdp": (ROWS["ddp"], ROWS["fsdp"]),
    "hierarchical_fsdp": (ROWS["zero2"], ROWS["fsdp"]),
}


@dataclass(frozen=True)
class Strategy:
    """The rows of both axes; None where the mesh has no such axis."""

    replicate_axis: AxisPlacement | None
    shard_axis: AxisPlacement | None

    def __str__(self) -> str:
        names = {row: name for name, row in ROWS.items()}
        axes = (("replicate", self.replicate_axis), ("shard", self.shard_axis))
        return ", ".join(f"{names[row]} over the {axis} axis" for axis, row in axes if row is not None)


@cache
def _usual(replicates: bool, shards: bool) -> Strategy:
    return Strategy(ROWS["ddp"] if replicates else None, ROWS["fsdp"] if shards else None)


def checked_strategy(name: StrategyName, info: DataParallelMeshInfo, *, has_all: bool) -> StrategyName | None:
    """Return `name` if the layout has all strategies; None if it has only the usual one, and it is that."""
    if name in NAMED and name not in ("fsdp", "hsdp") and not has_all:
        raise ShardingError(
            f'{here()}: strategy={name!r} needs layout="contiguous"; the interleaved layout has fsdp (1-D'
            " meshes) and hsdp (2-D ones) only"
        )
    chosen = strategy_for(name, info)
    if has_all:
        return name
    if chosen != strategy_for(None, info):
        raise ShardingError(f"{here()}: strategy={name!r} needs a mesh with a shard axis, got replicas only")
    return None


def strategy_for(name: StrategyName | None, info: DataParallelMeshInfo) -> Strategy:
    """Return the named strategy on the axes of `info`; None: FSDP on a shard axis, DDP on a replicate one."""
    if name is None:
        return _usual(isinstance(info, DDPMeshInfo), isinstance(info, FSDPMeshInfo))
    if name not in NAMED:
        raise ShardingError(f"{here()}: strategy must be one of {', '.join(NAMED)}, got {name!r}")
    outer, inner = NAMED[name]
    if (outer is None) == isinstance(info, HSDPMeshInfo):
        dims = "1-D" if outer is None else "2-D (replicate, shard)"
        raise ShardingError(f"{here()}: strategy={name!r} needs a {dims} mesh, got {info.mesh}")
    # A mesh of replicas only has no shard axis: its one axis takes the row.
    if outer is None and not isinstance(info, FSDPMeshInfo):
        return Strategy(inner, None)
    return Strategy(outer, inner)
