"""The state of an optimizer, by name, without a trace of having asked for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from shardwise.comm.agree import together
from shardwise.errors import CheckpointError, here
from shardwise.optim.by_name import undo_step


def optimizer_state(
    model: nn.Module, optimizer: Optimizer | Iterable[Optimizer], *, stages: DeviceMesh | None = None
) -> dict[str, Any]:
    """Return the state by parameter name, to save or to load into; the optimizer is as before.

    It is what torch's `get_optimizer_state_dict(model, optimizer)` returns, of several optimizers one state
    of all; of `shardwise.optim.flat` and `ShardedOptimizer` their own. An optimizer without state, which has
    taken no step, tells the state with which its first begins: `step` is 0. torch's function takes a step
    with gradients of zero and leaves the optimizer that state, so later steps count it; where there are
    gradients it returns none. Here it is made aside, and freed with what is returned. Two kinds of state do
    not begin so: momentum of SGD with `dampening`, which begins by the first gradient undampened, and what
    an optimizer of others counts besides `step`.

    Args:
        stages: the ranks of a pipeline's stages, `mesh["pp"]`, each with a model and an optimizer of its own.
            The state then names the parameters of all, as that of the whole model does: they load each other.
            Collective over them.

    Raises:
        CheckpointError: several optimizers, one of which loads a state of its own parameters only; or stages
            with different numbers of parameter groups, on all of them.
    """
    state = _of_all(model, optimizer)
    if stages is not None:
        _name_all(state["param_groups"], stages)
    return state


def _name_all(groups: list[dict[str, Any]], stages: DeviceMesh) -> None:
    """Let each group name the parameters that it has on any stage."""
    names = together(
        "taking the state of all stages' optimizers",
        lambda: [group["params"] for group in groups],
        group=stages.get_group(),
    )
    counts = [len(each) for each in names]
    if len(set(counts)) > 1:
        raise CheckpointError(
            f"{here()}: the optimizers of a pipeline's stages have {counts} parameter groups; give all"
            " of them the same groups, in one order, empty where a stage has no such parameters"
        )
    for index, group in enumerate(groups):
        group["params"] = list(dict.fromkeys(name for each in names for name in each[index]))


def _of_all(model: nn.Module, optimizer: Optimizer | Iterable[Optimizer]) -> dict[str, Any]:
    if isinstance(optimizer, Optimizer):
        return _state_of(model, optimizer)
    several = list(optimizer)
    own = [type(one).__name__ for one in several if hasattr(one, "allocate_state")]
    if own and len(several) > 1:
        raise CheckpointError(
            f"{here()}: {own[0]} loads a state of its own parameters only; give each of the {len(several)}"
            " optimizers an entry of its own in the state: optimizer_state(model, optimizer)"
        )
    states = [_state_of(model, one) for one in several]
    return {
        "state": {name: values for state in states for name, values in state["state"].items()},
        "param_groups": [group for state in states for group in state["param_groups"]],
    }


def _state_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    if optimizer.state:
        return _described(model, optimizer)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    gradients = [param.grad for param in params]
    options = [dict(group) for group in optimizer.param_groups]
    state, optimizer.state = optimizer.state, defaultdict(dict)
    try:
        for param in params:
            param.grad = None
        if hasattr(optimizer, "allocate_state"):
            optimizer.allocate_state()
        described = _described(model, optimizer)
    finally:
        optimizer.state = state
        for group, before in zip(optimizer.param_groups, options, strict=True):
            group.update(before)
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient
    if hasattr(optimizer, "allocate_state"):  # it took no step
        return described
    for group, before in zip(described["param_groups"], options, strict=True):
        group.update({key: before[key] for key in group.keys() & before.keys() - {"params"}})
        for name in group["params"]:
            undo_step(type(optimizer), described["state"].get(name, {}), group)
    return described


def _described(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    if hasattr(optimizer, "allocate_state"):
        return optimizer.state_dict()
    return get_optimizer_state_dict(model, optimizer)
