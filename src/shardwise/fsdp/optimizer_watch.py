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
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardwise import _compat
from shardwise.errors import ShardingError, here
from shardwise.sharded_parameter import ShardedRows

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
    """Parameters of one optimizer of which this rank holds no rows, once they have state.

    Attributes:
        state: the optimizer's, when this was found; loading replaces it.
        steps: each parameter's own count of steps.
    """

    state: Any
    params: list[ShardedRows]
    steps: list[Tensor | None]
    aside: list[tuple[ShardedRows, Tensor]] = field(default_factory=list)


_bystanders: weakref.WeakKeyDictionary[Optimizer, _Bystanders] = weakref.WeakKeyDictionary()


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if _checked.get(optimizer) != _changes:
        _check(optimizer)
        _bystanders.pop(optimizer, None)
    known = _bystanders.get(optimizer)
    if known is None or known.state is not optimizer.state:
        known = _find_bystanders(optimizer)
    if known.params:
        _put_aside(known)


def _put_aside(known: _Bystanders) -> None:
    """Take away gradients of no elements, and count the steps that the optimizer would have counted."""
    counts = []
    for param, step in zip(known.params, known.steps, strict=True):
        if (grad := param.grad) is not None:
            param.grad = None
            known.aside.append((param, grad))
            if step is not None:
                counts.append(step)
    if counts:
        with torch.no_grad():
            _compat.foreach_add(counts, 1)


def _find_bystanders(optimizer: Optimizer) -> _Bystanders:
    """Remembered once each of them has its state, which the optimizer makes in their first step."""
    found = _Bystanders(optimizer.state, [], [])
    kind = type(optimizer)
    if is_elementwise(kind) and kind.__name__ not in _MORE_THAN_STEPS:
        for options in optimizer.param_groups:
            stateless = kind is torch.optim.SGD and not options["momentum"]
            for param in options["params"]:
                if not isinstance(param, ShardedRows) or param.local.numel():
                    continue
                state = optimizer.state.get(param)
                if state or stateless:
                    found.params.append(param)
                    found.steps.append((state or {}).get("step"))
                elif param.grad is not None:
                    return _Bystanders(optimizer.state, [], [])
    _bystanders[optimizer] = found
    return found


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


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    known = _bystanders.get(optimizer)
    if known is not None and known.aside:
        for param, grad in known.aside:
            param.grad = grad
        known.aside.clear()
    Steps.count += 1
