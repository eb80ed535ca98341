"""Passes over the graphs of operators that a backend of `torch.compile` is given."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.fx import Graph

from shardwise import _compat
from shardwise.errors import ShardingError
from shardwise.graph.passes import Passes

Backend = Callable[..., Any]


def with_passes(
    backend: str | Backend,
    passes: Passes,
    *,
    options: dict[str, Any] | None,
    first: Callable[[Graph], None] | None = None,
) -> dict[str, Any]:
    """Return the arguments of `torch.compile` with which `passes` run over the graphs of `backend`.

    Args:
        backend: names other than inductor's and "aot_eager"'s, and functions without `first`, are passed on
            as they are: they get no graphs of operators.
        options: inductor's, beside those that are set here.
        first: edits graphs with backward in them before the passes do.

    Raises:
        ShardingError: options for another backend than inductor, or that are set here.
    """
    if options is not None and backend != "inductor":
        raise ShardingError(f"options are inductor's; backend {backend!r} takes none")
    if backend == "inductor":
        ours = inductor_options(passes, passes.uuid)
        if first is not None:
            ours["joint_custom_pre_pass"] = _compat.inductor_pass(first, passes.uuid)
        for name in ours:
            if name in (options or {}):
                raise ShardingError(f"option {name} is shardwise.compile's own; call torch.compile to set it")
        return {"backend": backend, "options": {**(options or {}), **ours}}

    def edit(graph: Graph) -> None:
        if first is not None:
            first(graph)
        passes(graph)

    if callable(backend):
        edited = partial(_compat.aot_edited, edit=edit, compiler=backend)
        return {"backend": backend if first is None else edited}
    if backend in _compat.AOT_EAGER:
        return {"backend": partial(_compat.aot_edited, edit=edit, decompose=_compat.AOT_EAGER[backend])}
    return {"backend": backend}


def inductor_options(edit: Callable[[Graph], Any], uuid: str | None) -> dict[str, Any]:
    """Return inductor's options for it to run `edit` last, and to leave collectives where that puts them.

    Args:
        uuid: tells caches of compiled graphs what `edit` does; None: graphs are compiled anew.
    """
    return {
        "post_grad_custom_post_pass": _compat.inductor_pass(edit, uuid),
        "reorder_for_peak_memory": False,  # which would move collectives, each rank as it sees fit
        "reorder_for_locality": False,  # which without autograd would gather everything first
        "_pre_fusion_custom_pass": _compat.collectives_in_place(),
    }
