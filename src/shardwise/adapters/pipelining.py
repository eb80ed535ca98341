"""Support for torch's pipeline stages of sharded modules.

At the end of a schedule a stage walks the state's groups to reduce the gradients that its micro-batches
accumulated, then ends backward. Here the end of backward does both.

Zero-bubble schedules split backward: gradients of inputs first, gradients of parameters later. Both halves
look in `parameters()` for the parameters that forward used, which are there only while gathered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from shardwise.errors import ShardingError, here
from shardwise.fsdp.finalization import reduce_unsynced
from shardwise.fsdp.module_state import ModuleState, state_of
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
        """Reduce the gradients that backwards left unreduced. Collective over the module's mesh."""
        if self._state.schedule is not None:
            reduce_unsynced(self._state).wait()


def backward_of_stages(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a stage's `backward_maybe_with_nosync` to gather the stage before each half of a split backward.

    Otherwise a stage whose forward reshards would silently get no gradients. Collective over the mesh of the
    stage's modules, whose ranks run the same schedule. The call also records the parameters as a stage's.
    """

    @functools.wraps(backward)
    def call(self: Any, backward_type: str, *args: Any, **kwargs: Any) -> Any:
        if backward_type != "full":
            _gather(self.submod)
        root = state_of(self.submod)
        if root is not None:
            norm.of_a_stage(param.sharded for group, _ in root.all_groups for param in group.params)
        return backward(self, backward_type, *args, **kwargs)

    return call


def _gather(stage: nn.Module) -> None:
    root = state_of(stage)
    if root is None:
        _check_is_whole(stage)
    elif root.schedule is not None:
        for state in (root, *root.below):
            for group in state.groups:
                state.gather(group, root.schedule, forward=False)


def _check_is_whole(stage: nn.Module) -> None:
    """Raise if a module inside the stage is sharded but the stage itself is not."""
    sharded = next((name for name, module in stage.named_modules() if state_of(module) is not None), None)
    if sharded is not None:
        raise ShardingError(
            f"{here()}: the schedule splits the backward of a stage whose '{sharded}' is sharded but whose"
            f" {type(stage).__name__} itself is not; call fully_shard on the {type(stage).__name__} too"
        )
