"""Optimizers and norms that know shards."""

from shardwise.optim.norm import clip_grad_norm_, get_total_norm

__all__ = ["clip_grad_norm_", "get_total_norm"]
