"""Predict memory, communication and time of a training step, before it is run.

The prediction follows what this library does: it runs on fake tensors, as one rank of a process group of any
size that does nothing (`record`). A few blocks represent many, exactly (`unroll`). The recording gives live
memory and bytes sent (`measure`), a model of a caching allocator gives reserved memory (`allocator`), and a
model of the hardware gives time (`timing`). `page`, `picture` and `trace` show a plan; `search` compares
settings, and `code` writes the Python for one; `calibrate` measures this machine.

Everything is imported on first use: the command checks its arguments by `setup`, `devices` and `shapes`,
which need no torch.
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
    """Keeps functions whose names some submodules share: importing a submodule does not replace them."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in __all__ and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package

__getattr__, __dir__, _ = lazy_loader.attach(__name__, submod_attrs=_HOMES)
