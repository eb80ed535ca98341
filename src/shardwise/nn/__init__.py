"""Parts of models: a cross-entropy in less memory, and sequences cut over ranks."""

from shardwise.nn.linear_cross_entropy import linear_cross_entropy
from shardwise.nn.sequence import SequenceCut

__all__ = ["SequenceCut", "linear_cross_entropy"]
