"""One sharded parameter: its two forms, and the modules in which one of them is registered.

    sharded      an nn.Parameter of global shape that holds this rank's piece, which the optimizer updates:
                 a DTensor (interleaved layout) or a ShardedParameter (contiguous layout)
    unsharded    an nn.Parameter that is the whole parameter while its group is gathered

The group's current form is registered under the parameter's name in every module that owns it (tied
parameters have several owners). This file handles one parameter; buffers and collectives belong to
the group.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shardwise import _compat
from shardwise.errors import ShardingError, here
from shardwise.fsdp import optimizer_watch
from shardwise.fsdp.fast import own_storage, process
from shardwise.fsdp.policy import MixedPrecisionPolicy
from shardwise.layout import EvenShard, Owned, ParamSpec, RaggedShard, Slot
from shardwise.mesh import DataParallelMeshInfo, DDPMeshInfo, FSDPMeshInfo
from shardwise.sharded_tensor.rows import ShardedRows


@dataclass
class ShardPlacementResult:
    """A result of `shard_placement_fn` that also names the mesh."""

    placement: ParamPlacement | None  # which dim to shard on, or which rows stay together; None: dim 0
    mesh_info: FSDPMeshInfo  # the axes over which this parameter is sharded


# Placements that a user may choose for a parameter: a dim to shard, or whole blocks of rows (contiguous).
ParamPlacement = Shard | RaggedShard | Owned
ShardPlacementFn = Callable[[nn.Parameter], "ParamPlacement | ShardPlacementResult | None"]


class Owner(NamedTuple):
    """A module's dict of parameters, and the name under which it holds this one.

    Not the module itself, which owns the group that owns this: a reference back would keep it alive.
    """

    parameters: dict[str, nn.Parameter | None]
    name: str


class ShardedParam(ABC):
    """A parameter cut over the shard axis; with tensor parallelism, a DTensor whose local piece is cut."""

    # Models have thousands of these. (Attributes that subclasses add are in their dicts.)
    __slots__ = (
        "__weakref__", "accumulated", "accumulates", "chosen_grad_dtype", "global_shape",
        "grads_have_stored_dtype", "info", "is_packed", "module", "name", "owners", "placement", "policy",
        "shape", "sharded", "smaller", "tp_spec", "trainable", "unsharded", "whole",
    )  # fmt: skip
    sharded: nn.Parameter  # set when packed
    placement: EvenShard | RaggedShard | Owned
    replaced_if: str
    grads_have_stored_dtype: bool  # whether sharded gradients have it
    whole: Tensor  # until packed: the whole parameter, or this rank's part of it

    def __init__(
        self,
        param: nn.Parameter,
        *,
        name: str,
        owners: list[Owner],
        module: nn.Module,
        info: DataParallelMeshInfo,
        policy: MixedPrecisionPolicy,
    ) -> None:
        self.name, self.owners, self.info, self.policy = name, owners, info, policy
        self.module = weakref.ref(module)  # passed to hooks for the all-gather
        self.chosen_grad_dtype = _compat.chosen_grad_dtype(param)
        self.trainable = param.requires_grad  # of both forms, unless the user changed one since
        self.is_packed = self.accumulates = False  # the latter: the next gradients are not reduced
        if isinstance(param, ShardedRows):
            raise ShardingError(
                f"{here()}: '{name}' is sharded by rows already ({param.piece.placements}). Apply fully_shard"
                " to inner modules before outer ones, pass its full_tensor() or put it in ignored_params"
            )
        # Tensor-parallel form of the unsharded parameter, None for plain tensors.
        self.tp_spec = _compat.spec_of(param) if isinstance(param, DTensor) else None
        self.whole = param.detach() if self.tp_spec is None else _compat.local_tensor(param).detach()
        self.global_shape = self.shape = param.shape
        if self.tp_spec is not None:
            self.shape = self.whole.shape
        if not self.whole.is_contiguous():
            raise ShardingError(
                f"{here()}: '{self.name}' of shape {tuple(self.shape)} has strides {self.whole.stride()};"
                " fully_shard needs contiguous parameters: call .contiguous() on it first"
            )
        if self.tp_spec is None and info.is_spmd_mesh:
            raise ShardingError(
                f"{here()}: with dp_mesh_dims every parameter must be a DTensor on the whole mesh,"
                f" but '{self.name}' is a plain tensor; distribute the module first"
            )
        self.unsharded: nn.Parameter | None = None
        self.smaller: Callable[[], nn.Parameter | None] = type(None)  # a weak reference, once there is one
        # The sum of earlier backwards, where FSDP2 keeps it separate from the leaf's gradient.
        self.accumulated: Tensor | None = None

    @property
    def ranks(self) -> int:
        return self.info.shard_mesh_size if isinstance(self.info, FSDPMeshInfo) else 1

    @property
    def numel(self) -> int:
        return self.shape.numel()

    @property
    def local(self) -> Tensor:
        """This rank's piece, unpadded; before packing, maybe the whole parameter."""
        return _compat.local_tensor(self.sharded) if self.is_packed else self.whole

    def check_data(self) -> None:  # noqa: B027
        """Raise if the user assigned to the sharded form's `data`, which has no effect."""

    def check_registered(self, *, smaller: bool) -> None:
        """Raise if the user replaced the registered form (the sharded one, or a `smaller` piece)."""
        piece = self.smaller()
        form = piece if smaller and piece is not None else self.sharded
        for owner in self.owners:
            current = owner.parameters.get(owner.name)
            if current is None or all(current is not own for own in (self.sharded, self.unsharded, piece)):
                raise self.replacement_error(current)
            owner.parameters[owner.name] = form  # functional_call put back another form

    def register_smaller(self, piece: nn.Parameter) -> None:
        self.smaller = weakref.ref(piece)
        optimizer_watch.watch_smaller(self, piece)
        self.register(piece)  # only modules keep it, and only until the next gather

    @abstractmethod
    def part_of(self, shard: Tensor) -> Tensor:
        """Return the view of this rank's piece in its group's shard buffer."""

    @abstractmethod
    def whole_in(self, full: Tensor) -> Tensor:
        """Return the view of the whole parameter in its group's unsharded buffer."""

    @abstractmethod
    def move(self, piece: Tensor) -> None:
        """Make `piece`, equal values in other memory, the sharded form; keep the object if possible."""

    @abstractmethod
    def _replacement(self, current: nn.Parameter | None) -> nn.Parameter | None:
        """Return `current`, which replaced the sharded form, as a sharded form; None if it cannot be one."""

    def follow_replacement(self) -> None:
        """Adopt a sharded parameter that replaced the group's own (`load_state_dict(assign=True)`)."""
        if not self.is_packed:
            return
        owner = self.owners[0]
        current = owner.parameters.get(owner.name)
        if current is None or (current is not self.sharded and current is not self.unsharded):
            is_parameter = isinstance(current, nn.Parameter)  # functional_call registers other tensors
            registered, current = current, self._replacement(current) if is_parameter else None
            if current is None:
                raise self.replacement_error(registered)
            self.sharded, self.unsharded = current, None  # the whole form was made for the other
        self.register(current)  # `load_state_dict(assign=True)` gives each owner of a tie another one
        self.refresh_form()

    def replacement_error(self, form: nn.Parameter | None) -> ShardingError:
        text = f"{type(form).__name__} {tuple(form.shape)}" if form is not None else "nothing"
        return ShardingError(
            f"{here()}: '{self.name}' was replaced by {text}; it can only be replaced by a DTensor of shape"
            f" {tuple(self.global_shape)}, {self.replaced_if}, before the first forward or by"
            " load_state_dict(assign=True). Load whole values with set_model_state_dict of"
            " torch.distributed.checkpoint.state_dict; parametrize, tie and prune before fully_shard;"
            " instead of passing computed parameters to functional_call, compute them in forward"
        )

    def register(self, form: nn.Parameter) -> None:
        for owner in self.owners:
            owner.parameters[owner.name] = form

    @property
    def dtype(self) -> torch.dtype:  # as stored
        return self.sharded.dtype if self.is_packed else self.whole.dtype

    @property
    def gather_dtype(self) -> torch.dtype:
        """The dtype in which the parameter is gathered and used."""
        dtype, computed = self.dtype, self.policy.param_dtype
        return computed if computed is not None and dtype.is_floating_point else dtype

    def layout_spec(self) -> ParamSpec:
        placement, trains = self.placement, self.trainable
        return ParamSpec(self.name, self.shape, self.dtype, self.gather_dtype, placement, trains)

    def wrap_unsharded(self, whole: Tensor) -> nn.Parameter:
        """Return the unsharded form over memory `whole`, made once."""
        if self.tp_spec is not None:
            whole = _compat.dtensor(whole, _compat.spec_as(self.tp_spec, whole.dtype))
        param = nn.Parameter(whole, requires_grad=self.sharded.requires_grad)
        self.trainable = param.requires_grad
        self.set_leaf_grad_dtype(param)
        optimizer_watch.watch_gathered(self, param)
        return param

    def rename(self, name: str) -> None:
        """Take the name that the root module gives the parameter."""
        # Also on the tensor, for optimizers: a weak table of tensors would keep torch from swapping them.
        self.name = self.sharded.shardwise_name = name  # type: ignore[attr-defined]

    # Gradients

    @property
    def sum_dtype(self) -> torch.dtype | None:
        """The dtype in which gradients are accumulated and reduced; None: the dtype in which they come."""
        if self.policy.reduce_dtype is None and self.chosen_grad_dtype:
            return self.chosen_grad_dtype[0]
        return self.policy.sum_dtype(stored=self.dtype, computed=self.gather_dtype)

    @property
    def sharded_grad_dtype(self) -> torch.dtype | None:
        """The dtype of the sharded gradient; None: the reduction's dtype."""
        return self.chosen_grad_dtype[0] if self.chosen_grad_dtype else self.dtype

    def refresh_form(self, *, is_new: bool = False) -> None:
        """Read the `grad_dtype` that the user set on the sharded form, or restore it after a conversion."""
        chosen = () if is_new else _compat.chosen_grad_dtype(self.sharded)
        if chosen or not self.chosen_grad_dtype:
            self.chosen_grad_dtype = chosen
        else:
            self.sharded.grad_dtype = self.chosen_grad_dtype[0]
        self.grads_have_stored_dtype = self.sharded_grad_dtype == self.dtype

    def set_leaf_grad_dtype(self, leaf: nn.Parameter) -> None:
        """Make autograd leave gradients on the unsharded form in the dtype in which they are summed."""
        # To widen a gradient, autograd would copy it. So gradients that are reduced next stay as they come,
        # and the reduction's copy widens them; gradients added to a wider sum need no copy either.
        dtype = self.sum_dtype
        if dtype == leaf.dtype or not leaf.is_floating_point():
            return
        if not _compat.SUMS_AS_KEPT and not self.chosen_grad_dtype:
            return  # autograd rounds every gradient to the leaf's dtype
        widens = dtype is not None and dtype.itemsize > leaf.dtype.itemsize and self.tp_spec is None
        as_they_come = widens and (not self.accumulates or leaf.grad is not None)
        leaf.grad_dtype = None if as_they_come or not _compat.SUMS_AS_KEPT else dtype

    @property
    def has_unreduced(self) -> bool:
        """Whether there is an unsharded gradient, which was not reduced."""
        leaf = self.unsharded
        return self.accumulated is not None or (leaf is not None and leaf.grad is not None)

    @property
    def has_grad_hooks(self) -> bool:
        return bool(_compat.grad_hooks(self.sharded) or _compat.post_accumulate_grad_hooks(self.sharded))

    def plain_grad(self, grad: Tensor) -> Tensor:
        """Return the local tensor of an unsharded gradient, in the parameter's tensor-parallel placements.

        Collective over the tensor-parallel mesh where the gradient's placements differ (partial
        sums of sequence-parallel norms, say). Data-parallel dims are left to the reduce-scatter.
        """
        if self.tp_spec is None:
            return grad
        if not isinstance(grad, DTensor):
            raise ShardingError(f"{here()}: '{self.name}' is a DTensor but its gradient is a {type(grad)}")
        placements = list(self.tp_spec.placements)
        dims, names = self.info.dp_mesh_dims, self.tp_spec.mesh.mesh_dim_names
        if dims is not None and names is not None:
            for name in (*dims.shard_names, *dims.replicate_names):
                placements[names.index(name)] = grad.placements[names.index(name)]
        if tuple(placements) != tuple(grad.placements):
            grad = grad.redistribute(placements=placements)
        return _compat.local_tensor(grad)  # if it is still being redistributed, its reader waits

    @abstractmethod
    def as_grad(self, piece: Tensor) -> Tensor:
        """Return a part of a reduced buffer as a gradient of the sharded form."""

    def assign_grad(self, piece: Tensor) -> None:
        """Set the sharded gradient, or add to it, with all that torch does for a leaf's: dtype and hooks."""
        grad = self.as_grad(piece.to(self.sharded_grad_dtype or piece.dtype))
        for change in list((_compat.grad_hooks(self.sharded) or {}).values()):  # a hook may remove itself
            if (changed := change(grad)) is not None:
                grad = changed
        if self.sharded.grad is None:
            self.sharded.grad = grad
        else:
            _compat.local_tensor(self.sharded.grad).add_(_compat.local_tensor(grad))
        for hook in list((_compat.post_accumulate_grad_hooks(self.sharded) or {}).values()):
            hook(self.sharded)


_ROWS = EvenShard(0)


class EvenParam(ShardedParam):
    """A parameter of the interleaved layout: a DTensor, cut evenly on one dim; by default, dim 0."""

    placement: EvenShard
    slot: Slot
    memory_begin: int = 0  # offset of its unsharded buffer among its segment's elements
    replaced_if = "cut evenly"

    def __init__(self, param: nn.Parameter, *, placement: ParamPlacement | None, **options: Any) -> None:
        super().__init__(param, **options)
        self.placement = self._check_placement(placement, self.whole)
        self.spec = self._sharding_spec(param)

    def assign_slot(self, slot: Slot) -> None:
        """Set which piece this rank holds; `move` gives it memory."""
        self.slot = slot
        if not self.is_packed:
            dim = self.placement.dim
            self.whole = self.whole.narrow(dim, slot.begin, slot.shard_shape[dim])

    def _check_placement(self, placement: ParamPlacement | None, whole: Tensor) -> EvenShard:
        if placement is not None and not isinstance(placement, Shard):
            raise ShardingError(
                f"{here()}: shard_placement_fn must return a Shard, a ShardPlacementResult or None"
                f" for '{self.name}', got {placement!r}; whole blocks of rows need layout=\"contiguous\""
            )
        if placement is None and whole.ndim:
            return _ROWS
        dim = 0 if placement is None else placement.dim
        if not -whole.ndim <= dim < whole.ndim:
            raise ShardingError(
                f"{here()}: '{self.name}' of shape {tuple(self.shape)} has no dim {dim} to shard;"
                f" return Shard(d) with 0 <= d < {whole.ndim} from shard_placement_fn"
            )
        dim %= whole.ndim
        if dim > 0 and whole.size(dim) % self.ranks:
            raise ShardingError(
                f"{here()}: '{self.name}' of shape {tuple(self.shape)} cannot be sharded evenly on dim {dim}"
                f" over {self.ranks} ranks; only dim 0 may be uneven"
            )
        return EvenShard(dim)

    # The DTensor that the sharded form is

    def _sharding_spec(self, param: nn.Parameter) -> _compat.DTensorSpec:
        info, tp = self.info, self.tp_spec
        if tp is None:
            placements = self._data_parallel(Shard(self.placement.dim))
            return _compat.dtensor_spec(info.mesh, placements, shape=param.shape, dtype=param.dtype)
        if info.is_spmd_mesh:
            return self._spmd_spec(tp)
        if tp.mesh == info.mesh:
            raise ShardingError(
                f"{here()}: '{self.name}' is sharded over these ranks already, by fully_shard on an outer"
                " module or by hand; apply fully_shard to inner modules before outer ones"
            )
        # Data parallelism beside a tensor-parallel mesh that it does not contain.
        outer = self._data_parallel(self._outer_shard(tp, range(tp.mesh.ndim)))
        mesh = _compat.concatenate_meshes([info.mesh, tp.mesh])
        return _compat.shared_spec(mesh, (*outer, *tp.placements), tp.tensor_meta)

    def _data_parallel(self, shard: Placement) -> list[Placement]:
        replicate: list[Placement] = [Replicate()] if isinstance(self.info, DDPMeshInfo) else []
        return [*replicate, shard] if isinstance(self.info, FSDPMeshInfo) else replicate

    def _outer_shard(self, inner: _compat.DTensorSpec, axes: Iterable[int]) -> Placement:
        """Return the outer placement of pieces that inner `axes` cut: strided if they cut the same dim."""
        dim, splits = self.placement.dim, 1
        for axis in axes:
            placement = inner.placements[axis]
            if isinstance(placement, (Shard, _compat.StridedShard)) and placement.dim == dim:
                splits *= inner.mesh.size(axis)
        return Shard(dim) if splits == 1 else _compat.StridedShard(dim, split_factor=splits)

    def _spmd_spec(self, whole: _compat.DTensorSpec) -> _compat.DTensorSpec:
        """Return the spec of data parallelism over named dims of the parameter's own mesh."""
        dims, mesh, names = self.info.dp_mesh_dims, whole.mesh, whole.mesh.mesh_dim_names
        assert dims is not None
        if mesh != self.info.spmd_mesh or names is None:
            raise ShardingError(
                f"{here()}: '{self.name}' is a DTensor on {mesh}, but fully_shard got the mesh"
                f" {self.info.spmd_mesh}; distribute it on the mesh that fully_shard is given"
            )
        for name in (*dims.shard_names, *dims.replicate_names):
            placement = whole.placements[names.index(name)]
            if not placement.is_replicate():
                raise ShardingError(
                    f"{here()}: '{self.name}' must be Replicate() on the data-parallel mesh dim '{name}',"
                    f" but is {placement}"
                )
        placements = list(whole.placements)
        for name in dims.shard_names:
            axis = names.index(name)
            placements[axis] = self._outer_shard(whole, range(axis + 1, mesh.ndim))
        if len(dims.shard_names) < 2:
            return _compat.shared_spec(mesh, placements, whole.tensor_meta)
        # Several shard dims count as one: represent them by the flattened data-parallel mesh.
        data_parallel = {*dims.shard_names, *dims.replicate_names}
        other_axes = [a for a in range(mesh.ndim) if names[a] not in data_parallel]
        outer = self._data_parallel(placements[names.index(dims.shard_names[0])])
        joined = _compat.concatenate_meshes([self.info.mesh, *(mesh[names[a]] for a in other_axes)])
        return _compat.shared_spec(joined, (*outer, *(placements[a] for a in other_axes)), whole.tensor_meta)

    # Switching forms

    def _replacement(self, current: nn.Parameter | None) -> nn.Parameter | None:
        if not isinstance(current, DTensor) or isinstance(current, ShardedRows):
            return None
        return current if current.shape == self.global_shape else None

    def refresh_form(self, *, is_new: bool = False) -> None:
        super().refresh_form(is_new=is_new)
        self.spec = _compat.spec_of(self.sharded)  # gradients share it: DTensor hashes each object once
        self._snapshot = self.local, _compat.storage_id(self.sharded)  # to detect changes by

    def check_data(self) -> None:
        local, storage = self._snapshot
        if _compat.storage_id(self.sharded) != storage and self.local is local:
            raise ShardingError(
                f"{here()}: '{self.name}'.data was assigned to (on {self.sharded.data.device}), but a sharded"
                " parameter is a DTensor, whose values this does not change. Change them in place:"
                " data.copy_(...), or any in-place operation under no_grad"
            )

    def part_of(self, shard: Tensor) -> Tensor:
        return own_storage(self.slot.of(shard))

    def whole_in(self, full: Tensor) -> Tensor:
        return full.narrow(0, self.slot.unsharded_offset - self.memory_begin, self.numel).view(self.shape)

    def move(self, piece: Tensor) -> None:
        in_place = self.is_packed and piece.device == self.local.device
        if in_place:
            _compat.set_local_tensor(self.sharded, piece)  # optimizers may hold the object
        else:  # a DTensor cannot change its device
            requires_grad = self.sharded.requires_grad if self.is_packed else self.trainable
            self.sharded = _compat.dtensor_parameter(piece, self.spec, requires_grad=requires_grad)
            self.register(self.sharded)
        if not self.is_packed:
            del self.whole
            self.is_packed = True
        self.refresh_form(is_new=not in_place)

    def as_grad(self, piece: Tensor) -> DTensor:
        if process.compiler:
            piece = own_storage(piece)
        spec, begin = self.spec, _compat.local_tensor(self.sharded)
        if piece.dtype != begin.dtype:
            spec, begin = _compat.spec_as(spec, piece.dtype), begin.new_empty(0, dtype=piece.dtype)
        return _compat.dtensor_at(piece, spec, begin=begin)
