"""A clear error for calling a part of a sharded model outside the model's forward.

`model.head(x)` on its own meets a sharded weight and would fail inside DTensor, far from the cause.
So between passes, each plain submodule that owns sharded parameters has an instance `forward`, which
raises an error that names the parameter and the remedy. A pass removes it first, so it costs nothing
inside. A submodule whose parameters are gathered (by `unshard()`, or kept for backward) runs as usual.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch import nn

from shardwise import _compat
from shardwise.errors import LifecycleError, here

if TYPE_CHECKING:
    from shardwise.fsdp.group import ParamGroup
    from shardwise.fsdp.parameter import ShardedParam


class Guard:
    """Stands in for one submodule's `forward` between passes."""

    def __init__(self, module: nn.Module, group: ParamGroup, param: ShardedParam) -> None:
        # Weak references: the guard is in the module's own dict.
        self.module = weakref.ref(module)
        self.group = weakref.ref(group)
        self.param = weakref.ref(param)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        group = self.group()
        if group is None or group.is_unsharded:
            return self._forward()(*args, **kwargs)
        raise LifecycleError(
            f"{here()}: {self._name} is sharded outside the forward of its fully_shard module, but"
            f" {type(self.module()).__name__} was called on its own. Call the sharded module; or make the"
            " method that calls this a forward with register_fsdp_forward_method; or call unshard() on the"
            " sharded module first"
        )

    def _forward(self) -> Any:
        module = self.module()
        # The class's forward: the instance's is this guard.
        return MethodType(type(module).forward, module) if module is not None else None

    @property
    def _name(self) -> str:
        param = self.param()
        return "its parameter" if param is None else f"'{param.name}'"

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._forward())

    def __deepcopy__(self, memo: Any) -> Any:
        raise LifecycleError(f"{self._name} is sharded; copy modules before fully_shard")


def guards(modules: Iterable[nn.Module], groups: Iterable[ParamGroup]) -> list[Guard]:
    """Return guards for the `modules` that own parameters of `groups`.

    A module with an instance `forward` gets none.
    """
    owners = {
        id(owner.parameters): (group, param)
        for group in groups
        # Reversed, so that the error names a module's first parameter.
        for param in reversed(group.params)
        for owner in param.owners
    }
    result = []
    for module in modules:
        owned = owners.get(id(_compat.parameters_of(module)))
        if owned is not None and "forward" not in module.__dict__:
            result.append(Guard(module, *owned))
    return result


def compiled_in(root: nn.Module) -> set[nn.Module]:
    """Return the compiled modules of `root` and all modules inside them."""
    return {inner for m in root.modules() if _compat.is_compiled(m) for inner in m.modules()}


def outside_of(compiled: set[nn.Module], guards: Iterable[Guard]) -> list[Guard]:
    """Return the guards of modules that are not in `compiled`, and lift the others."""
    # Guards come and go between passes, so recomputing a compiled module would meet other code.
    lift(guard for guard in guards if guard.module() in compiled)
    return [guard for guard in guards if guard.module() not in compiled]


def install(guards: Iterable[Guard]) -> None:
    """Put guards in place, at the end of a pass."""
    for guard in guards:
        if (module := guard.module()) is not None and "forward" not in module.__dict__:
            module.__dict__["forward"] = guard  # a `forward` that was set since stays


def lift(guards: Iterable[Guard]) -> None:
    """Remove guards at the beginning of a pass."""
    for guard in guards:
        if (module := guard.module()) is None:
            continue
        if "forward" in module.__dict__ and module.__dict__["forward"] is guard:
            del module.__dict__["forward"]
