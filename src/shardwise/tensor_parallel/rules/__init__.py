"""What every operation does to placements, and what it becomes on one rank."""

from shardwise.tensor_parallel.rules import attention, embedding, linear, norms
from shardwise.tensor_parallel.rules.pointwise import is_pointwise, pointwise
from shardwise.tensor_parallel.rules.registry import find, name_of, rule
from shardwise.tensor_parallel.rules.views import getitem

__all__ = [
    "attention",
    "embedding",
    "find",
    "getitem",
    "is_pointwise",
    "linear",
    "name_of",
    "norms",
    "pointwise",
    "rule",
]
