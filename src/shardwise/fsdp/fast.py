"""Code that only saves host time. Results are the same without it.

Python calls per block in a steady step, with each function and without it (`benchmarks/host_cost.py`:
8 ranks, blocks of 12 parameters; forward and backward unless stated otherwise):

    step_locally         optimizers of torch.optim get local tensors instead of DTensors: a whole step of 8
                         blocks, interleaved, AdamW fused 1,310, not 8,998; foreach 2,752, not 6,205
    skip_empty_params    AdamW steps on rows that lie elsewhere: fused 22, not 132; foreach 40, not 348
    process              counters are compared instead of calls made, and interleaved gradients have no
                         storage of their own: 132 calls fewer
    allocates_plain      gathers write where parameters are, and staging is made once: 179, not 201
    copy_code             compilers limit the number of graphs per code object: equal blocks share one
    own_storage          parts of buffers instead of copies, where torch needs a storage from its beginning

Elsewhere: one counter covers all changes of `requires_grad` (`ShardedRows.changes`: 179, not 235), and
`_compat` has functions that torch's tracer skips without a wrapper (`runs_eagerly`: 179, not 203) and hooks
without handles (`hook_gradient`: 179, not 184).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from types import FunctionType
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise import _compat
from shardwise._compat.dtensors import traced_by
from shardwise.comm.api import FromDevice
from shardwise.sharded_tensor.rows import ShardedRows, cut_like
from shardwise.sharded_tensor.rows.piece import Piece


class _Process:
    """Values that groups and parameters read in every step; as attributes, they cost no call."""

    steps = 0  # of optimizers of sharded parameters in this process
    computing: ClassVar[set[torch.Stream]] = set()  # accelerators: streams that have gradients' memory
    # Whether a function is compiled; if so, each gradient begins its own storage. A tracer cannot take a
    # DTensor whose wrapper has another storage offset than its local tensor, and torch cannot copy one where
    # both have the same nonzero offset.
    compiler = False


process = _Process()


def copy_code(function: Callable[..., Any], *, own_globals: bool = False) -> FunctionType:
    """Return a copy of a function with its own code object, for which compilers keep its graphs.

    With `own_globals`, what its graphs refer to is freed with the copy, not with the module that defines the
    function, which may then use cells and builtins, but no globals.
    """
    # Compilers limit the number of graphs per code object, and a nested function has one for all closures.
    of = cast(FunctionType, function)
    names = {"__name__": of.__module__, "__builtins__": __builtins__} if own_globals else of.__globals__
    return FunctionType(of.__code__.replace(), names, of.__name__, of.__defaults__, of.__closure__)


def allocates_plain(comm: object) -> bool:
    """Return whether `comm` allocates as c10d's does, so that buffers may be reused from step to step."""
    allocate: Any = type(comm).allocate  # type: ignore[attr-defined]
    return allocate is FromDevice.allocate


def own_storage(piece: Tensor) -> Tensor:
    """Return the memory of `piece`, a part of a buffer, as a tensor that begins its own storage."""
    # A DTensor takes over its local tensor's offset, and copying or saving one that has an offset
    # fails in torch; besides, saving a part of a buffer would save all of it.
    if piece.is_meta or _compat.is_fake(piece):
        return piece
    start = piece.storage_offset() * piece.element_size()
    # A slice of a storage shares its memory and keeps it alive.
    storage = piece.untyped_storage()[start : start + piece.nbytes]
    return torch.empty(0, dtype=piece.dtype, device=piece.device).set_(
        storage, 0, piece.shape, piece.stride()
    )


traced_by(own_storage)


# Optimizers of torch.optim that update each element by itself; others may communicate over a parameter.
ELEMENTWISE = (
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
)  # fmt: skip
_MORE_THAN_STEPS = ("ASGD", "NAdam")  # their state counts more than "step"


def is_elementwise(kind: type[Optimizer]) -> bool:
    return kind.__name__ in ELEMENTWISE and getattr(torch.optim, kind.__name__, None) is kind


_cuts: dict[bool, Callable[[Any], Any]] = {True: attrgetter("piece"), False: _compat.spec_of}


class _LocalSteps:
    """Lets a step of one optimizer work on the memory behind its sharded parameters, gradients and state."""

    def __init__(self) -> None:
        # Pairs of cuts known to be equal, by ids. The values keep both alive, so no other object has these.
        self.same_cuts: dict[tuple[int, int], tuple[Any, Any]] = {}
        # For a step that stores state by parameter: parameters, their local tensors, earlier momentum.
        self.moved: list[tuple[list[Any], list[Any], list[Any]]] = []

    def take(self, optimizer: Optimizer, group: dict[str, Any], lists: _compat.StepLists) -> None:
        """Replace all DTensors by their local tensors, if gradients and state are cut as parameters are."""
        params = lists[0]
        if not params or group.get("differentiable"):
            return
        # Momentum of SGD is None until a parameter's first gradient, and some get theirs later than others.
        kinds = [*zip(map(type, params), map(type, lists[2] or params), strict=True)]
        # More than one kind: plain parameters or ShardedTensors beside DTensors, or momentum not yet made.
        _, *others = {*kinds}
        if not others:
            self._take_locals(optimizer, group, lists)
            return
        replaced, begin = [], len(self.moved)
        for kind in dict.fromkeys(kinds):
            if not issubclass(kind[0], DTensor):
                continue
            places = [place for place, k in enumerate(kinds) if k == kind]
            subset = tuple([values[place] for place in places] if values else [] for values in lists)
            if not self._take_locals(optimizer, group, subset):
                del self.moved[begin:]
                return
            replaced.append((places, subset))
        for places, subset in replaced:
            for values, changed in zip(lists, subset, strict=True):
                for place, value in zip(places, changed, strict=False):  # `changed` is empty if `values` is
                    values[place] = value

    def _take_locals(self, optimizer: Optimizer, group: dict[str, Any], lists: _compat.StepLists) -> bool:
        """Replace parameters of one kind (all have momentum, or none); return False if nothing changed."""
        params = lists[0]
        cut = _cuts[isinstance(params[0], ShardedRows)]
        try:
            cuts = list(map(cut, params))
            sharded = [values for values in lists if self._is_sharded(values)]
            if not all(self._have_same_cut(cuts, list(map(cut, values))) for values in sharded):
                return False
        except AttributeError:  # some are plain, or sharded in another way
            return False
        # Local tensors have their own version counters: without this, parameters would seem unchanged.
        _compat.increment_versions(tuple(params))
        if type(optimizer) is torch.optim.SGD and group["momentum"]:
            # Only SGD stores its state by the parameters of this list, after they were replaced.
            self.moved.append((list(params), params, list(lists[2])))
        for values in sharded:
            # In place: the step goes on with these list objects.
            values[:] = map(_compat.local_tensor, values)
        return True

    def _is_sharded(self, values: list[Any]) -> bool:
        first = values[0] if values else None
        if isinstance(first, Tensor) and first.ndim and not isinstance(first, DTensor):
            raise AttributeError
        return isinstance(first, DTensor)

    def _have_same_cut(self, cuts: list[Any], others: list[Any]) -> bool:
        if all(map(self.same_cuts.__contains__, zip(map(id, cuts), map(id, others), strict=True))):
            return True
        if len(self.same_cuts) > 16 * len(cuts) + 1000:  # gradients are new objects in each step
            self.same_cuts.clear()
        for a, b in zip(cuts, others, strict=True):
            if not (_same_cut(a, b) and a.shape == b.shape):
                return False
            self.same_cuts[id(a), id(b)] = a, b
        return True


def _same_cut(a: Any, b: Any) -> bool:
    if a is b or isinstance(a, Piece):
        return bool(a == b)
    return bool(a.mesh == b.mesh and a.placements == b.placements)


_local_steps: weakref.WeakKeyDictionary[Optimizer, _LocalSteps] = weakref.WeakKeyDictionary()


def step_locally(optimizer: Optimizer) -> None:
    """Make the optimizer's steps work on local tensors from now on, if it updates each element by itself."""
    params = (param for group in optimizer.param_groups for param in group["params"])
    if optimizer in _local_steps or not is_elementwise(type(optimizer)):
        return
    # Else torch's step works on plain memory already.
    if any(isinstance(param, DTensor) for param in params):
        steps = _local_steps[optimizer] = _LocalSteps()
        _compat.change_step_lists(optimizer, steps.take)
        _compat.drop_gradients_unread(optimizer)


def restore_torch_step(optimizer: Optimizer) -> None:
    """Give the optimizer torch's own step back: a compiler cannot handle the replacement."""
    if _local_steps.pop(optimizer, None) is not None:
        _compat.restore_step_methods(optimizer)


def rekey_state(optimizer: Optimizer) -> None:
    """Store under its parameters the state that a local step left under local tensors."""
    if (steps := _local_steps.get(optimizer)) is None:
        return
    for params, locals_, momenta in steps.moved:
        for param, local, momentum in zip(params, locals_, momenta, strict=True):
            state = optimizer.state.pop(local, None)  # None if the step raised
            if state and momentum is None:
                optimizer.state[param]["momentum_buffer"] = cut_like(param, state["momentum_buffer"])
    # Else the parameters would outlive their model until the next step.
    steps.moved.clear()


# A parameter without rows on this rank, which has a gradient: its group's options, its state if its optimizer
# keeps any, and its step count, which state dicts may hold too.
_EmptyParam = tuple[ShardedRows, dict[str, Any], dict[str, Any] | None, Tensor | None]


@dataclass
class _EmptyParams:
    """The parameters of one optimizer that have no rows on this rank."""

    state: Any  # the optimizer's when these were found; loading replaces it
    members: list[_EmptyParam] = field(default_factory=list)
    gradients: list[tuple[ShardedRows, Tensor]] = field(default_factory=list)  # theirs, during a step


_empty_params: weakref.WeakKeyDictionary[Optimizer, _EmptyParams] = weakref.WeakKeyDictionary()


def skip_empty_params(optimizer: Optimizer) -> None:
    """Remove gradients of parameters without rows here before a step, to save dispatch; count the step."""
    empty = _empty_params.get(optimizer)
    if empty is None or empty.state is not optimizer.state:
        empty = _find_empty_params(optimizer)
    steps = []
    for param, options, state, step in empty.members:
        grad, entry = param.grad, empty.state.get(param)
        as_before = entry is state and (state.get("step") is step if state else not options.get("momentum"))
        if grad is None or not as_before:  # an unused parameter does not count this step
            # Its state was changed, or it has no gradient: leave all parameters to torch's own step.
            restore_gradients(optimizer)
            forget_empty_params(optimizer)
            return
        # Optimizers skip parameters without a gradient.
        param.grad = None
        # Held only during the step: users get their gradients back after it.
        empty.gradients.append((param, grad))
        if step is not None:
            steps.append(step)
    if steps:
        _compat.count_step(steps)


def restore_gradients(optimizer: Optimizer) -> None:
    """Restore, after a step, the gradients that `skip_empty_params` removed."""
    if (empty := _empty_params.get(optimizer)) is not None:
        for param, grad in empty.gradients:
            param.grad = grad
        empty.gradients.clear()


def forget_empty_params(optimizer: Optimizer) -> None:
    _empty_params.pop(optimizer, None)  # the next step finds them anew


def _find_empty_params(optimizer: Optimizer) -> _EmptyParams:
    """Find parameters without rows here; remember them once their first step has made all their state."""
    empty = _EmptyParams(optimizer.state)
    kind = type(optimizer)
    groups = optimizer.param_groups if is_elementwise(kind) and kind.__name__ not in _MORE_THAN_STEPS else []
    for options in groups:
        stateless = kind is torch.optim.SGD and not options["momentum"]
        for param in options["params"]:
            if not isinstance(param, ShardedRows) or param.local.numel() or param.grad is None:
                continue
            state = optimizer.state.get(param)
            if not stateless and not state:
                return _EmptyParams(optimizer.state)
            step = state.get("step") if state else None
            count = step if isinstance(step, Tensor) else None
            empty.members.append((param, options, state, count))
    _empty_params[optimizer] = empty
    return empty
