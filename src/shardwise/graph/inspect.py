"""`shardwise.inspect_graph`: reports what the graphs of a compiled model contain.

It compiles the model anew, runs it once and restores its state. The report is of that compilation, with the
model's present settings and mode, and grad enabled or not.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, overload

import torch
from torch import nn
from torch.fx import Graph, GraphModule

from shardwise.errors import ShardingError
from shardwise.fsdp import FSDPModule
from shardwise.fsdp.fast import copy_code
from shardwise.fsdp.group import ParamGroup
from shardwise.fsdp.module_state import states_in
from shardwise.fsdp.tensors import grad_tensors, map_tensors
from shardwise.graph.measure import graph_report
from shardwise.graph.record import record
from shardwise.graph.reports import GraphReport, ModelReport


@overload
def inspect_graph(model_or_graph: Graph | GraphModule, /) -> GraphReport: ...  # type: ignore[overload-overlap]
@overload
def inspect_graph(model_or_graph: nn.Module, /, *example_args: Any, **example_kwargs: Any) -> ModelReport: ...
def inspect_graph(
    model_or_graph: Graph | nn.Module, /, *example_args: Any, **example_kwargs: Any
) -> GraphReport | ModelReport:
    """Count what a graph contains: collectives, what overlaps them, copies, unsharded parameters.

    A graph is measured as it is, and nothing runs; `graph_report` takes further arguments.

    A model, sharded or not, is compiled by `torch.compile` with a backend that runs graphs operator by
    operator, and is called once with the example inputs. If grad is enabled and outputs require it, their sum
    is run backward. So this call is collective, like a training step: every rank of the model's groups must
    call it. The model's gradients and buffers and the random number generators are restored. Hooks that users
    registered run, including one that steps an optimizer.

    The compilation belongs to this call: other compilations of the model are neither used nor changed, and
    the model can be freed as usual. After graph breaks, functions called by the model each keep a graph, for
    this call's backend only, until `torch.compiler.reset()`; on torch 2.12 these graphs count towards the
    recompilation limit. A model compiled in parts is inspected as one graph; to see the parts, compile them
    with `shardwise.graph.record()`.

    Args:
        model_or_graph: a graph of operators as AOTAutograd makes them, or a module.
        example_args, example_kwargs: the model's inputs, whose gradients do not change.

    Raises:
        ShardingError: a graph that is not of operators, or inputs given with a graph.
    """
    is_graph = isinstance(model_or_graph, GraphModule) and not isinstance(model_or_graph, FSDPModule)
    if isinstance(model_or_graph, Graph) or is_graph:
        if example_args or example_kwargs:
            raise ShardingError("inspect_graph takes example inputs with a model; a graph is not run")
        return graph_report(model_or_graph)  # type: ignore[arg-type]
    model = model_or_graph
    assert isinstance(model, nn.Module)
    recorder = record()
    options = dict.fromkeys({"isolate_recompiles"} & inspect.signature(torch.compile).parameters.keys(), True)

    def call(args: Any, kwargs: Any) -> Any:
        return model(*args, **kwargs)

    call = copy_code(call, own_globals=True)
    compiled = torch.compile(call, backend=recorder, **options)  # type: ignore[call-overload]
    with _left_as_found(model):
        args, kwargs = map_tensors(
            lambda x: x.detach().requires_grad_(x.requires_grad), (example_args, example_kwargs)
        )
        output = compiled(args, kwargs)
        tensors = [tensor for tensor in grad_tensors(output) if tensor.is_floating_point()]
        if tensors and torch.is_grad_enabled():
            torch.autograd.backward([tensor.sum() for tensor in tensors])
    report = recorder.report()
    recorder.graphs.clear()  # the compiler keeps its backends
    return report


@contextmanager
def _left_as_found(model: nn.Module) -> Iterator[None]:
    """Restore gradients, buffers and random number generators on exit; clear gradients on entry."""
    # Where evaluation left parameters gathered, they hide the sharded ones, which get gradients.
    params = [*model.parameters(), *(param.sharded for group in _groups(model) for param in group.params)]
    grads = [(param, param.grad) for param in params]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    earlier = {id(segment): segment.earlier for segment in _segments(model)}
    devices = dict.fromkeys(param.device for param in model.parameters() if param.device.type != "cpu")
    kind = next(iter(devices)).type if devices else "cuda"
    with torch.random.fork_rng([device.index for device in devices], device_type=kind):
        for param, _ in grads:
            param.grad = None
        for segment in _segments(model):
            segment.earlier = None
        try:
            yield
        finally:
            for param, grad in grads:
                param.grad = grad
            for segment in _segments(model):
                segment.earlier = earlier.get(id(segment))
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)


def _segments(model: nn.Module) -> list[Any]:
    """Return the segments that compiled sharded modules have; none before the first compilation."""
    groups = _groups(model)
    return [segment for group in groups if isinstance(group.traced, list) for segment in group.traced]


def _groups(model: nn.Module) -> list[ParamGroup]:
    return [group for state in states_in(model.modules()) for group in state.groups]
