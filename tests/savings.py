"""What makes tests cheaper and changes nothing they see: fewer collections, less of torch's own work."""

from __future__ import annotations

import functools
import gc
import os
import sys
from datetime import timedelta
from typing import Any

COLLECTS_AT = 20_000, 10, 10  # objects: a tenth of what exporting or compiling a model takes was collections

_TESTS = 20
_left = [1, 0]  # tests until the next look for garbage, and how many modules there were at the last


def collect_seldom() -> None:
    """Collect garbage once in some tests; what stays, with what was imported, is not visited again."""
    _left[0] -= 1
    if not _left[0] or len(sys.modules) != _left[1]:
        _left[:] = [_TESTS, len(sys.modules)]
        gc.collect()
        gc.freeze()


def spend_less_in_torch() -> None:
    """Seed no accelerator where there is none, and look for differences between unequal tensors only.

    `torch.manual_seed` formats its caller's stack for each kind of device that may be there later: 3 ms.
    """
    import torch

    for device in (torch.cuda, torch.mtia, torch.xpu):
        if not device.is_available():
            device.manual_seed_all = _nothing
    assert_close = torch.testing.assert_close

    @functools.wraps(assert_close)
    def unless_equal(actual: Any, expected: Any, **how: Any) -> None:
        plain = all(type(one) is torch.Tensor and one.is_cpu for one in (actual, expected))
        if not plain or actual.dtype != expected.dtype or not torch.equal(actual, expected):
            assert_close(actual, expected, **how)

    torch.testing.assert_close = unless_equal
    _list_operators_once()
    # Guards are timed behind a flush of the caches of the processor: a twelfth of what compiling takes.
    for guards in (torch._C._dynamo.guards, sys.modules.get("torch._dynamo.guards")):
        if guards is not None:
            guards.profile_guard_manager = _in_no_time  # type: ignore[attr-defined]


def _list_operators_once() -> None:
    """Each decomposition of a program asks for all operators made of others, and overrides each: 0.1 s.

    Half of that is to ask, and to evaluate annotations of the function that overrides.
    """
    import torch
    from torch._export import utils
    from torch.export import exported_program

    collect = utils._collect_all_valid_cia_ops
    known: dict[Any, Any] = {}

    def collecting() -> Any:
        names = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
        key = len(names), len(torch.ops._dir)
        if key not in known:
            known[key] = collect()
        return known[key]

    for module in (utils, exported_program):
        module._collect_all_valid_cia_ops = collecting  # type: ignore[attr-defined]

    class Quick(type):
        __getitem__ = __or__ = __ror__ = lambda cls, _: cls

        def __instancecheck__(cls, value: Any) -> bool:
            return callable(value)

    torch._ops.Callable = Quick("Callable", (), {})  # type: ignore[misc]


def _nothing(seed: int) -> None:
    pass


def _in_no_time(*_: Any) -> float:
    return 0.0


def look_often() -> None:
    """Let ranks that wait look for the others every 0.1 s."""
    from shardwise.comm import watch

    watch._TICK = 0.1


def share_a_device() -> None:
    """Let all groups of gloo share a device: each has a thread that polls, as long as a group is alive."""
    import torch.distributed as dist
    from torch.distributed import ProcessGroupGloo, distributed_c10d

    device = ProcessGroupGloo.create_device(interface=os.environ["GLOO_SOCKET_IFNAME"])

    class OnOneDevice(ProcessGroupGloo):
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **other: Any) -> None:
            options = ProcessGroupGloo._Options()
            options._timeout, options._devices = timeout, [device]
            super().__init__(store, rank, size, options)

    dist.ProcessGroupGloo = distributed_c10d.ProcessGroupGloo = OnOneDevice  # type: ignore[misc]


def remember_shapes() -> None:
    """DTensor runs each operation on fake tensors, anew on each mesh, for shapes that depend on none."""
    import torch
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._sharding_prop import ShardingPropagator, detect_fake_mode

    propagate = ShardingPropagator._propagate_tensor_meta_non_cached
    known: dict[Any, Any] = {}

    def shapes(value: Any) -> Any:
        if isinstance(value, DTensorSpec):
            return value.tensor_meta
        if isinstance(value, (list, tuple)):
            return type(value), *map(shapes, value)
        return type(value), value

    def remembering(self: Any, schema: Any) -> Any:
        if detect_fake_mode() is not None:
            return propagate(self, schema)
        named = [(name, shapes(value)) for name, value in schema.kwargs_schema.items()]
        key = schema.op, torch.get_default_dtype(), shapes(schema.args_schema), *named
        if key not in known:
            known[key] = propagate(self, schema)
        return known[key]

    ShardingPropagator._propagate_tensor_meta_non_cached = remembering


def forget_meshes() -> None:
    """DTensor remembers what it worked out for a mesh, and each group kept alive has a thread that polls."""
    from torch.distributed.tensor import _collective_utils, _redistribute
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    from shardwise._compat import forget_placements

    forget_placements()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
    ShardingPropagator._propagate_tensor_meta_cached.cache_clear()
