"""Count the collectives that a piece of code issues: number, kinds, bytes.

    with CommCounter() as counter:
        model(batch).sum().backward()
    counter.count("all_gather"), counter.bytes("reduce_scatter"), counter.wire_bytes()

Collectives are counted as they pass torch's operator dispatcher, so any implementation counts equally:
torch.distributed's functions, functional collectives, tensor subclasses, a compiled graph, on any
backend, from forward or from backward. Values are never touched.

Not counted: collectives of threads that the user started (a counter belongs to one thread and the
backward passes it starts), calls on a `Backend` object instead of a `ProcessGroup`, symmetric-memory
kernels, and the replay of a captured CUDA graph. Under a counter, operators take a detour through Python,
so timings are not meaningful.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardwise._compat import FakeTensor, TorchDispatchMode, resolve_process_group
from shardwise.comm.kinds import NAMESPACES, NATIVE, Form, form_of, sent_bytes


@dataclass(frozen=True)
class Collective:
    """One call of a collective on the calling rank."""

    kind: str  # "all_gather", "reduce_scatter", "all_reduce", "broadcast", "send", "recv", ...
    bytes: int  # of the full buffer: all shards of a gather or scatter together
    dtype: torch.dtype | None  # of the first tensor; None if the call moves no tensor
    group_size: int

    @property
    def wire_bytes(self) -> int:
        """Bytes this rank sends in the ideal algorithm, rounded up; see `CommCounter.wire_bytes`."""
        return sent_bytes(self.kind, self.bytes, ranks=self.group_size)


def collectives(namespace: str, name: str, args: tuple[Any, ...]) -> Iterator[Collective]:
    """Yield the collectives that a call of the operator `namespace::name` issues."""
    if name == "batch_p2p_ops":  # (operators, peers, tags, tensors, group name)
        for operator, tensor in zip(args[0], args[3], strict=True):
            yield from collectives(namespace, operator, (tensor, args[-1]))
        return
    form = form_of(namespace, name)
    if form is None:
        return
    group: Any = args[-1]  # its name; in older torch, its size
    if namespace == NATIVE:
        group = dist.ProcessGroup.unbox(next(arg for arg in args if isinstance(arg, torch.ScriptObject)))
    elif not isinstance(group, int):
        group = resolve_process_group(group)
    yield collective(form, args, ranks=group if isinstance(group, int) else group.size())


def collective(form: Form, args: tuple[Any, ...], *, ranks: int) -> Collective:
    tensors = [] if form.argument is None else list(tensors_in(args[form.argument]))
    size = sum(t.numel() * t.element_size() for t in tensors)
    dtype = tensors[0].dtype if tensors else None
    return Collective(form.kind, bytes=size * ranks if form.per_rank else size, dtype=dtype, group_size=ranks)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def on_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return nested lists, tuples and dicts with `change` applied to every tensor in them."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)([on_tensors(item, change) for item in value])
    if isinstance(value, dict):
        return {key: on_tensors(item, change) for key, item in value.items()}
    return value


def _issues_its_own(kind: type[torch.Tensor]) -> bool:
    """Return whether a tensor class implements operators itself, perhaps with collectives."""
    inherited = kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return not inherited and not issubclass(kind, FakeTensor)


class CommCounter(TorchDispatchMode):
    """Records in `calls`, in order, every collective that its thread issues inside the context.

    Not collective: a counter on one rank counts that rank's calls. A coalesced call counts once,
    with the bytes of all its tensors. Counters nest, each counting everything within it.
    """

    # Else torch raises if a checkpoint or another higher-order operator is called under a counter.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Collective] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keep compiled code compiled under a counter; by default torch would run it eagerly."""
        return True

    def count(self, kind: str) -> int:
        """Return the number of calls of `kind`."""
        return sum(call.kind == kind for call in self.calls)

    def bytes(self, kind: str | None = None) -> int:
        """Return the full-buffer bytes of the calls of `kind`, or of all."""
        return sum(call.bytes for call in self.calls if kind in (None, call.kind))

    def wire_bytes(self, kind: str | None = None) -> int:
        """Return the bytes this rank sends for the calls of `kind`, or for all, in the ideal ring algorithm.

        On n ranks a ring moves (n-1)/n of the full buffer for an all-gather or a reduce-scatter
        and twice that for an all-reduce. A send counts whole, a recv nothing. See `comm.kinds`.
        """
        return sum(call.wire_bytes for call in self.calls if kind in (None, call.kind))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        namespace, _, name = func.name().partition("::")
        name = name.partition(".")[0]
        if namespace in NAMESPACES:
            self.calls.extend(collectives(namespace, name, args))
        elif any(_issues_its_own(kind) for kind in types):
            return NotImplemented  # the subclass continues, with this counter active
        return func(*args, **(kwargs or {}))
