"""The mesh axes of data parallelism: the shard axis, the replicate axis, or both.

    1-D mesh                       FSDPMeshInfo    shard over the axis
    2-D mesh                       HSDPMeshInfo    replicate over axis 0, shard over axis 1
    larger mesh and named dims     as `DataParallelMeshDims` says; several names are flattened
                                   into one axis

Creating an info takes process groups from the mesh without communication, except that flattening
several named dims creates a group (collective over the whole mesh).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise import _compat
from shardwise.errors import ShardingError, here

MeshDimNames = str | tuple[str, ...] | None
Axis = int | None


@dataclass
class DataParallelMeshDims:
    """Names of the dims of a larger mesh that are data parallel.

    Attributes:
        shard: dim or dims to shard parameters over.
        replicate: dim or dims to replicate over. At least one of the two must be set.
    """

    shard: MeshDimNames = None
    replicate: MeshDimNames = None

    def __post_init__(self) -> None:
        if not self.shard_names and not self.replicate_names:
            raise ShardingError("DataParallelMeshDims: set at least one of shard and replicate")

    @property
    def shard_names(self) -> tuple[str, ...]:
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        return _names(self.replicate)


def _names(names: MeshDimNames) -> tuple[str, ...]:
    if names is None:
        return ()
    return (names,) if isinstance(names, str) else tuple(names)


@dataclass
class DataParallelMeshInfo:
    """The data-parallel mesh, and which of its dims shard and replicate.

    Attributes:
        mesh: 1-D or 2-D mesh of the data-parallel ranks.
        shard_mesh_dim: its dim to shard over, if any.
        replicate_mesh_dim: its dim to replicate over, if any.
        dp_mesh_dims: the names by which the dims were picked from `spmd_mesh`.
        spmd_mesh: the larger mesh on which the parameters already are DTensors.
    """

    mesh: DeviceMesh
    shard_mesh_dim: Axis = None
    replicate_mesh_dim: Axis = None
    dp_mesh_dims: DataParallelMeshDims | None = None
    spmd_mesh: DeviceMesh | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.shard_mesh_dim is None and self.replicate_mesh_dim is None:
            raise ShardingError(f"{type(self).__name__}: set shard_mesh_dim, replicate_mesh_dim, or both")

    @property
    def is_spmd_mesh(self) -> bool:
        return self.dp_mesh_dims is not None

    @cached_property
    def mesh_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Process groups of `mesh`, by axis. Looked up by name, which is slow."""
        return tuple(self.mesh.get_group(axis) for axis in range(self.mesh.ndim))

    @cached_property
    def process_groups(self) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
        """The groups to shard over and to replicate over; None where there is no such axis."""
        return (
            self.shard_process_group if isinstance(self, FSDPMeshInfo) else None,
            self.replicate_process_group if isinstance(self, DDPMeshInfo) else None,
        )

    def require(self, axis: Axis, kind: str) -> int:
        """Return the mesh dim `axis`, which must be set and exist."""
        if axis is None:
            raise ShardingError(f"{type(self).__name__}: set {kind}_mesh_dim to a dim of {self.mesh}")
        if not -self.mesh.ndim <= axis < self.mesh.ndim:
            raise ShardingError(f"{kind}_mesh_dim={axis} is out of range for {self.mesh}")
        return axis


@dataclass
class FSDPMeshInfo(DataParallelMeshInfo):
    """Adds `shard_mesh_size`, `shard_mesh_rank` and `shard_process_group`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        axis = self.require(self.shard_mesh_dim, "shard")
        self.shard_mesh_size: int = self.mesh.size(axis)
        self.shard_process_group: dist.ProcessGroup = self.mesh.get_group(axis)
        self.shard_mesh_rank: int = self.shard_process_group.rank()


@dataclass
class DDPMeshInfo(DataParallelMeshInfo):
    """Adds `replicate_mesh_size`, `replicate_mesh_rank` and `replicate_process_group`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        axis = self.require(self.replicate_mesh_dim, "replicate")
        self.replicate_mesh_size: int = self.mesh.size(axis)
        self.replicate_process_group: dist.ProcessGroup = self.mesh.get_group(axis)
        self.replicate_mesh_rank: int = self.replicate_process_group.rank()


@dataclass
class HSDPMeshInfo(FSDPMeshInfo, DDPMeshInfo):
    """Shards over one axis and replicates over the other."""


# By id of the mesh (of the default group, for the mesh of all ranks) and names. A live info keeps both
# alive, so their ids are not reused.
_infos: WeakValueDictionary[tuple[int, Any], DataParallelMeshInfo] = WeakValueDictionary()


def mesh_info(mesh: DeviceMesh | None, dims: DataParallelMeshDims | None = None) -> DataParallelMeshInfo:
    """Return the data-parallel axes of `mesh`; the same object as long as it is referenced.

    Args:
        mesh: 1-D (shard), 2-D (replicate, shard), or any mesh with dims named by `dims`. None
            makes a 1-D mesh of all ranks (collective), on the accelerator if there is one.
        dims: names of the data-parallel dims of a larger mesh.

    Raises:
        ShardingError: the mesh has more than 2 dims and `dims` is None, has no dim names where they
            are needed, or lacks a dim named in `dims`.
    """
    names = dims and (dims.shard_names, dims.replicate_names)
    info = _infos.get((id(dist.group.WORLD if mesh is None else mesh), names))
    if info is None:
        info = _info(default_mesh() if mesh is None else mesh, dims)
        _infos[id(dist.group.WORLD if mesh is None else mesh), names] = info
    return info


def _info(mesh: DeviceMesh, dims: DataParallelMeshDims | None) -> DataParallelMeshInfo:
    if dims is not None:
        return _named(mesh, dims)
    if mesh.ndim == 1:
        return FSDPMeshInfo(mesh, shard_mesh_dim=0)
    if mesh.ndim != 2:
        raise ShardingError(
            f"{here()}: fully_shard expects a 1-D or 2-D mesh, got {mesh.ndim} dims: {mesh}."
            " Pass a sub-mesh such as mesh['shard'], or name the data-parallel dims in dp_mesh_dims"
        )
    if mesh.mesh_dim_names is None:
        raise ShardingError(
            f"{here()}: the 2-D mesh {mesh} has no dim names;"
            " create it with mesh_dim_names=('replicate', 'shard')"
        )
    return HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)


def smaller_shards(mesh: DeviceMesh, ranks: int, *, made: DeviceMesh | None = None) -> DeviceMesh:
    """Return `mesh` reshaped to (replicate, shard), with `ranks` ranks to shard over; cached on `mesh`.

    Args:
        made: a mesh to cache and return instead.
    """
    cache: dict[int, DeviceMesh] = vars(mesh).setdefault("_shardwise_smaller_shards", {})
    if made is not None:
        cache[ranks] = made
    if ranks not in cache:
        cache[ranks] = DeviceMesh(mesh.device_type, mesh.mesh.reshape(-1, ranks))
    return cache[ranks]


def default_mesh() -> DeviceMesh:
    """Return a 1-D mesh of every rank, on the accelerator if there is one, else on CPU."""
    if not dist.is_initialized():
        dist.init_process_group()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device_type = "cpu" if accelerator is None else accelerator.type
    return init_device_mesh(device_type, (dist.get_world_size(),))


def shard_mesh(info: DataParallelMeshInfo) -> DeviceMesh:
    """Return the 1-D mesh of the ranks that shard this rank's parameters."""
    mesh, axis = info.mesh, info.shard_mesh_dim
    if mesh.ndim == 1 or axis is None or mesh.mesh_dim_names is None:
        return mesh
    return mesh[mesh.mesh_dim_names[axis]]


def mesh_device(mesh: DeviceMesh) -> torch.device:
    """Return this rank's device, of the mesh's device type."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def _named(mesh: DeviceMesh, dims: DataParallelMeshDims) -> DataParallelMeshInfo:
    if mesh.mesh_dim_names is None:
        raise ShardingError(f"{here()}: dp_mesh_dims needs a mesh with mesh_dim_names, got {mesh}")
    for name in (*dims.shard_names, *dims.replicate_names):
        if name not in mesh.mesh_dim_names:
            raise ShardingError(
                f"{here()}: dp_mesh_dims names '{name}', but the mesh has the dims {mesh.mesh_dim_names}"
            )
    dim_names = (*dims.shard_names, *dims.replicate_names)
    order = mesh.mesh_dim_names.index
    if len(set(dim_names)) != len(dim_names) or any(
        list(names) != sorted(names, key=order) for names in (dims.shard_names, dims.replicate_names)
    ):
        raise ShardingError(
            f"{here()}: {dims} must name each dim once, in the order of the mesh: {mesh.mesh_dim_names}"
        )
    shard, replicate = (_flat(mesh, names) for names in (dims.shard_names, dims.replicate_names))
    if replicate is None and shard is not None:
        return FSDPMeshInfo(shard, shard_mesh_dim=0, dp_mesh_dims=dims, spmd_mesh=mesh)
    if shard is None and replicate is not None:
        return DDPMeshInfo(replicate, replicate_mesh_dim=0, dp_mesh_dims=dims, spmd_mesh=mesh)
    assert shard is not None
    assert replicate is not None
    joined = _compat.concatenate_meshes([replicate, shard])
    return HSDPMeshInfo(joined, shard_mesh_dim=1, replicate_mesh_dim=0, dp_mesh_dims=dims, spmd_mesh=mesh)


def _flat(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh | None:
    if len(names) < 2:
        return mesh[names[0]] if names else None
    return _compat.flatten_mesh(mesh[names], "_".join(names))
