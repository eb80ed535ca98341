"""Fake tensors in a third of the time: FakeTensorMode's own cache costs more than the operators do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise._compat.recurrent import FAKES

_WORDS = {bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
_SEQUENCES = {list, tuple, torch.Size}
_OWN = ("aten", "prims")
_NOT_FAKED = (torch.float32, torch.float16)  # of _grouped_mm, whose kernels take them


class _Unknown(Exception):  # noqa: N818
    """Raised for a value that cannot be part of a key."""


class _Result(NamedTuple):
    """A result's metadata, and the index of the input tensor that it is, or is a view of."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: Any
    dtype: torch.dtype
    device: torch.device
    same_as: int | None = None
    view_of: int | None = None


class _Uncompiled:
    """A mode without the wrapper that torch puts around a mode's dispatch to hide it from compilers."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class EagerDispatchMode(_Uncompiled, TorchDispatchMode):
    """A `TorchDispatchMode` that no compiler meets."""


class FastFakeTensorMode(_Uncompiled, FakeTensorMode):
    """A `FakeTensorMode` that looks up results of torch's own operators on its tensors by shapes.

    Calls that are new, that it cannot answer from shapes alone, or that change the shape of an argument
    (`t_`, `resize_`, an `out` of another size) are left to torch.
    """

    _results: ClassVar[dict[Any, tuple[type, list[_Result]] | None]] = {}

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._attributes: dict[torch.device, dict[str, Any]] = {}  # of all fake tensors of a device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors: list[Tensor] = []
        key = self._key(func, args, kwargs, tensors) if func.namespace in _OWN else None
        if key is None or not tensors:  # a result of no tensor may hold values
            return super().__torch_dispatch__(func, types, args, kwargs)
        if (entry := self._results.get(key)) is not None:
            kind, results = entry
            if kind is type(None):
                return None
            fakes = [self._recreate(result, tensors) for result in results]
            return fakes[0] if kind is FakeTensor else kind(fakes)
        if (fake := FAKES.get(func)) is not None:
            result: Any = fake(*args, **kwargs)
        elif func is torch.ops.aten._grouped_mm.default and args[0].dtype in _NOT_FAKED:
            halves = (*[arg.bfloat16() for arg in args[:2]], *args[2:])
            result = super().__torch_dispatch__(func, types, halves, kwargs)
            result = result.to(args[0].dtype)
        else:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        if key not in self._results:
            changes = torch.Tag.inplace_view in func.tags or key != self._key(func, args, kwargs, [])
            self._results[key] = None if changes else self._described(result, tensors)
        return result

    def _key(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """Return a key that determines a result's metadata, or None; add tensors to the list."""
        try:
            words = [self._word(arg, tensors) for arg in args]
            named = [(name, self._word(arg, tensors)) for name, arg in kwargs.items()]
        except _Unknown:
            return None
        return func, torch.get_default_dtype(), *words, *named

    def _word(self, value: Any, tensors: list[Tensor]) -> Any:
        kind: Any = type(value)
        if kind is FakeTensor:
            plain = value.fake_mode is self and value.constant is None and not value.dtype.is_complex
            if not plain or value.layout is not torch.strided:
                raise _Unknown
            tensors.append(value)
            return value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device
        if kind in _SEQUENCES:
            return kind, *[self._word(item, tensors) for item in value]
        if kind not in _WORDS:
            raise _Unknown
        return kind, value  # as 1 is True

    def _described(self, result: Any, tensors: list[Tensor]) -> tuple[type, list[_Result]] | None:
        """Return a description that recreates `result`; None if metadata do not suffice."""
        if result is None:  # it wrote to its arguments
            return type(result), []
        results = list(result) if type(result) in (list, tuple) else [result]
        storages = [t.untyped_storage()._cdata for t in tensors]
        entries = []
        for t in results:
            if type(t) is not FakeTensor or t.constant is not None or t.layout is not torch.strided:
                return None
            if t.dtype.is_complex or t.is_neg():
                return None
            storage = t.untyped_storage()
            same_as = next((i for i, tensor in enumerate(tensors) if tensor is t), None)
            entry = _Result(t.shape, t.stride(), t.storage_offset(), t.dtype, t.fake_device, same_as)
            if same_as is None and storage._cdata in storages[: len(tensors)]:
                entry = entry._replace(view_of=storages.index(storage._cdata))
            elif same_as is None and (t.requires_grad or not self._is_alone(t, entry, storages)):
                return None
            storages.append(storage._cdata)
            entries.append(entry)
        return type(result), entries

    def _is_alone(self, t: Tensor, entry: _Result, storages: list[int]) -> bool:
        """Return whether a tensor has memory of its own, no larger than it needs."""
        storage = t.untyped_storage()
        if storage._cdata in storages or entry.offset:
            return False
        return self._recreate(entry, []).untyped_storage().nbytes() == storage.nbytes()

    def _recreate(self, entry: _Result, tensors: list[Tensor]) -> Tensor:
        if entry.same_as is not None:
            return tensors[entry.same_as]
        with torch._C._DisableTorchDispatch():
            meta = torch.empty_strided(entry.shape, entry.stride, dtype=entry.dtype, device="meta")
            if entry.view_of is not None:
                meta.set_(tensors[entry.view_of].untyped_storage(), entry.offset, entry.shape, entry.stride)
        if entry.device not in self._attributes:
            first = FakeTensor(self, meta, entry.device)
            self._attributes[entry.device] = dict(vars(first))
            return first
        # As FakeTensor does it, without its checks, which take as long as all else here.
        options: Any = {"dispatch_device": True, "device_for_backend_keys": entry.device}
        fake = Tensor._make_subclass(FakeTensor, meta, False, **options)
        vars(fake).update(self._attributes[entry.device])
        return fake


@contextmanager
def operators_on_cpu(functions: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """Replace torch's composite operators by these functions on the CPU, for all callers."""
    # Replacing a module's name affects only callers that look it up there. A mode of torch functions, which
    # is off within torch's own functions, takes a quarter more of a plan's time. `Library` has no public end.
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name, function in functions.items():
            library.impl(name, function, "AutogradCPU")
        yield
