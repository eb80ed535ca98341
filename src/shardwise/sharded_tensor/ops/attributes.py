"""Attributes and methods that read or change a sharded tensor's properties, not its values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from shardwise import _compat
from shardwise.errors import ShardingError, here
from shardwise.sharded_tensor import move
from shardwise.sharded_tensor.base import is_foreign
from shardwise.sharded_tensor.construct import from_torch
from shardwise.sharded_tensor.metadata import check_pinnable
from shardwise.sharded_tensor.ops.elementwise import write_parts
from shardwise.sharded_tensor.ops.operands import called_as, probe, rule
from shardwise.sharded_tensor.registry import PLAIN, Args, Kwargs, handles
from shardwise.sharded_tensor.tensor import ShardedTensor

_T: Any = Tensor

# Answered by the wrapper, which has the whole tensor's shape, dtype and device type.
_ATTRIBUTES = """
    shape dtype device layout ndim itemsize is_sparse is_quantized is_cuda is_cpu is_meta is_nested is_mkldnn
    is_sparse_csr is_xpu is_mps
"""
_METHODS = """
    size dim ndimension numel nelement element_size is_floating_point is_complex is_signed __len__ __hash__
    get_device is_same_size
"""
_DTYPES = "float double half bfloat16 int long bool"  # each a method too
PLAIN.update(getattr(_T, name).__get__ for name in _ATTRIBUTES.split())
PLAIN.update(getattr(_T, name) for name in _METHODS.split())
PLAIN.update([torch.numel, torch.is_floating_point, torch.is_complex, torch.is_same_size])


def _dense(sharded: ShardedTensor, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
    return all(tensor.is_contiguous(memory_format=memory_format) for tensor in sharded.tensors)


def _pinned(sharded: ShardedTensor, device: Any = None) -> bool:
    return sharded.metadata().tensor_properties.pin_memory and all(t.is_pinned() for t in sharded.tensors)


_ANSWERS: dict[Any, Callable[..., Any]] = {
    _T.requires_grad.__get__: lambda s: any(tensor.requires_grad for tensor in s.tracked),
    _T.is_leaf.__get__: lambda s: all(tensor.is_leaf for tensor in s.tracked),
    _T.grad_fn.__get__: lambda s: next((t.grad_fn for t in s.tracked if t.grad_fn is not None), None),
    **dict.fromkeys((_T.data.__get__, _T.detach, torch.detach), lambda s: move.convert(s, torch.detach)),
    _T.is_contiguous: _dense,
    _T.is_pinned: _pinned,
    _T.cpu: ShardedTensor.cpu,
    _T.cuda: ShardedTensor.cuda,
    **{getattr(_T, name): partial(ShardedTensor.to, dtype=getattr(torch, name)) for name in _DTYPES.split()},
    _T.type_as: lambda tensor, other: tensor.to(other.dtype),
    _T.__format__: object.__format__,
}


for _func, _answer in _ANSWERS.items():
    called_as(_func)(_answer)


@called_as(_T.requires_grad_, _T.requires_grad.__set__)
def _requires_grad_(sharded: ShardedTensor, requires_grad: bool = True) -> ShardedTensor:
    for tensor in sharded.tracked:
        if tensor.requires_grad != requires_grad:
            tensor.requires_grad_(requires_grad)
    sharded._metadata = sharded.metadata().with_properties(requires_grad=requires_grad)
    return sharded


@rule(_T.retain_grad, takes="input")
def _retain_grad(func: Any, sharded: ShardedTensor) -> None:
    for tensor in sharded.tracked:
        if tensor.requires_grad:
            tensor.retain_grad()


@rule(_T.grad.__get__, takes="input")
def _grad(func: Any, sharded: ShardedTensor) -> ShardedTensor | None:
    """Return the local shards' gradients as a sharded tensor; None if this rank's shards have none."""
    tensors = sharded.views
    if not tensors:
        grad = next((end.grad for end in sharded.tracked if end.grad is not None), None)
        return None if grad is None else sharded.with_tensors([], anchor=grad)
    if all(tensor.grad is None for tensor in tensors):
        return None
    grads = [torch.zeros_like(t) if t.grad is None else t.grad for t in tensors]
    return sharded.with_tensors(grads, anchor=sharded.anchor.detach())


@called_as(_T.grad.__set__, _T.grad.__delete__)
def _set_grad(sharded: ShardedTensor, grad: Any = None) -> None:
    if grad is None:
        for tensor in sharded.tracked:
            tensor.grad = None
        return
    if not isinstance(grad, ShardedTensor) or not grad.metadata().cut_as(sharded.metadata()):
        raise ShardingError(
            f"{here()}: the gradient of {sharded._name()} is None or a ShardedTensor cut alike, found"
            f" {type(grad).__name__} of shape {tuple(grad.shape)}; use shard_tensor or reshard"
        )
    if grad.dtype != sharded.dtype:
        raise ShardingError(
            f"{here()}: the gradient of {sharded._name()} has the dtype {sharded.dtype}, found {grad.dtype};"
            " convert it with to()"
        )
    views = sharded.views
    for tensor, shard_grad in zip(views, grad.views, strict=True):
        tensor.grad = shard_grad
    for end in sharded.tracked[len(views) :]:
        end.grad = grad.anchor.detach()


@rule(_T.detach_, takes="input")
def _detach_(func: Any, sharded: ShardedTensor) -> ShardedTensor:
    # Not in place: on some ranks only, shards may be views, which torch cannot detach in place.
    detached = cast(ShardedTensor, sharded.detach())
    sharded._shards, sharded._metadata = detached._shards, detached._metadata
    sharded._anchor, sharded._ends = detached._anchor, detached._ends
    return sharded


@rule(_T.data.__set__, takes="input value")
def _set_data(func: Any, sharded: ShardedTensor, value: Any) -> None:
    """Replace the shards by those of a tensor of the same shape; keep leaf objects if the cut is the same."""
    if not isinstance(value, ShardedTensor) or value.metadata().size != sharded.metadata().size:
        raise ShardingError(
            f"{here()}: expected a ShardedTensor of shape {tuple(sharded.metadata().size)} as .data, found a"
            f" {type(value).__name__} of shape {tuple(value.shape)}; use copy_()"
        )
    needs_grad = sharded.requires_grad
    if value.metadata().cut_as(sharded.metadata()):
        for shard, new in zip(sharded._shards, value._shards, strict=True):
            shard.tensor.data, shard.metadata = new.tensor, new.metadata
    else:
        sharded._shards, sharded._ends = cast(ShardedTensor, value.detach())._shards, ()
    for end in (*sharded._ends, sharded._anchor):
        end.data = value.anchor
    with _compat.plain_attributes():
        sharded.data = value  # the wrapper's own dtype and device
    sharded._metadata, sharded._spec = value.metadata().with_properties(requires_grad=needs_grad), value._spec
    sharded.requires_grad_(needs_grad)


@handles(_compat.has_compatible_shallow_copy_type)
def _keeps_identity(func: Any, args: Args, kwargs: Kwargs) -> bool:
    """Return whether each shard of `old` can take memory of `new` through `.data` (`nn.Module.to`)."""
    old, new = args
    if not (isinstance(old, ShardedTensor) and isinstance(new, ShardedTensor)):
        return False
    return len(old.tensors) == len(new.tensors) and all(map(func, old.tracked, new.tracked))


@rule(_T.clone, torch.clone, takes="input memory_format")
def _clone(func: Any, sharded: ShardedTensor, memory_format: torch.memory_format | None) -> ShardedTensor:
    return move.convert(sharded, torch.clone, memory_format=memory_format or torch.preserve_format)


@called_as(_T.contiguous)
def _contiguous(
    sharded: ShardedTensor, memory_format: torch.memory_format = torch.contiguous_format
) -> ShardedTensor:
    if memory_format is sharded.metadata().tensor_properties.memory_format and _dense(sharded, memory_format):
        return sharded
    return move.convert(sharded, Tensor.contiguous, memory_format=memory_format)


@called_as(_T.pin_memory)
def _pin_memory(sharded: ShardedTensor, device: Any = None) -> ShardedTensor:
    check_pinnable()
    tensors = [tensor.pin_memory() for tensor in sharded.tensors]
    metadata = sharded.metadata().with_properties(pin_memory=True)
    return sharded.with_tensors(tensors, metadata=metadata, anchor=sharded.anchor)


@rule(_T.share_memory_, takes="input")
def _share_memory_(func: Any, sharded: ShardedTensor) -> ShardedTensor:
    for tensor in sharded.tensors:
        tensor.share_memory_()
    return sharded


@handles(_T.to)
def _to(func: Any, args: Args, kwargs: Kwargs) -> ShardedTensor | Tensor:
    if isinstance(args[0], ShardedTensor):
        return args[0].to(*args[1:], **kwargs)
    plain = [arg.anchor if isinstance(arg, ShardedTensor) else arg for arg in args]  # plain.to(sharded)
    return cast(Tensor, func(*plain, **kwargs))


@called_as(_T.module_load)
def _module_load(target: Tensor, other: Tensor, assign: bool = False) -> Tensor:
    """Return the replacement of a parameter if modules load by swapping tensors."""
    return (other if assign else target.copy_(other)).detach()


@called_as(_T.copy_)
def _copy_(target: Tensor, other: Any, non_blocking: bool = False) -> Tensor:
    """Copy from a tensor of the same cut (local), of another (collective), or a replicated one (local)."""
    if not isinstance(target, ShardedTensor):
        return target.copy_(other.full_tensor())
    cut = target.metadata()
    if is_foreign(other):
        other = from_torch(other)
    if isinstance(other, ShardedTensor) and other.shape == target.shape and not other.metadata().cut_as(cut):
        other = move.move_to(other, lambda: cut, subject="copy_")
    elif isinstance(other, Tensor) and not isinstance(other, ShardedTensor):
        probe(other).expand(cut.size)  # raises on all ranks, if at all
    return write_parts(Tensor.copy_, (target, other, non_blocking), {}, target)
