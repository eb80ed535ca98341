"""An ordinary optimizer over the local shards of sharded tensors, and over plain tensors.

An optimizer that treats every element independently need not know its shard. So it gets this rank's shards as
its parameters. On a rank without shards, it gets the empty tensor that represents them in the autograd graph,
so that steps are still counted. Users and checkpoints see the state of whole parameters, by name:

    inside    AdamW over [shard, shard, bias, ...]        state of each shard
    outside   {"weight": {"exp_avg": ShardedTensor cut as the weight, "step": tensor(3.)}, "bias": ...}

Gradients of plain (replicated) parameters are used unchanged; they must be equal on every rank.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwise.errors import ShardingError, here
from shardwise.optim import by_name
from shardwise.sharded_tensor import ShardedTensor
from shardwise.sharded_tensor.kinds import shards_of


class ShardedOptimizer(Optimizer):
    """`optimizer_class` over sharded and plain parameters, as a `torch.optim.Optimizer`.

    `param_groups` hold the options, which schedulers may change, the parameters' "names" and local tensors.
    A `torch.amp.GradScaler` would look for infinities only on this rank; train in bfloat16.

    Args:
        named_params: a mapping or pairs of names and parameters: `named_params_with_sharded_tensor(module)`,
            or `module.named_parameters()`; the same names on every rank, in the same order.
        optimizer_class: Adadelta, Adagrad, Adam, AdamW, Adamax, ASGD, NAdam, RAdam, RMSprop, Rprop or SGD of
            `torch.optim`, or any class that treats every element independently and declares it by an
            attribute `elementwise = True`.
        args: arguments of the optimizer after its parameters.
        param_groups: dicts of "names" and options for those parameters; all others have the options in
            `kwargs`, and come first.
        kwargs: keyword arguments of the optimizer.

    Raises:
        ShardingError: an optimizer that needs whole parameters; unknown, repeated or non-leaf parameters.
    """

    def __init__(
        self,
        named_params: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
        optimizer_class: type[Optimizer],
        *args: Any,
        param_groups: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        if not getattr(optimizer_class, "elementwise", False):
            advice = "if it does too, say so by a class attribute elementwise = True"
            by_name.check_elementwise(optimizer_class, over="shards", advice=advice)
        self._named = dict(named_params)
        _check_params(self._named)
        self._tensors = {name: shards_of(param) for name, param in self._named.items()}
        groups = [self._with_tensors(group) for group in _grouped(list(self._named), param_groups or [])]
        self._inner: Optimizer | None = None
        inner = cast(Any, optimizer_class)(groups, *args, **kwargs)
        super().__init__(inner.param_groups, inner.defaults)
        self._inner = inner
        self.param_groups, self.state = inner.param_groups, inner.state

    @property
    def named_params(self) -> dict[str, Tensor]:
        """The parameters by name."""
        return dict(self._named)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the local shards and plain parameters. Local, unless `closure` is not.

        If only some of this rank's shards of a parameter have gradients, the others' count as zero. All ranks
        must have gradients of the same parameters, as after a backward in which all took part.

        Args:
            closure: evaluates the model and returns the loss, which `step` then returns.

        Raises:
            ShardingError: a parameter's shards have changed since this optimizer was made.
        """
        assert self._inner is not None
        if closure is None:
            self._complete_gradients()
            return self._inner.step()

        def evaluated() -> Any:
            loss = closure()
            self._complete_gradients()
            return loss

        return cast(Any, self._inner).step(evaluated)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop, or set to zero, all gradients. Local."""
        if set_to_none:
            for param in self._named.values():
                param.grad = None
        elif self._inner is not None:
            self._inner.zero_grad(set_to_none=False)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Optimize more parameters: `{"params": {name: tensor, ...}, option: value, ...}`. Local.

        Raises:
            ShardingError: "params" is no mapping from names, or has a name or tensor that is already known.
        """
        if self._inner is None:  # the base class passes on the groups of the optimizer inside
            super().add_param_group(param_group)
            return
        params = param_group.get("params")
        if not isinstance(params, Mapping):
            raise ShardingError(
                f'{here()}: a group of a ShardedOptimizer has "params" by name, {{name: tensor}}, found'
                f" {type(params).__name__}"
            )
        repeated = [name for name in params if name in self._named]
        if repeated:
            raise ShardingError(f"{here()}: {repeated[:5]} are optimized already; add parameters once")
        _check_params({**self._named, **params})
        self._named.update(params)
        self._tensors.update({name: shards_of(param) for name, param in params.items()})
        options = {key: value for key, value in param_group.items() if key != "params"}
        self._inner.add_param_group(self._with_tensors({**options, "names": list(params)}))

    def state_dict(self) -> dict[str, Any]:
        """Return the state by parameter name. Local.

        `{"state": {name: {"exp_avg": tensor, "step": number, ...}}, "param_groups": [{"params": [name, ...],
        "lr": ..., ...}]}`. State with one element per element of a sharded parameter is a `ShardedTensor` of
        the same cut, which shares memory with the optimizer. `torch.distributed.checkpoint` saves it, and
        loads it into another cut or number of ranks. Before the first step there is no state; see
        `allocate_state`.
        """
        state = {}
        for name, param in self._named.items():
            states = [self.state[tensor] for tensor in self._tensors[name] if self.state.get(tensor)]
            if states:
                state[name] = _whole_state(name, param, self._tensors[name], states)
        return by_name.named_state(state, self.param_groups, [group["names"] for group in self.param_groups])

    def allocate_state(self) -> None:
        """Make state for trainable parameters that have none, so that `state_dict` can be loaded into. Local.

        The values are those with which the first step begins (`step` is 0); parameters do not change.
        """
        inner = self._inner

        def like_original(groups: list[dict[str, Any]]) -> Optimizer:
            twin: Any = object.__new__(type(inner))
            twin.__dict__.update(vars(inner))  # its options, whatever its constructor takes
            twin.state, twin.param_groups = defaultdict(dict), groups
            return cast(Optimizer, twin)

        frozen = {x for name, xs in self._tensors.items() if not self._named[name].requires_grad for x in xs}
        by_name.allocate_state(self, like_original, frozen=frozen)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a copy of a state by parameter name, as `state_dict()` returns it.

        Local for sharded tensors cut like the parameter, and for whole tensors (equal on every rank), which
        are cut; collective for sharded tensors that are cut differently.

        Raises:
            ShardingError: names, groups or shapes differ from this optimizer's.
        """
        options = by_name.loaded_options(state_dict, [group["names"] for group in self.param_groups])
        state: dict[str, Any] = state_dict["state"]
        for name, values in state.items():
            by_name.check_shapes(name, self._named[name].shape, values)
        for group, loaded in zip(self.param_groups, options, strict=True):
            group.update(loaded)
            for name in group["names"]:
                tensors = self._tensors[name]
                parts = _local_state(self._named[name], tensors, state.get(name, {}))
                for tensor, values in zip(tensors, parts, strict=True):
                    if values:
                        self.state[tensor] = _move_counts(values, tensor, group)
                    else:
                        self.state.pop(tensor, None)

    def _with_tensors(self, group: dict[str, Any]) -> dict[str, Any]:
        return {**group, "params": [tensor for name in group["names"] for tensor in self._tensors[name]]}

    @torch.no_grad()
    def _complete_gradients(self) -> None:
        for name, tensors in self._tensors.items():
            shards = shards_of(self._named[name])
            if len(shards) != len(tensors) or any(a is not b for a, b in zip(shards, tensors, strict=True)):
                raise ShardingError(
                    f"{here()}: {name} holds other shards than when its optimizer was made; cut parameters"
                    " first and make the optimizer then"
                )
            if len(tensors) > 1 and any(tensor.grad is not None for tensor in tensors):
                for tensor in tensors:
                    if tensor.grad is None:
                        tensor.grad = torch.zeros_like(tensor)


# Arguments


def _check_params(named: Mapping[str, Tensor]) -> None:
    names: dict[int, str] = {}
    for name, param in named.items():
        earlier = names.setdefault(id(param), name)
        if earlier != name:
            raise ShardingError(f"{here()}: {earlier} and {name} are one parameter; give it once")
        if not param.is_leaf:
            raise ShardingError(
                f"{here()}: {name} is the result of an operation, which collects no gradient; optimize the"
                " leaves it was made of"
            )


def _grouped(names: list[str], groups: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield one group for the names that are in no group, then `groups`."""
    grouped: dict[str, None] = {}
    for group in groups:
        for name in group["names"]:
            if name not in names:
                near = difflib.get_close_matches(name, names, n=3, cutoff=0.4) or names[:3]
                raise ShardingError(f"{here()}: no parameter is named {name!r}; near names are {near}")
            if name in grouped:
                raise ShardingError(f"{here()}: {name} is in two param_groups; name it once")
            grouped[name] = None
    rest = [name for name in names if name not in grouped]
    if rest or not groups:
        yield {"names": rest}
    for group in groups:
        yield {**group, "names": list(group["names"])}


# State of shards and of whole parameters


def _whole_state(
    name: str, param: Tensor, tensors: Sequence[Tensor], states: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return one parameter's state from the states of its shards on this rank."""
    if not isinstance(param, ShardedTensor):
        return dict(states[0])
    result: dict[str, Any] = {}
    for key, value in states[0].items():
        if by_name.is_elements(key, value, tensors[0].shape):
            parts = [state[key] for state in states]
            result[key] = param.with_tensors(parts if param.tensors else [], anchor=parts[0].new_empty(0))
        elif isinstance(value, Tensor) and value.numel() != 1:
            raise ShardingError(
                f"{here()}: the optimizer's {key!r} of {name} has shape {tuple(value.shape)} for a shard of"
                f" shape {tuple(tensors[0].shape)}; only state by element, and numbers, can be described"
            )
        else:
            result[key] = value
    return result


def _local_state(param: Tensor, tensors: Sequence[Tensor], values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the state of each of this rank's shards of a parameter."""
    parts: list[dict[str, Any]] = [{} for _ in tensors]
    for key, value in values.items():
        cut: Sequence[Any] = [by_name.copied(value) for _ in tensors]
        if by_name.is_elements(key, value, param.shape):
            cut = [torch.empty_like(tensor, dtype=value.dtype, requires_grad=False) for tensor in tensors]
            if isinstance(param, ShardedTensor):
                whole = param.with_tensors(cut if param.tensors else [], anchor=cut[0].new_empty(0))
                whole.copy_(value)
            else:
                cut[0].copy_(value)
        for part, piece in zip(parts, cut, strict=True):
            part[key] = piece
    return parts


def _move_counts(values: dict[str, Any], tensor: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
    """Move counts to the device where the step reads them."""
    if group.get("fused") or group.get("capturable"):
        return {k: v.to(tensor.device) if isinstance(v, Tensor) else v for k, v in values.items()}
    return values
