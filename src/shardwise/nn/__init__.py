"""What models compute in less memory than by the functions that it replaces."""

from shardwise.nn.linear_cross_entropy import linear_cross_entropy

__all__ = ["linear_cross_entropy"]
