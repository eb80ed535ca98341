"""Run code that uses torch's FSDP2 on shardwise instead."""

from shardwise.adapters.fsdp2 import install, uninstall

__all__ = ["install", "uninstall"]
