"""Sharded training for PyTorch models too large for one device."""

from importlib import metadata

import lazy_loader

from shardwise import torch_version  # noqa: F401  # says what is wrong with torch

# Imports what `__init__.pyi` names when it is first asked for: the command answers before torch is imported.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

try:
    __version__ = metadata.version("shardwise")
except metadata.PackageNotFoundError:  # source that nobody installed
    __version__ = "0+unknown"
