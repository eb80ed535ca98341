"""Pure arithmetic of sharding: boxes, placements, and positions of parameters in a group's buffers."""

from shardwise.layout.box import Box
from shardwise.layout.contiguous import ContiguousLayout, ContiguousSegment, Place, gaps_between, rows_between
from shardwise.layout.group_layout import InterleavedLayout, ParamSpec, Segment, Slot
from shardwise.layout.index import cover, disjoint
from shardwise.layout.messages import Message, transfer
from shardwise.layout.packing import Packing, least_shard_numel, pack
from shardwise.layout.placement import EvenShard, Owned, Placement, RaggedShard

GroupLayout = InterleavedLayout | ContiguousLayout  # positions of a group's parameters
Gathered = Segment | ContiguousSegment  # positions in one buffer that it gathers into

__all__ = [
    "Box",
    "ContiguousLayout",
    "ContiguousSegment",
    "EvenShard",
    "Gathered",
    "GroupLayout",
    "InterleavedLayout",
    "Message",
    "Owned",
    "Packing",
    "ParamSpec",
    "Place",
    "Placement",
    "RaggedShard",
    "Segment",
    "Slot",
    "cover",
    "disjoint",
    "gaps_between",
    "least_shard_numel",
    "pack",
    "rows_between",
    "transfer",
]
