"""Process groups: their stores, timeouts, allocators and symmetric memory."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as bindings
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d as c10d
from torch.distributed._functional_collectives import all_to_all_single_autograd


def group_allocator(group: dist.ProcessGroup, device: torch.device) -> Any | None:
    """Return the backend that allocates communication buffers for `group`, if it has an allocator."""
    backend = group._get_backend(device)
    return backend if backend.supports_tensor_alloc(device) else None


# verify.streams: `new_group` waits for all ranks of the group with the process's own state half changed, and
# names a group by its ranks and how many such groups exist, so two threads cannot make two at a time.
def second_group(group: dist.ProcessGroup, name: str) -> dist.ProcessGroup:
    """Make a gloo group of the ranks of `group`, known to functional collectives as `name`. Collective."""
    store = bindings.PrefixStore(name, default_store())
    kind = dist.ProcessGroup.BackendType.GLOO
    second: Any = dist.ProcessGroup(store, group.rank(), group.size())
    backend = dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout_of(group))
    second._set_default_backend(kind)
    second._register_backend(torch.device("cpu"), kind, backend)
    second._set_group_name(name)
    bindings._unregister_process_group(cast(Any, name))  # one may remain from a destroyed default group
    bindings._register_process_group(cast(Any, name), second)
    return cast(dist.ProcessGroup, second)


def premultiplied_sum(factor: float) -> Any:
    """Return NCCL's reduction that multiplies by `factor` first; it has no public name before 2.13."""
    op: Any = dist.ReduceOp.PREMUL_SUM
    return op(factor) if callable(op) else dist._make_nccl_premul_sum(factor)  # type: ignore[attr-defined]


# The default process group's store; raises ValueError if there is no group.
default_store: Callable[[], Store] = c10d._get_default_store


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return the time for which a collective of `group` waits for other ranks."""
    backend: Any = group._get_backend(group._device_types[0])
    try:
        return cast(timedelta, backend.options._timeout)
    except (AttributeError, RuntimeError):  # it has none, which backends of other libraries need not
        return c10d._get_default_timeout(cast(Any, dist.get_backend(group)))


# checkpoint.living: the number of a process group is among the keys by which its ranks find each other.
def number_groups_anew() -> None:
    """Count process groups from 0 again, as one that failed was counted too. No group may exist."""
    c10d._world.group_count = 0


# checkpoint.living: ranks connect within seconds, or not at all; what they send may take longer. torch has a
# public function since 2.15. Its "nccl" backend there lacks `_set_default_timeout`, which gloo and the older
# NCCL backend have on every release.
def set_timeout(group: dist.ProcessGroup | None, timeout: timedelta) -> None:
    """Set how long collectives of `group` (the default group if None) wait for other ranks."""
    group = group or c10d._get_default_group()
    for device in group._device_types:
        backend: Any = group._get_backend(device)
        older = getattr(backend, "_set_default_timeout", None)
        (older or backend.set_timeout)(timeout)


def follow_timeout(group: dist.ProcessGroup) -> None:
    """Give a mesh's group the default group's timeout if it has torch's default timeout."""
    # Torch's default depends on the backend: 10 minutes over NCCL, else 30.
    whole = c10d._get_default_group()
    if group is whole:
        return
    default = c10d._get_default_timeout(cast(Any, dist.get_backend(group)))
    if timeout_of(group) == default:
        set_timeout(group, timeout_of(whole))


def use_symmetric_memory(backend: str) -> None:
    """Choose the backend that allocates symmetric memory; torch has no public module for it."""
    from torch.distributed import _symmetric_memory

    _symmetric_memory.set_backend(cast(Any, backend))


def symmetric_empty(numel: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup) -> Tensor:
    """Return an uninitialised tensor registered with every rank of `group`. Collective."""
    from torch.distributed import _symmetric_memory

    tensor = _symmetric_memory.empty(numel, dtype=dtype, device=device)
    _symmetric_memory.rendezvous(tensor, group=group)
    return tensor


# Collectives that autograd and compilers can trace have no public module.
exchange: Callable[[Tensor, list[int], list[int], dist.ProcessGroup], Tensor] = all_to_all_single_autograd
