"""Parameters, gradients and optimizer state that are row ranges of whole tensors."""

from shardwise.sharded_tensor.rows import ops
from shardwise.sharded_tensor.rows.piece import Piece, RowShard
from shardwise.sharded_tensor.rows.tensor import ShardedParameter, ShardedRows, cut_like

__all__ = ["Piece", "RowShard", "ShardedParameter", "ShardedRows", "cut_like", "ops"]
