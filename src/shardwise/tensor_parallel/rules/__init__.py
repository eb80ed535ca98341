"""What every operation does to placements, and what it becomes on one rank."""

from shardwise.tensor_parallel.rules import (
    attention,
    backward,
    embedding,
    indexing,
    linear,
    loss,
    norms,
    random,
    spatial,
)
from shardwise.tensor_parallel.rules.parts import getitem
from shardwise.tensor_parallel.rules.pointwise import is_pointwise, pointwise
from shardwise.tensor_parallel.rules.registry import find, name_of, rule

__all__ = [
    "attention",
    "backward",
    "embedding",
    "find",
    "getitem",
    "indexing",
    "is_pointwise",
    "linear",
    "loss",
    "name_of",
    "norms",
    "pointwise",
    "random",
    "rule",
    "spatial",
]
