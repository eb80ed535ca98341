"""`ShardedRows`: a tensor of which each rank holds whole rows, and `ShardedParameter`, one that trains.

It has the shape of the whole tensor and the memory of this rank's rows, and means the whole tensor:

    elementwise ops, in place or not    run on the local rows; whole plain operands are cut to them
    sum, mean, norm, max, any, ...      are those of the whole tensor (collective)
    anything else                       raises ShardingError; nothing computes a local answer silently

So every optimizer of elementwise arithmetic, fused and foreach ones too, steps on local memory at the
cost of one call per op, and `torch.nn.utils.clip_grad_norm_` is right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise import _compat
from shardwise.errors import ShardingError, here
from shardwise.layout import Box
from shardwise.sharded_parameter import convert, ops
from shardwise.sharded_parameter.piece import Piece

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class ShardedRows(Tensor):
    """A tensor of global shape whose local memory is this rank's rows.

    Made by `fully_shard(layout="contiguous")`: parameters, their gradients, and what optimizers derive
    from them. Where a rank holds no rows, `local` has zero of them.
    """

    __torch_function__ = _compat.disabled_torch_function
    _local: Tensor
    piece: Piece

    @classmethod
    def wrap(cls, local: Tensor, piece: Piece, *, requires_grad: bool = False) -> ShardedRows:
        """`local` (shape `piece.rows.sizes`, contiguous) as this rank's part of a whole tensor. Local."""
        made: ShardedRows = _compat.make_wrapper(
            cls, piece.shape, dtype=local.dtype, device=local.device, requires_grad=requires_grad
        )
        made._local = local
        made.piece = piece
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = ops.HANDLERS.get(func) or ops.find_handler(func)
        return handler(func, args, kwargs or {})

    @property
    def local(self) -> Tensor:
        """This rank's rows: memory that optimizers update in place."""
        return self._local

    @property
    def box(self) -> Box:
        """Where `local` lies in the whole tensor."""
        return self.piece.box

    def full_tensor(self) -> Tensor:
        """The whole tensor, in memory of its own. Collective over the ranks that hold its rows."""
        return convert.full_tensor(self._local, self.piece)

    def to_dtensor(self, mesh: DeviceMesh | None = None) -> DTensor:
        """The same tensor as a DTensor cut evenly on dim 0; moves the rows that lie elsewhere.

        Collective over the ranks that hold its rows.

        Args:
            mesh: 1-D mesh of just these ranks, or None to make one.

        Raises:
            ShardingError: a tensor-parallel tensor, or rows cut over several mesh axes.
        """
        return convert.to_dtensor(self._local, self.piece, mesh)

    def load_dtensor(self, source: DTensor) -> None:
        """Take the values of a DTensor of the same global shape.

        Collective over the DTensor's mesh.
        """
        with torch.no_grad():
            self.copy_(source.full_tensor())

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"{type(self).__name__}({self._local.detach()!r}, {self.box} of {tuple(self.shape)}{grad})"

    def __deepcopy__(self, memo: Any) -> ShardedRows:
        copied = type(self).wrap(self._local.detach().clone(), self.piece, requires_grad=self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShardingError(
            f"{here()}: pickling a {type(self).__name__} of shape {tuple(self.shape)} would save one rank's"
            f" rows ({self.box}) as if they were all; use shardwise.checkpoint.save, or full_tensor()"
        )

    # What torch.nn.Module asks before it replaces a parameter: its data, or the object's whole content

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_local"], (self.piece, self.requires_grad)

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], meta: Any, size: Any, stride: Any) -> ShardedRows:
        piece, requires_grad = meta
        return cls.wrap(inner["_local"], piece, requires_grad=requires_grad)

    # torch.distributed.checkpoint's protocol for tensors that know their parts

    def __create_write_items__(self, name: str, value: Any) -> list[Any]:
        return convert.write_items(name, self._local, self.piece)

    def __create_chunk_list__(self) -> list[Any]:
        return convert.chunks(self.piece)

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return self._local


class ShardedParameter(ShardedRows, nn.Parameter):
    """A parameter of a module sharded with `layout="contiguous"`, as its optimizer sees it."""

    _is_param = True  # what nn.Parameter's isinstance asks of a tensor subclass

    def __new__(cls, *unused: Any, **also: Any) -> ShardedParameter:
        raise ShardingError('a ShardedParameter is made by fully_shard(..., layout="contiguous")')


_compat.allow_foreach(ShardedRows, ShardedParameter)
