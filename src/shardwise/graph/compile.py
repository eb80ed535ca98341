"""`shardwise.compile`: `torch.compile` of a sharded model whose graphs communicate early, in one order.

Around a backend it does two things. Before a graph is compiled, ranks compare the collectives in it: ranks
that traced different graphs raise instead of waiting for each other. And the graphs of operators that
AOTAutograd makes of it, one for the forward and one for the backward, go through `shardwise.graph.passes`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.fx import Graph

from shardwise import _compat
from shardwise.errors import ShardingError, ShardwiseError, here
from shardwise.fsdp import FSDPModule
from shardwise.fsdp.module import compile_gathered
from shardwise.fsdp.module_state import states_in
from shardwise.graph.passes import Passes
from shardwise.graph.passes.check_order import check_text, graphs_in, order_text

BACKENDS = ("inductor", *_compat.AOT_EAGER, "eager")
MODES = ("full", "regional")
Backend = Callable[..., Any]


def compile(
    model: nn.Module,
    *,
    backend: str | Backend = "inductor",
    mode: str = "full",
    fullgraph: bool = True,
    dynamic: bool | None = None,
    prefetch: int | None = None,
    max_unsharded: int | None = None,
    merge_bytes: int = 0,
    options: dict[str, Any] | None = None,
) -> Any:
    """Compile a model that `fully_shard` has sharded, its gathers and reductions with it.

    Like `torch.compile` it compiles when the model is first called, and backward when that first runs. Each
    new graph is compared over the ranks of the sharded parameters' groups before it is compiled, once for
    graphs with equal collectives: that call is collective, as the model's forward is.

    Args:
        model: sharded, itself or modules in it.
        backend: "inductor", "aot_eager" or "aot_eager_decomp_partition" with passes; "eager" and any other
            backend, as a callable that takes a graph module and example inputs, without: they are given no
            graph of operators.
        mode: "full" compiles the whole model into one graph, in which gathers overlap the compute of other
            groups. "regional" compiles what each innermost sharded module does between its gather and its
            reductions, and equal ones once, in the time of one; when groups are gathered and reduced stays
            the uncompiled model's. Passes have nothing to do there.
        fullgraph: raise where a graph would break; the default, unlike torch's.
        dynamic: as `torch.compile` has it.
        prefetch: gather parameters this many groups ahead; 0: where they are needed. None: one ahead, in
            backward once the gradients of the module before are reduced, which holds a group less than 1.
        max_unsharded: gather no more groups than this at a time; None: as many as `prefetch` takes.
        merge_bytes: merge small collectives of one kind up to this size; 0: merge none. Reductions over more
            than two ranks may then add in another order.
        options: inductor's, beside those that keep the order of collectives.

    Returns:
        What `torch.compile` returns ("full"), or `model` ("regional").

    Raises:
        ShardingError: no module of `model` is sharded; an unknown mode or backend; options for a backend
            other than inductor, or that this function sets; settings of passes in mode "regional". When
            called: more groups in use at a time than `max_unsharded`.
        RankMismatchError: when called, on every rank of a group: their graphs differ.
    """
    if mode not in MODES:
        raise ShardingError(f"mode {mode!r} is unknown; expected one of {', '.join(MODES)}")
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not sharded:
        raise ShardingError(
            f"{here()}: no module of this {type(model).__name__} is sharded; call fully_shard before"
            " shardwise.compile, or torch.compile for a model that shall not be sharded"
        )
    passes = Passes(prefetch=prefetch, max_unsharded=max_unsharded, merge_bytes=merge_bytes)
    if mode == "regional" and passes != Passes():
        raise ShardingError(
            'prefetch, max_unsharded and merge_bytes are of mode "full"; in mode "regional" groups are'
            " gathered when the uncompiled model gathers them; set_modules_to_forward_prefetch changes that"
        )
    # Beside breaks, and between the collectives of sharded modules, graphs may be one rank's only.
    run = _AgreedBackend(
        _backend(backend, passes, dynamic, options), sharded, silent_ones=mode == "full" and fullgraph
    )
    if mode == "full":
        return torch.compile(model, backend=run, fullgraph=fullgraph, dynamic=dynamic)
    for module in sharded:
        if not any(isinstance(inner, FSDPModule) for inner in module.modules() if inner is not module):
            compile_gathered(module, backend=run, fullgraph=fullgraph, dynamic=dynamic)
    return model


def _backend(
    backend: str | Backend, passes: Passes, dynamic: bool | None, options: dict[str, Any] | None
) -> Backend:
    made = with_passes(backend, passes, options=options)
    if backend == "inductor":
        return _compat.inductor(made["options"], dynamic)
    if backend == "eager":
        return lambda module, inputs: module
    found = made["backend"]
    if not callable(found):
        raise ShardingError(
            f"backend {backend!r} is unknown; expected one of {', '.join(BACKENDS)}, or a callable that"
            " torch.compile would take"
        )
    return cast(Backend, found)


class _AgreedBackend:
    """A backend that first compares a graph's collectives with those of other ranks.

    A graph like one before is not compared: a rank may have to compile again for sizes that only it has met.
    Nor is one that issues nothing, except for `silent_ones`.
    """

    def __init__(self, backend: Backend, sharded: list[FSDPModule], *, silent_ones: bool) -> None:
        self._backend = backend
        self._silent_ones = silent_ones
        self._agreed: set[str] = set()
        self._groups, self._named, self._device = _groups_of(sharded)

    def __call__(self, module: Any, inputs: Any) -> Any:
        try:
            self._agree(order_text(graphs_in(module), groups=self._named))
            return self._backend(module, inputs)
        except Exception as raised:
            error = getattr(raised, "inner_exception", raised)  # compilers wrap what passes raise
            if not isinstance(error, ShardwiseError):
                raise
        return partial(_fail, error)  # Dynamo would wrap it as well, and an error of its own reach the user

    def _agree(self, text: str) -> None:
        if text not in self._agreed and (text or self._silent_ones):
            check_text(text, groups=self._groups, device=self._device)
            self._agreed.add(text)


def _fail(error: Exception, *args: Any) -> Any:
    raise error


def _groups_of(sharded: list[FSDPModule]) -> tuple[list[ProcessGroup], list[str], torch.device]:
    """Return the groups over which ranks compare, the names of all with parameters, and their device."""
    groups: dict[ProcessGroup, None] = {}
    names: list[str] = []
    states = states_in(sharded)
    for state in states:
        for group in state.groups:
            groups |= {one: None for one in group.info.process_groups if one is not None and one.size() > 1}
            if group.settings.reduce_scatter_group is not None:
                names.append(group.settings.reduce_scatter_group.group_name)
    return list(groups), [*(group.group_name for group in groups), *names], states[0].device


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
