"""Meshes of named dims, and what each dim divides or copies over its ranks:

    pp          stages of the model, in order
    replicate   copies of everything
    dp          rows of the batch; parameters are sharded over it
    sp          pieces of each sequence
    ep          rows of the batch, and experts
    tp          matrices, tensor parallel

The number of ranks is the product of the sizes. Dense parameters are sharded over dp, sp and ep, whose ranks
hold different tokens; experts, already divided over ep, are sharded over dp, sp and tp. The ranks of tp are
neighbours, as they communicate most.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from itertools import groupby

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise import _compat
from shardwise.comm.agree import agree
from shardwise.errors import ShardingError, here, name_places

NAMES = ("pp", "replicate", "dp", "sp", "ep", "tp")  # ranks of the last are neighbours
_OF_BATCH = ("replicate", "dp", "ep")
_TRAFFIC = {
    "pp": "activations of a micro-batch, to the next stage and back",
    "replicate": "gradients, summed once per step",
    "dp": "parameters, gathered by group; gradients, reduced once per step",
    "sp": "queries, keys, values and results of attention; parameters and gradients like dp",
    "ep": "tokens, to their experts and back; dense parameters and gradients like dp",
    "tp": "activations, twice per block; experts like dp",
}


@dataclass(frozen=True)
class Dimensions:
    """A mesh described by text: `Dimensions("pp2,dp2,tp2")` has 8 ranks.

    Attributes:
        text: names with sizes, in any order. dp is always a dim, of size 1 if not named.

    Raises:
        ShardingError: an unknown name, a name given twice, or one without a size.
    """

    text: str

    def __post_init__(self) -> None:
        _ = self.sizes

    @property
    def sizes(self) -> dict[str, int]:
        """Return sizes by name: from the dim whose ranks are farthest apart to that of neighbours."""
        sizes: dict[str, int] = {}
        for part in self.text.replace(" ", "").split(","):
            match = re.fullmatch(r"([a-z]+)([1-9]\d*)", part)
            if match is None or match[1] not in NAMES or match[1] in sizes:
                raise ShardingError(
                    f"invalid '{part}' in the mesh '{self.text}'; expected each of {', '.join(NAMES)} at"
                    " most once, followed by its size, such as pp2,dp2,tp2"
                )
            sizes[match[1]] = int(match[2])
        return {name: sizes.get(name, 1) for name in NAMES if sizes.get(name, 1) > 1 or name == "dp"}

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes.values())

    def mesh(self, device_type: str) -> DeviceMesh:
        """Create the mesh; later messages give ranks' coordinates on it. Collective over all ranks.

        Raises:
            RankMismatchError: on every rank, if ranks give different meshes.
            ShardingError: the job has another number of ranks.
        """
        if (world := dist.group.WORLD) is not None:
            description = ",".join(f"{name}{size}" for name, size in self.sizes.items())
            agree(description, group=world, subject="the mesh", advice="Give the same mesh on every rank.")
        if dist.get_world_size() != self.ranks:
            raise ShardingError(
                f"{here()}: the mesh {self.text} needs {self.ranks} ranks, but the job has"
                f" {dist.get_world_size()}; start {self.ranks} ranks, or change a size"
            )
        name_places(self._describe_place)
        mesh = init_device_mesh(device_type, tuple(self.sizes.values()), mesh_dim_names=tuple(self.sizes))
        # All ranks create these groups here, in the same order: some stages may have no experts.
        for make in (dense_mesh, expert_mesh):
            make(mesh)
        return mesh

    def place(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a rank, by name."""
        coordinates: dict[str, int] = {}
        for name, size in reversed(self.sizes.items()):
            rank, coordinates[name] = divmod(rank, size)
        return {name: coordinates[name] for name in self.sizes}

    def _describe_place(self, rank: int) -> str:
        return ", ".join(f"{name} {at}" for name, at in self.place(rank).items() if self.sizes[name] > 1)

    def peers(self, name: str) -> list[list[int]]:
        """Return every set of ranks that differ only in this dim."""

        def fixed(rank: int) -> list[int]:
            return [index for dim, index in self.place(rank).items() if dim != name]

        return [list(ranks) for _, ranks in groupby(sorted(range(self.ranks), key=fixed), key=fixed)]

    def picture(self) -> str:
        """Return text that shows every rank at its coordinates, and what is sent along each dim."""
        sizes = {name: size for name, size in self.sizes.items() if size > 1} or self.sizes
        columns: list[str] = [name for name in sizes if name in ("ep", "tp")] or list(sizes)[-1:]
        rows = [name for name in sizes if name not in columns]

        def label(names: list[str], rank: int) -> str:
            coordinates = self.place(rank)
            return "  ".join(f"{name} {coordinates[name]}" for name in names)

        across = math.prod(sizes[name] for name in columns)
        margin = len(label(rows, self.ranks - 1))
        head = [label(columns, rank) for rank in range(across)]
        width = max(len(cell) + 3 for cell in (*head, str(self.ranks - 1)))
        lines = [" " * margin + "".join(cell.rjust(width) for cell in head)]
        for begin in range(0, self.ranks, across):
            ranks = "".join(str(rank).rjust(width) for rank in range(begin, begin + across))
            lines.append(label(rows, begin).ljust(margin) + ranks)
        lines.append("")
        for name, size in sizes.items():
            if size > 1:
                sets = ["-".join(map(str, ranks)) for ranks in self.peers(name)]
                listed = "  ".join(sets[:4] + ["..."] * (len(sets) > 4))
                lines.append(f"{name}: {_TRAFFIC[name]}\n    {listed}")
        return "\n".join(lines)


def part(mesh: DeviceMesh, name: str) -> DeviceMesh | None:
    """Return the sub-mesh of the dim `name`; None if the mesh has no such dim."""
    return mesh[name] if name in (mesh.mesh_dim_names or ()) else None


def dense_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that shards all parameters but experts: (shard), or (replicate, shard).

    Collective over all ranks if `Dimensions` did not make `mesh`.
    """
    return _data_mesh(mesh, ("dp", "sp", "ep"))


def expert_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that shards experts, which are already divided over ep.

    Their gradients are sums over all ranks' tokens: call `set_gradient_divide_factor(data_ranks(mesh))`.
    Collective over all ranks if `Dimensions` did not make `mesh`.
    """
    return _data_mesh(mesh, ("dp", "sp", "tp"))


def data_ranks(mesh: DeviceMesh) -> int:
    """Return the number of ranks that hold different tokens; averaging over them gives the batch's mean."""
    return math.prod(_size(mesh, name) for name in (*_OF_BATCH, "sp"))


def share_of_batch(mesh: DeviceMesh) -> tuple[int, int]:
    """Return (index, count): this rank takes share `index` of `count` even shares of the batch's rows."""
    index, count = 0, 1
    for name in _OF_BATCH:
        if (size := _size(mesh, name)) > 1:
            index, count = index * size + mesh.get_local_rank(name), count * size
    return index, count


def _size(mesh: DeviceMesh, name: str) -> int:
    submesh = part(mesh, name)
    return 1 if submesh is None else submesh.size()


def _data_mesh(mesh: DeviceMesh, dims: tuple[str, ...]) -> DeviceMesh:
    names = tuple(name for name in dims if name in (mesh.mesh_dim_names or ()))
    shard = mesh[names[0]] if len(names) == 1 else _compat.flatten_mesh(mesh[names], "_".join(names))
    replicate = part(mesh, "replicate")
    return shard if replicate is None else _compat.concatenate_meshes([replicate, shard])
