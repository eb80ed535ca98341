"""Reduction of a parameter group's unsharded gradients to sharded gradients.

collect   take the gradients that autograd left on the unsharded parameters; without synchronisation
          they stay there, accumulated, for a later backward
reduce    run one reduction for all gradients of one dtype (`comm.foreach_reduce`)
assign    make views of the reduced shard the sharded parameters' gradients, or add them to those
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, cast

import torch
from torch import Tensor, nn

from shardwise import _compat
from shardwise.comm import CommStreams, ReduceResult, divide_factors, foreach_reduce
from shardwise.comm.api import backend_of
from shardwise.comm.foreach import Reduction, current_stream
from shardwise.comm.order import Event, event_for
from shardwise.errors import ShardingError, here
from shardwise.fsdp.fast import process
from shardwise.fsdp.group import ParamGroup
from shardwise.fsdp.parameter import EvenParam, ShardedParam
from shardwise.fsdp.policy import CPUOffloadPolicy

# With `map`, no Python code runs per parameter.
_HAS_STORED_DTYPE, _UNSHARDED = attrgetter("grads_have_stored_dtype"), attrgetter("unsharded")
_DIM, _SHARD_NUMEL = attrgetter("placement.dim"), attrgetter("slot.padded_shard_numel")
Collected = list[tuple[ShardedParam, Tensor]]
Kind = tuple[torch.dtype, torch.dtype | None]  # dtypes of the reduction and its result; None: by parameter


@dataclass
class GradReducer(ABC):
    """A group's reductions, and the state they keep from one backward to the next."""

    group: ParamGroup
    # HSDP gradients that were reduce-scattered but not yet all-reduced; the key says which, together.
    partials: dict[Any, Tensor] = field(default_factory=dict)
    offload_events: list[torch.Event] = field(default_factory=list)  # of copies to CPU: the optimizer waits
    unsynced: bool = False  # whether the latest backward left its gradients unreduced
    _plans: dict[Kind, Reduction] = field(default_factory=dict)
    _events: dict[Any, Event] = field(default_factory=dict)
    _synced: bool = True  # whether leaves are set up for a reduction in every backward
    has_separate_sums: bool = False  # whether accumulated gradients exist beside the leaves'

    def forget_plans(self) -> None:
        """Drop plans and events, since the group's settings or streams changed."""
        # Plans hold streams, factors and process groups; an event's words are made from its plan.
        self._plans.clear()
        self._events.clear()
        # Sums over backwards may have a wider dtype, to be set on leaves before gradients come.
        if self._synced is not self.group.settings.reduce_grads:
            self._synced = self.group.settings.reduce_grads
            for param in self.group.params:
                param.accumulates = not self._synced
                if param.unsharded is not None:
                    param.set_leaf_grad_dtype(param.unsharded)

    def announce(self, plan: Reduction, params: Sequence[ShardedParam], *, batch: Any) -> None:
        """Announce a reduction of gradients of `params`, which share a segment or dtypes (`batch`)."""
        complete = len(params) == len(self.group.params)
        # Names only where some are missing: then the usual key is cheap to make.
        key = (batch, None if complete else tuple([param.name for param in params]))
        event = self._events.get(key)
        if event is None:
            event = self._events[key] = event_for(
                f"reduce the gradients of '{self.group.name}'\n'{self.group.name}' is reduced to"
                f" {plan.result_dtype}, as {plan.dtype}, by {plan.factors}"
                f"{'' if plan.all_reduce else ', without all-reduce'}\n"
                + "\n".join(f"with a gradient: {param.name}" for param in params),
                advice="Where ranks use different parameters, call"
                " set_reduce_scatter_unused_params(True) on the root module; elsewhere make the same"
                " calls on every rank.",
            )
        self.group.announce(event)

    def store_unreduced(self) -> None:
        """Keep gradients unsharded, in the dtype of their sums, for a backward without synchronisation."""
        for param in self.group.params:
            leaf, sum_dtype = param.unsharded, param.sum_dtype
            if leaf is None or leaf.grad is None or sum_dtype == leaf.dtype:
                continue
            if not _compat.SUMS_AS_KEPT:
                self._accumulate_separately(param, leaf)
            elif sum_dtype is not None and leaf.grad.dtype != sum_dtype:
                # torch refuses a `grad_dtype` other than the dtype of the existing gradient.
                grad, leaf.grad = leaf.grad.to(sum_dtype), None
                leaf.grad_dtype = sum_dtype
                leaf.grad = grad
            param.set_leaf_grad_dtype(leaf)

    def _accumulate_separately(self, param: ShardedParam, leaf: nn.Parameter) -> None:
        """Add a leaf's gradient, to which autograd may add several times per backward, to `accumulated`."""
        assert leaf.grad is not None
        if param.accumulated is None:
            param.accumulated = leaf.grad.to(param.sum_dtype or leaf.grad.dtype)
        else:
            param.accumulated += leaf.grad
        leaf.grad = None
        self.has_separate_sums = True

    def collect_from(self, param: ShardedParam) -> Tensor | None:
        """Return one parameter's gradient, and remove it from the parameter."""
        unsharded = param.unsharded
        if unsharded is None:
            return None
        grad = unsharded.grad
        if param.accumulated is not None:
            if grad is not None:
                self._accumulate_separately(param, unsharded)
            grad, param.accumulated = param.accumulated, None
        if grad is not None:
            unsharded.grad = None
            return grad if param.tp_spec is None else param.plain_grad(grad)
        if self.group.settings.reduce_unused and unsharded.requires_grad:
            # Zeros, so that reductions have equal sizes on ranks that use other parameters.
            return torch.zeros(param.shape, dtype=unsharded.dtype, device=unsharded.device)
        return None

    def plan_for(self, stored: torch.dtype, computed: torch.dtype) -> Reduction:
        """Return the plan to reduce gradients of these dtypes, without streams."""
        kind = (self.group.policy.sum_dtype(stored=stored, computed=computed), stored)
        return self._plans.get(kind) or self._plan(kind, None)

    @abstractmethod
    def assigner(self, segment: int, params: Sequence[ShardedParam]) -> Callable[[Tensor], None]:
        """Return a function that hands a segment's reduced shard, as `reduce` leaves it, to `params`."""

    @abstractmethod
    def collect(self) -> Any:
        """Return the gradients of this backward and of earlier unsynchronised ones, as `reduce` takes them.

        The result is false if there are none.
        """

    @abstractmethod
    def reduce(self, collected: Any, *, streams: CommStreams | None) -> list[ReduceResult]:
        """Reduce gradients and assign them to the sharded parameters.

        Collective over the group's shard and replicate ranks. Consumes `collected`. Returns the results
        whose memory streams still use.
        """

    def _plan(self, kind: Kind, streams: CommStreams | None) -> Reduction:
        group, settings, info = self.group, self.group.settings, self.group.info
        # The ranks to reduce-scatter over, and the ranks to all-reduce over.
        shard_group, replicate_group = info.process_groups
        inner, outer = group.strategy.shard_axis, group.strategy.replicate_axis
        # DDP and ZeRO-1 all-reduce over the axis that others reduce-scatter over.
        if inner is not None and not inner.gradient:
            shard_group, replicate_group = None, shard_group
        if shard_group is not None:
            # A separate process group of the same ranks lets gathers overlap with reductions.
            shard_group = settings.reduce_scatter_group or shard_group
        scatters_twice = outer is not None and outer.gradient
        dtype, result_dtype = kind
        device_group = shard_group or replicate_group
        assert device_group is not None
        factors = divide_factors(
            shard_size=shard_group.size() if shard_group is not None else 1,
            replicate_size=replicate_group.size() if replicate_group is not None else 1,
            reduce_dtype=dtype,
            backend=backend_of(device_group, group.device),
            factor=settings.divide_factor,
            force_sum=settings.force_sum,
        )
        plan = self._plans[kind] = Reduction(
            shard_group=shard_group,
            replicate_group=replicate_group,
            dtype=dtype,
            result_dtype=result_dtype or dtype,
            factors=factors,
            comm=settings.reduce_scatter,
            device=group.device,
            align_bytes=group.align_bytes,
            all_reduce=settings.all_reduce_grads,
            hook=settings.all_reduce_hook,
            streams=streams,
            hook_stream=settings.all_reduce_hook_stream,
            replicate_scatter=settings.reduce_scatter if scatters_twice else None,
        )
        return plan

    def shard_becomes_grads(self, params: Sequence[ShardedParam], plan: Reduction) -> bool:
        """Return whether the shard that a reduce-scatter leaves becomes the gradients unchanged."""
        # Such a shard is memory of computation's stream, to reuse what logits and activations free. A shard
        # that is freed before computation has waited for it is memory of the stream that reduces.
        return (
            plan.shard_ranks > 1
            and plan.dtype == plan.result_dtype
            and (plan.replicate_group is None or (plan.all_reduce and plan.replicate_scatter is None))
            and not self.group.offload.on_host
            and not any(p.sharded.grad is not None or p.has_grad_hooks for p in params)
        )

    def _to_offload_device(self, params: Sequence[ShardedParam], shard: Tensor) -> Tensor:
        """Return the reduced shard on the device of the sharded parameters."""
        offload = self.group.offload
        if not isinstance(offload, CPUOffloadPolicy) or shard.device.type == "cpu":
            return shard
        # The copy may run asynchronously only if nothing on the CPU reads it before backward ends.
        waits = any(p.sharded.grad is not None or p.has_grad_hooks for p in params)
        shard = shard.to("cpu", non_blocking=offload.pin_memory and not waits)
        if offload.pin_memory and not waits:
            # The stream that reduced, the current one here, also copies.
            self.offload_events.append(current_stream(self.group.device).record_event())
        return shard

    def wait_for_offload(self) -> None:
        """Wait for gradients that are copied to CPU, at the end of the last backward."""
        for event in self.offload_events:
            # The host itself must wait: the optimizer that reads these gradients runs there.
            event.synchronize()
        self.offload_events.clear()

    def reset(self) -> None:
        """Drop every gradient that was not reduced yet."""
        self.wait_for_offload()
        self.partials.clear()
        for param in self.group.params:
            param.accumulated = None
            if param.unsharded is not None:
                param.unsharded.grad = None


def check_grad_dtypes(group: ParamGroup) -> None:
    """Raise if the user changed a `grad_dtype` too late for gradients that are being reduced."""
    for param in group.params:
        current, initial = _compat.chosen_grad_dtype(param.sharded), param.chosen_grad_dtype
        if current != initial:
            raise ShardingError(
                f"{here()}: grad_dtype of '{param.name}' was set to {param.sharded.grad_dtype} after the"
                f" first forward, expected {param.sharded_grad_dtype}: set it before the first forward"
            )


def kind_of(params: Sequence[ShardedParam]) -> Kind:
    """Return the dtypes of one reduction of these parameters' gradients: of the sums and of the result."""
    sums = {param.sum_dtype or param.gather_dtype for param in params}
    results = {param.sharded_grad_dtype for param in params}
    return functools.reduce(torch.promote_types, sums), results.pop() if len(results) == 1 else None


@dataclass
class InterleavedReducer(GradReducer):
    """Reduces gradients that are cut into rows by rank, side by side in the reduce-scatter's input."""

    _kinds: dict[ShardedParam, Kind] = field(default_factory=dict)
    _common_kind: Kind | None = None  # if all parameters have the same
    _plain: bool = False  # no parameter is tensor-parallel
    _layout: Any = None  # the group's, when `_kinds` were found

    def _find_kinds(self) -> None:
        self._layout = self.group.layout
        by_dtypes: dict[Any, list[ShardedParam]] = {}
        for param in self.group.params:
            sum_dtype = param.policy.sum_dtype(stored=param.dtype, computed=param.gather_dtype)
            by_dtypes.setdefault((param.dtype, sum_dtype), []).append(param)
        self._plain = all(param.tp_spec is None for param in self.group.params)
        self._kinds = {}
        for params in by_dtypes.values():
            self._kinds.update(dict.fromkeys(params, kind_of(params)))
        kinds = set(self._kinds.values())
        self._common_kind = kinds.pop() if len(kinds) == 1 else None

    def collect(self) -> Collected:
        params = self.group.params
        if self._layout is not self.group.layout:
            self._find_kinds()
        # The usual case avoids a Python call per parameter.
        if self.has_separate_sums or not self._plain or self.group.settings.reduce_unused:
            grads = list(map(self.collect_from, params))
            self.has_separate_sums = False
        else:
            leaves = list(map(_UNSHARDED, params))
            grads = [None if leaf is None else leaf.grad for leaf in leaves]
            for leaf in leaves:
                if leaf is not None:
                    leaf.grad = None
        return [(param, grad) for param, grad in zip(params, grads, strict=True) if grad is not None]

    def reduce(self, collected: Collected, *, streams: CommStreams | None) -> list[ReduceResult]:
        """Reduce gradients: one reduction per pair of stored and sum dtype, in order of appearance."""
        batches: dict[Kind, Collected] = {}
        if self._common_kind is not None:
            # The list itself, emptied as a batch: gradients are freed once they are copied.
            batches[self._common_kind] = collected
        else:
            kinds = dict.fromkeys(self._kinds[param] for param, _ in collected)
            # No name here outlives its batch: only each list holds its gradients.
            batches = {kind: [pair for pair in collected if self._kinds[pair[0]] == kind] for kind in kinds}
            collected.clear()
        results = []
        for kind, batch in batches.items():
            plan = self._plans[kind] if kind in self._plans else self._plan(kind, streams)
            if kind[1] is None:  # gradients of one stored dtype side by side, as in FSDP2
                dtypes = list(dict.fromkeys(param.sharded_grad_dtype for param, _ in batch))
                batch.sort(key=lambda pair: dtypes.index(pair[0].sharded_grad_dtype))
            results.append(self._reduce_batch(batch, plan))
        return results

    def _reduce_batch(self, batch: Collected, plan: Reduction) -> ReduceResult:
        params: list[Any] = list(map(itemgetter(0), batch))
        grads = list(map(itemgetter(1), batch))
        # Now only `grads` holds them, and `foreach_reduce` empties it.
        batch.clear()
        if self.group.orders:
            self.announce(plan, params, batch=(plan.result_dtype, plan.dtype))
        key: tuple[str, ...] = ()
        partial = None
        if self.partials or not plan.all_reduce:
            # By names, since partial sums cover exactly these parameters.
            key = tuple(param.name for param in params)
            partial = self._partial(key)
        result = foreach_reduce(
            grads,
            list(map(_DIM, params)),
            plan,
            shard_numel=sum(map(_SHARD_NUMEL, params)),
            partial=partial,
            keeps_shard=plan.streams is not None and self.shard_becomes_grads(params, plan),
        )
        if result.partial is not None:
            self.partials[key] = result.partial
        if result.shard is not None:
            if result.stream is None:
                self._view_out(params, result.shard)
            else:
                # Additions, hooks and optimizers run on the reduction's stream; computation need not wait.
                with result.stream:
                    self._view_out(params, result.shard)
        return result

    def assigner(self, segment: int, params: Sequence[ShardedParam]) -> Callable[[Tensor], None]:
        return partial(self._view_out, cast(list[EvenParam], params))

    def _partial(self, key: tuple[str, ...]) -> Tensor | None:
        partial = self.partials.pop(key, None)
        if partial is None and self.partials:
            earlier = {name for names in self.partials for name in names}
            changed = sorted(earlier.symmetric_difference(key))
            if earlier & set(key):
                raise ShardingError(
                    f"{here()}: gradients of group '{self.group.name}' are accumulated without all-reduce,"
                    f" but this backward used other parameters than the last: {changed}. Call"
                    " set_reduce_scatter_unused_params(True), or all-reduce in every backward"
                )
        return partial

    def _view_out(self, params: list[EvenParam], shard: Tensor) -> None:
        # One copy of the shard, not one per gradient.
        shard = self._to_offload_device(params, shard)
        offset = shard.storage_offset()  # a compiled graph may return a part of a larger buffer
        forms = [param.sharded for param in params]
        # Attribute access skips torch's `__torch_function__` look-up here.
        with _compat.plain_attributes():
            one_by_one = (
                not all(map(_HAS_STORED_DTYPE, params))
                or any(map(_compat.grad_hooks, forms))
                or any(map(_compat.post_accumulate_grad_hooks, forms))
            )
        with nullcontext() if one_by_one else _compat.plain_attributes():
            for param in params:
                slot, sharded = param.slot, param.sharded
                piece = shard.as_strided(slot.shard_shape, slot.shard_stride, offset)
                offset += slot.padded_shard_numel
                if one_by_one:
                    param.assign_grad(piece)
                elif sharded.grad is not None:
                    local = _compat.local_tensor(sharded.grad)
                    local += piece
                # Tracers take no DTensor at an offset: a gradient begins its own storage, which costs calls.
                elif process.compiler:
                    sharded.grad = param.as_grad(piece)
                else:  # as `dtensor_at` makes it
                    begin = sharded._local_tensor  # type: ignore[attr-defined]
                    grad = _compat.dtensor(begin, param.spec)
                    grad._local_tensor = piece
                    sharded.grad = grad
