"""Watches what optimizers do to sharded models, through torch's global step hooks.

    before a step   an optimizer built before `fully_shard` holds the whole parameters that sharding
                    replaced; one built between forward and backward may hold gathered parameters,
                    or pieces of a smaller mesh. Their steps would train nothing, so they raise
    after a step    gathered parameters are out of date: modules compare the count of steps with the
                    count when they gathered; optimizers of other models do not count

All of these are held weakly. An optimizer is checked once after each change of the
models. Parameters without rows on this rank skip steps, as `fast.py` describes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from shardwise import _compat
from shardwise.comm.foreach import current_stream
from shardwise.comm.streams import WITHOUT_STREAMS
from shardwise.errors import ShardingError, here
from shardwise.fsdp import fast
from shardwise.fsdp.fast import process

_REPLACED = "fully_shard has replaced; build the optimizer after fully_shard"
_IN_TIME = "build the optimizer before the first forward, or when the model has been resharded"
_GATHERED = f"are whole only while gathered; {_IN_TIME}"
_SMALLER = f"are cut over a smaller mesh only between forward and backward; {_IN_TIME}"


Param = Any  # a `ShardedParam`, which imports this file

# Parameters that no optimizer should hold, by identity: name, reason, and a weak reference to the sharded
# parameter that each is a form of, or None.
_watched = WeakIdKeyDictionary()
_checked: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()  # `_changes` at the check
# Optimizers of nothing sharded, with their number of groups at the check.
_of_others: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
_changes = 0
_watching = False


def look_for_compiler(optimizer: Optimizer | None = None) -> None:
    """Make gradients in a form that tracers accept, once any function is compiled."""
    # Optimizers of other libraries may compile parts of their step.
    foreign = optimizer is not None and not type(optimizer).__module__.startswith(("torch.", "shardwise."))
    process.compiler = process.compiler or foreign or _compat.compiler_in_use()


def watch_replaced(replaced: dict[str, nn.Parameter]) -> None:
    """Remember parameters, by name, that a model no longer has."""
    global _watching, _changes
    if not _watching:
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
        _watching = True
    _changes += 1
    for name, param in replaced.items():
        _watched[param] = name, _REPLACED, None


def watch_gathered(param: Param, whole: nn.Parameter) -> None:
    """Remember the whole form of a sharded parameter."""
    global _changes
    # An optimizer that was checked may be given this one: check it again.
    _changes += 1
    _watched[whole] = param.name, _GATHERED, weakref.ref(param)


def watch_smaller(param: Param, piece: nn.Parameter) -> None:
    """Remember a piece over a smaller mesh. No optimizer is checked again for it: forwards make many."""
    _watched[piece] = param.name, _SMALLER, weakref.ref(param)


def sharded_form(param: Tensor) -> Tensor:
    """Return the sharded form of a parameter in another form, which has its gradient; else `param` itself."""
    if param not in _watched:
        return param
    _, reason, ref = _watched[param]
    owner: Any = None if ref is None else ref()
    is_form = owner is not None and (reason is _SMALLER or owner.unsharded is param)
    return owner.sharded if is_form else param


def was_replaced(param: Tensor) -> bool:
    return param in _watched and _watched[param][1] is _REPLACED


@_compat.runs_eagerly
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    look_for_compiler(optimizer)
    if process.computing:
        keep_gradients(param for group in optimizer.param_groups for param in group["params"])
    compiled = _compat.in_compiled_call()
    if compiled:
        fast.restore_torch_step(optimizer)
    if _checked.get(optimizer) != _changes:
        _check(optimizer)
        fast.forget_empty_params(optimizer)
        if not compiled:
            fast.step_locally(optimizer)
    # The first argument is the optimizer itself.
    closure = any(value is not None for value in (*args[1:], *kwargs.values()))
    if not (closure or _compat.has_step_hooks(optimizer)):  # these make gradients, or read them
        fast.skip_empty_params(optimizer)


def keep_gradients(params: Iterable[Tensor]) -> None:
    """Keep the memory of freed gradients from being reused before this stream has read it in a step."""
    # It belongs to the streams of backward, which need not wait for that step (`set_post_optim_event`).
    grads = [param.grad for param in params if param.grad is not None]
    if not process.computing or not grads or grads[0].device.type in WITHOUT_STREAMS:
        return
    stream = current_stream(grads[0].device)
    # On backward's only stream, the next user of this memory runs after the step anyway.
    if process.computing != {stream}:
        for grad in grads:
            # When a gradient is freed, the allocator waits for this stream's work up to then.
            _compat.local_of(grad).record_stream(stream)


def _check(optimizer: Optimizer) -> None:
    _checked[optimizer] = _changes
    params = [param for group in optimizer.param_groups for param in group["params"]]
    held = [_watched[param] for param in params if param in _watched]
    for reason in (_REPLACED, _GATHERED, _SMALLER):
        if wrong := [name for name, why, _ in held if why is reason]:
            # Each of its steps raises, not only the first.
            del _checked[optimizer]
            raise ShardingError(
                f"{here()}: a step of this {type(optimizer).__name__} would train nothing: it holds"
                f" {len(wrong)} parameters ({', '.join(wrong[:5])}{', ...' if len(wrong) > 5 else ''})"
                f" that {reason}"
            )
    if _holds_sharded(params):
        _of_others.pop(optimizer, None)
    else:
        _of_others[optimizer] = len(optimizer.param_groups)


def _holds_sharded(params: list[Tensor]) -> bool:
    """Return whether some parameter is sharded, or is memory of one; an empty one may be, on other ranks."""
    kinds = {type(param) for param in params} - {nn.Parameter}
    if not all(map(_compat.is_plain, kinds)) or not all(param.numel() for param in params):
        return True
    owners: Any = [ref() for *_, ref in _watched.values() if ref is not None]
    memory = {_compat.storage_id(owner.local) for owner in owners if owner is not None}
    return any(_compat.storage_id(param) in memory for param in params)


@_compat.runs_eagerly
def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    fast.restore_gradients(optimizer)
    fast.rekey_state(optimizer)
    # For any sharded model: a needless gather is better than computing with old parameters. Other optimizers
    # may step on some ranks only.
    if _of_others.get(optimizer) != len(optimizer.param_groups):
        process.steps += 1
