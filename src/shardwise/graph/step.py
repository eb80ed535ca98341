"""A whole training step as one callable: zero gradients, forward, loss, backward, clip, optimizer.

Forward, loss and backward are traced together into one graph, in which every segment of a sharded model is
gathered, gathered again for backward if forward frees it (`recompute`), and reduced::

    batch, shards -> | forward, loss, backward | -> loss, reduced shards

No hook runs inside the graph. After it, the reduced shards become the gradients of the sharded parameters, as
after any backward. Clipping and the optimizer then run uncompiled, with the numbers and state of an
uncompiled step.

If one graph is impossible and the user allows several, forward is compiled in parts and autograd runs their
backwards. `describe()` says how each part runs, and why.
"""

from __future__ import annotations

import gc
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.optim import Optimizer
from torch.utils.checkpoint import CheckpointPolicy

from shardwise import _compat
from shardwise.comm.order import Event, Order, event_for, first_line
from shardwise.comm.watch import explained
from shardwise.errors import ShardingError, here
from shardwise.fsdp import trace_plan
from shardwise.fsdp.fast import copy_code
from shardwise.fsdp.group import ParamGroup
from shardwise.fsdp.module_state import ModuleState, states_in
from shardwise.fsdp.parameter import ShardedParam
from shardwise.fsdp.traced import Segment
from shardwise.graph.compile import with_passes
from shardwise.graph.nodes import collectives, is_view
from shardwise.graph.passes import Passes
from shardwise.optim import clip_grad_norm_

_ONE = "forward, loss and backward"
_RUNS = event_for("run a compiled step")
_EAGER = ("eager", "eager_noexcept", "eager_debug")  # backends that run a graph as it was traced


class _Scheduler(Protocol):
    def step(self) -> Any: ...


def compile_step(
    model: nn.Module,
    loss_fn: Callable[..., Tensor] | None,
    optimizer: Optimizer,
    *,
    backend: str | Callable[..., Any] = "inductor",
    fullgraph: bool = True,
    max_norm: float | None = None,
    scheduler: _Scheduler | None = None,
    dynamic: bool | None = None,
    prefetch: int | None = None,
    max_unsharded: int | None = None,
    options: dict[str, Any] | None = None,
) -> CompiledStep:
    """Return a training step of `model`: a callable `step(*batch) -> loss`, compiled when first called.

    Calling the step is collective over the ranks of the sharded modules, like forward and backward. Making it
    is local.

    Args:
        model: sharded as a whole, in parts, or not at all. Make a new step after changing its modules.
        loss_fn: `loss_fn(model, *batch)` calls the model and returns the loss, a scalar tensor. None if the
            model returns it: `model(*batch)`.
        optimizer: any whose `step()` takes no closure, made after `fully_shard`.
        backend: as of `torch.compile`. A function gets graphs of operators that include backward.
        fullgraph: raise if forward, loss and backward cannot be one graph. If False, allow several.
        max_norm: clip the norm of the gradients of all of the model's parameters to this.
        scheduler: called after each step of the optimizer.
        dynamic, prefetch, max_unsharded, options: as of `shardwise.compile`.

    Raises:
        ShardingError: options for a backend other than inductor; an optimizer of other parameters, or whose
            step takes a closure; when called, a step that cannot be one graph.
    """
    if not isinstance(optimizer, Optimizer) or isinstance(optimizer, torch.optim.LBFGS):
        raise ShardingError(
            f"{here()}: expected an optimizer whose step takes no closure, found {type(optimizer).__name__}"
        )
    ids = {id(param) for param in model.parameters()}
    # Where evaluation left them gathered, they hide the sharded ones, which optimizers hold.
    ids |= {id(param) for param in _sharded(_params(model, states_in(model.modules())))}
    trained = [id(param) for group in optimizer.param_groups for param in group["params"]]
    if trained and ids.isdisjoint(trained) and type(optimizer).__module__.startswith("torch."):
        raise ShardingError(
            f"{here()}: this {type(optimizer).__name__} would train nothing of this {type(model).__name__};"
            " make it of model.parameters(), after fully_shard"
        )
    loss, counts = _loss(model, loss_fn), Counter[str]()
    passes = Passes(prefetch=prefetch, max_unsharded=max_unsharded)
    compiler = partial(with_passes, backend, passes, options=options)

    def edit(graph: Graph) -> None:  # compilers keep it, so it must not keep the step
        recompute(graph)
        counts.clear()
        counts.update(collective.kind for collective in collectives(graph))

    running = dict[Order, Event]()
    edited = _compat.announcing(partial(_announce, running), dynamic=dynamic, **compiler(first=edit))
    whole = torch.compile(_with_backward(loss), fullgraph=True, dynamic=dynamic, backend=edited)
    forward = torch.compile(loss, dynamic=dynamic, **compiler())
    edits = backend not in _EAGER
    return CompiledStep(
        model, optimizer, scheduler, whole, forward, max_norm, fullgraph, edits, running, counts
    )


@dataclass(eq=False, repr=False)
class CompiledStep:
    """A training step, as `compile_step` returns it.

    Attributes:
        graphs: how each part of the step runs: "one graph", "eager", ..., with the reason. Empty before the
            first call.
        collectives: counts in the one graph, by kind: "all_gather", "reduce_scatter", "all_reduce", ... Empty
            if there is no such graph, or the backend shows none.
        grad_norm: of the latest step, before clipping; None without `max_norm`.
    """

    _model: nn.Module
    _optimizer: Optimizer
    _scheduler: _Scheduler | None
    _whole: Callable[..., tuple[Tensor, Any]]
    _forward: Callable[..., Tensor]
    _max_norm: float | None
    _fullgraph: bool
    _recomputes: bool
    _running: dict[Order, Event]  # announce, during a call, that its graph runs
    collectives: Counter[str]
    graphs: dict[str, str] = field(default_factory=dict)
    grad_norm: Tensor | None = None
    _why_not: str | None = None  # there is no one graph
    _params: list[ShardedParam | nn.Parameter] = field(default_factory=list)
    _states: list[ModuleState] | None = None
    _compared: list[Any] = field(default_factory=list)  # what the groups' graphs read when ranks compared it
    _events: dict[Order, Event] = field(default_factory=dict)  # announce a call

    def __call__(self, *batch: Any, **named: Any) -> Tensor:
        """Run one step and return the loss, detached.

        Raises:
            ShardingError: one graph is impossible and `fullgraph` is set; or gradients are not synchronised.
            RankMismatchError: ranks train different parameters, or one of them makes no such step.
        """
        if self._states is None:
            self._states = states_in(self._model.modules())
            self._params = _params(self._model, self._states)
        segments = self._prepared(self._states)
        self._optimizer.zero_grad()
        for segment in segments:
            segment.earlier = None
        with _compat.plain_attributes():
            for param in _sharded(self._params):
                param.grad = None
        traced = _compat.graphs_traced()
        with self._announced(), torch.enable_grad():
            loss = self._backward(segments, batch, named)
        if _compat.graphs_traced() != traced:
            gc.collect()  # tracers leave cycles that hold the model and the batch
        if self._max_norm is not None:
            self.grad_norm = clip_grad_norm_(_sharded(self._params), self._max_norm)
        self._optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()
        self.graphs = self._described()
        return loss

    def describe(self) -> str:
        """Describe how each part of the step runs, a line for each. Empty before the first call."""
        return "\n".join(f"{part}: {text}" for part, text in self.graphs.items())

    def _prepared(self, states: list[ModuleState]) -> list[Segment]:
        """Return the segments that take part; note the reason if one graph is impossible."""
        groups = [group for state in states for group in state.groups]
        for state in states:
            # Before tracing, which would make them anew: the leaves of segments are arguments.
            if state.schedule is None or any(map(trace_plan.needs_segments, state.groups)):
                trace_plan.prepare(state)
        self._describe_to_peers(groups)
        segments: list[Segment] = []
        for group in groups:
            group.abandon_gather()  # one that evaluation started is out of date after this step
            group.reshard()
            name = group.name or type(self._model).__name__
            if not group.settings.reduce_grads:
                raise ShardingError(
                    f"{here()}: group '{name}' does not synchronise its gradients, so a step has none;"
                    " call set_requires_gradient_sync(True)"
                )
            if isinstance(group.traced, str):
                self._fall_back(f"group '{name}' has {group.traced}, which no graph can hold")
            else:
                segments.extend(group.traced or [])
        return [segment for segment in segments if segment.route.requires_grad]

    def _describe_to_peers(self, groups: Sequence[ParamGroup]) -> None:
        """Describe the step, if other parameters train than in the last one; see `comm.order`."""
        traced = [group.traced for group in groups]
        if traced != self._compared:
            self._compared, lines = traced, dict[Order, list[str]]()
            for group in groups:
                for order in group.orders:
                    lines.setdefault(order, [f"begin a compiled step of {type(self._model).__name__}"])
                    lines[order].append(group.describe_gather())
            self._events = {order: event_for("\n".join(words)) for order, words in lines.items()}

    @contextmanager
    def _announced(self) -> Iterator[None]:
        """Announce the step, whose collectives are not announced one by one, and explain its failure.

        Its graph announces that it runs, so peers in it see that a rank left while tracing.
        """
        for order, event in self._events.items():
            order.begin_pass(event)
        self._running.update(dict.fromkeys(self._events, _RUNS))
        try:
            yield
        except Exception as error:
            orders, cause = list(self._events), error
            if isinstance(error, RuntimeError):
                cause = explained(error, orders, "run a compiled step")
            for order in orders:
                order.leave(f"raised {type(cause).__name__} in a compiled step: {first_line(str(cause))}")
            if cause is not error:
                raise cause from error
            raise
        finally:
            self._running.clear()  # compilers keep it

    def _backward(self, segments: list[Segment], batch: Any, named: Any) -> Tensor:
        """Return the loss; its gradients are left on the parameters."""
        if self._why_not is None:
            plain = [p for p in self._params if not isinstance(p, ShardedParam) and p.requires_grad]
            if not (segments or plain):
                raise ShardingError(
                    f"{here()}: no parameter of the model trains, so a step has no"
                    " gradients; unfreeze some, or call the model itself"
                )
            try:
                with _compat.tracing_autograd():
                    loss, grads = self._whole(
                        [*(segment.route for segment in segments), *plain], batch, named
                    )
            except Exception as error:
                reason = _compat.why_untraceable(error)
                if reason is None:
                    raise
                self._fall_back(reason, error)
            else:
                _assign(segments, plain, grads)
                return loss
        _announce(self._running)
        loss = self._forward(*batch, **named)
        loss.backward()
        return loss.detach()

    def _fall_back(self, reason: str, error: Exception | None = None) -> None:
        if self._fullgraph:
            raise ShardingError(
                f"{here()}: forward, loss and backward cannot be one graph: {reason}. Pass fullgraph=False to"
                " compile the forward in parts and let autograd run their backwards"
            ) from error
        self._why_not = reason

    def _described(self) -> dict[str, str]:
        parts = {}
        if self._why_not is None:
            counts = ", ".join(f"{count} {kind}" for kind, count in sorted(self.collectives.items()))
            parts[_ONE] = f"one graph ({counts})" if counts else "one graph"
            if not self._recomputes:
                parts[_ONE] += (
                    "; parameters stay gathered from forward to backward, as this backend edits none"
                )
        else:
            parts["forward and loss"] = f"compiled, not one graph with backward, because {self._why_not}"
            parts["backward"] = "autograd, through the compiled backwards of the forward's graphs"
        if self._max_norm is not None:
            parts["clipping"] = "eager, because its all-reduce needs all gradients"
        kind = type(self._optimizer).__name__
        parts["optimizer"] = f"eager, because {kind} keeps its state by parameter and its uncompiled numbers"
        return parts


def _announce(events: dict[Order, Event]) -> None:
    for order, event in events.items():
        order.advance(event)


def _loss(model: nn.Module, loss_fn: Callable[..., Tensor] | None) -> Callable[..., Tensor]:
    def forward(*batch: Any, **named: Any) -> Tensor:
        return model(*batch, **named) if loss_fn is None else loss_fn(model, *batch, **named)

    return copy_code(forward, own_globals=True)


def _with_backward(loss_of: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Any]]:
    gradients = torch.autograd.grad

    def step(leaves: list[Tensor], batch: Any, named: Any) -> tuple[Tensor, Any]:
        loss = loss_of(*batch, **named)
        grads = gradients(loss, leaves, allow_unused=True)
        return loss.detach(), grads

    return copy_code(step, own_globals=True)


def _params(model: nn.Module, states: list[ModuleState]) -> list[ShardedParam | nn.Parameter]:
    """List parameters in the order of `model.parameters()`, whichever form of them modules hold now."""
    by_place = {
        (id(owner.parameters), owner.name): param
        for state in states
        for group in state.groups
        for param in group.params
        for owner in param.owners
    }
    params: dict[int, ShardedParam | nn.Parameter] = {}
    for module in model.modules():
        parameters = _compat.parameters_of(module)
        for name, param in parameters.items():
            managed = by_place.get((id(parameters), name), param)
            if managed is not None:
                params.setdefault(id(managed), managed)
    return list(params.values())


def _sharded(params: Iterable[ShardedParam | nn.Parameter]) -> list[nn.Parameter]:
    return [param.sharded if isinstance(param, ShardedParam) else param for param in params]


@torch.no_grad()
def _assign(segments: list[Segment], plain: list[nn.Parameter], grads: Any) -> None:
    """Assign gradients that a graph returned to the parameters, as after a backward."""
    for segment, grad in zip(segments, grads, strict=False):
        if grad is not None and segment.assign is not None:
            segment.assign(grad)
    pairs = [(p, g) for p, g in zip(plain, grads[len(segments) :], strict=True) if g is not None]
    if pairs:
        torch.autograd.backward([p for p, _ in pairs], [g for _, g in pairs])  # with the users' hooks


_AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def recompute(graph: Graph) -> list[Node]:
    """Make backward recompute what forward's checkpointed regions computed; return the copied nodes.

    A compiler that splits forward from backward recomputes such regions: gathers of sharded modules that free
    their parameters after forward, and what users checkpoint. A graph that contains both is not split, and
    would keep their results from forward to backward. Tracing marks the nodes of these regions and the start
    of backward; this function copies marked nodes in front of their first use in backward::

        gather -> wait -> views -> linear ... | loss | ... gather' -> wait' -> views' -> gradient of linear

    Random numbers are not drawn again; views of recomputed values are taken again. Values that the graph
    returns are not recomputed. Does nothing for a graph without backward.
    """
    nodes = list(graph.nodes)
    start = next((i for i, node in enumerate(nodes) if node.meta.get("autograd_backward")), len(nodes))
    place = {node: i for i, node in enumerate(nodes)}
    repeated: set[Node] = set()
    for node in nodes[:start]:
        # A view of a recomputed value would keep the original.
        if _is_marked(node) or (is_view(node) and all(source in repeated for source in node.all_input_nodes)):
            repeated.add(node)
    copies: dict[Node, Node] = {}
    for node in nodes[start:]:
        if node.op == "output":
            continue
        sources = [source for source in node.all_input_nodes if source in repeated]
        for source in sorted(_missing(sources, repeated, copies), key=place.__getitem__):
            with graph.inserting_before(node):
                copies[source] = graph.node_copy(source, lambda n: copies.get(n, n))
        for source in sources:
            node.replace_input_with(source, copies[source])
    return list(copies.values())


def _missing(sources: list[Node], repeated: set[Node], copies: dict[Node, Node]) -> set[Node]:
    """Return the nodes that `sources` is computed from and that have no copy yet."""
    missing: set[Node] = set()
    todo = list(sources)
    while todo:
        node = todo.pop()
        if node in repeated and node not in copies and node not in missing:
            missing.add(node)
            todo += node.all_input_nodes
    return missing


def _is_marked(node: Node) -> bool:
    """Return whether `node` lies in a checkpointed region and may be computed twice."""
    if node.op != "call_function" or node.meta.get("recompute") not in _AGAIN:
        return False
    schema = _compat.schema(node.target)
    if schema is None:
        return node.target is operator.getitem
    return not schema.is_mutable and torch.Tag.nondeterministic_seeded not in node.target.tags  # type: ignore[union-attr]
