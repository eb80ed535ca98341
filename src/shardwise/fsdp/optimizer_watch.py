"""What optimizers do to sharded models, seen through torch's global step hooks.

    before a step   an optimizer that was built before `fully_shard` holds the whole parameters that
                    sharding replaced, and one built between forward and backward may hold gathered
                    ones; steps of either would train nothing, so the first one raises
                    where this rank holds no rows of a parameter, torch's elementwise optimizers have
                    nothing to do: its gradient, of no elements, is put aside, which spares its dispatch,
                    and its steps are counted all the same
    after a step    gradients put aside come back; gathered parameters are out of date: modules compare
                    the count of steps with the count when they gathered

Such parameters are held weakly, and an optimizer is looked at once after each change of the models.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardwise import _compat
from shardwise.errors import ShardingError, here
from shardwise.fsdp.parameter import EvenParam, own_storage
from shardwise.sharded_tensor.rows import ShardedRows

_REPLACED = "fully_shard has replaced; build the optimizer after fully_shard"
_GATHERED = (
    "are whole only while gathered; build the optimizer before the first forward, or when the model has"
    " been resharded"
)


class _Watched:
    """Parameters that no optimizer should hold, by identity, with their names."""

    def __init__(self) -> None:
        self.alive: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        self.names: dict[int, str] = {}

    def add(self, name: str, param: Tensor) -> None:
        if len(self.names) > 2 * len(self.alive) + 1000:
            self.names = {key: self.names[key] for key in self.alive}
        self.alive[id(param)] = param
        self.names[id(param)] = name

    def in_optimizer(self, optimizer: Optimizer) -> list[str]:
        params = (param for group in optimizer.param_groups for param in group["params"])
        return [self.names[id(param)] for param in params if id(param) in self.alive]


_replaced, _gathered = _Watched(), _Watched()
_checked: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()  # at which change
_changes = 0
_watching = False


class Steps:
    """How many optimizer steps this process has made since the first `fully_shard`."""

    count = 0


def look_for_compiler() -> bool:
    """From when a function is compiled, let gradients be such as tracers take; is this that moment?"""
    if EvenParam.grads_are_traced or not _compat.compiler_in_use():
        return False
    EvenParam.grads_are_traced = True
    return True


def watch_replaced(replaced: dict[str, nn.Parameter]) -> None:
    """Remember parameters, by name, that a model no longer has."""
    global _watching, _changes
    if not _watching:
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
        _watching = True
    _changes += 1
    for name, param in replaced.items():
        _replaced.add(name, param)


def watch_gathered(name: str, param: nn.Parameter) -> None:
    """Remember the whole form of a sharded parameter."""
    global _changes
    _changes += 1
    _gathered.add(name, param)


def was_replaced(param: Tensor) -> bool:
    """Has a sharded parameter taken this one's place?"""
    return id(param) in _replaced.alive


# Of torch.optim; other optimizers may communicate over a parameter, or count them.
ELEMENTWISE = (
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
)  # fmt: skip
_MORE_THAN_STEPS = ("ASGD", "NAdam")  # whose state counts in other ways than by "step"


def is_elementwise(kind: type[Optimizer]) -> bool:
    """Is this an optimizer of torch.optim that updates each element by itself?"""
    return kind.__name__ in ELEMENTWISE and getattr(torch.optim, kind.__name__, None) is kind


@dataclass
class _Bystanders:
    """Parameters of one optimizer of which this rank holds no rows, and which have state and gradients.

    Attributes:
        state: the optimizer's, when these were found; loading replaces it.
        counts: their counts of steps, one for all that are equal.
        aside: their gradients, during a step.
    """

    state: Any
    params: list[ShardedRows] = field(default_factory=list)
    counts: list[Tensor] = field(default_factory=list)
    aside: list[tuple[ShardedRows, Tensor]] = field(default_factory=list)


_bystanders: weakref.WeakKeyDictionary[Optimizer, _Bystanders] = weakref.WeakKeyDictionary()


@_compat.runs_eagerly
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if look_for_compiler():
        for param in (param for options in optimizer.param_groups for param in options["params"]):
            if isinstance(param.grad, DTensor) and not isinstance(param.grad, ShardedRows):
                _compat.set_local_tensor(param.grad, own_storage(_compat.local_tensor(param.grad)))
    if _checked.get(optimizer) != _changes:
        _check(optimizer)
        _separate_counts(optimizer)
    known = _bystanders.get(optimizer)
    if known is None or known.state is not optimizer.state:
        known = _find_bystanders(optimizer)
    for param in known.params:
        if (grad := param.grad) is None:  # an unused parameter does not count this step
            _return_gradients(known)
            _separate_counts(optimizer)
            return
        param.grad = None
        known.aside.append((param, grad))
    with torch.no_grad():
        for count in known.counts:
            count.add_(1)


def _find_bystanders(optimizer: Optimizer) -> _Bystanders:
    """Remembered once each of them has its state, which the optimizer makes in their first step."""
    found = _Bystanders(optimizer.state)
    kind = type(optimizer)
    if not is_elementwise(kind) or kind.__name__ in _MORE_THAN_STEPS:
        _bystanders[optimizer] = found
        return found
    for options in optimizer.param_groups:
        stateless = kind is torch.optim.SGD and not options["momentum"]
        for param in options["params"]:
            if not isinstance(param, ShardedRows) or param.local.numel() or param.grad is None:
                continue
            if not stateless and not optimizer.state.get(param):
                return _Bystanders(optimizer.state)
            found.params.append(param)
    _share_counts(optimizer, found)
    _bystanders[optimizer] = found
    return found


def _share_counts(optimizer: Optimizer, found: _Bystanders) -> None:
    """Let all bystanders with equal counts have one tensor, so that counting is one addition."""
    shared: dict[tuple[float, torch.device], Tensor] = {}
    for param in found.params:
        state = optimizer.state.get(param, {})
        if isinstance(step := state.get("step"), Tensor):
            value = 0.0 if _compat.is_fake(step) else float(step)  # fake tensors have no values that differ
            state["step"] = shared.setdefault((value, step.device), step.clone())
    found.counts = list(shared.values())
    if found.counts and optimizer not in _separating:
        _separating.add(optimizer)
        optimizer.register_state_dict_pre_hook(_separate_counts)


_separating: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def _separate_counts(optimizer: Optimizer) -> None:
    """A count of its own to each: before it steps by itself, or for a state dict, which may be written to."""
    known = _bystanders.pop(optimizer, None)
    for param in () if known is None else known.params:
        state = optimizer.state.get(param)
        if state and isinstance(step := state.get("step"), Tensor):
            state["step"] = step.clone()


def _return_gradients(known: _Bystanders) -> None:
    for param, grad in known.aside:
        param.grad = grad
    known.aside.clear()


def _check(optimizer: Optimizer) -> None:
    _checked[optimizer] = _changes
    for watched, why in ((_replaced, _REPLACED), (_gathered, _GATHERED)):
        wrong = watched.in_optimizer(optimizer)
        if wrong:
            del _checked[optimizer]
            raise ShardingError(
                f"{here()}: a step of this {type(optimizer).__name__} would train nothing: it holds"
                f" {len(wrong)} parameters ({', '.join(wrong[:5])}{', ...' if len(wrong) > 5 else ''})"
                f" that {why}"
            )


@_compat.runs_eagerly
def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if (known := _bystanders.get(optimizer)) is not None:
        _return_gradients(known)
    Steps.count += 1
