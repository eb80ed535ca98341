"""`ShardedTensor`: one logical tensor in boxes on any ranks.

It has the shape and dtype of the whole tensor and the memory of this rank's shards, any number of them:

    metadata()        the position of every shard, on every rank
    local_shards()    this rank's shards: tensors, which have gradients and which optimizers update
    reshard(spec)     the same values cut differently, each element sent at most once
    full_tensor()     the whole on every rank;  gather(dst) the whole on one

Operations run on the local shards, with the collectives they need (`sharded_tensor.ops`). A plain tensor
beside a sharded one is a whole tensor, equal on every rank. All ranks of the group must call every operation.
Autograd sees the local shards: they have the gradients, which `.grad` returns as a sharded tensor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import rpc

from shardwise import _compat
from shardwise.errors import ShardingError, here
from shardwise.layout import Box
from shardwise.sharded_tensor import failure
from shardwise.sharded_tensor.autograd import nothing_of, tied
from shardwise.sharded_tensor.base import ShardedTensorBase
from shardwise.sharded_tensor.metadata import Shard, ShardedTensorMetadata
from shardwise.sharded_tensor.refuse import refuse
from shardwise.sharded_tensor.registry import HANDLERS, PLAIN, Args, Kwargs, between_graphs, declared
from shardwise.sharded_tensor.spec import ShardingSpec


class ShardedTensor(ShardedTensorBase):
    """A tensor of which each rank of a process group holds any number of boxes; together they cover it once.

    `ShardedTensor(spec, *size, ...)` is `empty(spec, *size, ...)`; `shardwise.sharded_tensor` has the other
    ways to make one.

    Attributes:
        process_group: the ranks that hold the tensor and take part in its operations.
    """

    process_group: dist.ProcessGroup
    # Set by `dcp`: torch.distributed.checkpoint's protocol for tensors that know their parts.
    __create_write_items__: ClassVar[Any]
    __create_chunk_list__: ClassVar[Any]
    __get_tensor_shard__: ClassVar[Any]
    # Set by `construct`: torch's method names for functions of this package.
    _init_from_local_shards: ClassVar[Any]
    _init_from_local_tensor: ClassVar[Any]
    _remote: Any
    _anchor: Tensor
    # Of a part of another tensor: empty views of this rank's shards of that tensor that the part leaves out.
    # An operation that writes the part writes them, too, so that autograd knows of it wherever the whole is.
    _ends: Sequence[Tensor] = ()

    @staticmethod
    @declared
    def __new__(cls, sharding_spec: ShardingSpec, *size: Any, **options: Any) -> ShardedTensor:
        raise NotImplementedError

    @classmethod
    @between_graphs
    def wrap(
        cls,
        shards: Sequence[Shard],
        metadata: ShardedTensorMetadata,
        *,
        process_group: dist.ProcessGroup,
        sharding_spec: ShardingSpec | None = None,
        anchor: Tensor | None = None,
    ) -> ShardedTensor:
        """Return the tensor that `metadata` describes, of which this rank has `shards`. Local; unchecked.

        Args:
            anchor: an empty tensor of the same dtype that connects a rank without shards to the autograd
                graph; needed if shards are results of differentiable operations.
        """
        properties = metadata.tensor_properties
        if anchor is None:
            device = device_of([shard.tensor for shard in shards], metadata)
            anchor = torch.empty(0, dtype=properties.dtype, device=device)
            anchor.requires_grad_(properties.requires_grad)
        sharded: ShardedTensor = _compat.make_wrapper(
            cls, metadata.size, dtype=properties.dtype, device=anchor.device, requires_grad=False
        )
        sharded._shards, sharded._metadata, sharded._spec = list(shards), metadata, sharding_spec
        sharded._anchor, sharded.process_group, sharded._remote = anchor, process_group, None
        sharded._ends = ()
        return sharded

    # ------------------------------------------------------------ what it is

    @between_graphs
    def local_shards(self) -> list[Shard]:
        """Return this rank's shards, in the order of the metadata; some ranks may have none. Local.

        Raises:
            ShardingError: the operation that should have made them failed on this rank.
        """
        if not _compat.is_forward_grad_enabled():
            _refuse_functions()
        failure.raise_here(failure.failures_in(self))
        if not self._ends:
            return self._shards
        return [Shard(tensor, s.metadata) for tensor, s in zip(self.tensors, self._shards, strict=True)]

    @between_graphs
    def local_tensor(self) -> Tensor:
        """Return the tensor of the only local shard. Local.

        Raises:
            ShardingError: this rank holds several shards or none, or failed to make its shard.
        """
        if len(self.local_shards()) != 1:
            raise ShardingError(
                f"{here()}: local_tensor() needs one local shard, found {len(self._shards)} of"
                f" {self._name()}; use local_shards()"
            )
        return self.tensors[0]

    @property
    def tensors(self) -> list[Tensor]:
        """The local shards' tensors, to read; the first is connected to what a part leaves out (`_ends`)."""
        tensors = self.views
        if tensors and self._ends and torch.is_grad_enabled():
            tensors[0] = tied(tensors[0], self._ends)
        return tensors

    @property
    def views(self) -> list[Tensor]:
        """The local shards' tensors, to write or make views of."""
        return [shard.tensor for shard in self._shards]

    @property
    def anchor(self) -> Tensor:
        """An empty tensor that represents a rank without shards in the autograd graph, to read."""
        if self._shards or len(self._ends) < 2 or not torch.is_grad_enabled():
            return self.end
        return tied(self.end, self._ends)

    @property
    def end(self) -> Tensor:
        """An empty tensor for a rank without shards, to write; of a part a view, so torch sees its base."""
        if self._shards or not self._ends:
            return self._anchor
        return max(self._ends, key=lambda end: end.requires_grad)

    @property
    def tracked(self) -> list[Tensor]:
        """All tensors by which autograd knows this rank's part."""
        return [*self.views, *(self._ends or [self._anchor])]

    @property
    def boxes(self) -> list[Box]:
        return [shard.metadata.box for shard in self._shards]

    @between_graphs
    def remote_shards(self) -> dict[int, list[rpc.RRef[Shard]]]:
        """Return references over torch RPC to every other rank's shards; needs `init_rrefs=True`. Local.

        Raises:
            ShardingError: the tensor was made without `init_rrefs=True`.
        """
        if self._remote is None:
            raise ShardingError(
                f"{here()}: remote_shards() needs {self._name()} to be made with init_rrefs=True, after"
                " torch.distributed.rpc.init_rpc"
            )
        return {rank: list(shards) for rank, shards in self._remote.items()}

    # ------------------------------------------------------------ the same values elsewhere

    @declared
    def full_tensor(self) -> Tensor:  # type: ignore[empty-body]
        """Return the whole as a plain tensor on every rank of the group; differentiable. Collective."""

    @declared
    def gather(  # type: ignore[override]
        self,
        dst: int = 0,
        out: Tensor | None = None,
        enforce_dtype: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Tensor | None:
        """Gather the whole tensor on rank `dst` of the group; other ranks get None. No gradient. Collective.

        Args:
            dst: rank within the group.
            out: on `dst`, a tensor of the whole shape to fill; None allocates one. Other ranks pass None.
            enforce_dtype: convert to the dtype of `out`, whatever it is.
            dtype: convert to this dtype before sending; by default the tensor's own.

        Raises:
            ShardingError: on every rank, an `out` of another shape or dtype, `out` on another rank than
                `dst`, or no such rank.
        """

    @declared
    def reshard(self, resharding_spec: ShardingSpec) -> ShardedTensor:  # type: ignore[empty-body]
        """Return the values cut by another spec over the same group, as a new tensor; differentiable.

        Every element that its new holder lacks is sent once, directly from its old holder. If both specs give
        the same shards, nothing moves and the result shares their memory. Collective.

        Raises:
            ShardingError: the spec cannot cut this shape, or names ranks outside the group.
            RankMismatchError: on every rank, if ranks ask for different specs.
        """

    @declared
    def to(self, *args: Any, **kwargs: Any) -> ShardedTensor:  # type: ignore[empty-body]
        """Convert as `torch.Tensor.to` does: to a device, a dtype, or another tensor's. Local."""

    def cpu(self, memory_format: torch.memory_format = torch.preserve_format) -> ShardedTensor:
        """Return every shard on the CPU of its rank. Local."""
        return self.to(torch.device("cpu"), memory_format=memory_format)

    def cuda(
        self,
        device: torch.device | int | str | None = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
    ) -> ShardedTensor:
        """Return every shard on a CUDA device of its rank, by default the current one. Local."""
        if device is None:
            device = torch.cuda.current_device()
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        return self.to(device, non_blocking=non_blocking, memory_format=memory_format)

    @between_graphs
    def with_tensors(
        self,
        tensors: Sequence[Tensor],
        *,
        metadata: ShardedTensorMetadata | None = None,
        anchor: Tensor | None = None,
    ) -> ShardedTensor:
        """Return a tensor whose local shards are `tensors`, cut as this one or by other `metadata`. Local.

        Custom operations return it. Dtype and requires_grad in the metadata become those of `tensors`.

        Args:
            metadata: describes as many local shards as `tensors`, of their shapes. By default this tensor's.
            anchor: the operation's result for `self.anchor`; on a rank without shards, the result has its
                dtype and requires_grad. By default one like `tensors`, or this tensor's.
        """
        metadata = metadata or self._metadata
        if metadata.shards_metadata is self._metadata.shards_metadata:
            spec, places = self._spec, [shard.metadata for shard in self._shards]
        else:
            spec, places = None, metadata.held_by(dist.get_rank())
        if anchor is None:
            anchor = tensors[0].detach().new_empty(0) if tensors else self.anchor
        like = tensors[0] if tensors else anchor
        needs_grad = anchor.requires_grad or any(tensor.requires_grad for tensor in tensors)
        old = metadata.tensor_properties
        pinned = old.pin_memory and like.is_pinned()
        if (like.dtype, needs_grad, pinned) != (old.dtype, old.requires_grad, old.pin_memory):
            metadata = metadata.with_properties(dtype=like.dtype, requires_grad=needs_grad, pin_memory=pinned)
        shards = [Shard(tensor, place) for tensor, place in zip(tensors, places, strict=True)]
        result = ShardedTensor.wrap(
            shards, metadata, process_group=self.process_group, sharding_spec=spec, anchor=anchor
        )
        failure.mark_failed(result, failure.failures_in(self))
        return result

    def ask_history(self) -> None:
        """Raise torch's error for a view without a history, before any rank communicates. Local."""
        if torch.is_grad_enabled():
            # Torch finds the history of a view whose base has changed when asked for it; else it sees a leaf.
            _ = [tensor.grad_fn for tensor in self.tracked]

    def has_written(self, stand_in: Tensor | None = None) -> None:
        """Tell autograd that all ranks have written the tensor: `views`, or `stand_in` without any. Local."""
        if self._shards and not self._ends:
            return
        sources = self.views or ([self._anchor] if stand_in is None else [stand_in])
        in_graph = stand_in is not None and stand_in.requires_grad
        version = _compat.version_of(stand_in) if stand_in is not None and in_graph else 0
        for end in self._ends or [self._anchor]:
            if end is not stand_in:
                end.copy_(nothing_of(*sources))
        if stand_in is not None and in_graph:
            # A number shares its version with an end: written once, as the operation's backward expects.
            _compat.set_versions((stand_in,), (version,))

    @between_graphs
    def map(self, function: Callable[[Tensor], Tensor]) -> ShardedTensor:
        """Apply an elementwise `function` to every local shard. Local; differentiable."""
        return cast(ShardedTensor, failure.run(_map_shards, function, (self,), {}))

    # ------------------------------------------------------------ as torch tensors

    @classmethod
    @between_graphs
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = HANDLERS.get(func)
        if not _compat.is_forward_grad_enabled():
            _refuse_functions()
        if handler is not None:
            return failure.run(handler, func, args, kwargs or {})
        if func in PLAIN:
            with _compat.plain_attributes():
                return func(*args, **(kwargs or {}))
        return refuse(func, args, kwargs or {})

    def _name(self) -> str:
        kind = "Parameter, a ShardedTensor" if getattr(self, "_is_param", False) else "ShardedTensor"
        return f"a {kind} of shape {tuple(self._metadata.size)}"

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        properties = self._metadata.tensor_properties
        grad = ", requires_grad=True" if self.requires_grad else ""
        shards = "".join(f"\n  {s.box.offsets}: {s.tensor.detach()!r}" for s in self._shards) or "\n  none"
        return (
            f"ShardedTensor(size={tuple(self._metadata.size)}, dtype={properties.dtype}{grad},"
            f" {self.sharding_spec()!r}, local shards by offset:{shards})"
        )

    def __deepcopy__(self, memo: Any) -> ShardedTensor:
        if not self.is_leaf:
            raise ShardingError(
                f"{here()}: only leaves of the autograd graph can be copied deeply, {self._name()} is the"
                " result of an operation; use detach() before"
            )
        requires_grad = self.requires_grad
        copied = cast(ShardedTensor, self.detach()).map(torch.clone)
        copied._ends = ()
        copied.requires_grad_(requires_grad)
        memo[id(self)] = copied
        if self.grad is not None:
            copied.grad = copy.deepcopy(self.grad, memo)
        for name, value in self.__dict__.items():
            if name not in copied.__dict__:  # `_is_param`, and what users set
                copied.__dict__[name] = copy.deepcopy(value, memo)
        return copied

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ShardingError(
            f"{here()}: backward() begins at a plain scalar, found {self._name()}; reduce it first, with"
            " sum() or mean()"
        )


def _map_shards(function: Any, args: Args, kwargs: Kwargs) -> ShardedTensor:
    sharded: ShardedTensor = args[0]
    tensors = [function(tensor) for tensor in sharded.views]
    result = sharded.with_tensors(tensors, anchor=None if tensors else function(sharded.anchor))
    if tensors and torch.is_grad_enabled():
        result._ends = [end.clone() for end in sharded._ends if end.requires_grad]
    return result


def device_of(tensors: Sequence[Tensor], metadata: ShardedTensorMetadata) -> torch.device:
    """Return the device of this rank's shards; without shards, the device type of the others."""
    if tensors:
        return tensors[0].device
    placements = (shard.placement for shard in metadata.shards_metadata if shard.placement is not None)
    return torch.device(next((placement.device().type for placement in placements), "cpu"))


def _refuse_functions() -> None:
    """Raise in a `torch.autograd.Function` that would lose a gradient: autograd does not see the wrapper."""
    for arg in _compat.function_arguments():
        if isinstance(arg, ShardedTensor) and any(tensor.requires_grad for tensor in arg.tracked):
            raise ShardingError(
                f"{here()}: a torch.autograd.Function would lose the gradient of {arg._name()}, which"
                " autograd knows by its local shards. Where it treats every element alike use"
                " map(Function.apply); otherwise give it full_tensor(), or detach() if no gradient is wanted"
            )
