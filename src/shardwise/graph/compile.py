"""`shardwise.compile`: `torch.compile` for sharded models, with collectives issued early and in one order.

It adds two things to a backend. Before a graph is compiled, ranks compare its collectives: ranks that traced
different graphs raise instead of waiting for each other. And `shardwise.graph.passes` run over the graphs of
operators that AOTAutograd makes of it, one for the forward and one for the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

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
from shardwise.graph.passes.check_order import check_order, graphs_in, order_text

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
    """Compile a model that `fully_shard` has sharded, including its gathers and reductions.

    Like `torch.compile`, it compiles when the model is first called, and backward when that first runs.
    Before a new graph is compiled, the ranks of the sharded parameters' groups compare it, once for graphs
    with equal collectives. So that call is collective, like the model's forward.

    Args:
        model: a sharded module, or one that contains sharded modules.
        backend: "inductor", "aot_eager" or "aot_eager_decomp_partition", with passes; "eager", or a callable
            that takes a graph module and example inputs, without passes, as these get no graph of operators.
        mode: "full" compiles the whole model into one graph, in which gathers overlap the compute of other
            groups. "regional" compiles what each innermost sharded module does between its gather and its
            reductions, and compiles equal modules once. Groups are gathered and reduced when the uncompiled
            model does it, so passes do not apply.
        fullgraph: raise on a graph break. Unlike in torch, this is the default.
        dynamic: as of `torch.compile`.
        prefetch: gather parameters this many groups ahead; 0: where they are needed. None: one ahead, but in
            backward only after the previous module's gradients are reduced, which holds one group less than
            1 does.
        max_unsharded: gather at most this many groups at a time; None: as many as `prefetch` takes.
        merge_bytes: merge small collectives of one kind up to this size; 0: merge none. Reductions over more
            than two ranks may then add in another order.
        options: for inductor, except those that keep the order of collectives.

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
    arguments = with_passes(backend, passes, options=options)
    compiler: Any = arguments["backend"]
    if backend == "inductor":
        compiler = _compat.inductor(arguments["options"], dynamic)
    elif backend != "eager" and not callable(compiler):
        raise ShardingError(
            f"backend {backend!r} is unknown; expected one of {', '.join(BACKENDS)}, or a callable that"
            " torch.compile would take"
        )
    # Next to graph breaks, or between collectives of sharded modules, a graph may exist on one rank only.
    run = _agreed(
        None if backend == "eager" else compiler, sharded, compare_empty=mode == "full" and fullgraph
    )
    if mode == "full":
        return torch.compile(model, backend=run, fullgraph=fullgraph, dynamic=dynamic)
    for module in sharded:
        if not any(isinstance(inner, FSDPModule) for inner in module.modules() if inner is not module):
            compile_gathered(module, backend=run, fullgraph=fullgraph, dynamic=dynamic)
    return model


def _agreed(backend: Backend | None, sharded: list[FSDPModule], *, compare_empty: bool) -> Backend:
    """Return a backend that first compares a graph's collectives with those of other ranks.

    A graph with the collectives of an earlier one is not compared: a rank may recompile for sizes that only
    it meets. Graphs without collectives are compared only if `compare_empty` is set. Without a backend,
    graphs run as traced.
    """
    groups: dict[ProcessGroup, None] = {}  # over which ranks compare
    named: list[str] = []  # also groups of parameters
    states = states_in(sharded)
    device = states[0].device  # compilers keep what is returned, so it must not keep states
    for group in [group for state in states for group in state.groups]:
        groups |= {g: None for g in group.info.process_groups if g is not None and g.size() > 1}
        if group.settings.reduce_scatter_group is not None:
            named.append(group.settings.reduce_scatter_group.group_name)
    named += [group.group_name for group in groups]
    agreed: set[str] = set()

    def fail(error: Exception, *args: Any) -> Any:
        raise error

    def run(module: Any, inputs: Any) -> Any:
        try:
            text = order_text(graphs_in(module), groups=named)
            if text not in agreed and (text or compare_empty):
                check_order(text, groups=list(groups), device=device)
                agreed.add(text)
            return module if backend is None else backend(module, inputs)
        except Exception as raised:
            error = getattr(raised, "inner_exception", raised)  # compilers wrap what passes raise
            if not isinstance(error, ShardwiseError):
                raise
        return partial(fail, error)  # Dynamo would wrap it too, and show the user its own error

    return run


def with_passes(
    backend: str | Backend,
    passes: Passes,
    *,
    options: dict[str, Any] | None,
    first: Callable[[Graph], None] | None = None,
) -> dict[str, Any]:
    """Return arguments of `torch.compile` that make `passes` run over the graphs of `backend`.

    Backends other than "inductor" and the "aot_eager" ones, and functions without `first`, get no graphs of
    operators. `first` edits graphs that contain backward, before the passes. Raises ShardingError for options
    that are set here, or for another backend than inductor.
    """
    if options is not None and backend != "inductor":
        raise ShardingError(f"options are inductor's; backend {backend!r} takes none")
    if backend == "inductor":
        own_options = inductor_options(passes, passes.uuid)
        if first is not None:
            own_options["joint_custom_pre_pass"] = _compat.inductor_pass(first, passes.uuid)
        for name in own_options:
            if name in (options or {}):
                raise ShardingError(f"option {name} is shardwise.compile's own; call torch.compile to set it")
        return {"backend": backend, "options": {**(options or {}), **own_options}}

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
    """Return options that make inductor run `edit` last, and keep collectives where `edit` puts them.

    Args:
        uuid: identifies `edit` in caches of compiled graphs; None: graphs are compiled anew.
    """
    return {
        "post_grad_custom_post_pass": _compat.inductor_pass(edit, uuid),
        "reorder_for_peak_memory": False,  # would move collectives, differently on each rank
        "reorder_for_locality": False,  # without autograd would gather everything first
        "_pre_fusion_custom_pass": _compat.collectives_in_place(),
    }
