"""What torch's pipeline stages look for in the state of a sharded module.

At the end of a schedule a stage walks the state's groups to reduce what its micro-batches accumulated, and
ends backward. Here the end of backward does both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import nn

from shardwise.fsdp import FSDPModule
from shardwise.fsdp.finalization import reduce_what_is_left
from shardwise.fsdp.module_state import state_of
from shardwise.fsdp.state import FSDPState


class StateOfStage:
    """`fully_shard.state(module)`, as `torch.distributed.pipelining` uses it."""

    all_states: Sequence[Any] = ()

    def __init__(self, module: nn.Module) -> None:
        self._module = cast(FSDPModule, module)

    @property
    def _state_ctx(self) -> StateOfStage:
        return self

    def _root_post_backward_final_callback(self) -> None:
        """Reduce the gradients of backwards without synchronisation. Collective over the module's mesh."""
        state = state_of(cast(nn.Module, self._module))
        assert state is not None
        schedule = cast(FSDPState, state).schedule
        if schedule is not None:
            schedule.reducing = handle = reduce_what_is_left(state)
            handle.wait()
