"""An optimizer over the memory of sharded parameters, instead of over the parameters.

In the contiguous layout a rank's rows of a group of parameters lie end to end in one shard buffer, and after
backward so do their gradients. An elementwise optimizer need not know where one parameter ends and the next
begins, so it can step on the buffer as one tensor::

    shard buffer    A A A A A B B C C C C -     parameters A, B, C and padding
    hyper-params    0 0 0 0 0 1 1 0 0 0 0       B without weight decay, say
    flat tensors    [   a   ] [b] [  c  ]       three runs; one, if all are equal

Each run has one state. That is correct as long as its parameters have gradients in the same steps; the first
time they do not, the run is split permanently. Users and checkpoints see state per parameter, by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise import _compat
from shardwise.errors import ShardingError, here
from shardwise.fsdp.contiguous import ContiguousGroup
from shardwise.fsdp.module_state import state_of
from shardwise.fsdp.optimizer_watch import keep_gradients
from shardwise.fsdp.rows import RowsParam
from shardwise.layout import gaps_between
from shardwise.optim import by_name
from shardwise.sharded_tensor.rows import ShardedRows

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")  # not part of a name, as in torch's checkpoints


def flat(
    optimizer: type[Optimizer], model: nn.Module, *, params: Iterable[Any] | None = None, **options: Any
) -> FlatOptimizer:
    """Make `optimizer` for a model sharded with `layout="contiguous"`: one tensor per group and options.

    Results equal those of `optimizer(model.parameters(), **options)`, at the host cost of a few tensors.
    (Fused on CPU, they agree to 1 ulp: the kernel rounds differently in a tensor's last elements, which are
    other ones here.) Local, except that loading a state that is cut differently is collective.

    Args:
        optimizer: an elementwise class of `torch.optim`: Adadelta, Adagrad, Adam, AdamW, Adamax, ASGD, NAdam,
            RAdam, RMSprop, Rprop or SGD.
        model: the model after `fully_shard`. Parameters that no group manages are optimized as usual.
        params: the parameters to optimize, as for `torch.optim`: parameters of the model, pairs of a name
            (unused) and a parameter, or dicts of "params" and their own options. None means all. Parameters
            that differ in options and alternate in their group make many tensors.
        options: the optimizer's options.

    Returns:
        A `torch.optim.Optimizer` whose state dict is by parameter name.

    Raises:
        ShardingError: an optimizer that is not elementwise; parameters that are not sharded with
            `layout="contiguous"`, that are not the model's, or that are given twice.
    """
    advice = "build it over model.parameters() instead"
    by_name.check_elementwise(optimizer, over="flat memory", advice=advice)
    managed = _managed(model)
    named = _names(model, managed)
    sets: list[dict[str, Any]] = []
    listed: list[Any] = list(named) if params is None else list(params)
    for entry in listed if listed and isinstance(listed[0], dict) else [{"params": listed}]:
        members = [entry["params"]] if isinstance(entry["params"], Tensor) else list(entry["params"])
        sets.append({**entry, "params": [m[1] if isinstance(m, tuple) else m for m in members]})
    seen: set[nn.Parameter] = set()
    for param in (param for entry in sets for param in entry["params"]):
        if param not in named:
            raise ShardingError(
                f"{here()}: params holds a {type(param).__name__} of shape {tuple(param.shape)} that is not a"
                " parameter of the model; take parameters from the model after fully_shard"
            )
        if param in seen:
            raise ShardingError(f"{here()}: '{named[param]}' is given twice in params")
        seen.add(param)
    result: FlatOptimizer = _flat_class(cast(Any, optimizer))(sets, managed, named, **options)
    return result


def _managed(model: nn.Module) -> dict[ContiguousGroup, None]:
    """Return the model's groups, resharded."""
    managed: dict[ContiguousGroup, None] = {}
    for name, module in model.named_modules():
        state = state_of(module)
        for group in () if state is None else state.groups:
            if not isinstance(group, ContiguousGroup):
                names = ", ".join(param.name for param in group.params[:5])
                raise ShardingError(
                    f"{here()}: the parameters of '{name or type(module).__name__}' ({names}) are sharded"
                    ' with layout="interleaved"; a flat optimizer needs fully_shard(..., layout="contiguous")'
                )
            managed[group] = None
    for group in managed:
        group.reshard()
        for param in group.params:
            if not param.grads_have_stored_dtype:
                raise ShardingError(
                    f"{here()}: gradients of '{param.name}' are kept in {param.sharded_grad_dtype}, the"
                    f" parameter in {param.dtype}; a flat optimizer steps on memory that is alike. Build"
                    " the optimizer over model.parameters(), or set no grad_dtype"
                )
    return managed


def _names(model: nn.Module, managed: dict[ContiguousGroup, None]) -> dict[nn.Parameter, str]:
    named = {}
    for name, param in model.named_parameters():
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        named[param] = name
    ids = {id(param.sharded) for group in managed for param in group.params}
    outer = [name for param, name in named.items() if id(param) not in ids and isinstance(param, ShardedRows)]
    if outer or not managed:
        wrong = outer or list(named.values())
        raise ShardingError(
            f"{here()}: {len(wrong)} parameters ({', '.join(wrong[:5])}{', ...' if len(wrong) > 5 else ''})"
            f" are {'sharded by a module around this one' if outer else 'not sharded'}; pass the module that"
            ' fully_shard(..., layout="contiguous") was applied to, or one that contains it'
        )
    return named


@dataclass(eq=False)
class _Run:
    """Adjacent parameters in a shard buffer that are optimized as one tensor."""

    group: ContiguousGroup
    segment: int
    begin: int  # of its range of the shard buffer
    end: int
    members: list[RowsParam]

    def lay(self) -> None:
        """Make the flat tensor over the current shard buffer."""
        self.shard = self.group.shards[self.segment]
        self.size = self.shard.numel()
        self.tensor = nn.Parameter(self.shard.narrow(0, self.begin, self.end - self.begin))
        self.params = [member.sharded for member in self.members]
        self.offsets = [member.place.shard_offset for member in self.members]

    @property
    def is_current(self) -> bool:
        return self.group.shards[self.segment] is self.shard

    def gradient(self) -> Tensor | list[bool]:
        """Return the gradient of the whole run, without a copy if all are views of one reduced shard.

        If only some members have gradients, return which ones do.
        """
        try:
            locals_ = [param.grad._local_tensor for param in self.params]  # type: ignore[union-attr]
        except AttributeError:
            return self._copy_gradients()
        base = _compat.base_of(locals_[0])
        if base is None or base.numel() != self.size:
            return self._copy_gradients()
        for local, offset in zip(locals_, self.offsets, strict=True):
            if _compat.base_of(local) is not base or local.storage_offset() != offset:
                return self._copy_gradients()
        return (
            base if self.end - self.begin == self.size else base.narrow(0, self.begin, self.end - self.begin)
        )

    def _copy_gradients(self) -> Tensor | list[bool]:
        has = [param.grad is not None for param in self.params]
        if not all(has):
            return has
        grads = torch.zeros_like(self.tensor)
        for member, param in zip(self.members, self.params, strict=True):
            self.rows_of(grads, member).copy_(cast(Tensor, param.grad))
        return grads

    def rows_of(self, tensor: Tensor, member: RowsParam) -> ShardedRows:
        """Return a member's rows of a tensor that is laid out like this run."""
        rows = member.place.box
        begin = member.place.shard_offset - self.begin
        return ShardedRows.wrap(tensor.narrow(0, begin, rows.numel).view(rows.sizes), member.piece)

    def padding(self) -> list[Tensor]:
        """Return the memory of this run that no member uses."""
        used = [(m.place.shard_offset, m.place.box.numel) for m in self.members]
        gaps = gaps_between(used, self.begin, self.end)
        return [self.tensor.detach().narrow(0, begin - self.begin, size) for begin, size in gaps]

    def cut(self, kinds: Sequence[Any]) -> list[tuple[Any, _Run]]:
        """Return the runs of members of equal kind, over the same range."""
        runs: list[tuple[Any, _Run]] = []
        for kind, pairs in groupby(zip(kinds, self.members, strict=True), key=itemgetter(0)):
            members, begin = [member for _, member in pairs], self.begin
            if runs:
                begin = runs[-1][1].end = members[0].place.shard_offset
            runs.append((kind, _Run(self.group, self.segment, begin, self.end, members)))
        return runs


class FlatOptimizer(Optimizer):
    """An optimizer over flat memory, made by `flat`; also an instance of the optimizer's own class.

    `param_groups` hold the options, which schedulers may change, and flat tensors.
    """

    def __init__(
        self,
        sets: list[dict[str, Any]],
        managed: Iterable[ContiguousGroup],
        named: dict[nn.Parameter, str],
        **options: Any,
    ) -> None:
        self._names_by_set = [[named[param] for param in entry["params"]] for entry in sets]
        set_of = {id(param): i for i, entry in enumerate(sets) for param in entry["params"]}
        tensors: list[list[nn.Parameter]] = [[] for _ in sets]
        self._runs: dict[nn.Parameter, _Run] = {}
        self._managed: dict[str, RowsParam] = {}  # includes those without rows here, which are in no run
        sharded: set[int] = set()
        for group in managed:
            for index, segment in enumerate(group.layout.segments):
                members = [group.params[place.index] for place in segment.places]
                members = [member for member in members if member.sharded.numel()]  # others are ordinary
                sharded.update(id(member.sharded) for member in members)
                self._managed.update({named[m.sharded]: m for m in members if id(m.sharded) in set_of})
                nonempty = [member for member in members if not member.place.box.is_empty]
                whole = _Run(group, index, 0, segment.shard_numel, nonempty)
                for kind, run in whole.cut([set_of.get(id(member.sharded)) for member in nonempty]):
                    if kind is None:
                        continue
                    run.lay()
                    self._runs[run.tensor] = run
                    tensors[kind].append(run.tensor)
        self._ordinary: dict[nn.Parameter, str] = {}
        for flat_params, entry in zip(tensors, sets, strict=True):
            ordinary = {param: named[param] for param in entry["params"] if id(param) not in sharded}
            self._ordinary.update(ordinary)
            flat_params.extend(ordinary)
        self._names = {member: name for name, member in self._managed.items()}
        self._is_built = False
        groups = [{**entry, "params": flat_params} for entry, flat_params in zip(sets, tensors, strict=True)]
        cast(Any, super()).__init__(groups, **options)
        self._is_built = True
        self._list_params()
        self.register_step_pre_hook(_before_step)
        self.register_step_post_hook(_after_step)

    def _list_params(self) -> None:
        self._params = [*self._ordinary, *(member.sharded for member in self._names)]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if getattr(self, "_is_built", False):
            raise ShardingError(
                f"{here()}: a flat optimizer lays out its memory once; give all parameters in params="
            )
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop, or set to zero, the gradients of the model's parameters."""
        for param in self._params:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.detach().zero_()

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Give each flat tensor the gradient of its parameters, until the step ends. Local.

        A step begins with this call (with a closure, it follows each evaluation).
        """
        keep_gradients(param for run in self._runs.values() for param in run.params)
        for tensor, run in list(self._runs.items()):
            if not run.is_current:
                tensor, run = self._follow_memory(tensor, run)
            grad = run.gradient()
            if isinstance(grad, Tensor):
                tensor.grad = grad
            elif any(grad):
                for part in self._split(tensor, run.cut(grad)):
                    part_grad = part.gradient()
                    part.tensor.grad = part_grad if isinstance(part_grad, Tensor) else None
            else:
                tensor.grad = None

    def _follow_memory(self, tensor: nn.Parameter, run: _Run) -> tuple[nn.Parameter, _Run]:
        """Return tensor and run over the model's new memory, after `to_empty` or loading by assignment."""
        shard = run.group.shards[run.segment]
        if self.state.get(tensor) and (shard.dtype, shard.device) != (tensor.dtype, tensor.device):
            raise ShardingError(
                f"{here()}: '{self._names[run.members[0]]}' is {shard.dtype} on {shard.device} now, but"
                f" the optimizer's state is {tensor.dtype} on {tensor.device}; convert and move the model"
                " before its first step"
            )
        (new_run,) = self._split(tensor, run.cut([None] * len(run.members)))
        return new_run.tensor, new_run

    def _split(self, tensor: nn.Parameter, cut: list[tuple[Any, _Run]]) -> list[_Run]:
        """Replace a run by other runs over the same range, each with its part of the state."""
        whole = self._runs.pop(tensor)
        state = self.state.pop(tensor, {})
        parts = [run for _, run in cut]
        for part in parts:
            part.lay()
            self._runs[part.tensor] = part
            if state:
                begin, size = part.begin - whole.begin, part.end - part.begin
                self.state[part.tensor] = {
                    key: value.narrow(0, begin, size) if _is_state(value, tensor) else by_name.copied(value)
                    for key, value in state.items()
                }
        for group in self.param_groups:
            members = group["params"]
            for i, member in enumerate(members):
                if member is tensor:
                    members[i : i + 1] = [part.tensor for part in parts]
                    break
        self._list_params()
        return parts

    # State by parameter name

    def state_dict(self) -> dict[str, Any]:
        """Return the state by parameter name, as torch's `get_optimizer_state_dict` has it. Local.

        `{"state": {name: {"exp_avg": rows, "step": scalar, ...}}, "param_groups": [{"params": [name, ...],
        "lr": ..., ...}]}`. Rows (`ShardedRows`) are this rank's and share memory with the optimizer; a
        distributed checkpoint writes and reads them for any number of ranks. There is no state of parameters
        of which this rank holds no rows, nor before the first step; see `allocate_state`.
        """
        packed = super().state_dict()
        tensors = [tensor for group in self.param_groups for tensor in group["params"]]
        state: dict[str, dict[str, Any]] = {}
        for index, values in packed["state"].items():
            tensor = tensors[index]
            run = self._runs.get(tensor)
            if run is None:
                state[self._ordinary[tensor]] = values
                continue
            for member in run.members:
                state[self._names[member]] = {
                    key: run.rows_of(value, member) if _is_state(value, tensor) else by_name.copied(value)
                    for key, value in values.items()
                }
        return by_name.named_state(state, packed["param_groups"], self._names_by_set)

    def allocate_state(self) -> None:
        """Give trainable parameters without state some, for `state_dict` to name what is to be filled. Local.

        The values are those with which the first step begins (`step` is 0); parameters do not change.
        """
        for tensor, run in list(self._runs.items()):
            run.group.reshard()  # which follows what the user froze on gathered parameters
            trained = [member.sharded.requires_grad for member in run.members]
            if any(trained) and not all(trained):
                self._split(tensor, run.cut(trained))
        frozen = {param for param in self._ordinary if not param.requires_grad}
        frozen |= {x for x, run in self._runs.items() if not run.members[0].sharded.requires_grad}
        by_name.allocate_state(self, cast(Any, type(self)).kind, frozen=frozen)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state by parameter name: `state_dict()`'s, or torch's `get_optimizer_state_dict`'s.

        Values are rows, DTensors or whole tensors. Local for rows that are cut as the parameters are;
        else collective over the ranks that hold them.

        Raises:
            ShardingError: names, groups or shapes that are not those of this optimizer.
        """
        loaded = by_name.loaded_options(state_dict, self._names_by_set)
        state: dict[str, Any] = state_dict["state"]
        local = {
            name: _local_state(name, state[name], self._managed[name])
            for names in self._names_by_set
            for name in names
            if name in self._managed and name in state
        }
        for tensor, run in list(self._runs.items()):
            kinds = [by_name.kind_of(local.get(self._names[member])) for member in run.members]
            if kinds.count(kinds[0]) != len(kinds):
                self._split(tensor, run.cut(kinds))
        packed: dict[str, Any] = {"state": {}, "param_groups": []}
        index = 0
        for group, options in zip(self.param_groups, loaded, strict=True):
            begin = index
            for tensor in group["params"]:
                if tensor in self._ordinary:
                    values = state.get(self._ordinary[tensor])
                else:
                    run = self._runs[tensor]
                    values = _join_states(run, [local.get(self._names[member]) for member in run.members])
                if values:
                    packed["state"][index] = values
                index += 1
            packed["param_groups"].append({**options, "params": list(range(begin, index))})
        super().load_state_dict(packed)


@lru_cache
def _flat_class(kind: type[Optimizer]) -> Any:
    return type(f"Flat{kind.__name__}", (FlatOptimizer, kind), {"kind": kind})


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    assert isinstance(optimizer, FlatOptimizer)
    if getattr(optimizer, "grad_scale", None) is not None:
        raise ShardingError(
            f"{here()}: a flat optimizer does not know torch.amp.GradScaler; train in bfloat16, or build the"
            " optimizer over model.parameters()"
        )
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return optimizer.take_gradients()

    def evaluated() -> Any:
        loss = closure()
        optimizer.take_gradients()
        return loss

    return (args[0], evaluated), {}


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    assert isinstance(optimizer, FlatOptimizer)
    for tensor in optimizer._runs:
        tensor.grad = None
    for group in optimizer.param_groups:
        if group.get("eps") == 0:  # padding, whose gradient is zero, was divided by zero
            for tensor in group["params"]:
                if tensor in optimizer._runs:
                    for unused in optimizer._runs[tensor].padding():
                        unused.zero_()


def _is_state(value: Any, tensor: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == tensor.shape


def _local_state(name: str, values: dict[str, Any], member: RowsParam) -> dict[str, Any]:
    """Return one parameter's state with tensors of its shape replaced by local rows."""
    by_name.check_shapes(name, member.piece.shape, values)
    result = {}
    for key, value in values.items():
        if not by_name.is_elements(key, value, member.piece.shape):
            result[key] = value
        elif isinstance(value, ShardedRows) and value.piece == member.piece:
            result[key] = value.local
        else:
            local = torch.empty(member.place.box.sizes, dtype=value.dtype, device=member.local.device)
            ShardedRows.wrap(local, member.piece).copy_(value)
            result[key] = local
    return result


def _join_states(run: _Run, states: list[dict[str, Any] | None]) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    for key, value in (states[0] or {}).items():
        if not isinstance(value, Tensor) or value.ndim == 0:
            joined[key] = by_name.copied(value)
            continue
        joined[key] = torch.zeros_like(run.tensor)
        for member, values in zip(run.members, states, strict=True):
            assert values is not None
            run.rows_of(joined[key], member).local.copy_(values[key])
    return joined
