"""Named ranges in profiles: each module's gather, wait, forward and reduce, while a profiler runs.

Each pass checks once whether a profiler runs. If so, the methods of its states, groups and reducers are
wrapped until a pass finds none running; without a profiler there is no cost.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.autograd.profiler import record_function

from shardwise.fsdp.module_state import ModuleState

_RANGED = {"unshard": "gather", "wait_for_unshard": "wait for", "reduce": "reduce"}
_FORWARD = ("pre_forward", "post_forward", "abandon_forward")


def begin(states: Sequence[ModuleState]) -> None:
    """Record ranges of these states in profiles from now on; the forward of the first has begun."""
    for state in states:
        name = state.name or "the root module"
        for owner in (*state.groups, *state.reducers):
            for method, words in _RANGED.items():
                if hasattr(owner, method):
                    _wrap_method(owner, method, partial(_ranged, f"shardwise: {words} {name}"))
        # A list, since a forward may call its own module: ranges end innermost first.
        opened: list[record_function] = []
        for method in _FORWARD:
            _wrap_method(state, method, partial(_forward, f"shardwise: forward {name}", opened))
        # Its `pre_forward` was called before it was wrapped, and opened no range.
        if state is states[0]:
            _open(f"shardwise: forward {name}", opened)


def end(states: Sequence[ModuleState]) -> None:
    """Remove the wrappers."""
    for state in states:
        for owner in (state, *state.groups, *state.reducers):
            for method in (*_RANGED, *_FORWARD):
                vars(owner).pop(method, None)


Wrapper = Callable[[Callable[..., Any], Any, Any], Any]  # calls a bound method


def _wrap_method(owner: Any, name: str, wrapper: Wrapper) -> None:
    myself = weakref.ref(owner)  # an attribute that refers back would keep the owner alive
    method = getattr(type(owner), name)

    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(method.__get__(myself()), args, kwargs)

    vars(owner)[name] = call


def _ranged(title: str, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    with record_function(title):
        return method(*args, **kwargs)


def _forward(
    title: str, opened: list[record_function], method: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Call a method of `_FORWARD`: a range lasts from the end of `pre_forward` to the next of them."""
    begins = method.__name__ == "pre_forward"
    if opened and not begins:
        opened.pop().__exit__(None, None, None)
    result = method(*args, **kwargs)
    if begins:
        _open(title, opened)
    return result


def _open(title: str, opened: list[record_function]) -> None:
    opened.append(record_function(title))
    opened[-1].__enter__()
