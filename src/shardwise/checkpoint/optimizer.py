"""The state of an optimizer, by name, read without changing the optimizer."""

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
from shardwise.fsdp.module_state import states_in
from shardwise.optim.by_name import undo_step


def optimizer_state(
    model: nn.Module, optimizer: Optimizer | Iterable[Optimizer], *, stages: DeviceMesh | None = None
) -> dict[str, Any]:
    """Return the state by parameter name, to save or to load into, without changing the optimizer.

    It equals the result of torch's `get_optimizer_state_dict(model, optimizer)`; several optimizers give one
    common state; `shardwise.optim.flat` and `ShardedOptimizer` give their own.

    For an optimizer that has taken no step and so has no state, the result is the state with which its first
    step begins: `step` is 0. torch's function takes a step with zero gradients and leaves that state in the
    optimizer, so later steps count it; if there are gradients, it returns none. Here the state is made
    separately, and freed with the result. Two kinds of state begin differently: momentum of SGD with
    `dampening`, which begins with the first gradient undampened, and counters other than `step` in other
    libraries' optimizers.

    Args:
        stages: the ranks of a pipeline's stages, `mesh["pp"]`, each with its own model and optimizer. The
            state then names the parameters of all stages, like that of the whole model, so that each can be
            loaded as the other. Collective over them.

    Raises:
        CheckpointError: one of several optimizers can only load a state of its own parameters; or, on all
            stages, stages have different numbers of parameter groups.
    """
    for sharded in states_in(model.modules()):
        for group in sharded.groups:
            group.reshard()  # an evaluation may have left it gathered, where optimizers know no parameter
    state = _joint_state(model, optimizer)
    if stages is not None:
        _name_all(state["param_groups"], stages)
    return state


def _name_all(groups: list[dict[str, Any]], stages: DeviceMesh) -> None:
    names = together(
        "taking the state of all stages' optimizers",
        lambda: [group["params"] for group in groups],
        group=stages.get_group(),
    )
    counts = [len(stage_names) for stage_names in names]
    if len(set(counts)) > 1:
        raise CheckpointError(
            f"{here()}: the optimizers of a pipeline's stages have {counts} parameter groups; give all"
            " of them the same groups, in one order, empty where a stage has no such parameters"
        )
    for index, group in enumerate(groups):
        group["params"] = list(dict.fromkeys(name for stage_names in names for name in stage_names[index]))


def _joint_state(model: nn.Module, optimizer: Optimizer | Iterable[Optimizer]) -> dict[str, Any]:
    if isinstance(optimizer, Optimizer):
        return _state_of(model, optimizer)
    several = list(optimizer)
    names = [type(optimizer).__name__ for optimizer in several if hasattr(optimizer, "allocate_state")]
    if names and len(several) > 1:
        raise CheckpointError(
            f"{here()}: {names[0]} loads a state of its own parameters only; give each of the {len(several)}"
            " optimizers an entry of its own in the state: optimizer_state(model, optimizer)"
        )
    states = [_state_of(model, optimizer) for optimizer in several]
    return {
        "state": {name: values for state in states for name, values in state["state"].items()},
        "param_groups": [group for state in states for group in state["param_groups"]],
    }


def _state_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    if optimizer.state:
        return _read_state(model, optimizer)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    gradients = [param.grad for param in params]
    options = [dict(group) for group in optimizer.param_groups]
    state, optimizer.state = optimizer.state, defaultdict(dict)
    try:
        for param in params:
            param.grad = None
        if hasattr(optimizer, "allocate_state"):
            optimizer.allocate_state()
        state_dict = _read_state(model, optimizer)
    finally:
        optimizer.state = state
        for group, initial in zip(optimizer.param_groups, options, strict=True):
            group.update(initial)
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient
    if hasattr(optimizer, "allocate_state"):  # it took no step
        return state_dict
    for group, initial in zip(state_dict["param_groups"], options, strict=True):
        group.update({key: initial[key] for key in group.keys() & initial.keys() - {"params"}})
        for name in group["params"]:
            undo_step(type(optimizer), state_dict["state"].get(name, {}), group)
    return state_dict


def _read_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    if hasattr(optimizer, "allocate_state"):
        return optimizer.state_dict()
    return get_optimizer_state_dict(model, optimizer)
