"""What the user asks for, by module: which way its weights are cut."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.errors import ShardingError


@dataclass(frozen=True)
class ColwiseParallel:
    """The module's outputs are cut: a linear layer's output features, an embedding's columns."""


@dataclass(frozen=True)
class RowwiseParallel:
    """What the module contracts is cut: a linear layer's input features, an embedding's rows (the vocabulary)."""


_STYLES = {"ColwiseParallel": "column", "RowwiseParallel": "row", "colwise": "column", "rowwise": "row"}


def styles_of(strategies: Mapping[str, Any], names: list[str]) -> dict[str, str]:
    """The style of each parameter in `names` that `strategies` speaks of.

    Args:
        strategies: by fully qualified name of a module or parameter, or a pattern with `*`: a style's class or
            instance, ours or torch's of the same name, or "colwise" or "rowwise".
        names: every parameter and buffer of the program.

    Raises:
        ShardingError: a name that no parameter has, with the nearest ones, or something that is no style.
    """
    found: dict[str, str] = {}
    for asked, style in strategies.items():
        matching = [name for name in names if _matches(name, asked)]
        if not matching:
            modules = sorted({name.rpartition(".")[0] for name in names} | set(names))
            near = difflib.get_close_matches(asked, modules, n=3)
            raise ShardingError(
                f"the strategy for {asked!r} fits no parameter of the program"
                + (f"; did you mean {', '.join(near)}?" if near else f"; it has {', '.join(names[:10])}")
            )
        kind = style if isinstance(style, str) else getattr(style, "__name__", type(style).__name__)
        if kind not in _STYLES:
            raise ShardingError(
                f"the strategy for {asked!r} is {style!r}; expected ColwiseParallel or RowwiseParallel"
            )
        for name in matching:
            found[name] = _STYLES[kind]
    return found


def _matches(name: str, asked: str) -> bool:
    module = name.rpartition(".")[0]
    return name == asked or module == asked or fnmatch.fnmatchcase(module, asked) or fnmatch.fnmatchcase(name, asked)
