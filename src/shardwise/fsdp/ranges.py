"""Named ranges in profiles: each module's gather, wait, forward and reduce, while a profiler runs.

A pass asks once whether one runs. If so, wrappers stand in front of its states', groups' and reducers'
methods until a pass finds none running; without a profiler nothing is paid.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.autograd.profiler import record_function

from shardwise.fsdp.module_state import ModuleState

_GATHERS = {"unshard": "gather", "wait_for_unshard": "wait for"}
_REDUCES = {"reduce": "reduce"}


def begin(states: Sequence[ModuleState]) -> None:
    """Let what these states do show in profiles from now on; the first one's forward has begun."""
    for state in states:
        name = state.name or "the root module"
        for owner, method, what in _ranged_methods(state):
            _put(owner, method, _ranged(f"shardwise: {what} {name}"))
        running: list[record_function] = []
        title = f"shardwise: forward {name}"
        _put(state, "pre_forward", _opening(title, running))
        _put(state, "post_forward", _closing(running))
        _put(state, "abandon_forward", _closing(running))
        if state is states[0]:
            _open(title, running)


def end(states: Sequence[ModuleState]) -> None:
    """Take the wrappers away."""
    for state in states:
        for name in ("pre_forward", "post_forward", "abandon_forward"):
            vars(state).pop(name, None)
        for owner, method, _ in _ranged_methods(state):
            vars(owner).pop(method, None)


def _ranged_methods(state: ModuleState) -> Iterator[tuple[Any, str, str]]:
    """Groups and reducers, their methods that are one range each, and what these do in words."""
    for owners, methods in ((state.groups, _GATHERS), (state.reducers, _REDUCES)):
        for owner in owners:
            for method, what in methods.items():
                yield owner, method, what


Wrapper = Callable[[Callable[..., Any], Any, Any], Any]  # calls a method that is bound already


def _put(owner: Any, name: str, wrapper: Wrapper) -> None:
    myself = weakref.ref(owner)  # an attribute that led back would keep the owner alive
    method = getattr(type(owner), name)

    def call(*args: Any, **kwargs: Any) -> Any:
        alive = myself()
        assert alive is not None
        return wrapper(method.__get__(alive), args, kwargs)

    vars(owner)[name] = call


def _ranged(title: str) -> Wrapper:
    def call(method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with record_function(title):
            return method(*args, **kwargs)

    return call


def _opening(title: str, running: list[record_function]) -> Wrapper:
    def call(method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        _open(title, running)
        return result

    return call


def _open(title: str, running: list[record_function]) -> None:
    running.append(record_function(title))
    running[-1].__enter__()


def _closing(running: list[record_function]) -> Wrapper:
    def call(method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if running:
            running.pop().__exit__(None, None, None)
        return method(*args, **kwargs)

    return call
