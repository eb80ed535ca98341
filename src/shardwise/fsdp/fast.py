"""What is there for host time alone. Without any of it every number is the same.

Python calls a block in a steady step, with it and without (`benchmarks/host_cost.py`: 8 ranks, blocks of 12
parameters; forward and backward unless it says otherwise):

    put_aside       AdamW steps on rows that lie elsewhere: fused 22, not 132; foreach 40, not 348
    Seen            counts compared in place of calls, and gradients of the interleaved layout without storage
                    of their own: 419, not 551
    allocates_as    gathers write where parameters are, and staging is made once: 179, not 201
    own_code        compilers keep so many graphs for a code object and not more: equal blocks share one
    own_storage     parts of buffers in place of copies, where torch wants a storage from its beginning

Elsewhere: rows count changes of `requires_grad` for all (`ShardedRows.changes`: 179, not 235), and `_compat`
has functions that torch's tracer skips without a wrapper (`runs_eagerly`: 179, not 203) and hooks without
handles (`hook_gradient`: 179, not 184).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwise import _compat
from shardwise.sharded_tensor.rows import ShardedRows


class Seen:
    """What groups and parameters look at in every step, as globals, which cost no call.

    Attributes:
        steps: how many optimizer steps this process has made since the first `fully_shard`.
        compiler: a function is compiled, so gradients begin storage of their own. A tracer cannot take
            DTensors whose wrapper lies at another offset than their memory, and torch does not copy those
            that lie at the same.
    """

    steps = 0
    compiler = False


def own_code(function: Callable[..., Any], *, own_globals: bool = False) -> FunctionType:
    """A copy of a function with a code object of its own, in which compilers keep its graphs.

    They keep so many for one, not more; functions made anew in each call of another share theirs.

    Args:
        own_globals: what its graphs refer to is freed with it, and not with the module that it is written
            in. The function may use cells and builtins then, but no globals.
    """
    of = cast(FunctionType, function)
    names = {"__name__": of.__module__, "__builtins__": __builtins__} if own_globals else of.__globals__
    return FunctionType(of.__code__.replace(), names, of.__name__, of.__defaults__, of.__closure__)


def allocates_as(comm: object, default: type[Any]) -> bool:
    """Does it leave allocation to torch? Then its buffers may be used again from step to step."""
    allocate: Any = type(comm).allocate  # type: ignore[attr-defined]
    return allocate is default.allocate


def own_storage(piece: Tensor) -> Tensor:
    """The memory of `piece`, a part of a buffer, as a tensor that begins its own storage.

    A DTensor takes over its local tensor's offset, and copying or saving one that has an offset
    fails in torch; besides, saving a part of a buffer would save all of it.
    """
    if piece.is_meta or _compat.is_fake(piece):
        return piece
    start = piece.storage_offset() * piece.element_size()
    storage = piece.untyped_storage()[start : start + piece.nbytes]
    return torch.empty(0, dtype=piece.dtype, device=piece.device).set_(
        storage, 0, piece.shape, piece.stride()
    )


# Optimizers of torch.optim that update each element by itself; others may communicate over a parameter.
ELEMENTWISE = (
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
)  # fmt: skip
_MORE_THAN_STEPS = ("ASGD", "NAdam")  # whose state counts in other ways than by "step"


def is_elementwise(kind: type[Optimizer]) -> bool:
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


def put_aside(optimizer: Optimizer) -> None:
    """Before a step: put gradients of bystanders aside, which spares their dispatch, and count the step."""
    known = _bystanders.get(optimizer)
    if known is None or known.state is not optimizer.state:
        known = _find_bystanders(optimizer)
    for param in known.params:
        if (grad := param.grad) is None:  # an unused parameter does not count this step
            put_back(optimizer)
            separate_counts(optimizer)
            return
        param.grad = None
        known.aside.append((param, grad))
    with torch.no_grad():
        for count in known.counts:
            count.add_(1)


def put_back(optimizer: Optimizer) -> None:
    """After a step: their gradients come back."""
    if (known := _bystanders.get(optimizer)) is not None:
        for param, grad in known.aside:
            param.grad = grad
        known.aside.clear()


def _find_bystanders(optimizer: Optimizer) -> _Bystanders:
    """Remembered once each of them has its state, which the optimizer makes in their first step."""
    found = _Bystanders(optimizer.state)
    kind = type(optimizer)
    groups = optimizer.param_groups if is_elementwise(kind) and kind.__name__ not in _MORE_THAN_STEPS else []
    for options in groups:
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
        optimizer.register_state_dict_pre_hook(separate_counts)


_separating: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def separate_counts(optimizer: Optimizer) -> None:
    """A count of its own to each: before it steps by itself, or for a state dict, which may be written to."""
    known = _bystanders.pop(optimizer, None)
    for param in () if known is None else known.params:
        state = optimizer.state.get(param)
        if state and isinstance(step := state.get("step"), Tensor):
            state["step"] = step.clone()
