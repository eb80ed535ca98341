"""`ShardedRows`: a tensor of which each rank holds whole rows, and `ShardedParameter`, one that trains.

It is a DTensor to whoever asks, placed by `RowShard`, with its own meaning of every operation. It has the
shape of the whole tensor and the memory of this rank's rows, and means the whole tensor:

    elementwise ops, in place or not    run on the local rows; whole plain operands are cut to them
    sum, mean, norm, max, any, ...      are those of the whole tensor (collective)
    anything else                       raises ShardingError; nothing computes a local answer silently

So every optimizer of elementwise arithmetic, fused and foreach ones too, steps on local memory at the
cost of one call per op, and `torch.nn.utils.clip_grad_norm_` is right.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from shardwise import _compat
from shardwise._compat.dtensors import OwnDTensor
from shardwise.errors import ShardingError, here
from shardwise.layout import Box
from shardwise.sharded_tensor import dcp
from shardwise.sharded_tensor.registry import Handler, declared
from shardwise.sharded_tensor.rows import convert
from shardwise.sharded_tensor.rows.piece import Piece, RowShard, piece_of

_requires_grad: Any = Tensor.requires_grad
_handlers: dict[Any, Handler] = {}  # by operator, once it was met


@declared
def handler_of(op: Any) -> Handler:  # type: ignore[empty-body]
    """Choose how to run `op` on rows, met for the first time; `ops` decides."""


def _of_local_rows_alone(what: str) -> Callable[..., NoReturn]:
    """Return a method that refuses, since its answer would be of this rank's rows alone."""

    def refuse(self: ShardedRows, *unused: Any, **ignored: Any) -> NoReturn:
        raise ShardingError(
            f"{here()}: {what} of a tensor of shape {tuple(self.shape)} sharded by rows would be of"
            f" this rank's ({self.box}) alone; call it on .full_tensor() (collective) or on .local"
        )

    return refuse


class ShardedRows(OwnDTensor):
    """A DTensor of global shape whose local memory is this rank's rows, maybe none.

    Made by `fully_shard(layout="contiguous")`: parameters, their gradients, and what optimizers derive
    from them; and by `distribute_tensor`, `DTensor.from_local` and `redistribute` with their `placements`.
    """

    # torch looks for it by name at every attribute (grad, dtype, ...): here it finds it first.
    __torch_function__ = OwnDTensor.__torch_function__
    _is_param = False  # what nn.Parameter asks of tensor subclasses, and sets
    piece: Piece

    @classmethod
    def wrap(cls, local: Tensor, piece: Piece, *, requires_grad: bool = False) -> ShardedRows:
        """Wrap `local` (shape `piece.rows.sizes`, contiguous) as this rank's part of a tensor. Local."""
        made: ShardedRows = _compat.make_wrapper(
            ShardedRows, piece.shape, dtype=local.dtype, device=local.device, requires_grad=requires_grad
        )
        made._local_tensor = local
        made.piece = piece
        if requires_grad:
            made.trains = True
        return made

    @classmethod
    @_compat.runs_eagerly
    def from_dtensor(cls, dtensor: DTensor, piece: Piece) -> ShardedRows:
        """Return a DTensor of the same global shape, cut as `piece`. Collective over the DTensor's mesh."""
        return cls.wrap(convert.rows_of(dtensor, piece), piece)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        handler = _handlers.get(func)
        if handler is None:
            handler = _handlers[func] = handler_of(func)
        return handler(func, args, kwargs or {})

    @property
    def local(self) -> Tensor:
        """This rank's rows: memory that optimizers update in place."""
        return self._local_tensor

    @property
    def box(self) -> Box:
        """The position of `local` in the whole tensor."""
        return self.piece.box

    def description(self) -> _compat.DTensorSpec:
        """Return what DTensor keeps as its `_spec`: mesh, placements, global shape and dtype."""
        return self.piece.spec(self.dtype)

    @_compat.runs_eagerly
    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Return this rank's rows; with gradient where this has one, else `local` itself. Local.

        Args:
            grad_placements: how the gradient of the result is placed: as this tensor, but for sums that are
                still to be added up (`Partial`) over mesh axes that replicate it. None: as this tensor.
        """
        if torch.is_grad_enabled() and self.requires_grad:
            return convert.to_local(self, grad_placements)
        return self._local_tensor

    @_compat.runs_eagerly
    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Return the whole tensor, in memory of its own. Differentiable.

        Collective over the ranks that hold its parts.

        Args:
            grad_placements: how the gradient of the result is placed on `device_mesh`: equal on all ranks
                (`Replicate`, the default) or to be added up (`Partial`).
        """
        if torch.is_grad_enabled() and self.requires_grad:
            return convert.full_tensor(self, grad_placements)
        return convert.make_whole(self._local_tensor, self.piece)

    @_compat.runs_eagerly
    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        forward_dtype: torch.dtype | None = None,
        **how: Any,
    ) -> DTensor:
        """Return the values with other placements. Differentiable. Collective over `device_mesh`.

        Rows to even rows over the same ranks move each row at most once; other placements gather the whole
        tensor on the way. `how` is what else DTensor takes (`async_op`, `backward_dtype`): this waits, and
        moves gradients in their dtype.
        """
        if placements is None:
            raise ShardingError(f"{here()}: redistribute needs placements, one for each axis of the mesh")
        mesh = self.device_mesh if device_mesh is None else device_mesh
        source = self if forward_dtype in (None, self.dtype) else cast(DTensor, self.to(forward_dtype))
        if mesh == self.device_mesh and tuple(placements) == self.placements:
            return source
        return convert.redistributed(source, mesh, tuple(placements))

    @_compat.runs_eagerly
    def to_dtensor(self, mesh: DeviceMesh | None = None) -> DTensor:
        """Return the tensor cut evenly on dim 0 over every axis of `mesh`, without gradient.

        `mesh` is by default of the ranks over which rows are cut. Collective as `redistribute`.
        """
        group = self.piece.group
        if mesh is None:
            mesh = DeviceMesh.from_group(group, self.device.type) if group is not None else self.device_mesh
        return cast(DTensor, self.detach()).redistribute(mesh, [Shard(0)] * mesh.ndim)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        name = "ShardedParameter" if self._is_param else "ShardedRows"
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"{name}({self._local_tensor.detach()!r}, {self.box} of {tuple(self.shape)}{grad})"

    def __deepcopy__(self, memo: Any) -> ShardedRows:
        kind = ShardedParameter if self._is_param else ShardedRows
        return kind.wrap(self._local_tensor.detach().clone(), self.piece, requires_grad=self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a DTensor does: this rank's rows and where they lie, in memory of their own."""
        local, mesh, placements = self._local_tensor.detach().clone(), self.device_mesh, self.placements
        return _unpickled, (local, mesh, placements, self.shape, self.requires_grad, self._is_param)

    # What torch does below the ops that `__torch_dispatch__` sees

    @property
    def data(self) -> Tensor:
        """The rows without gradient."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        """Copy other rows of a tensor of the same shape, or a DTensor of it, to where these lie.

        Ranks gather that memory; only another dtype or device takes other.
        """
        if not isinstance(value, DTensor) or value.shape != self.shape:
            raise ShardingError(
                f"{here()}: expected rows of a tensor of shape {tuple(self.shape)} as .data, found a"
                f" {type(value).__name__} of shape {tuple(value.shape)}; use copy_()"
            )
        if not isinstance(value, ShardedRows):
            value = self.from_dtensor(value, self.piece)
        if value.piece == self.piece and (value.dtype, value.device) == (self.dtype, self.device):
            if value._local_tensor is not self._local_tensor:
                self._local_tensor.copy_(value._local_tensor)
                torch.autograd.graph.increment_version(self)
            return
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self._local_tensor, self.piece = value._local_tensor, value.piece
        ShardedRows.changes += 1

    # What `fully_shard` reads of every parameter in every step: an attribute of a tensor subclass costs
    # torch a lookup by name, a plain one is ten times as cheap.

    changes = 0  # how often `requires_grad` or the memory of any was set: readers know when to look again
    trains = False  # requires_grad
    any_hooked = False  # has any of them?
    hooked = False  # has it hooks that run when its gradient is there?
    cuts_gradient = False  # has it the hook of `reductions.cut_gradient`?

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

    tolist: Any = _of_local_rows_alone("tolist()")
    numpy: Any = _of_local_rows_alone("numpy()")
    __array__: Any = numpy

    # What torch.compile asks of a tensor made of others; DTensor answers the first half from `_spec`

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Any], meta: Any, size: Any, stride: Any) -> ShardedRows:
        local, described = inner["_local_tensor"], meta[0]
        if isinstance(described, _compat.DTensorSpec):
            mesh, placements, known = described.mesh, described.placements, cast(Any, described.tensor_meta)
        else:
            mesh, placements, known = inner["device_mesh"], described, meta[1]
        piece = piece_of(mesh, placements, known.shape, local.dtype)  # `size` may be symbols
        return ShardedRows.wrap(local, piece, requires_grad=meta[-1])

    def _stable_hash_for_caching(self) -> str:
        """Return the cache key for compiled graphs; unlike DTensor's, it depends on this rank's rows."""
        local, box = self._local_tensor, self.piece.box
        facts = (
            *(tuple(self.shape), tuple(local.shape), local.stride(), local.dtype, local.device),
            *(box, self.placements, self.device_mesh, self.requires_grad),
        )
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    # torch.distributed.checkpoint's protocol for tensors that know their parts

    def __create_write_items__(self, name: str, value: Any) -> list[Any]:
        return dcp.write_items(name, self.__create_chunk_list__(), self.shape, like=self._local_tensor)

    def __create_chunk_list__(self) -> list[Any]:
        return dcp.chunks([self.box], self.shape, is_first=self.piece.rank == 0)

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return self._local_tensor


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


def cut_like(param: Tensor, local: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Return `local` as this rank's part of a tensor cut as `param`: rows, a DTensor, or itself where plain.

    Args:
        shape: of the whole tensor; None: that of `param`. Of rows, only dims after the first may differ.
    """
    if isinstance(param, ShardedRows):
        piece = param.piece
        if shape is not None and tuple(shape) != tuple(param.shape):
            piece = piece.with_trailing(shape[1:])
        return ShardedRows.wrap(local, piece)
    if isinstance(param, DTensor):
        spec = _compat.spec_of(param)
        if shape is not None:
            whole = torch.Size(shape)
            spec = _compat.dtensor_spec(spec.mesh, spec.placements, shape=whole, dtype=local.dtype)
        return _compat.dtensor(local, spec)
    return local


def _unpickled(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: torch.Size,
    requires_grad: bool,
    is_param: bool,
) -> ShardedRows:
    kind = ShardedParameter if is_param else ShardedRows
    return kind.wrap(local, piece_of(mesh, placements, shape, local.dtype), requires_grad=requires_grad)


_compat.allow_foreach(ShardedRows)
torch.serialization.add_safe_globals([_unpickled, RowShard])
