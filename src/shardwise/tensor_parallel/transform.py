"""`tensor_parallel_transformation`: an exported program in, one rank's exported program out."""

from __future__ import annotations

import copy
import operator
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from shardwise.errors import ShardingError
from shardwise.tensor_parallel import state
from shardwise.tensor_parallel.canonical import canonical
from shardwise.tensor_parallel.partition import Parameter, Partition, Replicated, Value
from shardwise.tensor_parallel.placement import REPLICATE
from shardwise.tensor_parallel.rules import find, getitem, is_pointwise, name_of, pointwise
from shardwise.tensor_parallel.styles import styles_of

OFFLINE_GROUP = "shardwise_tensor_parallel"


def tensor_parallel_transformation(
    exported_program: ExportedProgram,
    rank: int,
    world_size: int,
    device_type: str,
    parallel_strategies: Mapping[str, Any],
    *,
    group_name: str | None = None,
    strict: bool = False,
) -> ExportedProgram:
    """The program that `rank` of `world_size` runs so that all together compute `exported_program`.

    Local: needs no process group and no communication, and any rank's program can be made in any process.

    Args:
        exported_program: from `torch.export.export`, as it is or decomposed. It stays as it is.
        rank: of the process that will run the result, within its group.
        world_size: how many ranks.
        device_type: where it will run.
        parallel_strategies: styles by module; see `styles_of`.
        group_name: of the process group that it communicates over; by default the default group's.
        strict: raise where an operation has no rule, in place of gathering its inputs.

    Returns:
        A program with the same inputs and outputs, whole on every rank, whose state dict has this rank's
        parts of the parameters.

    Raises:
        ShardingError: a rank, name or style that does not fit.
    """
    if not 0 <= rank < world_size:
        raise ShardingError(f"rank {rank} is not one of {world_size} ranks")
    graph, signature = canonical(exported_program), exported_program.graph_signature
    names = {
        spec.arg.name: spec.target
        for spec in signature.input_specs
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) and spec.target is not None
    }
    styles = styles_of(parallel_strategies, list(names.values()))
    placeholders = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    parameters = {
        placeholders[arg]: Parameter(name, placeholders[arg], styles.get(name)) for arg, name in names.items()
    }
    partition = Partition(
        rank, world_size, group_name or _default_group(), state.fake_mode_of(exported_program), parameters
    )
    for node in graph.nodes:
        _build(partition, node, strict=strict)
    for lost in partition.replicated:
        warnings.warn(
            f"{lost.op} ({lost.node}, {lost.source}) has no tensor-parallel rule: its inputs are gathered,"
            f" {lost.gathered_bytes} bytes a call; register a rule with shardwise.tensor_parallel.rule",
            stacklevel=2,
        )
    return state.program_of(exported_program, partition)


def _default_group() -> str:
    if not dist.is_initialized() or dist.group.WORLD is None:
        return OFFLINE_GROUP
    return dist.group.WORLD.group_name


def _build(p: Partition, node: fx.Node, *, strict: bool) -> None:
    if node.op == "placeholder":
        made = p.graph.placeholder(node.name)
        made.meta = copy.copy(node.meta)
        p.values[node] = Value(made, REPLICATE)
    elif node.op == "get_attr":
        made = p.graph.get_attr(str(node.target))
        made.meta = copy.copy(node.meta)
        p.values[node] = Value(made, REPLICATE)
    elif node.op == "output":
        p.graph.output(p.take_all(node.args[0]))
    elif node.target is operator.getitem:
        getitem(p, node)
    elif (known := find(node)) is not None:
        known(p, node)
    elif isinstance(node.target, torch._ops.OpOverload) and is_pointwise(node, name_of(node)):
        pointwise(p, node)
    else:
        _replicate(p, node, strict=strict)


def _replicate(p: Partition, node: fx.Node, *, strict: bool) -> None:
    """An operation without a rule, on whole inputs."""
    cut = [x for x in node.all_input_nodes if x in p.values and p.values[x].placement != REPLICATE]
    cut = [x for x in cut if isinstance(x.meta.get("val"), Tensor)]
    if cut:
        source = (node.meta.get("stack_trace") or "no source line").strip().splitlines()[-1].strip()
        size = sum(x.meta["val"].numel() * x.meta["val"].element_size() for x in cut)
        lost = Replicated(node.name, name_of(node), source, int(size))
        if strict:
            raise ShardingError(
                f"{lost.op} ({lost.node}, {source}) has no tensor-parallel rule and would gather"
                f" {lost.gathered_bytes} bytes; register a rule, or pass strict=False"
            )
        p.replicated.append(lost)
    made = p.emit(node.target, *p.take_all(node.args), **p.take_all(node.kwargs))
    value = node.meta.get("val")
    p.keep(node, made, (REPLICATE,) * len(value) if isinstance(value, (tuple, list)) else REPLICATE)


