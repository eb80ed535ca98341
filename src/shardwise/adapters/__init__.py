"""Puts shardwise where other people's code asks for FSDP2."""

from shardwise.adapters.fsdp2 import install, uninstall

__all__ = ["install", "uninstall"]
