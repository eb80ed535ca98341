"""Common code of optimizers over parts of parameters: which optimizers may, and state by parameter name.

    {"state": {"weight": {"exp_avg": tensor, "step": tensor(3.)}, ...},
     "param_groups": [{"params": ["weight", ...], "lr": 0.1, ...}]}

as in torch's `get_optimizer_state_dict`. State with one element per element of a parameter is cut in memory
like the parameter, and whole to readers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.errors import ShardingError, here
from shardwise.fsdp.fast import ELEMENTWISE, is_elementwise
from shardwise.sharded_tensor import ShardedTensor

_WHY_NOT = {
    "Adafactor": "it keeps sums over the rows and columns of each parameter",
    "AdamW8bit": "it quantizes its state in blocks of many elements",
    "LBFGS": "it takes inner products of all parameters",
    "Muon": "it multiplies whole matrices; use shardwise.optim.Muon",
    "SparseAdam": "it needs sparse gradients",
}
# State that is one number per parameter, even if the parameter is a single number.
_NUMBERS = ("step", "eta", "mu", "mu_product")
# State that a step changes even if gradients are zero, with its first value; a name is that of an option.
_BEFORE_A_STEP = {"step": 0.0, "mu_product": 1.0, "mu": 1.0, "eta": "lr", "step_size": "lr"}


def check_elementwise(kind: type[Optimizer], *, over: str, advice: str) -> None:
    """Raise ShardingError unless `kind` treats every element independently; `advice` if that is unknown."""
    if is_elementwise(kind):
        return
    cause = next((_WHY_NOT[base.__name__] for base in kind.__mro__ if base.__name__ in _WHY_NOT), None)
    cause = cause or f"only {', '.join(ELEMENTWISE)} of torch.optim are known to; {advice}"
    raise ShardingError(
        f"{here()}: {kind.__name__} cannot step on {over}, where every element must be treated alone: {cause}"
    )


def named_state(
    state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """Return the state dict of groups whose parameters have `names`, with state in their order."""
    ordered = [name for own in names for name in own if name in state]
    return {
        "state": {name: state[name] for name in ordered},
        "param_groups": [
            {**_options(group), "params": list(own)} for group, own in zip(groups, names, strict=True)
        ],
    }


def loaded_options(state_dict: Mapping[str, Any], names: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Return a loaded state's options for each group of parameters, by `names`; raises if groups differ."""
    groups = state_dict["param_groups"]
    group_of = {name: number for number, group in enumerate(groups) for name in group["params"]}
    if any(not isinstance(name, str) for name in group_of):
        raise ShardingError(
            f"{here()}: this optimizer state numbers its parameters; states are loaded by name, from its own"
            " state_dict() or torch.distributed.checkpoint.state_dict.get_optimizer_state_dict"
        )
    expected = [name for own in names for name in own]
    missing = [name for name in expected if name not in group_of]
    unknown = sorted({*group_of, *state_dict["state"]} - set(expected))
    if missing or unknown:
        raise ShardingError(
            f"{here()}: the optimizer state lacks {missing[:5] or 'nothing'}, and has"
            f" {unknown[:5] or 'nothing'} more than this optimizer; make it over the same parameters, by the"
            " same names, as the one that was saved"
        )
    for own in names:
        if len({group_of[name] for name in own}) > 1:
            raise ShardingError(
                f"{here()}: {list(own)[:5]} are one group here but several in the loaded state; give the same"
                " groups as the optimizer that was saved"
            )
    return [_options(groups[group_of[own[0]]]) if own else {} for own in names]


def check_shapes(name: str, shape: Sequence[int], values: Mapping[str, Any]) -> None:
    """Raise ShardingError for state that is neither a number nor of the parameter's `shape`."""
    for key, value in values.items():
        if isinstance(value, Tensor) and value.numel() != 1 and tuple(value.shape) != tuple(shape):
            raise ShardingError(
                f"{here()}: '{key}' of '{name}' has shape {tuple(value.shape)}, expected that of the"
                f" parameter, {tuple(shape)}"
            )


def is_elements(key: str, value: Any, shape: Sequence[int]) -> bool:
    """Return whether a state has one element per element of a parameter of `shape`."""
    return isinstance(value, Tensor) and tuple(value.shape) == tuple(shape) and key not in _NUMBERS


def copied(value: Any) -> Any:
    """Return a copy of a number in the state, or of a plain tensor; other values as they are."""
    return value.clone() if isinstance(value, Tensor) and not isinstance(value, ShardedTensor) else value


def kind_of(values: Mapping[str, Any] | None) -> Any:
    """Return a key that is equal for parameters whose state can be shared."""
    return tuple(
        (key, None if value.ndim else value.item()) if isinstance(value, Tensor) else (key, value)
        for key, value in sorted((values or {}).items())
    )


def allocate_state(
    optimizer: Optimizer, make: Callable[[list[dict[str, Any]]], Optimizer], *, frozen: Collection[Tensor]
) -> None:
    """Give tensors, but `frozen` ones, the state that their first step begins with; they do not change.

    `make` makes an optimizer of the same kind over other groups of parameters.
    """
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            if optimizer.state.get(tensor) or tensor in frozen:
                continue
            stand_in = nn.Parameter(torch.zeros_like(tensor))
            stand_in.grad = torch.zeros_like(stand_in)
            trial = make([{**_options(group), "params": [stand_in]}])
            trial.step()
            if trial.state[stand_in]:
                optimizer.state[tensor] = trial.state[stand_in]
                undo_step(type(trial), optimizer.state[tensor], group)


def undo_step(kind: type[Optimizer], values: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Undo, in place, the change to the state by a step with zero gradients; of unknown kinds only "step"."""
    for key in values.keys() & (_BEFORE_A_STEP.keys() if is_elementwise(kind) else {"step"}):
        initial: Any = _BEFORE_A_STEP[key]
        initial = options[initial] if isinstance(initial, str) else initial
        if isinstance(values[key], Tensor):
            values[key].fill_(initial)
        else:
            values[key] = type(values[key])(initial)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "names")}
