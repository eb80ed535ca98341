"""One shard on the rank that holds it: memory, and where it lies in the whole tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwise.layout import Box
from shardwise.sharded_tensor.metadata import ShardMetadata


@dataclass
class Shard:
    """`tensor` (shape `metadata.shard_sizes`) lies at `metadata.shard_offsets` of the whole tensor.

    Nothing is checked here: what does not fit is found, on all ranks together, where a sharded tensor
    is made of shards.
    """

    tensor: torch.Tensor
    metadata: ShardMetadata

    @staticmethod
    def from_tensor_and_offsets(tensor: torch.Tensor, shard_offsets: Sequence[int], rank: int) -> Shard:
        """`tensor` as the shard at `shard_offsets` on global rank `rank`. Local."""
        placement = f"rank:{rank}/{tensor.device}"
        return Shard(tensor, ShardMetadata(list(shard_offsets), list(tensor.shape), placement))

    @property
    def box(self) -> Box:
        return self.metadata.box
