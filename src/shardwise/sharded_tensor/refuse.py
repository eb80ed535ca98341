"""Errors for operations that sharded tensors do not support, or not in this case; operations that users add.

Every message names the operation, the shape and spec of each sharded operand, and the nearest supported
alternative. It depends only on metadata, so all ranks raise, before any communication.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from shardwise.errors import ShardingError, here
from shardwise.sharded_tensor.base import first_sharded, sharded_in
from shardwise.sharded_tensor.registry import HANDLERS, Args, Handler, Kwargs

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
    raise ShardingError(
        f"{here()}: {name} is not possible on this ShardedTensor ({_specs(sharded)}): {reason}; {hint}"
    )


def _specs(sharded: Any) -> str:
    return ", ".join(f"{tuple(s.metadata().size)} by {s.sharding_spec()!r}" for s in sharded)


# Operations that users register

_CUSTOM: set[Any] = set()  # functions that users have implemented
_BY_SPEC: dict[Any, dict[str, Callable[..., Any]]] = {}  # their implementations by class of spec


def custom_sharded_op_impl(func: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as `func` (a torch function, method or getter) for sharded tensors.

    It is called as `impl(types, args, kwargs, process_group)` on every rank that calls `func` with a
    sharded tensor among its arguments: the types that took part, the arguments as given, and the
    process group of the first sharded one. It replaces this library's implementation of `func`, if any.

        @custom_sharded_op_impl(torch.special.erfcx)
        def erfcx(types, args, kwargs, process_group):
            return args[0].map(torch.special.erfcx)
    """

    def register(impl: Callable[..., Any]) -> Callable[..., Any]:
        def handler(func: Any, args: Args, kwargs: Kwargs) -> Any:
            sharded = first_sharded(args, kwargs)
            return impl((type(sharded),), args, kwargs, sharded.process_group)

        HANDLERS[func] = handler
        _CUSTOM.add(func)
        return impl

    return register


def custom_sharding_spec_op(
    sharding_spec_class: type, func: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as `func` for tensors cut by specs of a class, or of its subclasses.

    It is called as for `custom_sharded_op_impl`, if the first sharded argument has such a spec; other specs
    are not affected. A function that `custom_sharded_op_impl` registers for `func` takes precedence.
    """

    def register(impl: Callable[..., Any]) -> Callable[..., Any]:
        if func not in _BY_SPEC:
            _BY_SPEC[func] = {}
            if func not in _CUSTOM:
                HANDLERS[func] = partial(_dispatch_by_spec, HANDLERS.get(func, refuse))
        # By name, as in torch: each of torch's spec classes has one here with the same name.
        _BY_SPEC[func][sharding_spec_class.__qualname__] = impl
        return impl

    return register


def _dispatch_by_spec(fallback: Handler, func: Any, args: Args, kwargs: Kwargs) -> Any:
    sharded = first_sharded(args, kwargs)
    spec = sharded.sharding_spec()
    for kind in type(getattr(spec, "spec", spec)).__mro__:
        impl = _BY_SPEC[func].get(kind.__qualname__)
        if impl is not None:
            return impl((type(sharded),), args, kwargs, sharded.process_group)
    return fallback(func, args, kwargs)
