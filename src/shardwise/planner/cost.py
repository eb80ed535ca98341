"""The cost of an operator: floating-point operations, and bytes read and written.

Operations are counted as in torch's own counter: a multiply-add is two, and causal attention is not halved.
The bytes of each tensor count once; a view costs nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import conv_flop_count, flop_registry, sdpa_flop_count

from shardwise.comm.count import tensors_in
from shardwise.comm.kinds import NAMESPACES
from shardwise.planner.shapes import check_positions

aten = torch.ops.aten
_CPU_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
_NOTHING = {  # touch no memory; those that return their argument are not views by their schema
    f"aten::{name}"
    for name in ("detach", "alias", "lift_fresh", "empty", "empty_like", "_unsafe_view", "_reshape_alias")
}


def cost_of(
    func: Any, args: Any, kwargs: Any, result: Any, tensors: Sequence[Tensor]
) -> tuple[int, int, str] | None:
    """Return FLOPs, bytes and the dtype of computation; None for an operator that touches no memory.

    `tensors` are those of the arguments and the result.
    """
    name = _name_of(func)
    if name is None or not tensors:
        return None
    nbytes = sum(map(_nbytes, {id(tensor): tensor for tensor in tensors}.values()))
    return _flops(func, name, args, kwargs, result), nbytes, dtype_name(tensors[0].dtype)


def _nbytes(tensor: Tensor) -> int:
    """Count the bytes of a tensor; expanded elements count once."""
    return tensor.untyped_storage().nbytes() if 0 in tensor.stride() else tensor.nbytes


@functools.cache
def _name_of(func: Any) -> str | None:
    """Return the name of an operator without its overload; None if it touches no memory."""
    name: str = func.name().partition(".")[0]
    return None if func.is_view or name in _NOTHING or func.namespace in NAMESPACES else name


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _flops(func: Any, name: str, args: Any, kwargs: Any, result: Any) -> int:
    if name == _CPU_ATTENTION:
        return int(sdpa_flop_count(*(tensor.shape for tensor in args[:3])))
    if name == f"{_CPU_ATTENTION}_backward":  # (gradient, query, key, value, ...): five matmuls for two
        return int(sdpa_flop_count(*(tensor.shape for tensor in args[1:4]))) * 5 // 2
    if name == "aten::_grouped_mm":  # a side without a group dim is split between groups
        a, b = args[:2]
        groups = a.shape[0] if a.ndim == b.ndim == 3 else 1
        return int(2 * groups * a.shape[-2] * a.shape[-1] * b.shape[-1])
    if name == "aten::convolution_backward":  # torch's own formula leaves groups out for one gradient
        gradient, x, weight = (list(tensor.shape) for tensor in args[:3])
        return int(conv_flop_count(x, weight, gradient, transposed=args[7])) * int(sum(args[10][:2]))
    if name.startswith(("aten::mkldnn_rnn_layer", "aten::_cudnn_rnn")):  # the first has no list of weights
        x, weights = args[0], args[1:3] if "mkldnn" in name else args[1]
        forward = 2 * x.numel() // x.shape[-1] * sum(tensor.numel() for tensor in weights if tensor.ndim == 2)
        return int(forward) * (2 if name.endswith("_backward") else 1)
    if name == "aten::_trilinear":  # nn.Bilinear: the product of three, summed over some dims
        return 2 * _trilinear_numel(*args[:6])
    if name == "aten::addbmm":
        return int(2 * args[1].numel() * args[2].shape[-1])
    if name in ("aten::mv", "aten::addmv", "aten::dot", "aten::vdot"):
        return 2 * max(tensor.numel() for tensor in tensors_in(args))
    formula = flop_registry.get(func.overloadpacket)
    return int(formula(*args, **kwargs, out_val=result)) if formula else 0


def _trilinear_numel(*factors: Any) -> int:
    shapes = []
    for tensor, dims in zip(factors[:3], factors[3:], strict=True):
        shape = list(tensor.shape)
        for dim in sorted(dims):
            shape.insert(dim, 1)
        shapes.append(shape)
    return math.prod(torch.broadcast_shapes(*shapes))


class Count(NamedTuple):
    """A storage's elements: `first`, `first + step`, ..."""

    first: int
    step: int

    def last_of(self, view: Tensor) -> int:
        """Return the greatest element of `view`, for an ascending count."""
        strides = zip(view.shape, view.stride(), strict=True)
        place = view.storage_offset() + sum((size - 1) * stride for size, stride in strides)
        return self.first + self.step * int(place)


def count_of(func: Any, args: Any, count_of_operand: Callable[[Tensor], Count | None]) -> Count | None:
    """Return the count that an operator's result holds, if any; `count_of_operand` returns an operand's."""
    if func.overloadpacket is aten.arange:
        begin, step = (args[0] if len(args) > 1 else 0), (args[2] if len(args) > 2 else 1)
        is_count = isinstance(begin, int) and isinstance(step, int) and step > 0
        return Count(begin, step) if is_count else None
    adds = func.overloadpacket is aten.add and len(args) == 2 and isinstance(args[1], int)
    if not adds and func.overloadpacket is not aten._to_copy:
        return None
    operand = count_of_operand(args[0])
    if operand is None or args[0].dim() != 1 or args[0].storage_offset() or not args[0].is_contiguous():
        return None
    return operand._replace(first=operand.first + (args[1] if adds else 0))


def check_lookup(func: Any, args: Any, count_of_operand: Callable[[Tensor], Count | None]) -> None:
    if func.overloadpacket is not aten.embedding or not args[1].numel():
        return
    table, positions = args[:2]
    count = count_of_operand(positions)
    if count is not None:
        check_positions(count.last_of(positions) + 1, len(table))
