"""Metadata of a sharded tensor, known on every rank: its shards, their placements, and its properties.

    ShardedTensorMetadata
      size               of the whole tensor
      tensor_properties  dtype, layout, requires_grad, memory format, pinned
      shards_metadata    one `ShardMetadata` per shard: offsets, sizes, placement (rank and device)

Ranks in placements are global ranks. The shards of one rank are numbered in the order of
`shards_metadata`, which is the order of its `local_shards()`.

The counterparts in torch's deprecated `torch.distributed._shard` are recognised by their attributes and
converted (`of`), in the same memory; nothing is imported from that package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any

import torch

from shardwise.errors import ShardingError, here
from shardwise.layout import Box, cover
from shardwise.layout.messages import subtract


@dataclass(init=False, repr=False, unsafe_hash=True, slots=True)
class RemoteDevice:
    """A device of one process: `rank:1/cuda:0`, `rank:1` (CPU), or `worker/cpu` by the name of an RPC worker.

    Two are equal if they name the same device of the same process.
    """

    _process: int | str  # a rank, or the name of an RPC worker, maybe none
    _device: torch.device

    def __init__(self, remote_device: str | torch.device) -> None:
        text = str(remote_device)
        process, slash, device = text.rpartition("/")
        if not slash and (text.startswith("rank:") or not _is_device(text)):
            process, device = text, "cpu"
        by_rank = process.startswith("rank:")
        if text[:1] in ("", "/") or not _is_device(device) or (by_rank and not process[5:].isdecimal()):
            raise _bad_placement(text)
        self._process = int(process[5:]) if by_rank else process
        self._device = torch.device(device)
        if self._device.type == "cpu":  # a process has only one
            self._device = torch.device("cpu")

    @staticmethod
    def of(placement: Any) -> RemoteDevice:
        """Make one from a string, a `RemoteDevice`, an object with `rank()` and `device()`, or its spec."""
        if isinstance(placement, RemoteDevice):
            return placement
        if isinstance(placement, (str, torch.device)):
            return RemoteDevice(placement)
        if callable(getattr(placement, "rank", None)) and callable(getattr(placement, "device", None)):
            rank, device = placement.rank(), placement.device()
            process = placement.worker_name() if rank is None else f"rank:{rank}"
            return RemoteDevice(f"{process}/{device}" if process else device)
        inner = getattr(placement, "device", None)  # of a DevicePlacementSpec
        if inner is not None and not callable(inner):
            return RemoteDevice.of(inner)
        raise _bad_placement(placement)

    def rank(self) -> int | None:
        """Return the global rank of the process; None if a worker's name identifies it."""
        return self._process if isinstance(self._process, int) else None

    def device(self) -> torch.device:
        return self._device

    def worker_name(self) -> str | None:
        """Return the process's name as an RPC worker, if it is identified by that."""
        return self._process if isinstance(self._process, str) and self._process else None

    def on(self, device: torch.device | str) -> RemoteDevice:
        """Return another device of the same process."""
        process = repr(self).rpartition("/")[0]
        return RemoteDevice(f"{process}/{device}" if process else str(device))

    def __repr__(self) -> str:
        process = self._process if isinstance(self._process, str) else f"rank:{self._process}"
        return f"{process}/{self._device}" if process else str(self._device)

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteDevice, (repr(self),)


def _is_device(text: str) -> bool:
    try:
        torch.device(text)
    except RuntimeError:
        return False
    return True


def _bad_placement(placement: object) -> ShardingError:
    return ShardingError(
        f'a placement is "rank:R/device", "rank:R", "worker/device" or an object with rank() and device(),'
        f" found {placement!r}"
    )


@dataclass
class ShardMetadata:
    """The position of one shard: its first element, its size, and the device of the process that holds it.

    Attributes:
        shard_offsets: per dim, the first element within the whole tensor.
        shard_sizes: per dim, the number of elements.
        placement: a `RemoteDevice`, or an argument of `RemoteDevice.of`.
    """

    shard_offsets: list[int]
    shard_sizes: list[int]
    placement: RemoteDevice | None = None

    def __init__(
        self, shard_offsets: Sequence[int], shard_sizes: Sequence[int], placement: Any = None
    ) -> None:
        self.shard_offsets = list(shard_offsets)
        self.shard_sizes = list(shard_sizes)
        self.placement = None if placement is None else RemoteDevice.of(placement)

    @staticmethod
    def of(shard: Any) -> ShardMetadata:
        """Make one from another, or from any object with the same attributes."""
        if isinstance(shard, ShardMetadata):
            return shard
        return ShardMetadata(shard.shard_offsets, shard.shard_sizes, shard.placement)

    def __hash__(self) -> int:
        return hash((tuple(self.shard_offsets), tuple(self.shard_sizes), self.placement))

    @property
    def box(self) -> Box:
        """The shard's elements. Raises ShardingError for offsets and sizes that are no box."""
        return Box(tuple(self.shard_offsets), tuple(self.shard_sizes))

    @property
    def rank(self) -> int:
        """Global rank of the holder. Raises ShardingError if the placement names none."""
        rank = None if self.placement is None else self.placement.rank()
        if rank is None:
            raise ShardingError(
                f"shard {self.shard_offsets} + {self.shard_sizes} has placement {self.placement},"
                ' which names no rank; use "rank:R/device"'
            )
        return rank


@dataclass
class TensorProperties:
    """The properties that all shards of a tensor share."""

    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    layout: torch.layout = torch.strided
    requires_grad: bool = False
    memory_format: torch.memory_format = torch.contiguous_format
    pin_memory: bool = False

    @staticmethod
    def create_from_tensor(tensor: torch.Tensor) -> TensorProperties:
        """Return the properties of `tensor`."""
        memory_format, pinned = memory_format_of(tensor), tensor.is_pinned()
        return TensorProperties(tensor.dtype, tensor.layout, tensor.requires_grad, memory_format, pinned)

    def __getstate__(self) -> dict[str, Any]:
        # By name: torch.save's pickle protocol, 2, cannot store a memory format.
        return {**self.__dict__, "memory_format": str(self.memory_format).removeprefix("torch.")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, memory_format=getattr(torch, state["memory_format"]))


def size_of(size: Sequence[Any]) -> torch.Size:
    """Return a caller's `*size`, `[3, 4]` or `[(3, 4)]`, as a size. Raises ShardingError for others."""
    if len(size) == 1 and isinstance(size[0], Sequence):
        size = tuple(size[0])
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in size):
        raise ShardingError(f"a size is of ints of at least 0, found {tuple(size)}")
    return torch.Size(size)


def check_pinnable() -> None:
    """Raise ShardingError unless this machine has a device for which memory can be pinned."""
    if not torch.accelerator.is_available():
        raise ShardingError(
            f"{here()}: pinned memory is for copies to an accelerator, and torch finds none on this machine;"
            " leave pin_memory out"
        )


@cache
def _check_movable(dtype: torch.dtype) -> None:
    """Raise ShardingError for a dtype whose elements torch cannot copy."""
    try:
        torch.empty(1, dtype=dtype).copy_(torch.empty(1, dtype=dtype))
    except (NotImplementedError, RuntimeError) as error:
        raise ShardingError(
            f"{here()}: torch cannot copy elements of {dtype}, so none could be moved between ranks;"
            " shard their bytes as torch.uint8, and view() local shards as what they are"
        ) from error


def memory_format_of(tensor: torch.Tensor) -> torch.memory_format:
    """Return the memory format in which `tensor` is dense; `torch.preserve_format` for other strides."""
    formats = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
    return next((f for f in formats if tensor.is_contiguous(memory_format=f)), torch.preserve_format)


@dataclass
class ShardedTensorMetadata:
    """The complete description of a sharded tensor, equal on every rank."""

    shards_metadata: list[ShardMetadata] = field(default_factory=list)
    size: torch.Size = field(default_factory=lambda: torch.Size([]))
    tensor_properties: TensorProperties = field(default_factory=TensorProperties)

    @staticmethod
    def of(metadata: Any) -> ShardedTensorMetadata:
        """Make one from another, or from any object with the same attributes."""
        if isinstance(metadata, ShardedTensorMetadata):
            return metadata
        properties = (getattr(metadata.tensor_properties, f.name) for f in fields(TensorProperties))
        shards = [ShardMetadata.of(shard) for shard in metadata.shards_metadata]
        return ShardedTensorMetadata(shards, torch.Size(metadata.size), TensorProperties(*properties))

    @property
    def shape(self) -> torch.Size:
        return self.size

    def boxes_by_rank(self, ranks: Sequence[int]) -> list[list[Box]]:
        """List the boxes of each of the global `ranks`, in the order of its shards."""
        boxes: dict[int, list[Box]] = {rank: [] for rank in ranks}
        for shard in self.shards_metadata:
            boxes[shard.rank].append(shard.box)
        return [boxes[rank] for rank in ranks]

    def held_by(self, rank: int) -> list[ShardMetadata]:
        """Return the shards of a global rank, in order."""
        return [shard for shard in self.shards_metadata if shard.rank == rank]

    def is_cut(self, dims: Sequence[int]) -> bool:
        """Return whether any shard with elements has only a part of some dim in `dims`."""
        boxes = (shard.box for shard in self.shards_metadata)
        return any(box.sizes[d] != self.size[d] for box in boxes if not box.is_empty for d in dims)

    def cut_as(self, other: ShardedTensorMetadata) -> bool:
        """Return whether both have one shape and give the same boxes to the same ranks in the same order."""
        if self is other or self.shards_metadata is other.shards_metadata:
            return True
        return self.size == other.size and self.places() == other.places()

    def places(self) -> list[tuple[int, list[int], list[int]]]:
        return [(shard.rank, shard.shard_offsets, shard.shard_sizes) for shard in self.shards_metadata]

    def with_properties(self, **changes: Any) -> ShardedTensorMetadata:
        """Return the metadata with other tensor properties."""
        return replace(self, tensor_properties=replace(self.tensor_properties, **changes))

    def map(self, size: Sequence[int], box: Callable[[Box], Box]) -> ShardedTensorMetadata:
        """Replace every shard's box, on the same placements, for a tensor of another `size`."""
        places = [(box(shard.box), shard.placement) for shard in self.shards_metadata]
        shards = [ShardMetadata(new.offsets, new.sizes, placement) for new, placement in places]
        return replace(self, shards_metadata=shards, size=torch.Size(size))

    def placed(self, place: Callable[[RemoteDevice], RemoteDevice]) -> ShardedTensorMetadata:
        """Replace the placement of every shard that has one."""
        shards = [replace(s, placement=s.placement and place(s.placement)) for s in self.shards_metadata]
        return replace(self, shards_metadata=shards)

    def check(self, ranks: Sequence[int] | None) -> None:
        """Raise ShardingError, naming the shards, unless they cover the tensor once on `ranks`, if known."""
        _check_movable(self.tensor_properties.dtype)
        if not self.shards_metadata:
            raise ShardingError(
                f"a sharded tensor of shape {tuple(self.size)} needs at least one shard, found none on any"
                " rank; give one of them a shard, though it be empty"
            )
        members = set(ranks or ())
        for index, shard in enumerate(self.shards_metadata):
            if ranks is not None and shard.rank not in members:
                raise ShardingError(
                    f"shard {index} ({shard.box}) is placed on rank {shard.rank}, which is not among the"
                    f" ranks {list(ranks)} of the process group; place it on one of them"
                )
        boxes = [shard.box for shard in self.shards_metadata]
        try:
            cover(boxes, self.size)
        except ShardingError as error:
            culprits = [
                f"shard {index} ({shard.box}) is on rank {shard.rank}"
                for index, shard in enumerate(self.shards_metadata)
                if str(shard.box) in str(error)
            ]
            if not culprits:  # the error names no shard: something is missing
                missing = [Box.whole(self.size)]
                for box in boxes:
                    missing = [rest for part in missing for rest in subtract(part, box)]
                culprits = [f"{missing[0]} is missing"]
            raise ShardingError(f"{error}; {', '.join(culprits)}") from None


@dataclass
class Shard:
    """`tensor` (shape `metadata.shard_sizes`) lies at `metadata.shard_offsets` of the whole tensor.

    Nothing is checked here: all ranks check shards together when they make a sharded tensor of them.
    """

    tensor: torch.Tensor
    metadata: ShardMetadata

    @staticmethod
    def of(shard: Any) -> Shard:
        """Make one, of the same memory, from another or from any object with the same attributes."""
        return shard if isinstance(shard, Shard) else Shard(shard.tensor, ShardMetadata.of(shard.metadata))

    @staticmethod
    def from_tensor_and_offsets(tensor: torch.Tensor, shard_offsets: Sequence[int], rank: int) -> Shard:
        """Return `tensor` as the shard at `shard_offsets` on global rank `rank`. Local."""
        placement = f"rank:{rank}/{tensor.device}"
        return Shard(tensor, ShardMetadata(list(shard_offsets), list(tensor.shape), placement))

    @property
    def box(self) -> Box:
        return self.metadata.box
