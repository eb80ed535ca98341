"""One rank's parameters, and the exported program around its graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ExportGraphSignature,
    TensorArgument,
)

from shardwise import _compat
from shardwise.errors import ShardingError
from shardwise.tensor_parallel.partition import Partition
from shardwise.tensor_parallel.placement import Placement, Split


def fake_mode_of(program: ExportedProgram) -> Any:
    """The mode of the fake tensors that the program was exported with."""
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and _compat.is_fake(value):
            return value.fake_mode  # type: ignore[attr-defined]
    raise ShardingError("the exported program has no tensors, so there is nothing to cut")


def held(whole: Tensor, placement: Placement | None, rank: int) -> Tensor:
    """What `rank` has of a whole parameter: a copy of its intervals, or the tensor itself where it has all."""
    if not isinstance(placement, Split):
        return whole
    parts = [whole.narrow(placement.dim, b, e - b) for b, e in placement.ranges[rank] or ((0, 0),)]
    with torch.no_grad():
        made = torch.cat(parts, placement.dim)
    return nn.Parameter(made, requires_grad=whole.requires_grad) if isinstance(whole, nn.Parameter) else made


def program_of(program: ExportedProgram, partition: Partition) -> ExportedProgram:
    """The exported program of `partition`, which was made of `program`."""
    graph = partition.graph
    graph.eliminate_dead_code(_is_impure)
    state = dict(program.state_dict)
    for parameter in partition.parameters.values():
        if parameter.name in state:
            state[parameter.name] = held(state[parameter.name], parameter.placement, partition.rank)
    constants = dict(program.constants)
    for parameter in partition.parameters.values():
        if parameter.name in constants:
            constants[parameter.name] = held(constants[parameter.name], parameter.placement, partition.rank)
    root = nn.Module()
    for node in graph.nodes:
        if node.op == "get_attr":
            setattr(root, str(node.target), getattr(program.graph_module, str(node.target)))
    module = fx.GraphModule(root, graph)
    module.meta.update(program.graph_module.meta)
    return ExportedProgram(
        root=module,
        graph=graph,
        graph_signature=_signature(program.graph_signature, graph),
        state_dict=state,
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph,
        example_inputs=program.example_inputs,
        constants=constants,
        verifiers=program.verifiers,
    )


def _signature(signature: ExportGraphSignature, graph: fx.Graph) -> ExportGraphSignature:
    """The same inputs; outputs by the names of this graph's nodes."""
    (output,) = graph.find_nodes(op="output")
    specs = []
    for spec, node in zip(signature.output_specs, output.args[0], strict=True):
        if isinstance(spec.arg, TensorArgument):
            spec = replace(spec, arg=TensorArgument(name=node.name))
        specs.append(spec)
    return ExportGraphSignature(input_specs=list(signature.input_specs), output_specs=specs)


def _is_impure(node: fx.Node) -> bool:
    if node.op in ("placeholder", "output"):
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and (schema.is_mutable or "assert" in schema.name)


