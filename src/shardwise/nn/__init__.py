"""Parts of models: a cross-entropy that saves memory, and sequences and experts cut over ranks."""

from shardwise.nn.experts import ExpertCut
from shardwise.nn.linear_cross_entropy import linear_cross_entropy
from shardwise.nn.sequence import SequenceCut

__all__ = ["ExpertCut", "SequenceCut", "linear_cross_entropy"]
