"""One rank's parameters, and the exported program around its graph.

The new program's state consists of copies: of this rank's shards, and of what every rank has whole. The whole
program keeps its graph, symbols and tensors. Names that share a tensor share its shard.

A record in the program, JSON in `graph_module.meta["custom"]`, says which part of each parameter the rank
holds. `torch.export.save` and `load` preserve it, `record_of` reads it, and `materialize` uses it to fill a
program from a checkpoint, shard by shard. Until then, a program exported on the meta device or from fake
tensors has no weights.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, ExportGraphSignature

from shardwise import _compat
from shardwise.errors import ShardingError
from shardwise.fsdp.tensors import map_tensors
from shardwise.tensor_parallel.device import storage_device, wrap_like
from shardwise.tensor_parallel.nodes import is_impure
from shardwise.tensor_parallel.partition import Partition
from shardwise.tensor_parallel.placement import REPLICATE, Placement, Split, local_shape
from shardwise.tensor_parallel.program import RECORD, Whole
from shardwise.tensor_parallel.styles import Plan

RECORD_VERSION = 1


@torch.no_grad()
def shard_of(whole: Tensor, placement: Placement | None, rank: int) -> Tensor:
    """Return the part of a whole parameter on `rank`: a copy of its intervals, or of all of it if replicated.

    For a tensor without memory (on meta, or fake), the part is on meta.
    """
    if whole.is_meta or _compat.is_fake(whole):
        part = torch.empty(local_shape(placement, whole.shape, rank), dtype=whole.dtype, device="meta")
    elif isinstance(placement, Split):
        part = torch.cat(
            [whole.narrow(placement.dim, b, e - b) for b, e in rank_intervals(placement, rank)], placement.dim
        )
    else:
        part = whole.detach().clone()
    return wrap_like(whole, part)


def rank_intervals(placement: Split, rank: int) -> tuple[tuple[int, int], ...]:
    """Return the intervals of the dim that `rank` holds; an empty one if it holds nothing."""
    return placement.ranges[rank] or ((0, 0),)


def _shards(
    whole: Whole, partition: Partition, sharing: ExportedProgram | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return this rank's state dict and constants, under the whole program's names."""
    program = whole.program
    parts = {**program.state_dict, **program.constants}
    shared_names = set() if sharing is None else record_of(sharing)["parameters"].keys()
    shared = {} if sharing is None else {**sharing.state_dict, **sharing.constants}
    placements = {parameter.name: parameter.placement for parameter in partition.parameters.values()}
    for name in [name for name in parts if name not in whole.ties]:
        if name in shared_names:
            parts[name] = shared[name]
        elif isinstance(parts[name], Tensor):
            parts[name] = shard_of(parts[name], placements.get(name), partition.rank)
    parts.update({name: parts[first] for name, first in whole.ties.items()})
    return {name: parts[name] for name in program.state_dict}, {x: parts[x] for x in program.constants}


def program_of(
    whole: Whole,
    partition: Partition,
    *,
    plan: Plan,
    device_type: str,
    gathers: list[dict[str, Any]],
    sharing: ExportedProgram | None = None,
) -> ExportedProgram:
    """Return the exported program of `partition`, made from `whole` by `plan`, for a device type.

    `gathers` are those that nothing asked for, as JSON, for the record. Tensors of `sharing` are shared.
    """
    program, graph = whole.program, partition.graph

    def move_example(x: Tensor) -> Tensor:
        if _compat.is_fake(x):  # `torch.export.load` would unpickle fakes as objects
            return torch.empty([int(size) for size in x.shape], dtype=x.dtype, device="meta")
        return x if x.is_meta else x.to(storage_device(device_type))

    graph.eliminate_dead_code(is_impure)
    for node in graph.nodes:  # nodes that move a value belong to the module that made it
        inputs = node.all_input_nodes if node.op == "call_function" else ()
        for name, x in product(("nn_module_stack", "stack_trace"), inputs):
            if name in x.meta:
                node.meta.setdefault(name, x.meta[name])
    state, constants = _shards(whole, partition, sharing)
    module = fx.GraphModule(program.graph_module, graph)
    for name, child in list(module.named_children()):  # graphs that this one calls
        setattr(module, name, copy.deepcopy(child))
    parameters = {
        name: {
            "shape": [int(size) for size in node.meta["val"].shape],
            "dtype": str(node.meta["val"].dtype).removeprefix("torch."),
            "style": plan.styles.get(name),
            "placement": placement_to_json(partition.parameters[node].placement),
            "tied": whole.ties.get(name),
        }
        for name, node in whole.by_name.items()
    }
    record = {
        "version": RECORD_VERSION,
        "rank": partition.rank,
        "world_size": partition.ranks,
        "group": partition.group,
        "device": device_type,
        "strategies": plan.strategies,
        "parameters": parameters,
        "gathers": gathers,
    }
    module.meta.update(program.graph_module.meta)
    module.meta["custom"] = {**(module.meta.get("custom") or {}), RECORD: record}
    return ExportedProgram(
        root=module,
        graph=graph,
        graph_signature=_signature(program.graph_signature, graph),
        state_dict=state,
        range_constraints=dict(program.range_constraints),
        module_call_graph=list(program.module_call_graph),
        example_inputs=map_tensors(move_example, program.example_inputs),
        constants=constants,
        verifiers=program.verifiers,
    )


def _signature(signature: ExportGraphSignature, graph: fx.Graph) -> ExportGraphSignature:
    (output,) = graph.find_nodes(op="output")
    specs = []
    for spec, value in zip(signature.output_specs, output.args[0], strict=True):
        argument: Any = spec.arg
        if isinstance(value, fx.Node):
            argument = replace(argument, name=value.name)
        elif not isinstance(argument, ConstantArgument):
            argument = ConstantArgument(name="", value=value)
        specs.append(replace(spec, arg=argument))
    return ExportGraphSignature(input_specs=list(signature.input_specs), output_specs=specs)


def placement_to_json(placement: Placement | None) -> Any:
    """Return a placement as JSON: "replicate", or the dim and every rank's intervals."""
    if not isinstance(placement, Split):
        return "replicate"
    return {"dim": placement.dim, "ranges": [[list(pair) for pair in part] for part in placement.ranges]}


def placement_from_json(data: Any) -> Placement:
    """Return the placement that `placement_to_json` wrote."""
    if data == "replicate":
        return REPLICATE
    return Split(data["dim"], tuple(tuple((b, e) for b, e in part) for part in data["ranges"]))


def record_of(program: ExportedProgram) -> dict[str, Any]:
    """Return the record that the transformation wrote with a program: rank, world size, group, placements.

    Raises:
        ShardingError: a program that the transformation did not make.
    """
    record = (program.graph_module.meta.get("custom") or {}).get(RECORD)
    if record is None:
        raise ShardingError(
            "the program is not one rank's part: tensor_parallel_transformation did not create it, or a"
            " later pass dropped graph_module.meta['custom']"
        )
    if record["version"] != RECORD_VERSION:
        raise ShardingError(
            f"expected version {RECORD_VERSION} of the program's record, found {record['version']}"
        )
    return dict(record)
