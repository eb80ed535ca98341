"""A clear error for calling a part of a sharded model outside the model's forward.

`model.head(x)` on its own meets a sharded weight and would fail inside DTensor, far from the cause.
So between passes, the plain submodules that own sharded parameters carry an instance `forward` that
names the parameter and the remedy; a pass takes it away first and so pays nothing inside. A submodule
whose parameters happen to be gathered (by `unshard()`, or kept for backward) just runs.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch import nn

from shardwise import _compat
from shardwise.errors import LifecycleError, here

if TYPE_CHECKING:
    from shardwise.fsdp.group import ParamGroup


class Guard:
    """Stands in for one submodule's `forward` between passes."""

    def __init__(self, module: nn.Module, group: ParamGroup, *, param: str) -> None:
        self.module = weakref.ref(module)
        self.group = weakref.ref(group)
        self.param = param

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, group = self.module(), self.group()
        if module is None or group is None or group.is_unsharded:
            return self._forward()(*args, **kwargs)
        raise LifecycleError(
            f"{here()}: '{self.param}' is sharded outside the forward of its fully_shard module, but"
            f" {type(module).__name__} was called on its own. Call the sharded module; or make the method"
            " that calls this a forward with register_fsdp_forward_method; or call unshard() on the"
            " sharded module first"
        )

    def _forward(self) -> Any:
        module = self.module()
        return MethodType(type(module).forward, module) if module is not None else None

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._forward())

    def __deepcopy__(self, memo: Any) -> Any:
        raise LifecycleError(f"'{self.param}' is sharded; copy modules before fully_shard")


def guards(
    root: nn.Module, groups: Iterable[ParamGroup], *, gathers: Callable[[nn.Module], bool]
) -> list[Guard]:
    """Guards for the submodules of `root` that own parameters of `groups`.

    Modules that gather by themselves need none, and an instance's own `forward` stays.
    """
    by_param = {p.sharded: (group, p.name) for group in groups for p in group.params}
    found = []
    for module in root.modules():
        if gathers(module) or "forward" in module.__dict__:
            continue
        for param in _compat.parameters_of(module).values():
            if param is not None and param in by_param:
                group, name = by_param[param]
                found.append(Guard(module, group, param=name))
                break
    return found


def install(guards: Iterable[Guard]) -> None:
    """Put guards in place, at the end of a pass."""
    for guard in guards:
        if (module := guard.module()) is not None:
            module.__dict__["forward"] = guard


def lift(guards: Iterable[Guard]) -> None:
    """Take guards away, at the beginning of a pass."""
    for guard in guards:
        if (module := guard.module()) is not None:
            module.__dict__.pop("forward", None)
