"""Sharded training for PyTorch models too large for one device."""

from importlib import import_module, metadata
from typing import Any

import lazy_loader

from shardwise import torch_version  # noqa: F401  # refuses an unsupported torch

_PACKAGES = [
    "checkpoint",
    "comm",
    "fsdp",
    "graph",
    "hf",
    "layout",
    "nn",
    "optim",
    "planner",
    "sharded_tensor",
    "tensor_parallel",
    "verify",
]
# Imports the names in `__init__.pyi` on first access, so the command answers before torch is imported.
_named, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    return import_module(f"{__name__}.{name}") if name in _PACKAGES else _named(name)


try:
    __version__ = metadata.version("shardwise")
except metadata.PackageNotFoundError:  # source that is not installed
    __version__ = "0+unknown"
