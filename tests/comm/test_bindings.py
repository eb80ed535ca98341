"""What goes to bindings that only CUDA builds of torch have, held against the signatures that they state.

`make bindings TORCH=2.15.0` installs such a build and runs this file; no GPU is needed. Where a call needs
no GPU it is made. Where its object cannot be made without one, a stand-in takes our call and binds it to
the signature in the binding's docstring. The rest is called until it finds no driver, which comes after its
arguments were read: a wrong one is a TypeError.
"""

from __future__ import annotations

import datetime
import inspect
import re
import typing
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory

from shardwise import _compat
from shardwise.comm import api, foreach
from shardwise.comm.agree import device_of
from shardwise.comm.api import SymmetricAllGather
from shardwise.comm.arithmetic import divide_factors
from shardwise.comm.streams import CommStreams, record_event
from shardwise.planner.calibrate import _context_bytes, _device_name, _memory_bytes, _wait

pytestmark = pytest.mark.skipif(not dist.is_nccl_available(), reason="torch was built without NCCL")

GPU = torch.device("cuda", 0)
# From 2.14 on there are several, and which one the name "nccl" gives depends on the release.
BACKENDS = [name for name in dir(dist) if name.startswith("ProcessGroupNCCL")] or ["none"]


def signatures(binding: Any) -> Iterator[inspect.Signature]:
    """Those that pybind11 wrote into the docstring, one for each overload."""
    name = re.escape(binding.__name__)
    for arguments in re.findall(rf"^(?:\d+\. )?{name}\((.*)\) -> ", binding.__doc__ or "", re.M):
        arguments = re.sub(r"<[^<>]* object at \w+>", "...", arguments)  # defaults
        arguments = re.sub(r"\w+(?:::\w+)+", "object", arguments)  # classes that Python has no name for
        made: dict[str, Any] = {}
        exec(f"from __future__ import annotations\ndef call({arguments}): ...", vars(datetime) | NAMES, made)
        yield inspect.signature(made["call"])


NAMES = {"torch": torch, "typing": typing, "datetime": datetime, "Tuple": tuple}


def fits(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Does a call bind to `signature`, with arguments of its types?"""
    try:
        bound = signature.bind(*args, **kwargs).arguments
    except TypeError:
        return False
    kinds = {name: eval(signature.parameters[name].annotation, NAMES) for name in bound if name != "self"}
    return all(isinstance(bound[name], typing.get_origin(kind) or kind)
               if isinstance(kind, type(tuple[int])) else isinstance(bound[name], kind)
               for name, kind in kinds.items())  # fmt: skip


class StandIn:
    """For an object of a binding's class, or the class: it has what that has, and takes what that takes."""

    def __init__(self, of: Any, **returns: Any) -> None:
        self.of, self.returns, self.calls = of, returns, []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.of, name)  # AttributeError, where the binding has no such name
        return partial(self._call, found) if callable(found) else self.returns[name]

    def _call(self, binding: Any, *args: Any, **kwargs: Any) -> Any:
        known = list(signatures(binding))
        assert known, f"no signature in the docstring of {binding}"
        whole = [(self, *args) if "self" in one.parameters else args for one in known]
        if not any(fits(one, args, kwargs) for one, args in zip(known, whole, strict=True)):
            raise TypeError(f"{binding.__name__} got {args} {kwargs}; it takes one of {[*map(str, known)]}")
        self.calls.append((binding.__name__, args, kwargs))
        return self.returns.get(binding.__name__)


_NO_GPU = r"CUDA driver|NVIDIA driver|doesn't support create a new Stream"


def reaches_the_driver(call: Callable[[], object]) -> None:
    """Its arguments were taken: it returns, or it finds no driver where there is no GPU.

    torch 2.12 finds no stream where an earlier test's fake tensors put a guard of theirs in CUDA's place.
    """
    try:
        call()
    except RuntimeError as error:
        if torch.cuda.is_available() or not re.search(_NO_GPU, str(error)):
            raise


def group_over(backend: str, timeout: datetime.timedelta) -> StandIn:
    """A process group's stand-in whose backend is one too, with real options."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    behind = StandIn(
        getattr(dist, backend), options=options, supports_tensor_alloc=True, allocate_tensor=torch.empty(12)
    )
    return StandIn(dist.ProcessGroup, _get_backend=behind, _device_types=[torch.device("cuda")])


def test_the_check_refuses_calls_that_a_binding_does() -> None:
    behind = StandIn(dist.ProcessGroupNCCL)
    behind.allocate_tensor(3, dtype=torch.float32, device=GPU)
    for args, kwargs in (
        ((3, torch.float32), {"device": GPU}),
        ((3,), {"dtype": torch.float32}),
        (("3",), {"dtype": torch.float32, "device": GPU}),
        ((3,), {"dtype": torch.float32, "device": GPU, "stream": 0}),
    ):
        with pytest.raises(TypeError, match="allocate_tensor got"):
            behind.allocate_tensor(*args, **kwargs)
    with pytest.raises(AttributeError):
        _ = behind.no_such_method


@pytest.mark.parametrize("async_op", [False, True])
def test_collectives_pass_what_a_process_group_takes(async_op: bool) -> None:
    group: Any = StandIn(dist.ProcessGroup)
    whole, shard = torch.empty(4), torch.empty(2)
    api.DefaultAllGather()(whole, shard, group, async_op)
    _, args, _ = group.calls.pop()
    assert args[0] is whole
    assert args[1] is shard
    assert args[2].asyncOp == async_op
    for factor in (None, 2.0, 10.0):
        op = premultiplied(factor).reduce_scatter_op
        api.DefaultReduceScatter()(shard, whole, group, op, async_op)
        _, args, _ = group.calls.pop()
        assert args[0] is shard
        assert args[1] is whole
        assert args[2].asyncOp == async_op
        assert args[2].reduceOp == op


def premultiplied(factor: float | None) -> Any:
    return divide_factors(
        shard_size=2, replicate_size=1, reduce_dtype=torch.float32, backend="nccl", factor=factor
    )


def test_a_premultiplied_sum_is_made() -> None:
    made = premultiplied(10.0).reduce_scatter_op
    assert isinstance(made, dist.ReduceOp)
    assert made == dist.ReduceOp.PREMUL_SUM
    assert premultiplied(2.0).reduce_scatter_op == dist.ReduceOp.AVG


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [api.ProcessGroupAllocAllGather, api.ProcessGroupAllocReduceScatter])
def test_buffers_are_asked_of_the_backend(backend: str, kind: Any) -> None:
    group = group_over(backend, datetime.timedelta(minutes=5))
    assert kind(group).allocate((3, 4), dtype=torch.bfloat16, device=GPU).shape == (3, 4)
    names = [name for name, *_ in group._get_backend(GPU).calls]
    assert names == ["supports_tensor_alloc", "allocate_tensor"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_timeout_is_read_and_set_and_followed(backend: str) -> None:
    default = dist.distributed_c10d.default_pg_nccl_timeout
    whole, part = (group_over(backend, wait) for wait in (datetime.timedelta(minutes=2), default))
    assert _compat.timeout_of(part) == default
    with (
        mock.patch.object(dist.distributed_c10d, "_get_default_group", return_value=whole),
        mock.patch.object(dist, "get_backend", return_value="nccl"),
    ):
        _compat.follow_timeout(part)
        _compat.set_timeout(None, datetime.timedelta(seconds=7))
    told = [*part.calls, *part._get_backend(GPU).calls]
    assert [args[-1].total_seconds() for name, args, _ in told if "timeout" in name] == [120]
    told = [*whole.calls, *whole._get_backend(GPU).calls]
    assert [args[-1].total_seconds() for name, args, _ in told if "timeout" in name] == [7]


def test_symmetric_memory_is_chosen_allocated_and_registered() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group, memory = dist.group.WORLD, torch.empty(6)
        stream = torch.Stream(stream_id=0, device_index=0, device_type=1)  # CUDA's default one
        with mock.patch.object(dist, "get_backend_config", return_value="cpu:gloo,cuda:nccl"):
            gather = SymmetricAllGather(group, "NCCL", GPU)
        assert _symmetric_memory.get_backend(GPU) == "NCCL"
        binding = StandIn(_symmetric_memory._SymmetricMemory, empty_strided_p2p=memory)
        with (
            mock.patch.object(_symmetric_memory, "_SymmetricMemory", binding),
            # A pool of memory is made on the device first, on releases that have one.
            mock.patch.object(_symmetric_memory, "_should_use_implicit_mempool", bool, create=True),
            mock.patch.object(torch.accelerator, "current_stream", return_value=stream),
        ):
            given = gather.allocate((2, 3), dtype=torch.float32, device=GPU)
            assert given.data_ptr() == memory.data_ptr()
        made, registered = binding.calls
        assert made == ("empty_strided_p2p", ((6,), (1,), torch.float32, GPU), {})
        assert registered[0] == "rendezvous"
        assert registered[1][0] is memory
        assert registered[1][1] == group.group_name
        if not torch.cuda.is_available():  # else all ranks register, of which a gloo group has none
            reaches_the_driver(lambda: gather.allocate((5,), dtype=torch.float32, device=GPU))
    finally:
        dist.destroy_process_group()


def test_streams_and_events_are_asked_as_they_take_it() -> None:
    stream = torch.Stream(stream_id=0, device_index=0, device_type=1)  # CUDA's default one
    streams = CommStreams(stream, stream, stream, stream)
    streams.wait(torch.Event(device="cuda"))
    reaches_the_driver(lambda: CommStreams.create(GPU))
    reaches_the_driver(lambda: record_event(stream))
    reaches_the_driver(lambda: foreach.current_stream(GPU))


@pytest.mark.parametrize("ask", [_wait, _device_name, _memory_bytes, _context_bytes])
def test_a_device_is_asked_as_its_module_takes_it(ask: Callable[[torch.device], object]) -> None:
    reaches_the_driver(lambda: ask(GPU))


@pytest.mark.parametrize("backend", ["nccl", "nccl2", "nccl-lazy"])
def test_what_ranks_tell_each_other_is_on_the_device_of_their_backend(backend: str) -> None:
    with mock.patch.object(dist, "get_backend_config", return_value=f"cuda:{backend}"):
        reaches_the_driver(lambda: device_of(mock.Mock()))
    with mock.patch.object(dist, "get_backend_config", return_value=f"cpu:gloo,cuda:{backend}"):
        assert device_of(mock.Mock()) == torch.device("cpu")
