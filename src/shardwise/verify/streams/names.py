"""Names for addresses of the simulated device, in the words of the library and its users."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from shardwise import _compat
from shardwise.fsdp.module_state import live_states
from shardwise.verify.streams.device import SimTensor, span


def name_at(address: int, models: list[nn.Module]) -> str:
    """Return the parameter, gradient or buffer of a group that has `address`; nothing if none has.

    Args:
        models: whose parameters have the names by which they are called.
    """
    for words, tensor in _named(models):
        local = _compat.local_of(tensor)
        if isinstance(local, SimTensor):
            low, high = span(local)
            if low <= address < high:
                return words
    return ""


def _named(models: list[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    for model in models:
        for name, param in model.named_parameters():
            yield f"parameter '{name}'", param
            if param.grad is not None:
                yield f"the gradient of '{name}'", param.grad
    for state in live_states():
        for group in state.groups:
            whose = group.title
            for one in group.params:
                yield f"parameter '{one.name}'", one.local
                if one.sharded.grad is not None:
                    yield f"the gradient of '{one.name}'", one.sharded.grad
                if one.unsharded is not None and one.unsharded.grad is not None:
                    yield f"the whole gradient of '{one.name}'", one.unsharded.grad
            yield from ((f"the shard of {whose}", shard) for shard in group.shards)
            yield from ((f"the gathered memory of {whose}", buffer.full) for buffer in group.buffers)
