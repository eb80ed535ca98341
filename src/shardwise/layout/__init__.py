"""Pure arithmetic of sharding: boxes, placements, and where parameters lie in a group's buffers."""

from shardwise.layout.box import Box, cover
from shardwise.layout.group_layout import GroupLayout, InterleavedLayout, ParamSpec, Segment, Slot
from shardwise.layout.placement import EvenShard

__all__ = [
    "Box",
    "EvenShard",
    "GroupLayout",
    "InterleavedLayout",
    "ParamSpec",
    "Segment",
    "Slot",
    "cover",
]
