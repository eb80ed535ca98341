"""Tables of implementations for sharded tensors: other modules fill them, and the class reads them.

`ShardedTensor.__torch_function__` looks a torch function up in `HANDLERS` by identity and calls

    handler(func, args, kwargs)

on every rank of the tensor's group. A function without a handler raises ShardingError. Methods that the class
only declares (`declared`) are found in the same way; `does` registers their implementations. So the class
depends on none of the modules that implement its operations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from shardwise import _compat

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Handler = Callable[[Any, Args, Kwargs], Any]
HANDLERS: dict[Any, Handler] = {}

# Functions that the wrapper answers for the whole tensor, without a handler.
PLAIN: set[Any] = set()

_METHODS: dict[Any, Callable[..., Any]] = {}

_H = TypeVar("_H", bound=Handler)
_F = TypeVar("_F", bound=Callable[..., Any])


def handles(*funcs: Any) -> Callable[[_H], _H]:
    """Register the decorated `handler(func, args, kwargs)` for every torch function in `funcs`."""

    def register(handler: _H) -> _H:
        HANDLERS.update(dict.fromkeys(funcs, handler))
        return handler

    return register


def between_graphs(function: _F) -> _F:
    """Exclude a function from tracing: inside it, ranks agree on values that they read from each other."""
    return _compat.runs_eagerly(function, reason="a graph holds no ShardedTensor; pass fullgraph=False")


def declared(method: _F) -> _F:
    """Declare a method or function, with signature and docstring, that a higher module implements."""

    @between_graphs
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return _METHODS[call](*args, **kwargs)

    return call  # type: ignore[return-value]


def does(method: Any) -> Callable[[_F], _F]:
    """Register the decorated function as the implementation of a `declared` method."""

    def register(function: _F) -> _F:
        _METHODS[method] = function
        return function

    return register
