"""What optimizers do to sharded models, seen through torch's global step hooks.

    before a step   an optimizer that was built before `fully_shard` holds the whole parameters that
                    sharding replaced; its steps would train nothing, so the first one raises
    after a step    gathered parameters are out of date; modules compare the count of steps with the
                    count when they gathered

Replaced parameters are held weakly: where no optimizer holds them there is nothing to check.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardwise.errors import ShardingError, here

_replaced: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
_names: dict[int, str] = {}
_steps = 0
_watching = False


def steps() -> int:
    """How many optimizer steps this process has made since the first `fully_shard`."""
    return _steps


def watch(replaced: dict[str, nn.Parameter]) -> None:
    """Remember, by name, parameters that a model no longer has."""
    global _watching
    if not _watching:
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
        _watching = True
    if len(_names) > 2 * len(_replaced):
        for key in [key for key in _names if key not in _replaced]:
            del _names[key]
    for name, param in replaced.items():
        _replaced[id(param)] = param
        _names[id(param)] = name


def was_replaced(param: Tensor) -> bool:
    """Has a sharded parameter taken this one's place?"""
    return id(param) in _replaced


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not _replaced:
        return
    stale = [
        _names[id(param)]
        for group in optimizer.param_groups
        for param in group["params"]
        if id(param) in _replaced
    ]
    if stale:
        raise ShardingError(
            f"{here()}: {type(optimizer).__name__} holds {len(stale)} parameters that fully_shard has"
            f" replaced ({', '.join(stale[:5])}{', ...' if len(stale) > 5 else ''}), so its step would train"
            " nothing; build the optimizer after fully_shard"
        )


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    global _steps
    _steps += 1
