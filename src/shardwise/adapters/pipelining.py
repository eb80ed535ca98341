"""The part of a sharded module's state that torch's pipeline stages look for.

At the end of a schedule a stage walks the state's groups to reduce what its micro-batches accumulated, and
ends backward. Here the end of backward does both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwise.fsdp.finalization import reduce_what_is_left
from shardwise.fsdp.module_state import ModuleState
from shardwise.optim import norm


class StateOfStage:
    """`fully_shard.state(module)`, as `torch.distributed.pipelining` uses it."""

    all_states: Sequence[Any] = ()

    def __init__(self, state: ModuleState) -> None:
        self._state = state

    @property
    def _state_ctx(self) -> StateOfStage:
        return self

    def _root_post_backward_final_callback(self) -> None:
        """Reduce the gradients of backwards without synchronisation. Collective over the module's mesh."""
        if self._state.schedule is not None:
            reduce_what_is_left(self._state).wait()
            for state in (self._state, *self._state.below):
                for group in state.groups:
                    norm.of_a_stage(param.sharded for param in group.params)
