"""Checkpoints that any number of ranks can write and any other number can read."""

from __future__ import annotations

from shardwise.checkpoint.background import Saving
from shardwise.checkpoint.commit import latest_step
from shardwise.checkpoint.living import LivingRanks
from shardwise.checkpoint.memory import HostMemory
from shardwise.checkpoint.optimizer import optimizer_state
from shardwise.checkpoint.read import load
from shardwise.checkpoint.slices import load_slices, save_slices
from shardwise.checkpoint.state import PerRank
from shardwise.checkpoint.stop import StopSignals
from shardwise.checkpoint.write import save, save_async

__all__ = [
    "HostMemory",
    "LivingRanks",
    "PerRank",
    "Saving",
    "StopSignals",
    "latest_step",
    "load",
    "load_slices",
    "optimizer_state",
    "save",
    "save_async",
    "save_slices",
]
