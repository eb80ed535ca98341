"""A parameter of the contiguous layout: each rank holds whole rows of it."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise import _compat
from shardwise.errors import ShardingError, here
from shardwise.fsdp.extension import POST, PRE
from shardwise.fsdp.parameter import ParamPlacement, ShardedParam
from shardwise.layout import ContiguousLayout, Owned, Place, RaggedShard
from shardwise.sharded_tensor.rows import Piece, ShardedParameter, ShardedRows
from shardwise.sharded_tensor.rows.piece import even_cuts_of

_ROWS = RaggedShard()


class RowsParam(ShardedParam):
    """A parameter whose sharded form is a `ShardedParameter`, once its group has packed it.

    Its placement says which rows stay together; None and `Shard(0)` keep single rows.
    """

    sharded: ShardedParameter
    piece: Piece
    placement: RaggedShard | Owned
    place: Place
    replaced_if = "on all ranks alike"

    def __init__(self, param: nn.Parameter, *, placement: ParamPlacement | None, **options: Any) -> None:
        super().__init__(param, **options)
        self.placement = self._check_placement(placement)
        if self.whole.is_complex():
            raise ShardingError(
                f"{here()}: '{self.name}' is complex, which the contiguous layout cannot gather in place. Use"
                ' layout="interleaved", or a real parameter and torch.view_as_complex in forward'
            )
        if not _compat.is_plain(type(self.whole)):
            raise ShardingError(self._hook_refusal(f"is a {type(self.whole).__name__}"))

    def _hook_refusal(self, cause: str) -> str:
        return (
            f"{here()}: '{self.name}' {cause}, but the contiguous layout gathers plain memory in place: each"
            f" rank sends the rows that it holds, which may be none, and {PRE} would need an equal share on"
            f' every rank. Use layout="interleaved" for this module; others may stay contiguous. Weights of'
            " torchao's float8 training may too, with enable_fsdp_float8_all_gather=False: they are then"
            " plain, and cast after the gather"
        )

    def check_data(self) -> None:
        super().check_data()
        local = self.sharded._local_tensor
        if hasattr(local, PRE) or hasattr(local, POST):
            raise ShardingError(self._hook_refusal("has local rows with hooks for the all-gather"))

    def _check_placement(self, placement: ParamPlacement | None) -> RaggedShard | Owned:
        if isinstance(placement, (RaggedShard, Owned)):
            return placement
        if placement is None or placement.dim in (0, -len(self.shape)):
            return _ROWS
        raise ShardingError(
            f"{here()}: '{self.name}' of shape {tuple(self.shape)} cannot be sharded on dim {placement.dim}:"
            " the contiguous layout shards parameters on dim 0 only, in one piece; return Shard(0) from"
            ' shard_placement_fn, or use layout="interleaved"'
        )

    def assign_rows(self, layout: ContiguousLayout, place: Place, groups: tuple[ProcessGroup, ...]) -> None:
        """Set which rows this rank holds; `move` gives them memory."""
        self.place = place
        rows = place.box
        # A view of the whole parameter, from which packing copies before it drops the view.
        self.whole = self.whole.narrow(0, rows.offsets[0], rows.sizes[0])
        box_of = partial(layout.box, place.index)
        spec, mesh = self.tp_spec, self._mesh_of_dtensor()
        cuts = () if spec is None else even_cuts_of(spec.mesh, spec.placements)
        axes = self.info.mesh_groups if mesh is self.info.mesh else ()
        self.piece = Piece(self.global_shape, groups, box_of, cuts, self.name, mesh, axes)

    def _mesh_of_dtensor(self) -> DeviceMesh:
        """Return the mesh of the sharded form, seen as a DTensor."""
        if self.tp_spec is None:
            return self.info.mesh
        mesh, dims = self.tp_spec.mesh, self.info.dp_mesh_dims
        if dims is None:
            return _compat.concatenate_meshes([self.info.mesh, mesh])
        if len(dims.shard_names) < 2 and len(dims.replicate_names) < 2:
            return mesh
        data_parallel = {*dims.shard_names, *dims.replicate_names}
        other_meshes = [mesh[name] for name in mesh.mesh_dim_names or () if name not in data_parallel]
        return _compat.concatenate_meshes([self.info.mesh, *other_meshes])

    def part_of(self, shard: Tensor) -> Tensor:
        return self.rows_in(shard)

    def whole_in(self, full: Tensor) -> Tensor:
        return full.narrow(0, self.place.start, self.numel).view(self.shape)

    def rows_in(self, shard: Tensor) -> Tensor:
        """Return this rank's rows in a reduced shard, which may be a part of a larger buffer."""
        place = self.place
        # `as_strided` counts from the start of the storage; the shard may begin later.
        begin = shard.storage_offset() + place.shard_offset
        # One operation; slicing and viewing would be two.
        return shard.as_strided(place.box.sizes, place.rows_stride, begin)

    def as_grad(self, piece: Tensor) -> Tensor:
        return ShardedRows.wrap(piece, self.piece) if self.no_rows is None else self.no_rows

    def move(self, piece: Tensor) -> None:
        fits = self.is_packed and (self.sharded.dtype, self.sharded.device) == (piece.dtype, piece.device)
        if fits:
            # Keep the object: optimizers may hold it.
            self.sharded._local_tensor, self.sharded.piece = piece, self.piece
        else:
            requires_grad = self.sharded.requires_grad if self.is_packed else self.trainable
            self.sharded = ShardedParameter.wrap(piece, self.piece, requires_grad=requires_grad)
            self.register(self.sharded)
        if not self.is_packed:
            # A view that would keep all memory of the whole parameter.
            del self.whole
            self.is_packed = True
        self.refresh_form(is_new=not fits)

    def refresh_form(self, *, is_new: bool = False) -> None:
        super().refresh_form(is_new=is_new)
        # Dtype or device may have changed.
        vars(self).pop("no_rows", None)

    @cached_property
    def no_rows(self) -> ShardedRows | None:
        """The gradient if this rank holds no rows, the same in every step; else None."""
        local = self.sharded._local_tensor
        if local.numel():
            return None
        dtype = self.sharded_grad_dtype or self.sum_dtype or self.gather_dtype
        return ShardedRows.wrap(torch.empty_like(local, dtype=dtype), self.piece)

    def rename(self, name: str) -> None:
        super().rename(name)
        self.piece = self.sharded.piece = replace(self.piece, name=name)
        # It has a piece with the old name.
        vars(self).pop("no_rows", None)

    def _replacement(self, current: nn.Parameter | None) -> nn.Parameter | None:
        if isinstance(current, DTensor) and current.shape == self.global_shape:
            current = self._to_own_rows(current)
        return current if isinstance(current, ShardedParameter) and current.piece == self.piece else None

    @torch.no_grad()
    def _to_own_rows(self, dtensor: DTensor) -> ShardedParameter:
        """Turn `dtensor`, in place, into this rank's rows. Collective if it was cut differently."""
        if isinstance(dtensor, ShardedParameter) and dtensor.piece == self.piece:
            return dtensor
        rows = ShardedRows.from_dtensor(cast(DTensor, dtensor.detach()), self.piece)
        sharded = ShardedParameter.wrap(rows.local, self.piece, requires_grad=dtensor.requires_grad)
        # In place: the module and the caller that loaded it hold this object.
        torch.utils.swap_tensors(dtensor, sharded)
        return cast(ShardedParameter, dtensor)
