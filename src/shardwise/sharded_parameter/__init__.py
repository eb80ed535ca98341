"""Parameters, gradients and optimizer state that are row ranges of whole tensors."""

from shardwise.sharded_parameter import clients, ops
from shardwise.sharded_parameter.piece import Piece
from shardwise.sharded_parameter.row_shard import RowShard
from shardwise.sharded_parameter.tensor import ShardedParameter, ShardedRows

__all__ = ["Piece", "RowShard", "ShardedParameter", "ShardedRows", "clients", "ops"]
