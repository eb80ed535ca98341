"""What is allocated."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shardwise import _compat


class Allocations(_compat.TorchDispatchMode):
    """Remembers the size in bytes of every tensor that is born with memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = [*args, (kwargs or {}).get("out")]
        given = {one.untyped_storage().data_ptr() for one in known if isinstance(one, Tensor)}
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in given:
            self.bytes.append(result.untyped_storage().nbytes())
        return result
