"""Operators on tensors that are row ranges of whole ones.

`find_handler` decides once per operator. A handler gets the operator and its arguments and answers for the
whole tensors::

    elementwise    elementwise.py   the op on local rows; plain operands are whole and are cut to the rows
    random         elementwise.py   drawn whole from this rank's generator, then cut
    lists          lists.py         foreach and fused ops: one call for all; norms in one all-reduce
    reductions     reductions.py    the op on local rows, then an all-reduce; along trailing dims neither
    the rest       elementwise.py   an error that names the op and what to use
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.sharded_tensor.registry import Handler, does
from shardwise.sharded_tensor.rows.elementwise import OTHERS, UNTAGGED, elementwise, elementwise_, refuse
from shardwise.sharded_tensor.rows.lists import LISTS, foreach
from shardwise.sharded_tensor.rows.reductions import REDUCTIONS
from shardwise.sharded_tensor.rows.tensor import handler_of

_KNOWN: dict[str, Handler] = {**OTHERS, **LISTS, **REDUCTIONS}


@does(handler_of)
def find_handler(op: Any) -> Handler:
    """Choose how to run `op`."""
    name = op._schema.name.removeprefix("aten::")
    if op.namespace == "prims":  # of which tracers make steps of optimizers
        return elementwise if torch.Tag.pointwise in op.tags or name == "prims::fma" else refuse
    if op.namespace != "aten":
        return refuse
    if name in _KNOWN and op._schema.overload_name != "other":  # max.other is maximum
        return _KNOWN[name]
    if name.startswith("_foreach_"):
        return foreach if _is_elementwise(name.removeprefix("_foreach_")) and not _has_out(op) else refuse
    if _is_elementwise(name):
        return elementwise_ if _writes_first(op) else elementwise
    return decomposed


def decomposed(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op made of others, which arrives whole in inference mode and from handlers."""
    result = op.decompose(*args, **kwargs)
    return refuse(op, args, kwargs) if result is NotImplemented else result


def _writes_first(op: Any) -> bool:
    first = op._schema.arguments[0]
    return first.alias_info is not None and bool(first.alias_info.is_write)


def _has_out(op: Any) -> bool:
    return any(argument.is_out for argument in op._schema.arguments)


def _is_elementwise(name: str) -> bool:
    """Return whether an op is known to be elementwise, or in-place or list form of one that torch tags so."""
    if name in UNTAGGED or name in ("zero", "copy", "copy_"):
        return True
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    return packet is not None and any(
        torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads()
    )
