"""Operators on row ranges of whole tensors, and torch's functions that make them from placements.

`find_handler` decides once per operator. A handler gets the operator and its arguments and computes the
result for the whole tensors::

    elementwise    elementwise.py   the op on local rows; plain operands are whole and are cut to the rows
    random         elementwise.py   drawn whole from this rank's generator, then cut
    lists          lists.py         foreach and fused ops: one call for all; norms in one all-reduce
    reductions     reductions.py    the op on local rows, then an all-reduce; along trailing dims neither
    the rest       elementwise.py   an error that names the op and what to use
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from shardwise._compat.dtensors import fill_whole, route_dtensors
from shardwise.errors import ShardingError, here
from shardwise.sharded_tensor.autograd import linked
from shardwise.sharded_tensor.registry import Args, Handler, Kwargs, does
from shardwise.sharded_tensor.rows import convert
from shardwise.sharded_tensor.rows.elementwise import SPECIAL, UNTAGGED, elementwise, elementwise_, refuse
from shardwise.sharded_tensor.rows.lists import LISTS, foreach
from shardwise.sharded_tensor.rows.piece import RowShard, local_part, piece_of
from shardwise.sharded_tensor.rows.reductions import REDUCTIONS
from shardwise.sharded_tensor.rows.tensor import ShardedRows, handler_of

_KNOWN: dict[str, Handler] = {**SPECIAL, **LISTS, **REDUCTIONS}


@does(handler_of)
def find_handler(op: Any) -> Handler:
    name = op._schema.name.removeprefix("aten::")
    if op.namespace == "prims":  # of which tracers make steps of optimizers
        return elementwise if torch.Tag.pointwise in op.tags or name == "prims::fma" else refuse
    if op.namespace != "aten":
        return refuse
    if name in _KNOWN and op._schema.overload_name != "other":  # max.other is maximum
        return _KNOWN[name]
    arguments = op._schema.arguments
    if name.startswith("_foreach_"):
        has_out = any(argument.is_out for argument in arguments)
        return foreach if _is_elementwise(name.removeprefix("_foreach_")) and not has_out else refuse
    if _is_elementwise(name):
        writes_first = arguments[0].alias_info is not None and arguments[0].alias_info.is_write
        return elementwise_ if writes_first else elementwise
    return decomposed


def decomposed(op: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run a composite op, which arrives undecomposed in inference mode and from handlers."""
    result = op.decompose(*args, **kwargs)
    return refuse(op, args, kwargs) if result is NotImplemented else result


def _is_elementwise(name: str) -> bool:
    """Return whether an op is known to be elementwise, or in-place or list form of one that torch tags so."""
    if name in UNTAGGED or name in ("zero", "copy", "copy_"):
        return True
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    return packet is not None and any(
        torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads()
    )


class _Rows:
    """Makes rows in place of torch's functions of the same names, for placements with a `RowShard`."""

    def is_asked_for(self, placements: Sequence[Placement] | None) -> bool:
        return any(type(placement) is RowShard for placement in placements or ())

    def from_local(
        self, local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int] | None
    ) -> ShardedRows:
        if shape is None:
            if not all(p.is_replicate() or isinstance(p, RowShard) for p in placements):
                raise ShardingError(
                    f"{here()}: DTensor.from_local needs the whole tensor's shape beside {tuple(placements)}"
                )
            counts = next(p.counts for p in placements if isinstance(p, RowShard))
            shape = (sum(counts), *local.shape[1:])
        piece = piece_of(mesh, placements, shape, local.dtype)
        if tuple(local.shape) != piece.rows.sizes:
            raise ShardingError(
                f"{here()}: expected this rank's rows {piece.box} of a tensor of shape {tuple(shape)}, found"
                f" a tensor of shape {tuple(local.shape)}"
            )
        local = local.contiguous()
        if torch.is_grad_enabled() and local.requires_grad:
            result = linked(
                lambda rows: ShardedRows.wrap(rows.view_as(rows), piece),
                lambda grad: (convert.rows_of(grad, piece),),
                local,
            )
            return cast(ShardedRows, result)
        return ShardedRows.wrap(local, piece)

    @torch.no_grad()
    def distribute(
        self, whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], source: int | None
    ) -> DTensor:
        even_placements = [Shard(0) if isinstance(p, RowShard) else p for p in placements]
        counts = {sum(p.counts) for p in placements if isinstance(p, RowShard)}
        by_rows = all(isinstance(p, RowShard) or p.is_replicate() for p in placements)
        if by_rows and counts != {whole.shape[0]}:  # cut evenly, for `load_state_dict` to refuse by name
            return distribute_tensor(whole, mesh, even_placements, src_data_rank=source)
        piece = piece_of(mesh, placements, whole.shape, whole.dtype)
        values = whole.detach()
        if not whole.is_meta and whole.device.type != mesh.device_type:
            values = values.to(mesh.device_type)
        if source is None or whole.is_meta:
            local = local_part(piece, values).clone(memory_format=torch.contiguous_format)
        else:
            local = convert.scatter_rows(values, piece, source)
        return ShardedRows.wrap(local, piece, requires_grad=whole.requires_grad)

    def redistribute(
        self, tensor: DTensor, mesh: DeviceMesh, placements: Sequence[Placement], dtype: torch.dtype | None
    ) -> ShardedRows:
        if dtype is not None:
            tensor = cast(DTensor, tensor.to(dtype))
        piece = piece_of(mesh, placements, tensor.shape, tensor.dtype)
        layout = tensor.device_mesh, tuple(Replicate() if p.is_partial() else p for p in tensor.placements)
        result = linked(
            lambda source: ShardedRows.wrap(convert.rows_of(source, piece), piece),
            lambda grad: (convert.make_dtensor(convert.rows_of(grad, piece), piece, *layout),),
            tensor,
        )
        return cast(ShardedRows, result)

    def cut_alike(self, sharded: DTensor, whole: Tensor) -> Tensor:
        """Return this rank's rows of `whole`; leave another shape for `load_state_dict` to refuse."""
        assert isinstance(sharded, ShardedRows)
        if whole.shape != sharded.shape:
            return whole
        return ShardedRows.wrap(local_part(sharded.piece, whole).clone(), sharded.piece)


route_dtensors(ShardedRows, _Rows())
for _name in ("dirac_", "sparse_"):
    fill_whole(_name, lambda tensor: isinstance(tensor, ShardedRows))
