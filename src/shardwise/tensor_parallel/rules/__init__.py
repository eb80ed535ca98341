"""Rules: how every operation changes placements, and its form on one rank."""

from shardwise.tensor_parallel.rules import (  # noqa: F401 -- each registers its rules
    attention,
    backward,
    linear,
    spatial,
    views,
    vocabulary,
)
from shardwise.tensor_parallel.rules.parts import getitem
from shardwise.tensor_parallel.rules.pointwise import is_pointwise, pointwise
from shardwise.tensor_parallel.rules.registry import find, rule

__all__ = ["find", "getitem", "is_pointwise", "pointwise", "rule"]
