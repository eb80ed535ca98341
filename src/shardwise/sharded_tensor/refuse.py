"""What is said of an operation that sharded tensors do not support."""

from __future__ import annotations

from typing import Any, NoReturn

from shardwise.errors import ShardingError, here


def refuse(func: Any, args: Any, kwargs: Any) -> NoReturn:
    """Raise ShardingError naming the operation, the specs of its sharded arguments and the nearest way."""
    from shardwise.sharded_tensor.tensor import ShardedTensor

    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        name = f"attribute {getattr(getattr(func, '__self__', None), '__name__', '?')}"
    sharded = [value for value in [*args, *kwargs.values()] if isinstance(value, ShardedTensor)]
    specs = ", ".join(f"{tuple(s.metadata().size)} by {s.sharding_spec()!r}" for s in sharded)
    raise ShardingError(
        f"{here()}: {name} is not supported on a ShardedTensor ({specs}). Use full_tensor() for the whole"
        " tensor, local_shards() or map() for each part, reshard() for another cut, or register it with"
        " shardwise.sharded_tensor.custom_sharded_op_impl"
    )
