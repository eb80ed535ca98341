"""Operations that users register."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from shardwise.sharded_tensor.base import first_sharded
from shardwise.sharded_tensor.refuse import refuse
from shardwise.sharded_tensor.registry import HANDLERS, Args, Handler, Kwargs

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
