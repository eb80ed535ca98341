"""Which parameters of a module are cut by which spec, and what becomes of its modules' outputs.

A plan is data, equal on every rank; `shard_module` carries it out. Names are fully qualified, as in
`named_parameters()` and `named_modules()`, relative to the module that is sharded:

    plan                  parameter -> spec             replaced by a sharded parameter
                          module -> `Sharder`           replaced by what the sharder makes of it
    output_plan           module (or "") -> spec        its output is resharded, or cut if it is whole
    return_local_tensor   modules (or "")               their sharded output becomes this rank's part
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from shardwise.sharded_tensor.spec import ShardingSpec


class Sharder(ABC):
    """Shards a whole submodule in a way of its own; users subclass it."""

    @abstractmethod
    def shard(self, module: nn.Module) -> nn.Module:
        """What takes the place of `module`, or `module` itself, changed. Called on every rank."""


@dataclass
class ShardingPlan:
    """What `shard_module` does to a module.

    Attributes:
        plan: by name of a parameter its spec, by name of a submodule its sharder.
        output_plan: by name of a module ("" for the whole) the spec that its output is resharded to.
        return_local_tensor: names of modules ("" for the whole) whose sharded output becomes the local
            tensor, after `output_plan`.
    """

    plan: Mapping[str, ShardingSpec | Sharder]
    output_plan: Mapping[str, ShardingSpec] | None = None
    return_local_tensor: Sequence[str] | None = None


class ShardingPlanner(ABC):
    """Makes plans for modules; users subclass it."""

    @abstractmethod
    def build_plan(self, module: nn.Module) -> ShardingPlan:
        """The plan for `module`, without changing it; the same on every rank."""
