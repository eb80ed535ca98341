"""Will it fit, and how fast? Memory, communication and time of a training step, before it is run.

What is predicted is what this library does: it is run on fake tensors, as one rank of a process group of
any size that does nothing (`record`). A few blocks stand for many, exactly (`unroll`). Memory alive and
bytes sent follow from that (`measure`), reserved memory by a model of a caching allocator (`allocator`),
time by a model of the hardware (`timing`). `page`, `picture` and `trace` show it; `search` compares
settings, and `code` is the Python of one; `calibrate` measures the machine at hand.

All of it is imported when some of it is first asked for: the command checks its arguments by `setup`,
`devices` and `shapes`, which need no torch.
"""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING, Any

import lazy_loader  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from shardwise.planner.advice import advise
    from shardwise.planner.calibrate import calibrate, to_toml
    from shardwise.planner.code import python
    from shardwise.planner.devices import Hardware, hardware_of
    from shardwise.planner.found import Point, Search
    from shardwise.planner.models import Model
    from shardwise.planner.page import page, trace
    from shardwise.planner.picture import picture
    from shardwise.planner.plan import Plan, plan
    from shardwise.planner.search import search
    from shardwise.planner.setup import Setup, from_json, to_json
    from shardwise.planner.sharding import recompute
    from shardwise.planner.tensor import with_positions

__all__ = [
    "Hardware",
    "Model",
    "Plan",
    "Point",
    "Search",
    "Setup",
    "advise",
    "calibrate",
    "from_json",
    "hardware_of",
    "page",
    "picture",
    "plan",
    "python",
    "recompute",
    "search",
    "to_json",
    "to_toml",
    "trace",
    "with_positions",
]

_HOMES = {
    "advice": ("advise",),
    "calibrate": ("calibrate", "to_toml"),
    "code": ("python",),
    "devices": ("Hardware", "hardware_of"),
    "found": ("Point", "Search"),
    "models": ("Model",),
    "page": ("page", "trace"),
    "picture": ("picture",),
    "plan": ("Plan", "plan"),
    "search": ("search",),
    "setup": ("Setup", "from_json", "to_json"),
    "sharding": ("recompute",),
    "tensor": ("with_positions",),
}


class _Package(types.ModuleType):
    """Has functions by names that some of its modules have too, which importing these does not replace."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in __all__ and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package

__getattr__, __dir__, _ = lazy_loader.attach(__name__, submod_attrs=_HOMES)
