"""Optimizers and norms that know shards."""

from shardwise.optim.flat import FlatOptimizer, flat
from shardwise.optim.norm import clip_grad_norm_, get_total_norm

__all__ = ["FlatOptimizer", "clip_grad_norm_", "flat", "get_total_norm"]
