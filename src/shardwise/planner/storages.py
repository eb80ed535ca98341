"""The exact number of bytes of live tensor memory at every moment of a program.

    with Storages() as storages:
        storages.see(list(model.parameters()))  # what was there before
        with storages.peak("forward"):
            loss = model(batch)
    storages.peaks["forward"]

Every storage that an operator takes or returns is tracked by a weak reference from then on, and counts until
it is freed. Memory also changes without an operator, by `UntypedStorage.resize_`, which is watched too. Views
share a storage and count once. Memory that an operator allocates internally and frees again is not counted.

Under `FakeTensorMode` sizes are real and memory is not, so any machine can measure any model.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor

from shardwise._compat import EagerDispatchMode, FakeTensor
from shardwise.comm.count import tensors_in


@cache
def runs_its_own_ops(kind: type) -> bool:
    """Return whether a tensor subclass wraps others and computes with them, as DTensor does."""
    inherited = getattr(kind, "__torch_dispatch__", None) is Tensor.__torch_dispatch__
    return not inherited and not issubclass(kind, FakeTensor)


@dataclass
class Life:
    """A storage's sizes: at `times[i]`, an index of events, it became `sizes[i]` bytes."""

    times: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)


class Storages(EagerDispatchMode):
    """Live bytes (`live`), the peaks of named phases (`peaks`), and each storage's history (`lives`)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peaks: dict[str, int] = {}
        self.lives: list[Life] = []
        self.now = 0  # counts events: operators, and changes of a storage
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], Life]] = {}
        self._highest = 0

    def __enter__(self) -> Self:
        resize = self._resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self.note_resize(storage)
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def note_resize(self, storage: torch.UntypedStorage) -> None:
        self._see(storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(runs_its_own_ops(kind) for kind in types):
            return NotImplemented  # the subclass runs; its operators on wrapped tensors come through here
        result = func(*args, **(kwargs or {}))
        self.now += 1
        self.record_operator(func, args, kwargs or {}, result)
        return result

    def record_operator(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        self.see((args, kwargs, result))

    def see(self, value: Any) -> None:
        """Track every tensor in nested lists, tuples and dicts, and its storage's size."""
        for tensor in tensors_in(value):
            if not runs_its_own_ops(type(tensor)):  # such a tensor has no memory, only those that it wraps
                self._see(tensor.untyped_storage())

    def life(self, tensor: Tensor) -> Life:
        return self._alive[id(tensor.untyped_storage())][1]

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        entry = self._alive.get(key)
        if entry is not None:
            sizes = entry[1].sizes
            if sizes and sizes[-1] == storage.nbytes():  # as nearly always
                return
        else:
            entry = (weakref.ref(storage, lambda _: self._forget(key)), Life())
            self._alive[key] = entry
            self.lives.append(entry[1])
        self._note_size(entry[1], storage.nbytes())

    def _forget(self, key: int) -> None:
        _, life = self._alive.pop(key)
        self._note_size(life, 0)

    def _living(self) -> list[torch.UntypedStorage]:
        """List storages that are not freed yet; garbage collection may remove some from the table."""
        return [storage for ref, _ in list(self._alive.values()) if (storage := ref()) is not None]

    def _note_size(self, life: Life, size: int) -> None:
        previous = life.sizes[-1] if life.sizes else 0
        if size == previous and life.sizes:
            return
        self.now += 1
        life.times.append(self.now)
        life.sizes.append(size)
        self.live += size - previous
        self._highest = max(self._highest, self.live)

    @contextmanager
    def peak(self, name: str) -> Iterator[None]:
        """Note the most bytes alive at once inside, under `name`."""
        self._check()
        self._highest = self.live
        yield
        self._check()
        self.peaks[name] = self._highest

    def _check(self) -> None:
        counted = sum(storage.nbytes() for storage in self._living())
        assert counted == self.live, f"{counted} bytes alive, {self.live} counted: memory changed unseen"
