"""`ShardedTensorBase`: metadata and local shards, without a process group.

For tools that read, plan or convert: it describes where shards are, but supports no computation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from shardwise import _compat
from shardwise.errors import ShardingError, here
from shardwise.sharded_tensor.metadata import Shard, ShardedTensorMetadata, TensorProperties, size_of
from shardwise.sharded_tensor.registry import PLAIN
from shardwise.sharded_tensor.spec import ShardingSpec, infer_sharding_spec, spec_of


class ShardedTensorBase(Tensor):
    """A tensor described by its metadata, with some of its shards.

    `ShardedTensorBase(spec, *size, dtype=..., requires_grad=...)` has no shards;
    `_init_from_local_shards_and_global_metadata` takes shards. Neither needs `torch.distributed`.
    """

    _shards: list[Shard]
    _metadata: ShardedTensorMetadata
    _spec: ShardingSpec | None

    @staticmethod
    def __new__(cls, sharding_spec: ShardingSpec, *size: Any, **properties: Any) -> ShardedTensorBase:
        properties["dtype"] = properties.get("dtype") or torch.get_default_dtype()
        spec = spec_of(sharding_spec)
        metadata = spec.build_metadata(size_of(size), TensorProperties(**properties))
        metadata.check(None)
        return _wrap([], metadata, spec)

    def __init__(self, *unused: Any, **ignored: Any) -> None:
        super().__init__()

    @classmethod
    def _init_from_local_shards_and_global_metadata(
        cls,
        local_shards: Sequence[Shard],
        sharded_tensor_metadata: ShardedTensorMetadata,
        sharding_spec: ShardingSpec | None = None,
    ) -> ShardedTensorBase:
        """Make a tensor from local shards. Raises ShardingError for a shard that is not in the metadata."""
        metadata = ShardedTensorMetadata.of(sharded_tensor_metadata)
        shards = [Shard.of(shard) for shard in local_shards]
        metadata.check(None)
        for shard in shards:
            if shard.metadata not in metadata.shards_metadata:
                raise ShardingError(f"{here()}: the metadata has no {shard.metadata}")
            found = list(shard.tensor.shape)
            if found != shard.metadata.shard_sizes:
                raise ShardingError(f"{here()}: {shard.metadata} has a tensor of shape {found}")
        return _wrap(shards, metadata, None if sharding_spec is None else spec_of(sharding_spec))

    def metadata(self) -> ShardedTensorMetadata:
        """Return every shard's box and placement, and the properties of all. Local."""
        return self._metadata

    def sharding_spec(self) -> ShardingSpec:
        """Return the spec that made it, or the simplest one that describes its shards. Local."""
        if self._spec is None:
            self._spec = infer_sharding_spec(self._metadata)
        return self._spec

    def local_shards(self) -> list[Shard]:
        """Return this rank's shards, in the order of the metadata. Local."""
        return self._shards

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in PLAIN:
            raise ShardingError(
                f"{here()}: no {getattr(func, '__name__', func)} on a ShardedTensorBase, which has"
                " no process group; make a ShardedTensor of it by"
                " init_from_local_shards_and_global_metadata()"
            )
        with _compat.plain_attributes():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:  # type: ignore[override]
        raise ShardingError(
            f"{here()}: {func} reached a {cls.__name__} without passing __torch_function__; use its"
            " local_shards(), or full_tensor() of a ShardedTensor"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        dtype = self._metadata.tensor_properties.dtype
        return (
            f"ShardedTensorBase(size={tuple(self._metadata.size)}, dtype={dtype},"
            f" {self.sharding_spec()!r}, shards here: {len(self._shards)})"
        )


def _wrap(
    shards: list[Shard], metadata: ShardedTensorMetadata, spec: ShardingSpec | None
) -> ShardedTensorBase:
    kind, device = metadata.tensor_properties, shards[0].tensor.device if shards else torch.device("cpu")
    base: ShardedTensorBase = _compat.make_wrapper(
        ShardedTensorBase, metadata.size, dtype=kind.dtype, device=device, requires_grad=kind.requires_grad
    )
    base._shards, base._metadata, base._spec = shards, metadata, spec
    return base


def sharded_in(values: Any) -> Iterator[Any]:
    """Yield the sharded tensors among the values, also inside lists and tuples."""
    for value in values:
        if isinstance(value, ShardedTensorBase):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from sharded_in(value)


def first_sharded(args: Any, kwargs: Any) -> Any:
    """Return the first sharded tensor among the arguments of an operation; there must be one."""
    return next(sharded_in([*args, *kwargs.values()]))


def is_foreign(tensor: Any) -> bool:
    """Return whether `tensor` is another library's sharded tensor."""
    return (
        isinstance(tensor, Tensor)
        and type(tensor) is not Tensor
        and not isinstance(tensor, ShardedTensorBase)
        and all(callable(getattr(type(tensor), name, None)) for name in ("local_shards", "metadata"))
    )
