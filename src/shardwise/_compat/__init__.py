"""Every private torch name this library uses, for torch 2.12 to 2.15, each with its reason.

Nothing else in the package may touch a torch name that starts with an underscore. A name that
torch moves or renames is fixed here, once.
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter, methodcaller
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

# Options of the process group's own collectives (below), exported nowhere else.
from torch._C._distributed_c10d import AllgatherOptions, PrefixStore, ReduceScatterOptions

# comm.count: the one subclass that cannot run below an active mode that yields to it.
# hf.generate: a model that has shapes and no memory.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed import distributed_c10d as c10d

# checkpoint.write: ranks send where they wrote as text, and the index is pickled with this record.
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

# DTensor's description of itself. There is no public way to wrap a local tensor of uneven size
# as a DTensor without a collective that asks the other ranks for their sizes.
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

# planner.watch: it runs operators on tensors of whole size to learn shapes, once for each kind.
from torch.distributed.tensor._sharding_prop import ShardingPropagator

# A dim cut by tensor parallelism first and by data parallelism second: the order of its pieces
# is not expressible with public placements.
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

# comm.count: seeing every operator that a thread issues has no public hook.
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise._compat.compiler import *
from shardwise._compat.device import *
from shardwise._compat.fakes import EagerDispatchMode as EagerDispatchMode
from shardwise._compat.fakes import FastFakeTensorMode as FastFakeTensorMode
from shardwise._compat.fakes import operators_on_cpu as operators_on_cpu
from shardwise._compat.gradients import *
from shardwise._compat.groups import *
from shardwise._compat.inductor import *
from shardwise._compat.optimizers import *
from shardwise._compat.recurrent import cudnn_layers as cudnn_layers

# Returns a local tensor as this rank's piece of the DTensor that a spec describes; no communication. Unlike
# `from_local` it is not under autograd. `__init__` is skipped: its three wrappers cost more than `__new__`.
dtensor: Callable[..., DTensor] = functools.partial(DTensor.__new__, DTensor, requires_grad=False)
# planner.record: CUDA's kernel for values of another width than keys; the CPU's public function never runs it
efficient_attention: Any = torch.ops.aten._scaled_dot_product_efficient_attention


def dtensor_at(local: Tensor, spec: DTensorSpec, *, begin: Tensor, requires_grad: bool = False) -> DTensor:
    """Return a DTensor, as `dtensor` does, over a part of a buffer."""
    # The wrapper inherits its tensor's storage offset, and torch neither copies nor saves a wrapper with an
    # offset. So it is first made over `begin`, any tensor of the same dtype and device without an offset.
    wrapper = dtensor(begin, spec, requires_grad=requires_grad)
    wrapper._local_tensor = local
    return wrapper


def dtensor_parameter(local: Tensor, spec: DTensorSpec, *, requires_grad: bool) -> nn.Parameter:
    """Make a parameter that is a DTensor; `nn.Parameter(...)` dispatches a detach, ten times as slow."""
    begin = torch.empty(0, dtype=local.dtype, device=local.device)
    param = dtensor_at(local, spec, begin=begin, requires_grad=requires_grad)
    param._is_param = True  # what nn.Parameter sets on a tensor subclass, and isinstance reads
    return cast(nn.Parameter, param)


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    stride = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        stride[d] = stride[d + 1] * max(1, shape[d + 1])
    return tuple(stride)


_specs: weakref.WeakValueDictionary[Any, DTensorSpec] = weakref.WeakValueDictionary()


def shared_spec(mesh: DeviceMesh, placements: Sequence[Placement], meta: TensorMeta | None) -> DTensorSpec:
    """Return the description that all equal DTensors share."""
    # DTensor looks operations up by their arguments' descriptions, and compares different objects field by
    # field: 8 Python calls per operation and tensor.
    # A live description keeps its mesh alive, so the mesh's id is not reused.
    key = (id(mesh), tuple(placements), meta)
    spec = _specs.get(key)
    if spec is None:
        spec = _specs[key] = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    return spec


def dtensor_spec(
    mesh: DeviceMesh, placements: Sequence[Placement], *, shape: torch.Size, dtype: torch.dtype
) -> DTensorSpec:
    """Return the description of contiguous DTensors of global `shape` and `dtype`."""
    return shared_spec(mesh, placements, TensorMeta(shape, contiguous_stride(shape), dtype))


def spec_as(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    """Return the description of DTensors like those of `spec`, but of another dtype."""
    meta = spec.tensor_meta
    assert meta is not None
    return shared_spec(spec.mesh, spec.placements, TensorMeta(meta.shape, meta.stride, dtype))


# A DTensor's description, and this rank's part of it with no call in Python; `to_local` runs under autograd.
spec_of: Callable[[Tensor], DTensorSpec] = attrgetter("_spec")
local_tensor: Callable[[Tensor], Tensor] = attrgetter("_local_tensor")


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor; a plain tensor as it is. No communication."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def set_local_tensor(tensor: Tensor, local: Tensor) -> None:
    """Move a DTensor's piece to other memory; the parameter object must stay the same."""
    cast(DTensor, tensor)._local_tensor = local


def concatenate_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Return one mesh with the dims of several sub-meshes of a common mesh; also under fake tensors."""
    with unset_fake_temporarily():  # as slicing a mesh does
        return DeviceMesh._concatenate(meshes)


# Returns a 1-D mesh, of that name, over all ranks of a mesh; creates a process group (collective).
flatten_mesh: Callable[[DeviceMesh, str], DeviceMesh] = DeviceMesh._flatten

# ProcessGroup's own methods skip the Python of `dist.all_gather_into_tensor`, whose name is
# also deprecated in 2.13 (a warning per call), while its successor is missing before.
_gather_of: Callable[[dist.ProcessGroup], Callable[..., Any]] = attrgetter(
    "all_gather_single" if hasattr(dist.ProcessGroup, "all_gather_single") else "_allgather_base"
)
_scatter_of: Callable[[dist.ProcessGroup], Callable[..., Any]] = attrgetter(
    "reduce_scatter_single" if hasattr(dist.ProcessGroup, "reduce_scatter_single") else "_reduce_scatter_base"
)


_GATHER_OPTIONS = {False: AllgatherOptions(), True: AllgatherOptions()}
for _async_op, _options in _GATHER_OPTIONS.items():
    _options.asyncOp = _async_op

# By id of the op, which is kept alive: its own hash and equality are slow.
_SCATTER_OPTIONS: dict[tuple[int, bool], tuple[ReduceScatterOptions, Any]] = {}


def all_gather_single(
    output: Tensor, input: Tensor, group: dist.ProcessGroup, *, async_op: bool
) -> dist.Work | None:
    """Gather every rank's `input` into `output` (1-D, ranks x input). Collective over `group`."""
    if output.dtype.is_complex:  # which gloo's own method refuses
        output, input = torch.view_as_real(output), torch.view_as_real(input)
    work: dist.Work | None = _gather_of(group)(output, input, _GATHER_OPTIONS[async_op])
    if work is None or async_op:  # NCCL returns none for a synchronous collective
        return work
    work.wait()
    return None


def reduce_scatter_single(
    output: Tensor, input: Tensor, op: Any, group: dist.ProcessGroup, *, async_op: bool
) -> dist.Work | None:
    """Reduce `input`s, and write this rank's slice to `output`. Collective over `group`."""
    try:
        entry = _SCATTER_OPTIONS[id(op), async_op]
    except KeyError:
        options = ReduceScatterOptions()
        options.reduceOp = op
        options.asyncOp = async_op
        entry = _SCATTER_OPTIONS[id(op), async_op] = (options, op)
    work: dist.Work | None = _scatter_of(group)(output, input, entry[0])
    if work is None or async_op:  # NCCL returns none for a synchronous collective
        return work
    work.wait()
    return None


# Pads, chunks and concatenates in one kernel on accelerators; there is no public name for it.
chunk_cat: Callable[..., Tensor] = torch._chunk_cat


def is_fake(tensor: Tensor) -> bool:
    """Return whether `tensor` has a shape but no memory."""
    return isinstance(tensor, FakeTensor)


@contextmanager
def fakes_convert() -> Iterator[None]:
    """Let modules of fake tensors be cast: parameters are replaced, and shared ones stay shared."""
    # `nn.Module._apply` swaps fakes in place, and fails, as torch keeps weak references to them.
    converted: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # the first is kept: its id is not reused

    def apply(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for child in module.children() if recurse else ():
            child._apply(fn)
        for name, p in module._parameters.items():
            while p is not None and id(p) in converted:
                p = converted[id(p)][1]
            if p is not None and (cast := fn(p.detach())).dtype != p.dtype:
                converted[id(p)] = (p, nn.Parameter(cast, p.requires_grad))
                p = converted[id(p)][1]
            module._parameters[name] = p
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else fn(buffer)
        return module

    with mock.patch.object(nn.Module, "_apply", apply):
        yield


# Whether a tensor is zeros without memory, as autograd makes for zero derivatives.
is_lazily_zero: Callable[[Tensor], bool] = methodcaller("_is_zerotensor")

# One kernel for many tensors where the device has one; foreach functions have no public names.
foreach_copy: Callable[[Sequence[Tensor], Sequence[Tensor]], None] = torch._foreach_copy_  # type: ignore[assignment]
foreach_mul: Callable[[Sequence[Tensor], Tensor], None] = torch._foreach_mul_  # type: ignore[assignment]
foreach_norm: Callable[[Sequence[Tensor], float, torch.dtype], Sequence[Tensor]] = torch._foreach_norm  # type: ignore[assignment]

# The version that autograd compares, when it reads a saved tensor, with the version saved; and sets it.
version_of: Callable[[Tensor], int] = attrgetter("_version")
set_versions: Callable[[tuple[Tensor, ...], tuple[int, ...]], None] = (
    torch._C._autograd._unsafe_set_version_counter
)

# As if each tensor was changed in place; `torch.autograd.graph.increment_version` without its Python, at a
# sixth of the cost of setting.
increment_versions: Callable[[tuple[Tensor, ...]], None] = torch._C._increment_version


def explain_backward_errors(explain: Callable[[Exception], Exception | None]) -> None:
    """Call `explain` with each error that backward raises; raise the better error that it returns, if any."""
    # Errors inside autograd's engine reach no hook, only the patched function, which every backward calls.
    from torch.autograd import graph

    run = graph._engine_run_backward

    @functools.wraps(run)
    def run_and_explain(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except Exception as error:
            better = explain(error)
            if better is None:
                raise
            raise better from error

    cast(Any, graph)._engine_run_backward = cast(Any, torch.autograd)._engine_run_backward = run_and_explain


# Read once a pass, so that profiles get named ranges and other passes pay nothing for them.
profiler_runs: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]

# Which backward pass autograd runs in this thread, -1 outside. (Activation checkpointing recomputes there.)
backward_pass: Callable[[], int] = torch._C._current_graph_task_id


def in_backward() -> bool:
    return backward_pass() != -1


# Runs a function once when the current backward pass has finished.
queue_backward_callback: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)


def storage_id(tensor: Tensor) -> int:
    """Identify a tensor's storage; a DTensor's wrapper has its own, changed by `data = ...` and swaps."""
    return cast(int, tensor.untyped_storage()._cdata)


def mark_fully_sharded(module: nn.Module) -> None:
    """Make torch's `replicate`, applied to a module around this one, skip this module's parameters."""
    # `replicate` looks for a mark under a key drawn anew in each process; there is no public way to set it.
    # The file that has the key was loaded with the state dict helpers that are extended below.
    contract: Any = sys.modules.get("torch.distributed._composable.contract")
    if contract is not None:
        registry = module.__dict__.setdefault(contract.REGISTRY_KEY, OrderedDict())
        registry["fully_shard"] = contract.RegistryItem()


def hook_state_dicts(
    module: nn.Module, key: Any, *, before: Callable[..., None], after_loading: Callable[..., None]
) -> None:
    """Call `before` when the module's state dict is taken or loaded, `after_loading` after it is loaded."""
    # torch's functions that register hooks make handles and wrap the hooks: half of the cost.
    module._state_dict_pre_hooks[key] = module._load_state_dict_pre_hooks[key] = before
    module._load_state_dict_post_hooks[key] = after_loading


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return a module's own dict of parameters by name: switching one is a single assignment."""
    # `setattr` would repeat checks that both sides of the switch have already passed.
    return module._parameters


# sharded_tensor.rows: a tensor with a shape, dtype and device but no memory of its own.
make_wrapper: Callable[..., Any] = Tensor._make_wrapper_subclass


def allow_foreach(*types: type[Tensor]) -> None:
    """Let optimizers choose foreach for parameters of these types, as torch does for DTensor."""
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    for supported in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
        supported.extend(kind for kind in types if kind not in supported)


# The process group of torch's deprecated ShardedTensor, which has no public name for it.
group_of_sharded_tensor: Callable[[Any], Any] = attrgetter("_process_group")

# optim: gradients that are views of one buffer are processed as that buffer. None if not a view.
base_of: Callable[[Tensor], Tensor | None] = attrgetter("_base")


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return `function.apply` without its support of `torch.func`, for use if `transforms_run` is False."""
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


# sharded_tensor: nn.Module.to asks it whether a parameter may take other memory and stay the same object.
has_compatible_shallow_copy_type: Any = torch._has_compatible_shallow_copy_type

# sharded_tensor: operations on lists of tensors, as optimizers call them with foreach=True.
foreach_functions: dict[str, Any] = {
    name.removeprefix("_foreach_"): getattr(torch, name)
    for name in dir(torch)
    if name.startswith("_foreach_")
}


# tensor_parallel: the functional collectives as they appear in graphs.
functional_collectives: Any = torch.ops._c10d_functional


def is_operator(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload)


def schema(target: Any) -> Any | None:
    return target._schema if is_operator(target) else None


def forget_placements() -> None:
    """Empty both caches of DTensor's look-ups; torch's own helper imports its compiler: half a second."""
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()


@contextmanager
def _own_placements(*, of_a_rank: bool) -> Iterator[None]:
    """Separate DTensor's operator look-ups in this context from those outside."""
    # A look-up finds the first of equal meshes, whose groups may be gone, or be a job's. With `of_a_rank`,
    # the look-ups outside are a job's, and are kept: a rank that lost them might send over the groups of a
    # second, equal mesh while others use the first. So meshes made here then equal none outside.
    if not of_a_rank:
        forget_placements()
        try:
            yield
        finally:
            forget_placements()
        return
    init, thread_id = DeviceMesh.__init__, -next(_simulations)

    def separate_init(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self._thread_id = thread_id  # meshes compare it, for tests whose ranks are threads

    with mock.patch.object(DeviceMesh, "__init__", separate_init):
        yield


_simulations = itertools.count(1)


@contextmanager
def no_process_groups() -> Iterator[None]:
    """Hide this process's groups, including the default one, and restore them afterwards."""
    # planner.noop_group: a plan may be made in a process that is a rank of a job. torch keeps one world per
    # process, in dicts that these properties expose.
    world = c10d._world
    tables: list[dict[Any, Any]] = [
        world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config,
        world.tags_to_pg, world.pg_to_tag, world.pg_coalesce_state,
    ]  # fmt: skip
    contents, default, count = [dict(table) for table in tables], world.default_pg, world.group_count
    for table in tables:
        table.clear()
    c10d._update_default_pg(None)
    hook = sys.excepthook  # each new default group wraps it
    try:
        with _own_placements(of_a_rank=default is not None):
            yield
    finally:
        for name in world.pg_names.values():
            c10d._unregister_process_group(name)  # type: ignore[attr-defined]
        for table, content in zip(tables, contents, strict=True):
            table.clear()
            table.update(content)
        c10d._update_default_pg(default)
        world.group_count = count  # names of later groups follow from it, and must be equal on ranks
        sys.excepthook = hook


def shapes_of_dtensors_unseen(watcher: Any) -> Any:
    """Return a patch that sets a watcher's `looks_away` while DTensor computes shapes."""
    name = "_propagate_tensor_meta_non_cached"
    original = getattr(ShardingPropagator, name)

    def unseen(*args: Any, **kwargs: Any) -> Any:
        previous, watcher.looks_away = watcher.looks_away, True
        try:
            return original(*args, **kwargs)
        finally:
            watcher.looks_away = previous

    return mock.patch.object(ShardingPropagator, name, unseen)
