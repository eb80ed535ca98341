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
from typing import Any

import lazy_loader


class _Package(types.ModuleType):
    """Keeps functions whose names some submodules share: importing a submodule does not replace them."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in __all__ and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
