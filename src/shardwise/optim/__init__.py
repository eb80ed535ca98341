"""Optimizers and norms that know shards."""

from shardwise.optim.adamw8bit import AdamW8bit
from shardwise.optim.flat import FlatOptimizer, flat
from shardwise.optim.muon import Muon
from shardwise.optim.norm import clip_grad_norm_, get_total_norm
from shardwise.optim.sharded import ShardedOptimizer
from shardwise.optim.tied import add_tied_gradients

__all__ = [
    "AdamW8bit",
    "FlatOptimizer",
    "Muon",
    "ShardedOptimizer",
    "add_tied_gradients",
    "clip_grad_norm_",
    "flat",
    "get_total_norm",
]
