"""The norm of a model's gradients, and clipping by it, across shards and meshes.

Local memory first, then one all-reduce for each mesh axis that any gradient is sharded over::

    total^p = all-reduce(SUM over sharding axes) of  sum over gradients of |g|^p

Contiguous gradients that fill their group's reduced shard are replaced by that shard, one tensor.

A gradient takes part only in the all-reduces of its own axes. A replicated axis holds equal copies, which
must count once, so it is left out. So models with parameters on several meshes (tensor-parallel or not,
experts or not) get one correct norm. A parameter without a gradient joins the all-reduces with nothing, so
that ranks with and without its gradient find the difference. Pipeline stages have different parameters: their
sums are added last, and parameters that two stages share count half on each. The infinity norm uses MAX
instead of SUM.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise import _compat
from shardwise.comm.arithmetic import extreme
from shardwise.comm.watch import announced
from shardwise.errors import ShardingError, here
from shardwise.fsdp.contiguous_reduction import merge_views
from shardwise.fsdp.optimizer_watch import sharded_form
from shardwise.sharded_tensor.holding import Groups
from shardwise.sharded_tensor.kinds import by_axes

_OF_A_STAGE = "_shardwise_of_a_stage"
PART = 1 << 16  # elements whose squares a CPU can sum in fp32 without losing digits


@torch.no_grad()
def get_total_norm(
    tensors: Iterable[Tensor], norm_type: float = 2.0, *, stages: DeviceMesh | None = None
) -> Tensor:
    """Return the norm of all elements of `tensors` together, as if each tensor were whole.

    Collective over every mesh of a sharded tensor in `tensors`; all ranks must pass the same tensors in
    the same order.

    Args:
        tensors: plain tensors (equal on all ranks), `ShardedRows`, `ShardedTensor`s, and DTensors.
        norm_type: the p of the p-norm, positive or infinite.
        stages: the ranks of a pipeline's stages, which have different tensors; all of them must call.

    Returns:
        A scalar on the device of the first tensor, fp32 or wider, equal on all ranks; zero without
        tensors.

    Raises:
        ShardingError: a DTensor that holds partial sums, or a norm type that is not positive.
    """
    local, counts = by_axes(tensors, {}, merge_views)
    return _norm(local, counts, norm_type, "", stages, {})


def _norm(
    local: Mapping[Groups, list[Tensor]],
    counts: Mapping[Groups, int],
    norm_type: float,
    purpose: str,
    stages: DeviceMesh | None,
    halves: Mapping[Groups, list[Tensor]],
) -> Tensor:
    """Return the norm of all tensors; `halves` count half. Collective over all axes and the stages."""
    norm_type = float(norm_type)  # "inf", as torch takes it
    if not norm_type > 0:
        raise ShardingError(f"{here()}: norm_type must be positive, got {norm_type}")
    if not local and not halves and stages is None:
        return torch.tensor(0.0)
    infinite = math.isinf(norm_type)
    pending = {axes: _local_power_sum(locals_, norm_type) for axes, locals_ in local.items()}
    for axes, locals_ in halves.items():
        half = _local_power_sum(locals_, norm_type) * (1.0 if infinite else 0.5)
        pending[axes] = half if axes not in pending else _add(pending[axes], half, infinite=infinite)
    all_count = sum(counts.values())  # in every group's words, to show a missing gradient everywhere
    for group in _in_order(dict.fromkeys(group for axes in pending for group in axes)):
        cut = [axes for axes in pending if group in axes]
        count = sum(counts[axes] for axes in counts if group in axes)
        of = "" if count == all_count else f" of {all_count}"
        operation = f"reduce the {norm_type}-norm of {count}{of} tensors{purpose}"
        reduced = _all_reduce(
            torch.stack([pending.pop(axes) for axes in cut]), group, operation, infinite=infinite
        )
        for axes, total in zip(cut, reduced.unbind(), strict=True):
            rest = tuple(g for g in axes if g is not group)
            pending[rest] = total if rest not in pending else _add(pending[rest], total, infinite=infinite)
    total = next(iter(pending.values()), torch.zeros(()))  # a stage may have no gradients
    if stages is not None:
        operation = f"reduce the {norm_type}-norm of all stages{purpose}"
        # In float64 from here on, since a stage without gradients has no dtype.
        wide = total.reshape(1).to(stages.device_type, torch.float64)
        (total,) = _all_reduce(wide, stages.get_group(), operation, infinite=infinite)
    return total if infinite else total.pow(1 / norm_type)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    stages: DeviceMesh | None = None,
    tied: Iterable[Tensor] = (),
) -> Tensor:
    """Scale gradients in place so that their total norm is at most `max_norm`.

    Takes the arguments of `torch.nn.utils.clip_grad_norm_`, for any mixture of plain parameters, sharded ones
    of either layout on any meshes, and `ShardedTensor`s, with one all-reduce per axis or group that cuts any.

    Collective over every mesh of a parameter. Ranks must pass the same parameters; gradients of plain
    parameters, which are not exchanged, must be equal.

    Args:
        stages: the ranks of a pipeline's stages, `mesh["pp"]`: each passes its own stages' parameters, and
            all are scaled by the norm of the whole model's gradients. Without it, each rank's stages have
            their own norm.
        tied: parameters that one other stage also has, with equal gradients: see `add_tied_gradients`.

    Returns:
        The norm before clipping: a scalar, equal on all ranks.

    Raises:
        RuntimeError: the norm is not finite and `error_if_nonfinite` is set; on every rank.
        RankMismatchError: ranks differ in the norm's type, its bound or their number of gradients; on every
            rank of their process group (over gloo).
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if stages is None and parameters and getattr(parameters[0], _OF_A_STAGE, False):
        warnings.warn(
            f"{here()}: gradients of a pipeline's stage are clipped by the norm of this stage alone; pass"
            ' stages=mesh["pp"] for that of the whole model',
            stacklevel=2,
        )
    with _compat.plain_attributes():
        grads = [p.grad for p in parameters]
    for index, grad in enumerate(grads):
        if grad is None:
            # An evaluation may have left it gathered: the sharded form has the gradient.
            parameters[index] = sharded_form(parameters[index])
            grads[index] = parameters[index].grad
    tied_ids = {id(form) for param in tied for form in (param, sharded_form(param))}
    half = list(map(tied_ids.__contains__, map(id, parameters)))
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    local, counts = by_axes(
        [grad for grad, twice in zip(grads, half, strict=True) if grad is not None and not twice],
        groups,
        merge_views,
    )
    tied_grads = [grad for grad in compress(grads, half) if grad is not None]
    halves, half_counts = by_axes(tied_grads, groups, merge_views)
    counts += half_counts
    missing = [p for p, grad in zip(parameters, grads, strict=True) if grad is None and p.requires_grad]
    for axes, locals_ in by_axes(missing, groups, merge_views)[0].items():  # other ranks may have theirs
        local.setdefault(axes, []).append(locals_[0].new_empty(0))
    # A bound that is a tensor is not read, since that would wait for its device.
    bound = "" if isinstance(max_norm, Tensor) else f" of {float(max_norm):.6g}"
    total = _norm(local, counts, norm_type, f", to clip them by a bound{bound}", stages, halves)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"{here()}: the {norm_type}-norm of the gradients is {total.item()}, so they cannot be clipped;"
            " lower the learning rate or loss scale, or pass error_if_nonfinite=False"
        )
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    by_device: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for locals_ in (*local.values(), *halves.values()):
        for grad in locals_:
            by_device.setdefault((grad.device, grad.dtype), []).append(grad)
    for (device, dtype), locals_ in by_device.items():
        _compat.foreach_mul(locals_, scale.to(device, dtype))
    return total


def of_a_stage(parameters: Iterable[Tensor]) -> None:
    """Mark parameters as those of a pipeline stage, which has only a part of the model. Local."""
    for param in parameters:
        if _OF_A_STAGE in vars(param):
            return
        setattr(param, _OF_A_STAGE, True)


def _in_order(groups: Iterable[dist.ProcessGroup]) -> list[dist.ProcessGroup]:
    """Sort groups by the offsets between their ranks, so by mesh axis, whichever tensor comes first."""
    ordered = list(groups)
    if len(ordered) > 1:
        of = {group: dist.get_process_group_ranks(group) for group in ordered}
        ordered.sort(key=lambda group: [rank - of[group][0] for rank in of[group]])
    return ordered


def _add(a: Tensor, b: Tensor, *, infinite: bool) -> Tensor:
    b = b.to(a.device)
    return torch.maximum(a, b) if infinite else a + b


def _all_reduce(totals: Tensor, group: dist.ProcessGroup, operation: str, *, infinite: bool) -> Tensor:
    """Return the totals over `group`: sums, or maxima for infinity."""
    if not infinite:
        return _in_place(totals, dist.ReduceOp.SUM, group, operation)
    return extreme(totals, lambda t: _in_place(t, dist.ReduceOp.MAX, group, operation), largest=True)


def _in_place(totals: Tensor, op: Any, group: dist.ProcessGroup, operation: str) -> Tensor:
    if torch.compiler.is_compiling():
        dist.all_reduce(totals, op=op, group=group)
        return totals
    with announced(group, operation):
        dist.all_reduce(totals, op=op, group=group)
    return totals


def _local_power_sum(tensors: list[Tensor], norm_type: float) -> Tensor:
    """Return the sum of |x|^p over all elements (their maximum for infinity), in fp32 or wider."""
    filled: list[Tensor] = []
    for tensor, size in zip(tensors, map(Tensor.numel, tensors), strict=True):
        if size >= 2 * PART and tensor.is_cpu and tensor.is_contiguous():
            filled += tensor.view(-1).split(PART)
        elif size:
            filled += (tensor,)
    wide = torch.float32
    for dtype in {t.dtype for t in tensors}:
        wide = torch.promote_types(wide, dtype)
    if not filled:
        return torch.zeros((), dtype=wide, device=tensors[0].device)
    norms = torch.stack(list(_compat.foreach_norm(filled, norm_type, wide)))
    return norms.amax() if math.isinf(norm_type) else norms.pow(norm_type).sum()
