"""Fake tensors in a third of the time: FakeTensorMode's own cache costs more than the operators do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

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
    same: int | None = None
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

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self._attributes: dict[torch.device, dict[str, Any]] = {}  # of all fake tensors of a device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors: list[Tensor] = []
        key = self._key(func, args, kwargs, tensors) if func.namespace in _OWN else None
        if key is None or not tensors:  # a result of no tensor may hold values
            return super().__torch_dispatch__(func, types, args, kwargs)
        if (found := self._results.get(key)) is not None:
            kind, results = found
            if kind is type(None):
                return None
            made = [self._made(one, tensors) for one in results]
            return made[0] if kind is FakeTensor else kind(made)
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype in _NOT_FAKED:
            halves = (*[one.bfloat16() for one in args[:2]], *args[2:])
            result: Any = super().__torch_dispatch__(func, types, halves, kwargs)
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
            words = [self._word(one, tensors) for one in args]
            named = [(name, self._word(one, tensors)) for name, one in kwargs.items()]
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
            return kind, *[self._word(one, tensors) for one in value]
        if kind not in _WORDS:
            raise _Unknown
        return kind, value  # as 1 is True

    def _described(self, result: Any, tensors: list[Tensor]) -> tuple[type, list[_Result]] | None:
        """Return a description that recreates `result`; None if metadata do not suffice."""
        if result is None:  # it wrote to its arguments
            return type(result), []
        results = list(result) if type(result) in (list, tuple) else [result]
        known = [one.untyped_storage()._cdata for one in tensors]
        found = []
        for one in results:
            if type(one) is not FakeTensor or one.constant is not None or one.layout is not torch.strided:
                return None
            if one.dtype.is_complex or one.is_neg():
                return None
            storage = one.untyped_storage()
            same = next((i for i, tensor in enumerate(tensors) if tensor is one), None)
            made = _Result(one.shape, one.stride(), one.storage_offset(), one.dtype, one.fake_device, same)
            if same is None and storage._cdata in known[: len(tensors)]:
                made = made._replace(view_of=known.index(storage._cdata))
            elif same is None and (one.requires_grad or not self._is_alone(one, made, known)):
                return None
            known.append(storage._cdata)
            found.append(made)
        return type(result), found

    def _is_alone(self, one: Tensor, made: _Result, known: list[int]) -> bool:
        """Return whether a tensor has memory of its own, no larger than it needs."""
        storage = one.untyped_storage()
        if storage._cdata in known or made.offset:
            return False
        return self._made(made, []).untyped_storage().nbytes() == storage.nbytes()

    def _made(self, one: _Result, tensors: list[Tensor]) -> Tensor:
        if one.same is not None:
            return tensors[one.same]
        with torch._C._DisableTorchDispatch():
            made = torch.empty_strided(one.shape, one.stride, dtype=one.dtype, device="meta")
            if one.view_of is not None:
                made.set_(tensors[one.view_of].untyped_storage(), one.offset, one.shape, one.stride)
        if one.device not in self._attributes:
            first = FakeTensor(self, made, one.device)
            self._attributes[one.device] = dict(vars(first))
            return first
        # As FakeTensor does it, without its checks, which take as long as all else here.
        how: Any = {"dispatch_device": True, "device_for_backend_keys": one.device}
        fake = Tensor._make_subclass(FakeTensor, made, False, **how)
        vars(fake).update(self._attributes[one.device])
        return fake


@contextmanager
def operators_on_cpu(functions: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """Replace torch's composite operators by these functions on the CPU, for all callers.

    Replacing a module's name affects only callers that look it up there. A mode of torch functions, which is
    off within torch's own functions, takes a quarter more of a plan's time. `Library` has no public end.
    """
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name, function in functions.items():
            library.impl(name, function, "AutogradCPU")
        yield
