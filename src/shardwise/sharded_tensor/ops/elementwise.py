"""Elementwise functions: on the local shards, without communication.

Operands are numbers, plain tensors (replicated), and sharded tensors that have on each rank what its shards
need: of the same cut, or of fewer dims (`operands`). Shapes broadcast as in torch; the result is cut like the
largest sharded operand. An operand with another cut raises; it is never moved.

In-place functions write the local tensors of the sharded left operand, which is returned; `out=` of the
result's shape is written likewise. Sharded values cannot be written into a plain tensor.
`equal` and `allclose` move the second tensor to the cut of the first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardwise.errors import ShardingError, here
from shardwise.sharded_tensor import failure
from shardwise.sharded_tensor.autograd import all_reduced
from shardwise.sharded_tensor.metadata import ShardedTensorMetadata
from shardwise.sharded_tensor.move import convert, move_to
from shardwise.sharded_tensor.ops.operands import broadcast, by_name, called_as, parts, rule
from shardwise.sharded_tensor.ops.shape import writable
from shardwise.sharded_tensor.refuse import refuse
from shardwise.sharded_tensor.registry import Args, Kwargs, handles
from shardwise.sharded_tensor.tensor import ShardedTensor

# Each is registered as a function of torch, a method of Tensor, an activation or a special function, and in
# place with a trailing underscore, if these exist.
_NAMES = """
    abs absolute acos acosh angle arccos arccosh arcsin arcsinh arctan arctanh asin asinh atan atanh
    bitwise_not ceil conj_physical cos cosh deg2rad digamma erf erfc erfinv exp exp2 expm1 fix floor frac i0
    isfinite isinf isnan isneginf isposinf isreal lgamma log log10 log1p log2 logical_not logit mvlgamma
    nan_to_num neg negative polygamma positive rad2deg reciprocal round rsqrt sgn sigmoid sign signbit sin
    sinc sinh sqrt square tan tanh trunc
    bessel_j0 bessel_j1 entr erfcx expit gammaln i0e i1 i1e log_ndtr ndtr ndtri psi xlog1py zeta

    add arctan2 atan2 bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor copysign div
    divide eq float_power floor_divide fmax fmin fmod gcd ge greater greater_equal gt heaviside hypot isclose
    lcm ldexp le less less_equal logaddexp logaddexp2 logical_and logical_or logical_xor lt maximum minimum
    mul multiply ne nextafter not_equal pow remainder rsub sub subtract true_divide xlogy

    addcdiv addcmul clamp clamp_max clamp_min clip fill lerp masked_fill where zero

    celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu relu6 selu silu
    softplus softshrink softsign tanhshrink threshold
"""
# Methods, also with the operands exchanged or in place if these exist.
_OPERATORS = """
    add sub mul truediv div floordiv mod pow and or xor lshift rshift abs eq ge gt invert le lt ne neg pos
"""


def elementwise(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Apply an elementwise `func` to arguments, at least one sharded; return a sharded tensor. Local."""
    if kwargs.get("out") is not None:
        return _write_out(kwargs["out"], func, args, kwargs)
    leader, metadata = broadcast([*args, *kwargs.values()])
    results = run_on_parts(func, args, kwargs, leader, metadata)
    if any(result is NotImplemented for result in results):
        return NotImplemented
    return result_of(results, leader, metadata)


def in_place(func: Any, args: Args, kwargs: Kwargs) -> ShardedTensor:
    """Apply `func`, which writes its first argument, a sharded tensor, in place; return it. Local."""
    target: Any = args[0] if args else kwargs.get("input")
    check_target(func, target, lambda: broadcast([*args, *kwargs.values()])[1].size)
    return write_parts(func, args, kwargs, target)


def write_parts(func: Any, args: Args, kwargs: Kwargs, target: ShardedTensor) -> ShardedTensor:
    """Apply `func`, which writes `target`, one of its arguments, to the parts in each local shard. Local."""
    with writable(target):
        result = run_on_parts(func, args, kwargs, target, target.metadata())[0]
    return refresh(target, result)


def check_target(func: Any, target: Any, size: Callable[[], torch.Size]) -> None:
    """Raise, on every rank, if `func` cannot write a result of that size into `target`."""
    if not isinstance(target, ShardedTensor):
        raise ShardingError(
            f"{here()}: {func.__name__} would write a sharded tensor into a plain {type(target).__name__};"
            " use the function that is not in place, or full_tensor() of the sharded one"
        )
    found, expected = size(), target.metadata().size
    if found != expected:
        raise RuntimeError(
            f"{func.__name__}: output with shape {list(expected)} doesn't match the broadcast shape"
            f" {list(found)}"
        )


def result_of(
    results: Sequence[Tensor], leader: ShardedTensor, metadata: ShardedTensorMetadata
) -> ShardedTensor:
    """Return the results of each local shard, or of its stand-in, as a tensor cut by `metadata`."""
    if leader.tensors:
        return leader.with_tensors(results, metadata=metadata)
    return leader.with_tensors([], metadata=metadata, anchor=results[0].reshape(-1)[:0])


def refresh(target: ShardedTensor, result: Tensor) -> ShardedTensor:
    """Return `target`, after its shards have been written; `result` is the first of them, or its stand-in."""
    target.has_written(None if target._shards else result)
    if target.requires_grad and not target.metadata().tensor_properties.requires_grad:
        target._metadata = target.metadata().with_properties(requires_grad=True)
    return target


def _write_out(out: Any, func: Any, args: Args, kwargs: Kwargs) -> ShardedTensor:
    """Apply `func` with `out=`, which unlike torch's must have the shape of the result."""
    values = [*args, *(value for name, value in kwargs.items() if name != "out")]
    shapes = [value.shape for value in values if isinstance(value, Tensor)]
    if not isinstance(out, ShardedTensor) or torch.broadcast_shapes(*shapes) != out.metadata().size:
        refuse(func, args, kwargs)
    broadcast([*values, out])
    return write_parts(func, args, kwargs, out)


def run_on_parts(func: Any, args: Args, kwargs: Kwargs, leader: ShardedTensor, metadata: Any) -> list[Any]:
    """Apply `func` to the parts in each local shard; on a rank without shards, to stand-ins."""
    columns = [parts(value, leader=leader, metadata=metadata) for value in args]
    named = {name: parts(value, leader=leader, metadata=metadata) for name, value in kwargs.items()}
    return [
        func(*[column[i] for column in columns], **{name: column[i] for name, column in named.items()})
        for i in range(max(1, len(leader.tensors)))
    ]


def _activation(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Handle a function whose argument `inplace` chooses."""
    return (in_place if by_name(func, args, kwargs)["inplace"] else elementwise)(func, args, kwargs)


for _name in _NAMES.split():
    for _holder in (torch, Tensor, F, torch.special):
        if _func := getattr(_holder, _name, None):
            _has_inplace = inspect.isfunction(_func) and "inplace" in inspect.signature(_func).parameters
            handles(_func)(_activation if _has_inplace else elementwise)
        if _func := getattr(_holder, f"{_name}_", None):
            handles(_func)(in_place)
for _name in _OPERATORS.split():
    for _form, _do in (("", elementwise), ("r", elementwise), ("i", in_place)):
        if _func := getattr(Tensor, f"__{_form}{_name}__", None):
            handles(_func)(_do)


@handles(torch.where, Tensor.where)
def _where(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Handle `where`, except with only a condition, whose result's size depends on values."""
    if len(args) + len(kwargs) < 3:
        refuse(func, args, kwargs)
    return elementwise(func, args, kwargs)


@rule(torch.positive, Tensor.positive, Tensor.__pos__, takes="input")
@rule(torch.conj_physical, Tensor.conj_physical, takes="input")
def _positive(func: Any, sharded: ShardedTensor) -> ShardedTensor:
    """Apply a function that may return its operand itself: who writes the result writes the operand."""
    return convert(sharded, func)


@called_as(torch.equal, Tensor.equal)
def _equal(input: Tensor, other: Tensor) -> bool:
    """Compare as `torch.equal`. Collective over the group, unless shapes differ."""
    return input.shape == other.shape and _everywhere(torch.equal, input, other)


@called_as(torch.allclose, Tensor.allclose)
def _allclose(input: Tensor, other: Tensor, *options: Any, **named: Any) -> bool:
    """Compare as `torch.allclose`; raises torch's error for differing dtypes. Collective over the group."""
    return _everywhere(torch.allclose, input, other, *options, **named)


@torch.no_grad()
def _everywhere(func: Any, left: Any, right: Any, *options: Any, **named: Any) -> bool:
    if isinstance(left, ShardedTensor) and isinstance(right, ShardedTensor) and left.shape == right.shape:
        cut = left.metadata()
        if not right.metadata().cut_as(cut):
            right = move_to(right, lambda: cut, subject="the comparison")
    leader, metadata = broadcast([left, right])
    left_parts, right_parts = (parts(value, leader=leader, metadata=metadata) for value in (left, right))
    group, device = leader.process_group, leader.anchor.device
    with failure.comparing("one answer", device=device, group=group, subject="what to compare"):
        holds = all(func(a, b, *options, **named) for a, b in zip(left_parts, right_parts, strict=True))
    answer = torch.tensor(holds or not leader.tensors, device=device)
    return bool(all_reduced(answer, group, dist.ReduceOp.MIN))
