"""`ShardedRows`: a tensor of which each rank holds whole rows, and `ShardedParameter`, one that trains.

It has the shape of the whole tensor and the memory of this rank's rows, and means the whole tensor:

    elementwise ops, in place or not    run on the local rows; whole plain operands are cut to them
    sum, mean, norm, max, any, ...      are those of the whole tensor (collective)
    anything else                       raises ShardingError; nothing computes a local answer silently

So every optimizer of elementwise arithmetic, fused and foreach ones too, steps on local memory at the
cost of one call per op, and `torch.nn.utils.clip_grad_norm_` is right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise import _compat
from shardwise.errors import ShardingError, here
from shardwise.layout import Box
from shardwise.sharded_parameter import convert
from shardwise.sharded_parameter.piece import Piece, local_part

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
HANDLERS: dict[Any, Handler] = {}  # by operator; `ops` decides


_requires_grad: Any = Tensor.requires_grad


class ShardedRows(Tensor):
    """A tensor of global shape whose local memory is this rank's rows.

    Made by `fully_shard(layout="contiguous")`: parameters, their gradients, and what optimizers derive
    from them. Where a rank holds no rows, `local` has zero of them.
    """

    __torch_function__ = _compat.disabled_torch_function
    _local: Tensor
    _is_param = False  # what nn.Parameter asks of tensor subclasses, and sets
    piece: Piece

    @classmethod
    def wrap(cls, local: Tensor, piece: Piece, *, requires_grad: bool = False) -> ShardedRows:
        """`local` (shape `piece.rows.sizes`, contiguous) as this rank's part of a whole tensor. Local."""
        made: ShardedRows = _compat.make_wrapper(
            ShardedRows, piece.shape, dtype=local.dtype, device=local.device, requires_grad=requires_grad
        )
        made._local = local
        made.piece = piece
        if requires_grad:
            made.trains = True
        return made

    @classmethod
    @_compat.runs_eagerly
    def from_dtensor(cls, dtensor: DTensor, piece: Piece) -> ShardedRows:
        """A DTensor of the same global shape, cut as `piece`.

        From `Shard(0)` over the ranks of the piece each row moves at most once; from other placements
        the whole tensor is gathered on the way. Collective over the DTensor's mesh.
        """
        return cls.wrap(convert.from_dtensor(dtensor, piece), piece)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        handler = HANDLERS.get(func) or _find_handler(func)
        return handler(func, args, kwargs or {})

    @property
    def local(self) -> Tensor:
        """This rank's rows: memory that optimizers update in place."""
        return self._local

    @property
    def box(self) -> Box:
        """Where `local` lies in the whole tensor."""
        return self.piece.box

    @_compat.runs_eagerly
    def full_tensor(self) -> Tensor:
        """The whole tensor, in memory of its own, without gradient.

        Collective over the ranks that hold its parts.
        """
        return convert.full_tensor(self._local, self.piece)

    @_compat.runs_eagerly
    def to_dtensor(self, mesh: DeviceMesh | None = None) -> DTensor:
        """The same tensor as a DTensor cut evenly on dim 0; each row moves at most once.

        Collective over the ranks that hold its rows.

        Args:
            mesh: 1-D mesh of just these ranks, or None to make one.

        Raises:
            ShardingError: a tensor-parallel tensor, rows cut over several mesh axes or none, or another
                mesh.
        """
        return convert.to_dtensor(self._local, self.piece, mesh)

    @_compat.runs_eagerly
    def load_dtensor(self, source: DTensor) -> None:
        """Take the values of a DTensor of the same global shape. Collective over the DTensor's mesh."""
        with torch.no_grad():
            self._local.copy_(convert.from_dtensor(source, self.piece))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        name = "ShardedParameter" if self._is_param else "ShardedRows"
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"{name}({self._local.detach()!r}, {self.box} of {tuple(self.shape)}{grad})"

    def __deepcopy__(self, memo: Any) -> ShardedRows:
        if id(self) not in memo:
            copied = self.wrap(self._local.detach().clone(), self.piece, requires_grad=self.requires_grad)
            copied._is_param = self._is_param
            memo[id(self)] = copied
        return cast(ShardedRows, memo[id(self)])

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ShardingError(
            f"{here()}: pickling rows {self.box} of a tensor of shape {tuple(self.shape)} would save one"
            " rank's as if they were all; use shardwise.checkpoint.save, torch.distributed.checkpoint, or"
            " full_tensor()"
        )

    # What torch does below the ops that `__torch_dispatch__` sees

    @property
    def data(self) -> Tensor:
        """The same rows without gradient."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        """Other rows of a tensor of the same shape, in place of these.

        They are copied to where these lie, which is what ranks gather; only another dtype or device takes
        other memory.
        """
        if not isinstance(value, ShardedRows) or value.shape != self.shape:
            raise ShardingError(
                f"{here()}: expected rows of a tensor of shape {tuple(self.shape)} as .data, found a"
                f" {type(value).__name__} of shape {tuple(value.shape)}; use copy_()"
            )
        if value.piece == self.piece and (value.dtype, value.device) == (self.dtype, self.device):
            if value._local is not self._local:
                self._local.copy_(value._local)
                torch.autograd.graph.increment_version(self)
            return
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self._local, self.piece = value._local, value.piece
        ShardedRows.changes += 1

    # What `fully_shard` reads of every parameter in every step: an attribute of a tensor subclass costs
    # torch a lookup by name, a plain one is ten times as cheap.

    changes = 0  # how often `requires_grad` or the memory of any was set: readers know when to look again
    trains = False  # requires_grad
    any_hooked = False  # has any of them?
    hooked = False  # has it hooks that run when its gradient is there?

    @property
    def requires_grad(self) -> bool:
        required: bool = _requires_grad.__get__(self)
        return required

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:
        self.requires_grad_(requires_grad)

    def requires_grad_(self, requires_grad: bool = True) -> ShardedRows:
        _requires_grad.__set__(self, requires_grad)
        self.trains = requires_grad
        ShardedRows.changes += 1
        return self

    def register_hook(self, hook: Any) -> Any:
        self.hooked = ShardedRows.any_hooked = True
        return super().register_hook(hook)  # type: ignore[no-untyped-call]

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        self.hooked = ShardedRows.any_hooked = True
        return super().register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def tolist(self) -> Any:
        return self._beyond("tolist()")

    def numpy(self, *, force: bool = False) -> Any:
        return self._beyond("numpy()")

    def __array__(self, dtype: Any = None) -> Any:
        return self._beyond("numpy()")

    def data_ptr(self) -> int:
        return self._beyond("data_ptr()")

    def _beyond(self, what: str) -> NoReturn:
        raise ShardingError(
            f"{here()}: {what} of a tensor of shape {tuple(self.shape)} sharded by rows would be of"
            f" this rank's ({self.box}) alone; call it on .full_tensor() (collective) or on .local"
        )

    # What torch.nn.Module and torch.compile ask of a tensor made of others

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


def _find_handler(op: Any) -> Handler:
    from shardwise.sharded_parameter.ops import find_handler  # which needs the class above

    handler = HANDLERS[op] = find_handler(op)
    return handler


class _IsParameter(type(nn.Parameter)):  # type: ignore[misc]
    """Parameters are `ShardedRows` marked as such, as torch marks parameters that are tensor subclasses."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, ShardedRows) and instance._is_param


class ShardedParameter(ShardedRows, nn.Parameter, metaclass=_IsParameter):
    """A parameter of a module sharded with `layout="contiguous"`, as its optimizer sees it."""

    def __new__(cls, *unused: Any, **also: Any) -> ShardedParameter:
        raise ShardingError('a ShardedParameter is made by fully_shard(..., layout="contiguous")')

    @classmethod
    def wrap(cls, local: Tensor, piece: Piece, *, requires_grad: bool = False) -> ShardedParameter:
        made = ShardedRows.wrap(local, piece, requires_grad=requires_grad)
        made._is_param = True
        return cast(ShardedParameter, made)


def _cut_alike(sharded: ShardedRows, whole: Tensor) -> Tensor:
    """This rank's rows of `whole`; another shape is left for `load_state_dict` to refuse by name."""
    if whole.shape != sharded.shape:
        return whole
    return ShardedRows.wrap(local_part(sharded.piece, whole).clone(), sharded.piece)


_compat.allow_foreach(ShardedRows)
_compat.extend_state_dict_helpers(ShardedRows, cut=_cut_alike)
