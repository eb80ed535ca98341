"""Functions whose graphs are theirs alone.

A compiler keeps the graphs of a function with its code, so many for one and not more, and their parts in its
globals. Functions made anew in each call of another share their code, and so would share that room; and what
their graphs refer to would live as long as the module that they are written in.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, cast


def own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a function with code and globals of its own, which are freed with it.

    The function may use cells and builtins, but no globals.
    """
    of = cast(FunctionType, function)
    names = {"__name__": of.__module__, "__builtins__": __builtins__}
    return FunctionType(of.__code__.replace(), names, of.__name__, of.__defaults__, of.__closure__)
