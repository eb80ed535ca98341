"""`ShardedRows`: a tensor of which each rank holds whole rows, and `ShardedParameter`, one that trains.

It is a DTensor to other code, placed by `RowShard`, with its own implementation of every operation. It has
the shape of the whole tensor and the memory of this rank's rows, and operations apply to the whole tensor:

    elementwise ops, in place or not    run on the local rows; whole plain operands are cut to match
    sum, mean, norm, max, any, ...      reduce the whole tensor (collective)
    anything else                       raises ShardingError; nothing returns a local result silently

So every optimizer with elementwise arithmetic, including fused and foreach ones, steps on local memory at the
cost of one call per op, and `torch.nn.utils.clip_grad_norm_` gives the right norm.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shardwise import _compat
from shardwise._compat.dtensors import OwnDTensor
from shardwise.errors import ShardingError, here
from shardwise.layout import Box
from shardwise.sharded_tensor import dcp
from shardwise.sharded_tensor.autograd import linked
from shardwise.sharded_tensor.registry import Handler, declared
from shardwise.sharded_tensor.rows import convert
from shardwise.sharded_tensor.rows.piece import Piece, RowShard, piece_of

_requires_grad: Any = Tensor.requires_grad
_handlers: dict[Any, Handler] = {}  # by operator, after its first use


@declared
def handler_of(op: Any) -> Handler:  # type: ignore[empty-body]
    """Choose how to run `op` on rows at its first use; `ops` decides."""


def _refuse_local_result(operation: str) -> Callable[..., NoReturn]:
    """Return a method that raises, since its result would cover only this rank's rows."""

    def refuse(self: ShardedRows, *unused: Any, **ignored: Any) -> NoReturn:
        raise ShardingError(
            f"{here()}: {operation} of a tensor of shape {tuple(self.shape)} sharded by rows would be of"
            f" this rank's ({self.box}) alone; call it on .full_tensor() (collective) or on .local"
        )

    return refuse


class ShardedRows(OwnDTensor):
    """A DTensor of global shape whose local memory is this rank's rows, maybe none.

    `fully_shard(layout="contiguous")` makes parameters and gradients of this class, and optimizers derive
    state from them. `distribute_tensor`, `DTensor.from_local` and `redistribute` make it from their
    `placements`.
    """

    # torch looks it up by name at every attribute (grad, dtype, ...): here it is found first.
    __torch_function__ = OwnDTensor.__torch_function__
    _is_param = False  # nn.Parameter reads and sets it on tensor subclasses
    piece: Piece

    @classmethod
    def wrap(cls, local: Tensor, piece: Piece, *, requires_grad: bool = False) -> ShardedRows:
        """Wrap `local` (shape `piece.rows.sizes`, contiguous) as this rank's part of a tensor. Local."""
        rows: ShardedRows = _compat.make_wrapper(
            ShardedRows, piece.shape, dtype=local.dtype, device=local.device, requires_grad=requires_grad
        )
        rows._local_tensor = local
        rows.piece = piece
        if requires_grad:
            rows.trains = True
        return rows

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
        """Return the counterpart of DTensor's `_spec`: mesh, placements, global shape and dtype."""
        return self.piece.spec(self.dtype)

    @_compat.runs_eagerly
    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Return this rank's rows; differentiable if this requires grad, else `local` itself. Local.

        Args:
            grad_placements: placements of the result's gradient: those of this tensor, except that it may be
                partial sums (`Partial`) over mesh axes that replicate the tensor. None: as this tensor.
        """
        if not (torch.is_grad_enabled() and self.requires_grad):
            return self._local_tensor
        piece = self.piece
        axes = convert.partial_axes(piece, grad_placements, piece.placements if grad_placements else ())

        def back(grad: Tensor) -> tuple[Tensor]:
            return (ShardedRows.wrap(convert.sum_over(grad, piece, axes).contiguous(), piece),)

        return cast(Tensor, linked(lambda rows: rows.local.view_as(rows.local), back, self))

    @_compat.runs_eagerly
    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Return the whole tensor, in new memory. Differentiable.

        Collective over the ranks that hold its parts.

        Args:
            grad_placements: placements of the result's gradient on `device_mesh`: equal on all ranks
                (`Replicate`, the default) or partial sums (`Partial`).
        """
        piece = self.piece
        if not (torch.is_grad_enabled() and self.requires_grad):
            return convert.make_whole(self._local_tensor, piece)
        axes = convert.partial_axes(piece, grad_placements, [Replicate()] * len(grad_placements or ()))

        def back(grad: Tensor) -> tuple[Tensor]:
            return (ShardedRows.wrap(convert.rows_of(convert.sum_over(grad, piece, axes), piece), piece),)

        return cast(Tensor, linked(lambda rows: convert.make_whole(rows.local, piece), back, self))

    @_compat.runs_eagerly
    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        forward_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> DTensor:
        """Return the values with other placements. Differentiable. Collective over `device_mesh`.

        A change to even rows over the same ranks moves each row at most once; other changes gather the whole
        tensor in between. `options` are DTensor's other arguments (`async_op`, `backward_dtype`), which have
        no effect: this waits, and moves gradients in their own dtype.
        """
        if placements is None:
            raise ShardingError(f"{here()}: redistribute needs placements, one for each axis of the mesh")
        mesh = self.device_mesh if device_mesh is None else device_mesh
        source = self if forward_dtype in (None, self.dtype) else cast(DTensor, self.to(forward_dtype))
        if mesh == self.device_mesh and tuple(placements) == self.placements:
            return source
        piece, target = self.piece, tuple(placements)
        result = linked(
            lambda rows: convert.make_dtensor(rows.local, piece, mesh, target),
            lambda grad: (ShardedRows.wrap(convert.rows_of(grad, piece), piece),),
            source,
        )
        return cast(DTensor, result)

    @_compat.runs_eagerly
    def to_dtensor(self, mesh: DeviceMesh | None = None) -> DTensor:
        """Return the tensor cut evenly on dim 0 over every axis of `mesh`, without gradient.

        By default, `mesh` has the ranks over which rows are cut. Collective like `redistribute`.
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
        """Pickle as a DTensor does: a copy of this rank's rows, and their position."""
        local, mesh, placements = self._local_tensor.detach().clone(), self.device_mesh, self.placements
        return _unpickled, (local, mesh, placements, self.shape, self.requires_grad, self._is_param)

    # Operations of torch below those that `__torch_dispatch__` sees

    @property
    def data(self) -> Tensor:
        """The rows without gradient."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        """Copy rows or a DTensor of the same shape into the memory of these rows.

        Ranks gather that memory, so it is replaced only for another dtype or device.
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

    # Attributes that `fully_shard` reads on every parameter in every step: torch's attributes of a tensor
    # subclass cost a lookup by name, plain ones a tenth of that.

    changes = 0  # counts changes of `requires_grad` or memory of any rows, so that readers know when to check
    trains = False  # requires_grad
    any_hooked = False  # whether any rows are hooked
    hooked = False  # whether hooks run on its gradient
    cuts_gradient = False  # whether it has the hook of `reductions.cut_gradient`

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

    tolist: Any = _refuse_local_result("tolist()")
    numpy: Any = _refuse_local_result("numpy()")
    __array__: Any = numpy

    # torch.compile's protocol for tensors made of others; DTensor implements the first half by `_spec`

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Any], meta: Any, size: Any, stride: Any) -> ShardedRows:
        local, spec = inner["_local_tensor"], meta[0]
        if isinstance(spec, _compat.DTensorSpec):
            mesh, placements, tensor_meta = spec.mesh, spec.placements, cast(Any, spec.tensor_meta)
        else:
            mesh, placements, tensor_meta = inner["device_mesh"], spec, meta[1]
        piece = piece_of(mesh, placements, tensor_meta.shape, local.dtype)  # `size` may be symbols
        return ShardedRows.wrap(local, piece, requires_grad=meta[-1])

    def _stable_hash_for_caching(self) -> str:
        """Return the cache key for compiled graphs; unlike DTensor's, it depends on this rank's rows."""
        local, box = self._local_tensor, self.piece.box
        key = (
            *(tuple(self.shape), tuple(local.shape), local.stride(), local.dtype, local.device),
            *(box, self.placements, self.device_mesh, self.requires_grad),
        )
        return hashlib.sha256(repr(key).encode()).hexdigest()

    # torch.distributed.checkpoint's protocol for tensors that know their parts

    def __create_write_items__(self, name: str, value: Any) -> list[Any]:
        return dcp.write_items(name, self.__create_chunk_list__(), self.shape, like=self._local_tensor)

    def __create_chunk_list__(self) -> list[Any]:
        return dcp.chunks([self.box], self.shape, is_first=self.piece.rank == 0)

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return self._local_tensor


class _IsParameter(type(nn.Parameter)):  # type: ignore[misc]
    """Makes `ShardedRows` marked as parameters its instances, as torch does for parameters of subclasses."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, ShardedRows) and instance._is_param


class ShardedParameter(ShardedRows, nn.Parameter, metaclass=_IsParameter):
    """A parameter of a module sharded with `layout="contiguous"`, as its optimizer sees it."""

    def __new__(cls, *unused: Any, **ignored: Any) -> ShardedParameter:
        raise ShardingError('a ShardedParameter is made by fully_shard(..., layout="contiguous")')

    @classmethod
    def wrap(cls, local: Tensor, piece: Piece, *, requires_grad: bool = False) -> ShardedParameter:
        parameter = ShardedRows.wrap(local, piece, requires_grad=requires_grad)
        parameter._is_param = True
        return cast(ShardedParameter, parameter)


def cut_like(param: Tensor, local: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Return `local` as this rank's part of a tensor of `shape` cut like `param`: rows, a DTensor, or plain.

    By default it has the shape of `param`. For rows, the first dim must not differ.
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
