"""Settings that users may change on a sharded module between steps; every rank must set the same values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.comm import (
    AllGather,
    AutoAllGather,
    AutoReduceScatter,
    DefaultAllGather,
    DefaultReduceScatter,
    ProcessGroupAllocAllGather,
    ProcessGroupAllocReduceScatter,
    ReduceScatter,
)
from shardwise.comm.api import SymmetricAllGather
from shardwise.comm.streams import as_torch_stream
from shardwise.errors import ShardingError, here
from shardwise.fsdp import finalization, trace_plan
from shardwise.fsdp.finalization import GradientReductionHandle
from shardwise.fsdp.group import Form, ParamGroup
from shardwise.fsdp.module_state import ModuleState, states_in
from shardwise.fsdp.state import FSDPState
from shardwise.mesh import DDPMeshInfo, FSDPMeshInfo


class ModuleSettings(nn.Module):
    """The setters of an `FSDPModule`."""

    _shardwise_state: FSDPState

    def _groups(self) -> list[ParamGroup]:
        return self._shardwise_state.groups

    def _states(self, recurse: bool) -> list[ModuleState]:
        return states_in(self.modules() if recurse else [self])

    def _set(self, recurse: bool, **settings: Any) -> None:
        for state in self._states(recurse):
            for group in state.groups:
                for name, value in settings.items():
                    setattr(group.settings, name, value)
        # Plans, graphs and the words that ranks compare were made from the old values.
        self._forget_plans(recurse)

    def _forget_plans(self, recurse: bool) -> None:
        for state in self._states(recurse):
            state.settings_changed()
            trace_plan.refresh(state)

    def _refuse_custom(self, group: ParamGroup, method: str) -> None:
        for comm in (group.settings.all_gather, group.settings.reduce_scatter):
            if not isinstance(comm, (DefaultAllGather, DefaultReduceScatter)):
                raise ShardingError(
                    f"{here()}: {method} cannot be used with the custom communication {type(comm).__name__},"
                    " which allocates its own buffers"
                )

    # When gradients are synchronised

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the next backward is the last before the optimizer step.

        Only the last one waits for reductions. Set it on the root module.
        """
        self._shardwise_state.set_schedule(is_last_backward=is_last_backward)

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Set whether `finalize_backward()` ends backward, instead of autograd and `set_is_last_backward`.

        Set it on the root, before backward begins.

        Raises:
            LifecycleError: this is not the root, or a backward has begun and was not ended.
        """
        finalization.set_manual(self._shardwise_state, enabled)

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """End all backwards since the last call: reduce gradients they left, reshard, wait for reductions.

        Collective. Call it on the root, after `set_manual_backward_finalization(True)`. To accumulate
        several backwards before a call, use `set_requires_gradient_sync(False)`; set it to True again before
        the call.

        Args:
            async_op: return a handle at once. Wait for it before using gradients or the next forward.

        Raises:
            LifecycleError: this is not the root, manual finalization is not set, a backward is running, an
                earlier handle was not waited for, or gradients were not all-reduced over replicas.
        """
        return finalization.finalize(self._shardwise_state, async_op=async_op)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether backward reduces gradients. False accumulates them unsharded, without communication."""
        self._set(recurse, reduce_grads=requires_gradient_sync, all_reduce_grads=requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether backward all-reduces over the replicate axis (HSDP). False accumulates sharded sums."""
        self._set(recurse, all_reduce_grads=requires_all_reduce)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Set whether parameters without a gradient join the reduction, as zeros.

        Needed where ranks use different parameters: their reductions would not match otherwise.
        """
        self._set(recurse, reduce_unused=reduce_scatter_unused_params)

    # When parameters are freed and gathered

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether forward frees the parameters from now on."""
        if not isinstance(reshard_after_forward, bool):
            raise ShardingError(
                f"{here()}: set_reshard_after_forward takes a bool, got {reshard_after_forward!r}; pass a"
                " number of ranks as fully_shard(reshard_after_forward=)"
            )
        for state in self._states(recurse):
            # The user has chosen, so the root is no longer an exception.
            state.reshard_is_automatic = False
            for group in state.groups:
                if group.gathers and isinstance(group.info, FSDPMeshInfo):
                    if group.form is Form.POST_FORWARD:  # a gather would take its pieces for the full mesh's
                        group.reshard()
                    group.post_forward_mesh = group.info if reshard_after_forward else None
        self._forget_plans(recurse)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Set whether backward frees the parameters. False saves gathers between accumulation steps."""
        self._set(recurse, reshard_after_backward=reshard_after_backward)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Set whether resharding keeps the memory of whole parameters allocated for the next gather.

        Their addresses then stay the same from step to step, as CUDA graphs need, at the cost of that memory.
        """
        self._set(recurse, keep_unsharded_storage=keep)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether backward gathers this module's parameters; False if it does not need them."""
        self._set(False, unshard_in_backward=unshard_in_backward)

    def set_modules_to_forward_prefetch(self, modules: Sequence[ModuleSettings]) -> None:
        """Set the modules whose gathers this module's forward starts, after its own gather."""
        self._shardwise_state.prefetch_in_forward = [state.myself for state in states_of(modules)]

    def set_modules_to_backward_prefetch(self, modules: Sequence[ModuleSettings]) -> None:
        """Set the modules whose gathers this module's backward starts, not the one before it in forward."""
        self._shardwise_state.prefetch_in_backward = [state.myself for state in states_of(modules)]

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Set an event that the next forward's gathers wait for, instead of all work on the current stream.

        The event is used once: set a new one after each optimizer step, on the root. It may be a
        `torch.Event` or of the device's own kind, such as `torch.cuda.Event`.
        """
        self._shardwise_state.set_schedule(post_optim_event=event)

    # How it communicates

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Gather this module's parameters through `comm`."""
        self._set(False, all_gather=comm)

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduce this module's gradients through `comm`."""
        self._set(False, reduce_scatter=comm)

    def set_all_reduce_hook(
        self, hook: Callable[[Tensor], None], *, stream: torch.Stream | None = None
    ) -> None:
        """Call `hook` on each reduced gradient shard (1-D, in the reduction's dtype), to change it in place.

        Args:
            hook: runs after the reduce-scatter, and after HSDP's all-reduce if there is one.
            stream: the stream on which it runs; only without HSDP.
        """
        if stream is not None and any(isinstance(group.info, DDPMeshInfo) for group in self._groups()):
            raise ShardingError(
                f"{here()}: stream= is for modules without HSDP: with HSDP the hook runs on the stream of the"
                " all-reduce; leave stream out"
            )
        # As a `torch.Stream`: other streams here would not wait for events of a device's own kind.
        hook_stream = None if stream is None else as_torch_stream(stream)
        self._set(False, all_reduce_hook=hook, all_reduce_hook_stream=hook_stream)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide summed gradients by `factor` instead of the number of data-parallel ranks."""
        if isinstance(factor, str) or not factor > 0:
            raise ShardingError(f"{here()}: the gradient divide factor must be positive, got {factor!r}")
        self._set(False, divide_factor=factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Call `set_gradient_divide_factor`; this is its older name."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Set whether to reduce by SUM only, and to divide outside the collective."""
        self._set(False, force_sum=enable)

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Set how many reduce-scatter inputs may be in flight on an accelerator (1 by default)."""
        if not isinstance(max_input_buffers, int) or max_input_buffers < 1:
            raise ShardingError(
                f"{here()}: max_input_buffers must be a number from 1 on, got {max_input_buffers!r}"
            )
        self._set(recurse, max_input_buffers=max_input_buffers)
        for state in self._states(recurse):
            if state.schedule is not None:
                # Inputs of all groups are counted together, so the largest setting applies.
                state.schedule.max_reduce_inputs = max(state.schedule.max_reduce_inputs, max_input_buffers)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Set whether reductions use a separate process group, to overlap with gathers.

        Collective over each shard group: creates one process group per set of shard ranks.
        """
        cache: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for state in self._states(recurse):
            for group in state.groups:
                if not isinstance(group.info, FSDPMeshInfo):
                    continue
                ranks = tuple(dist.get_process_group_ranks(group.info.shard_process_group))
                # One for all groups over the same ranks: a process group costs connections.
                if enable and ranks not in cache:
                    # Collective over these ranks only: others may make theirs at another time, or none.
                    cache[ranks] = group.settings.reduce_scatter_group or dist.new_group(
                        list(ranks), use_local_synchronization=True, group_desc="shardwise_reduce_scatter"
                    )
                group.settings.reduce_scatter_group = cache.get(ranks)
                if group.orders:  # after a first forward: ranks that wait here in vain must be ended too
                    group.join_orders()
        self._forget_plans(recurse)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Set whether communication buffers come from the process group's allocator, where it has one."""
        for group in self._groups():
            self._refuse_custom(group, "set_allocate_memory_from_process_group_for_comm")
            if not isinstance(group.info, FSDPMeshInfo):
                continue
            info = group.info
            reduce_group = group.settings.reduce_scatter_group or info.shard_process_group
            settings, gather_group = group.settings, info.shard_process_group
            settings.all_gather = ProcessGroupAllocAllGather(gather_group) if enable else AutoAllGather()
            settings.reduce_scatter = (
                ProcessGroupAllocReduceScatter(reduce_group) if enable else AutoReduceScatter()
            )
        self._forget_plans(False)

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Gather through symmetric memory, which NCCL moves without occupying compute units.

        Collective at the first gather (buffers are registered with all ranks).

        Raises:
            ShardingError: the process group's backend has no symmetric memory.
        """
        for group in self._groups():
            self._refuse_custom(group, "set_symm_mem_for_comm")
            if group.shard_group is not None:
                # Buffers are registered with the ranks of the group's own process group.
                group.settings.all_gather = SymmetricAllGather(group.shard_group, backend, group.device)
        self._forget_plans(False)

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Set whether gathers allocate on the current stream (explicit prefetching)."""
        self._set(True, unshard_async_op=async_op)


def states_of(modules: Sequence[ModuleSettings]) -> list[FSDPState]:
    for module in modules:
        if not isinstance(module, ModuleSettings):
            raise ShardingError(
                f"{here()}: expected modules that fully_shard was applied to, got {type(module)}"
            )
    return [module._shardwise_state for module in modules]
