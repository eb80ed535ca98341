"""Convolutions and scans of transformers' models, as the kernels that it calls if they are installed.

The packages are mamba-ssm 2.3.2, causal-conv1d 1.7.0 and flash-linear-attention 0.6.0. Each kernel is one
operator that reads and writes whole tensors, saves what its package saves for backward, and allocates what
the package allocates temporarily. Operations count like those of attention, in chunks of tokens. What
transformers' function is given has its parameters' names.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

_FLOAT = torch.float32
_SCAN_CHUNK = 2048  # tokens for which mamba-ssm's selective scan keeps one state
_DELTA_CHUNK = 64  # tokens that flash-linear-attention processes together

_New = tuple[tuple[int, ...], tuple[int, ...], str]  # a tensor to be made: sizes, strides, dtype


def _new(size: Sequence[int], dtype: torch.dtype, order: Iterable[int] | None = None) -> _New:
    """Describe a tensor whose dims are in this memory order, outermost first."""
    strides, step = [0] * len(size), 1
    for dim in reversed([*(range(len(size)) if order is None else order)]):
        strides[dim], step = step, step * size[dim]
    return tuple(size), tuple(strides), str(dtype).removeprefix("torch.")


def _like(tensor: Tensor, dtype: torch.dtype | None = None) -> _New:
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return _new(tensor.shape, dtype or tensor.dtype, order)


def _operator(name: str) -> Callable[..., list[Tensor]]:
    """Make an operator that reads tensors and makes others, on fake tensors; `makes` is a list as text."""

    def run(reads: list[Tensor], makes: str, flops: int) -> list[Tensor]:
        return [
            reads[0].new_empty_strided(size, stride, dtype=getattr(torch, dtype))
            for size, stride, dtype in ast.literal_eval(makes)
        ]

    operator = torch.library.custom_op(f"shardwise::{name}", run, mutates_args=())
    operator.register_fake(run)
    packet = getattr(torch.ops.shardwise, name)
    register_flop_formula(packet, get_raw=True)(lambda reads, makes, flops, **_: flops)
    return operator


_linear_attention = _operator("linear_attention")  # as a kernel would
_projections = _operator("projections")  # as the matmuls inside a kernel's function would


@dataclass
class _Work:
    """Memory and operations of a kernel, in forward and in backward."""

    result: _New
    saved: list[Tensor | _New | None]  # for backward: inputs, `result` itself, others that it makes
    forward: list[_New] = field(default_factory=list)  # alive until forward ends
    backward: list[_New] = field(default_factory=list)  # alive until backward ends, beside gradients
    flops: int = 0  # of the kernel's forward; its backward has five matmuls for two, as attention's
    projections: int = 0  # FLOPs of linear layers within it; their backward has two matmuls for one


class _Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, work: _Work, *inputs: Tensor | None) -> Tensor:
        tensors = [tensor for tensor in inputs if tensor is not None]
        saved = [item for item in work.saved if isinstance(item, tuple) and item is not work.result]
        results = [] if work.projections else [work.result]
        outputs = _linear_attention(tensors, str([*saved, *work.forward, *results]), work.flops)
        if work.projections:
            outputs += _projections(outputs, str([work.result]), work.projections)
        new, result = iter(outputs), outputs[-1]
        ctx.save_for_backward(
            *(result if x is work.result else next(new) if isinstance(x, tuple) else x for x in work.saved)
        )
        ctx.work = replace(work, saved=[])  # which would keep them until the whole of backward ends
        ctx.inputs = [None if tensor is None else _like(tensor) for tensor in inputs]
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        work: _Work = ctx.work
        specs = [
            spec if needs else None for spec, needs in zip(ctx.inputs, ctx.needs_input_grad[1:], strict=True)
        ]
        required = [spec for spec in specs if spec is not None]
        reads = [*grads, *(tensor for tensor in ctx.saved_tensors if tensor is not None)]
        if work.projections:
            reads += _projections(reads, str(work.backward), 2 * work.projections)
        temporary = [] if work.projections else work.backward
        outputs = iter(_linear_attention(reads, str([*required, *temporary]), work.flops * 5 // 2))
        return None, *(None if spec is None else next(outputs) for spec in specs)


def _apply(work: _Work, *inputs: Tensor | None) -> Any:
    return _Kernel.apply(work, *inputs)  # type: ignore[no-untyped-call]


def _rows(*tensors: Tensor | None) -> Iterator[Any]:
    """Yield tensors whose last dim lies together, copied where it does not."""
    for tensor in tensors:
        yield tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous()


def _convolution(given: Any) -> Any:
    """Stand for causal-conv1d's: `hidden_states` are (batch, channels, tokens), in any order."""
    inputs = [given.hidden_states, given.weight, given.bias]
    return _apply(_Work(_like(given.hidden_states), inputs), *inputs)


def _states(shape: Sequence[int], width: int) -> _New:
    batch, channels, tokens = shape
    return _new((batch, channels, math.ceil(tokens / _SCAN_CHUNK), 2 * width), _FLOAT)


def _selective_scan(given: Any) -> Any:
    """Stand for mamba-ssm's of Mamba: (batch, channels, tokens), `A` (channels, width)."""
    u, dt, B, C, z = _rows(given.hidden_states, given.dt, given.B, given.C, given.z)
    inputs, width = [u, dt, given.A, B, C, given.D, z, given.delta_bias], given.A.shape[1]
    gated = [] if z is None else [_like(u)]  # before the gate
    saved = [*inputs, _states(u.shape, width), *gated]
    result = _apply(_Work(_like(u), saved, backward=[_like(B, _FLOAT), _like(C, _FLOAT)]), *inputs)
    return (result, u.new_empty(*u.shape[:2], width, dtype=_FLOAT)) if given.return_last_state else result


def _mamba(given: Any) -> Any:
    """Stand for mamba-ssm's block of Mamba: convolution, scan and the projections around it.

    Backward computes the convolution and the steps' sizes again.
    """
    (xz,) = _rows(given.xz)
    batch, channels, tokens = xz.shape[0], xz.shape[1] // 2, xz.shape[2]
    rank, width, dtype = given.delta_proj_weight.shape[1], given.A.shape[1], xz.dtype
    (out, _), columns = given.out_proj_weight.shape, given.x_proj_weight.shape[0]
    tokens_spec, projected = _new((batch, channels, tokens), dtype), _new((batch * tokens, columns), dtype)
    state_specs = [_new((batch, 1, width, tokens), dtype) for x in (given.B, given.C) if x is None]
    weights = [xz, given.conv1d_weight, given.conv1d_bias, given.x_proj_weight, given.delta_proj_weight]
    weights.append(given.out_proj_weight)
    scanned = [given.A, given.B, given.C, given.D, given.delta_bias]
    states = _states((batch, channels, tokens), width)
    work = _Work(
        _new((batch, tokens, out), dtype),
        [*weights, *scanned, projected, *state_specs, tokens_spec, states],
        # The convolution's result, the steps' sizes, the gated result.
        forward=[tokens_spec] * 3,
        # Those again, and the gradient of each.
        backward=[*[tokens_spec] * 6, projected],
        projections=2 * batch * tokens * channels * (columns + rank + out),
    )
    return _apply(work, *weights, given.out_proj_bias, *scanned)


def _chunks(shape: Sequence[int], groups: int, width: int, chunk: int) -> tuple[list[_New], int]:
    """Return the temporary tensors of mamba-ssm's scan of Mamba 2, and its FLOPs; `width` is of states."""
    batch, tokens, heads, head = shape
    count = math.ceil(tokens / chunk)
    steps = _new((batch, heads, count, chunk), _FLOAT)
    states = _new((batch, count, heads, head, width), _FLOAT)
    products = _new((batch, count, groups, chunk, chunk), _FLOAT)
    flops = 2 * batch * tokens * (chunk * (groups * width + heads * head) + 2 * heads * head * width)
    return [steps, steps, states, products], flops


def _chunk_scan(given: Any) -> Any:
    """Stand for mamba-ssm's of Mamba 2: (batch, tokens, heads, width of one), `B` and `C` by groups."""
    x, dt, B, C = _rows(given.hidden_states, given.dt, given.B, given.C)
    temporary, flops = _chunks(x.shape, B.shape[2], B.shape[3], given.chunk_size)
    steps, _sizes, states, _products = temporary
    result, others = _like(x), [given.A, B, C, given.D, given.dt_bias]
    saved = [result, x, dt, steps, *others]
    work = _Work(result, saved, temporary[1:], [*temporary, states, states], flops)
    result_tensor = _apply(work, x, dt, *others)
    last = (x.shape[0], *x.shape[2:], B.shape[-1])
    return (result_tensor, x.new_empty(last, dtype=_FLOAT)) if given.return_final_states else result_tensor


def _mamba2(given: Any) -> Any:
    """Stand for mamba-ssm's block of Mamba 2: convolution, scan, norm, gate and the projection after it.

    Backward computes the convolution and the normed result again.
    """
    (zxbcdt,) = _rows(given.zxbcdt)
    (batch, tokens, _all), heads, dtype = zxbcdt.shape, given.A.shape[0], zxbcdt.dtype
    head, groups, projection = given.headdim or given.D.shape[-1], given.ngroups, given.outproj_weight
    convolved, inner = given.conv1d_weight.shape[0], heads * head
    width = (convolved - inner) // (2 * groups)
    temporary, flops = _chunks((batch, tokens, heads, head), groups, width, given.chunk_size)
    out = inner if projection is None else projection.shape[0]
    norms = [] if given.rmsnorm_weight is None else [_new((groups * batch * tokens,), _FLOAT)]
    inner_spec, convolved_spec = (_new((batch, tokens, size), dtype) for size in (inner, convolved))
    inputs = [zxbcdt, given.conv1d_weight, given.conv1d_bias, given.dt_bias, given.A, given.D]
    inputs += [given.rmsnorm_weight, projection, given.outproj_bias]
    work = _Work(
        _new((batch, tokens, out), dtype),
        [*inputs, inner_spec, *norms],
        forward=[*temporary, convolved_spec, inner_spec],
        # Gradients of states, and both in half the bytes; what was convolved, and its gradient; those of the
        # normed result and of the scan's, and the normed result again.
        backward=[*temporary, temporary[2], temporary[2], convolved_spec, convolved_spec, *[inner_spec] * 3],
        flops=flops,
        projections=0 if projection is None else 2 * batch * tokens * inner * out,
    )
    return _apply(work, *inputs)


def _delta_rule(given: Any) -> tuple[Tensor, Tensor | None]:
    """Stand for flash-linear-attention's gated delta rule, and Kimi's, whose `g` has a width too.

    Queries, keys and values are (batch, tokens, heads, width).
    """
    tensors = (given.query, given.key, given.value, given.g, given.beta)
    query, key, value, g, beta = (tensor.contiguous() for tensor in tensors)
    batch, tokens, heads, out = value.shape
    width, dtype, chunk = key.shape[-1], key.dtype, _DELTA_CHUNK
    inputs: list[Any] = [query, key]
    if given.use_qk_l2norm_in_kernel:
        inputs = [*map(_like, inputs), *(_new(tensor.shape[:-1], _FLOAT) for tensor in inputs)]
    by_channel = g.ndim == key.ndim
    products = [_new((batch, tokens, heads, chunk), dtype)] * (2 if by_channel else 1)
    keys, values = _new((batch, tokens, heads, width), dtype), _like(value)
    states = _new((batch, math.ceil(tokens / chunk), heads, width, out), dtype)
    temporary = [keys, *([keys] if by_channel else []), values, values, states]
    work = _Work(
        values,
        [*inputs, value, _like(g, _FLOAT), *([g] if by_channel else []), beta, *products],
        forward=temporary,
        # Gradients of states, of values, and of queries and keys by each head.
        backward=[*temporary, states, values, keys, keys, keys],
        flops=2 * batch * tokens * heads * (chunk * (3 * width + 2 * out) + 3 * width * out),
    )
    result = _apply(work, query, key, value, g, beta)
    last = value.new_empty(batch, heads, width, out, dtype=_FLOAT) if given.output_final_state else None
    return result, last


FUNCTIONS: dict[str, tuple[str, Callable[[Any], Any]]] = {  # of transformers: their kernels' names, and they
    "causal_conv1d_fn": ("causal_conv1d_fn", _convolution),
    "mamba_selective_scan": ("selective_scan_fn", _selective_scan),
    "mamba_inner_fn": ("mamba_inner_fn", _mamba),
    "mamba2_chunk_scan": ("mamba_chunk_scan_combined", _chunk_scan),
    "mamba2_split_conv1d_scan_combined": ("mamba_split_conv1d_scan_combined", _mamba2),
    "torch_chunk_gated_delta_rule": ("chunk_gated_delta_rule", _delta_rule),
    "chunk_kimi_delta_attention": ("chunk_kda", _delta_rule),
}
