"""Tensor subclasses that choose what is gathered for them.

A local tensor may have `fsdp_pre_all_gather` and `fsdp_post_all_gather`, from its class (quantised weights,
say) or set on it before the first forward. Its parameter is then not part of the group's flat buffer: it
provides its own all-gather inputs, and builds the unsharded tensor from the gathered outputs:

    fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy) -> (inputs, metadata)
    fsdp_post_all_gather(outputs, metadata, param_dtype, *, out=None) -> (tensor, inner tensors) or None

An older form of the first hook takes only `mesh`. Inputs must have the same size on every rank: for a
parameter that is sharded unevenly, the size of the padded shard.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor

from shardwise import _compat
from shardwise.errors import ShardingError, here
from shardwise.fsdp.parameter import EvenParam
from shardwise.mesh import shard_mesh

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


def is_gathered_separately(param: EvenParam) -> bool:
    """Return whether `param` is gathered apart: its local tensor is a subclass, or has the hooks."""
    local = param.local
    return not _compat.is_plain(type(local)) or hasattr(local, PRE) or hasattr(local, POST)


class ExtendedParam:
    """Gathers one parameter outside the flat buffer: its local tensor is a subclass or has the hooks.

    Without the hooks, its padded shard is the only input.
    """

    def __init__(self, param: EvenParam, *, device: torch.device) -> None:
        if param.placement.dim != 0:
            raise ShardingError(
                f"{here()}: '{param.name}' is a tensor subclass and can only be sharded on dim 0,"
                f" not {param.placement.dim}"
            )
        self.param, self.device = param, device
        self.mesh = shard_mesh(param.info)
        self.padded_shape = param.placement.padded_shape(tuple(param.shape), ranks=param.ranks)
        local = param.local
        # Every rank sends the same amount: its piece if that has the padded shape, else a padded copy.
        self.padded = local if tuple(local.shape) == self.padded_shape else local.new_zeros(self.padded_shape)
        has_hooks = [hasattr(local, name) for name in (PRE, POST)]
        if has_hooks[0] != has_hooks[1]:
            raise ShardingError(
                f"{here()}: the tensor of '{param.name}' ({type(self.padded).__name__}) defines only one of"
                f" {PRE} and {POST}; define both"
            )
        self.has_hooks = has_hooks[0]
        self.metadata: Any = None
        self.shapes: list[torch.Size] = []
        self.outputs: list[Tensor] = []  # one per gathered input, 1-D
        self.filled: list[Tensor] = []  # aliases of `outputs`
        self.inner: list[Tensor] = []  # further memory of the unsharded tensor

    def _hook(self, name: str, shard: Tensor) -> Callable[..., Any]:
        """Return a hook of the local tensor; if it is a method, bind it to `shard`."""
        local = self.param.local
        hook = getattr(local, name)
        if getattr(hook, "__self__", None) is local:
            # Bound to the piece, though the padded shard is sent, maybe from another device.
            return MethodType(hook.__func__, shard)
        return cast(Callable[..., Any], hook)

    def inputs(self) -> list[Tensor]:
        """Return the 1-D tensors that this rank sends, made on the current stream, which copies them in."""
        shard, local = self.padded, self.param.local
        if shard is not local and local.numel():
            # The optimizer changes the piece, not this padded copy.
            shard.narrow(0, 0, local.size(0)).copy_(local)
        if shard.device != self.device:
            shard = shard.to(self.device, non_blocking=True)
        if not self.has_hooks:
            self.shapes = [shard.shape]
            return [_as_flat_memory(shard)]
        inputs, self.metadata = self._call_pre(self._hook(PRE, shard))
        self.shapes = [t.shape for t in inputs]
        return [_as_flat_memory(t) for t in inputs]

    def _call_pre(self, hook: Callable[..., Any]) -> tuple[Sequence[Tensor], Any]:
        count = len(inspect.signature(hook).parameters)
        param = self.param
        if count == 1:
            inputs, metadata = hook(self.mesh)
        elif count == 5:
            stride = _compat.contiguous_stride(param.shape)
            inputs, metadata = hook(self.mesh, param.shape, stride, param.module(), param.policy)
        else:
            raise ShardingError(
                f"{here()}: {PRE} of '{param.name}' takes {count} arguments; expected (mesh) or"
                " (mesh, outer_size, outer_stride, module, mp_policy)"
            )
        # Checked on every rank, so that the ranks without padding do not wait for the others.
        uneven = param.shape[param.placement.dim] % param.ranks != 0
        wrong = [tuple(t.shape) for t in inputs if tuple(t.shape) != self.padded_shape]
        if uneven and wrong:
            raise ShardingError(
                f"{here()}: '{param.name}' of shape {tuple(param.shape)} is cut unevenly over {param.ranks}"
                f" ranks, so {PRE} must return inputs of the padded shard's shape {self.padded_shape},"
                f" got {wrong}"
            )
        return inputs, metadata

    def allocate(self, inputs: Sequence[Tensor], ranks: int) -> list[Tensor]:
        """Return memory for the gathered inputs, kept between gathers and refilled."""
        # They are aliases without a shared version counter: the unsharded tensor may be a view of this
        # memory.
        if not self.outputs:
            # The first forward may run in inference mode, whose tensors autograd refuses later.
            with torch.inference_mode(False):
                self.outputs = [
                    torch.empty(ranks * t.numel(), dtype=t.dtype, device=self.device) for t in inputs
                ]
                # Filling these leaves the versions of `outputs`: autograd sees no change of what it saved.
                self.filled = [tensor.data for tensor in self.outputs]
        # The unsharded tensor is built from these, so the same tensors get their memory back.
        for tensor in self.outputs:
            _resize(tensor, tensor.numel())
        return self.filled

    def finish(self) -> None:
        """Build the unsharded parameter, or refill it, from the gathered inputs."""
        param = self.param
        if not self.has_hooks:
            if param.unsharded is None:
                whole = self.outputs[0].narrow(0, 0, param.numel).view(param.shape)
                param.unsharded = param.wrap_unsharded(whole)
            return
        gathered = tuple(t.view(-1, *s[1:]) for t, s in zip(self.outputs, self.shapes, strict=True))
        dtype = param.policy.param_dtype or param.sharded.dtype
        hook = self._hook(POST, self.padded)
        if param.unsharded is not None:
            # `free` emptied them; the hook below fills them.
            for tensor in self.inner:
                _resize(tensor, tensor.numel())
            # Refill the same object: autograd has saved it, and modules have it registered.
            hook(gathered, self.metadata, dtype, out=param.unsharded)
            return
        with torch.inference_mode(False):
            whole, inner = hook(gathered, self.metadata, dtype)
        self.inner = list(inner)
        param.unsharded = param.wrap_unsharded(
            whole.as_strided(param.shape, _compat.contiguous_stride(param.shape))
        )

    def free(self) -> None:
        # Empty the tensors, but keep them: the unsharded parameter and saved tensors refer to them.
        for tensor in (*self.outputs, *self.inner):
            _resize(tensor, 0)


def _as_flat_memory(tensor: Tensor) -> Tensor:
    """Return `tensor` as 1-D plain memory, which is what collectives take."""
    if not _compat.is_plain(type(tensor)):
        tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor.reshape(-1)


def _resize(tensor: Tensor, numel: int) -> None:
    storage, size = tensor.untyped_storage(), numel * tensor.element_size()
    if storage.nbytes() != size:  # a resize to the same size moves it too
        storage.resize_(size)
