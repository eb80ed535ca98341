"""Count the collectives a piece of code issues: how many, of what kind, how many bytes.

    with CommCounter() as counter:
        model(batch).sum().backward()
    counter.count("all_gather"), counter.bytes("reduce_scatter"), counter.wire_bytes()

Collectives are seen as they pass torch's operator dispatcher, so any implementation counts alike:
torch.distributed's functions, functional collectives, tensor subclasses, a compiled graph, on any
backend, from forward or from backward. Values are never touched.

Not seen: what threads started by the user issue (a counter belongs to one thread and the backward
passes it starts), calls on a `Backend` object instead of a `ProcessGroup`, symmetric-memory
kernels, and the replay of a captured CUDA graph. Operators take a detour through Python meanwhile,
so nothing timed under a counter is meaningful.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardwise._compat import FakeTensor, TorchDispatchMode, resolve_process_group


@dataclass(frozen=True)
class Collective:
    """One call of a collective, as the calling rank sees it."""

    kind: str  # "all_gather", "reduce_scatter", "all_reduce", "broadcast", "send", "recv", ...
    bytes: int  # of the full buffer: all shards of a gather or scatter together
    dtype: torch.dtype | None  # of the first tensor; None if the call moves no tensor
    group_size: int

    @property
    def wire_bytes(self) -> int:
        """Bytes this rank sends in the ideal algorithm, rounded up; see `CommCounter.wire_bytes`."""
        sent = self.bytes * _SENT_SHARE.get(self.kind, _everything)(self.group_size)
        return -(-sent.numerator // sent.denominator)


def _ring(n: int) -> Fraction:
    return Fraction(n - 1, n)


def _everything(n: int) -> Fraction:
    return Fraction(1)


_SENT_SHARE: dict[str, Callable[[int], Fraction]] = {
    "all_gather": _ring,
    "reduce_scatter": _ring,
    "all_reduce": lambda n: 2 * _ring(n),
    "all_to_all": _ring,
    "gather": _ring,
    "scatter": _ring,
    "broadcast": lambda n: Fraction(int(n > 1)),
    "reduce": lambda n: Fraction(int(n > 1)),
    "recv": lambda n: Fraction(0),
}


class _Form(NamedTuple):
    kind: str
    argument: int | None  # position of the tensors that hold the bytes
    per_rank: bool = False  # those tensors are one rank's share of the full buffer


_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "_dtensor")
_NOT_COLLECTIVE = ("wait_tensor", "_wrap_tensor_autograd", "check_for_nan", "mesh_get_process_group")

_NATIVE = {  # operators of torch.ops.c10d
    "allreduce_": _Form("all_reduce", 0),
    "allreduce_coalesced_": _Form("all_reduce", 0),
    "_allgather_base_": _Form("all_gather", 0),
    "allgather_": _Form("all_gather", 0),
    "allgather_coalesced_": _Form("all_gather", 0),
    "allgather_into_tensor_coalesced_": _Form("all_gather", 0),
    "_reduce_scatter_base_": _Form("reduce_scatter", 1),
    "reduce_scatter_": _Form("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": _Form("reduce_scatter", 1),
    "broadcast_": _Form("broadcast", 0),
    "reduce_": _Form("reduce", 0),
    "gather_": _Form("gather", 1, per_rank=True),
    "scatter_": _Form("scatter", 0, per_rank=True),
    "alltoall_": _Form("all_to_all", 1),
    "alltoall_base_": _Form("all_to_all", 1),
    "send": _Form("send", 0),
    "recv_": _Form("recv", 0),
    "recv_any_source_": _Form("recv", 0),
    "barrier": _Form("barrier", None),
    "monitored_barrier_": _Form("barrier", None),
}

# operators of torch.ops._c10d_functional and its kin, without "_coalesced", "_out" and a last "_"
_FUNCTIONAL = {
    "all_reduce": _Form("all_reduce", 0),
    "all_gather_into_tensor": _Form("all_gather", 0, per_rank=True),
    "reduce_scatter_tensor": _Form("reduce_scatter", 0),
    "all_to_all_single": _Form("all_to_all", 0),
    "broadcast": _Form("broadcast", 0),
    "isend": _Form("send", 0),
    "irecv": _Form("recv", 0),
    "shard_dim_alltoall": _Form("all_to_all", 0),  # of torch.ops._dtensor
}


def _collectives(name: str, args: tuple[Any, ...], *, native: bool) -> Iterator[Collective]:
    if name == "batch_p2p_ops":  # (operators, peers, tags, tensors, group name)
        for operator, tensor in zip(args[0], args[3], strict=True):
            yield from _collectives(operator, (tensor, args[-1]), native=False)
        return
    if native:
        form, group_size = _NATIVE.get(name), _boxed_group_size(args)
    else:
        base = name.removesuffix("_").removesuffix("_out").removesuffix("_coalesced")
        form, group_size = _FUNCTIONAL.get(base), _named_group_size(args[-1])
    # An operator that torch adds later is still counted, under its own name.
    kind, argument, per_rank = form or _Form(name.strip("_"), 0)
    tensors = [] if argument is None else list(_tensors(args[argument]))
    size = sum(t.numel() * t.element_size() for t in tensors)
    dtype = tensors[0].dtype if tensors else None
    yield Collective(kind, bytes=size * group_size if per_rank else size, dtype=dtype, group_size=group_size)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _boxed_group_size(args: tuple[Any, ...]) -> int:
    """The process group is the first boxed object among a native operator's arguments."""
    boxed = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
    return dist.ProcessGroup.unbox(boxed).size()


def _named_group_size(group: Any) -> int:
    """A functional operator's last argument is its group's name, or, in the older form, its size."""
    return group if isinstance(group, int) else resolve_process_group(group).size()


def _issues_its_own(kind: type[torch.Tensor]) -> bool:
    """Does this tensor class implement operators itself, perhaps with collectives? (Fake tensors cannot.)"""
    inherited = kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return not inherited and not issubclass(kind, FakeTensor)


class CommCounter(TorchDispatchMode):
    """Records in `calls`, in order, every collective its thread issues while it is entered.

    Not collective: a counter on one rank counts that rank's calls. A coalesced call counts once,
    with the bytes of all its tensors. Counters nest, each counting everything within it.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Collective] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays compiled under a counter; by default torch would run it eagerly."""
        return True

    def count(self, kind: str) -> int:
        """Number of calls of `kind`."""
        return sum(call.kind == kind for call in self.calls)

    def bytes(self, kind: str | None = None) -> int:
        """Full-buffer bytes of the calls of `kind`, or of all."""
        return sum(call.bytes for call in self.calls if kind in (None, call.kind))

    def wire_bytes(self, kind: str | None = None) -> int:
        """Bytes this rank sends for the calls of `kind`, or for all, in the ideal ring algorithm.

        On n ranks a ring moves (n-1)/n of the full buffer for an all-gather or a reduce-scatter
        and twice that for an all-reduce, the least any algorithm can (Patarasuk and Yuan,
        "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009; nccl-tests'
        PERFORMANCE.md has the factors for the other kinds). A send counts whole, a recv nothing.
        """
        return sum(call.wire_bytes for call in self.calls if kind in (None, call.kind))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        namespace, _, name = func.name().partition("::")
        name = name.partition(".")[0]
        if namespace in _NAMESPACES and name not in _NOT_COLLECTIVE:
            self.calls.extend(_collectives(name, args, native=namespace == "c10d"))
        elif any(_issues_its_own(kind) for kind in types):
            return NotImplemented  # the subclass goes on, with this counter active
        return func(*args, **(kwargs or {}))
