"""Errors for operations that sharded tensors do not support, or not in this case.

Every message names the operation, the shape and spec of each sharded operand, and the nearest supported
alternative. It depends only on metadata, so all ranks raise, before any communication.
"""

from __future__ import annotations

from typing import Any, NoReturn

from shardwise.errors import ShardingError, here
from shardwise.sharded_tensor.base import sharded_in
from shardwise.sharded_tensor.registry import HANDLERS

_GENERAL = (
    "Use full_tensor() for the whole tensor, local_shards() or map() for each part, reshard() for another"
    " cut, or register it with shardwise.sharded_tensor.custom_sharded_op_impl"
)
_ALONG = (
    "Along a dim that is whole in every shard (reshard() makes it so) use map(lambda shard:"
    " torch.{name}(shard, ...)); otherwise full_tensor()"
)
_ELEMENTS = (
    "For rows of a table use torch.nn.functional.embedding, for ranges an index of ints and slices; otherwise"
    " full_tensor()"
)
_MEMORY = (
    "It has no memory of its own; ask the tensors of local_shards(). To save it in the background, use"
    " shardwise.checkpoint.save_async"  # torch's async_save asks for data_ptr
)
_VALUES = "Values are spread over the ranks; use full_tensor(), or gather() for one rank"
_RESIZE = "Its size and cut are fixed; make a new tensor with shardwise.sharded_tensor.empty() and copy_()"

_HINT_OF = {
    name: hint
    for hint, names in {
        _ALONG: "flip fliplr flipud roll rot90 cummax cummin cumprod cumsum logcumsumexp sort argsort tril"
        " triu",
        _ELEMENTS: "gather index_select take take_along_dim masked_select nonzero index_copy index_add"
        " index_fill scatter scatter_add index_put index_put_ scatter_ scatter_add_ __getitem__ __setitem__",
        _MEMORY: "data_ptr untyped_storage storage stride storage_offset is_shared",
        _VALUES: "tolist numpy __array__ __contains__ unique topk median quantile kthvalue mode",
        _RESIZE: "resize_ resize_as_ set_",
    }.items()
    for name in names.split()
}


def refuse(func: Any, args: Any, kwargs: Any) -> NoReturn:
    """Raise ShardingError naming the operation, the specs of its sharded arguments, and an alternative."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        name = f"attribute {getattr(getattr(func, '__self__', None), '__name__', '?')}"
    sharded = list(sharded_in([*args, *kwargs.values()]))
    hint = _HINT_OF.get(name, _GENERAL).format(name=name)
    names = {getattr(key, "__name__", None) for key in HANDLERS}
    if name not in _HINT_OF and name.endswith("_") and name[:-1] in names:
        hint = f"Use {name[:-1]}(), which returns the result"
    raise ShardingError(f"{here()}: {name} is not supported on a ShardedTensor ({_specs(sharded)}). {hint}")


def refuse_case(name: str, *sharded: Any, reason: str, hint: str) -> NoReturn:
    """Raise ShardingError for one case of the operation `name`, which is supported in others."""
    raise ShardingError(
        f"{here()}: {name} is not possible on this ShardedTensor ({_specs(sharded)}): {reason}; {hint}"
    )


def _specs(sharded: Any) -> str:
    return ", ".join(f"{tuple(s.metadata().size)} by {s.sharding_spec()!r}" for s in sharded)
