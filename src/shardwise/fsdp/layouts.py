"""The layouts by name: everything that depends on how a group's parameters lie in its buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from shardwise.fsdp.contiguous import ContiguousGroup
from shardwise.fsdp.contiguous_reduction import ContiguousReducer
from shardwise.fsdp.group import ParamGroup
from shardwise.fsdp.interleaved import InterleavedGroup
from shardwise.fsdp.parameter import EvenParam, ShardedParam
from shardwise.fsdp.reduction import GradReducer, InterleavedReducer
from shardwise.fsdp.rows import RowsParam

LayoutName = Literal["interleaved", "contiguous"]


@dataclass(frozen=True)
class Layout:
    """The classes that make up a layout."""

    param: Callable[..., ShardedParam]  # how one parameter is cut
    group: Callable[..., ParamGroup]  # how parameters are gathered together
    reducer: Callable[[Any], GradReducer]  # how their gradients are reduced
    has_strategies: bool  # `group` can keep parameters or gradients whole, as a `Strategy` says
    guards_forward: bool  # submodules called on their own need guards; else their parameters raise the error


LAYOUTS: dict[LayoutName, Layout] = {
    "interleaved": Layout(
        EvenParam, InterleavedGroup, InterleavedReducer, has_strategies=False, guards_forward=True
    ),
    "contiguous": Layout(
        RowsParam, ContiguousGroup, ContiguousReducer, has_strategies=True, guards_forward=False
    ),
}
