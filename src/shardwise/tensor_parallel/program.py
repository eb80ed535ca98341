"""The whole program, read into canonical form; the rule of each operation builds a rank's form of it.

`transform` builds a rank's program from it, node by node; `exploring` builds every operation for every state
of its inputs. Both use the same graph and rules, so what `exploring` predicts is what `transform` builds.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from shardwise import _compat
from shardwise.errors import ShardingError
from shardwise.graph.nodes import kind_of
from shardwise.tensor_parallel.canonical import canonicalize, functionalize
from shardwise.tensor_parallel.nodes import is_tensor, line_of, modules_of, name_of, nbytes, op_of
from shardwise.tensor_parallel.partition import Parameter, Partition, Value
from shardwise.tensor_parallel.placement import REPLICATE, Placement
from shardwise.tensor_parallel.rules import find, getitem, is_pointwise, pointwise

RECORD = "shardwise.tensor_parallel"  # in a cut program: key in graph_module.meta["custom"], see `state`
_STATE = (InputKind.PARAMETER, InputKind.BUFFER)
# Outputs that belong to a parameter or buffer, and are cut like it.
_MUTATIONS = (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION)
_OVERWRITES = ("index_copy", "index_put", "slice_scatter", "select_scatter", "scatter")
_WRITES = (*_MUTATIONS, OutputKind.GRADIENT_TO_PARAMETER)


@dataclass(frozen=True)
class Whole:
    """A program in canonical form."""

    program: ExportedProgram  # functional; its graph is not the one that is cut
    graph: fx.Graph  # canonical; if placeholders share a tensor, the first has all uses
    parameters: dict[fx.Node, Parameter]  # and buffers, by placeholder
    by_name: dict[str, fx.Node]  # placeholders by every name of these, also of those that strict export drops
    ties: dict[str, str]  # the first name of the same tensor, by later names
    aliases: dict[fx.Node, fx.Node]  # placeholders without uses: the one whose tensor each shares
    mutated: frozenset[str]  # parameters and buffers that the program writes to

    @property
    def fake_mode(self) -> Any:
        """The mode of the fake tensors that the program was exported with."""
        for node in self.program.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, Tensor) and _compat.is_fake(value):
                return value.fake_mode  # type: ignore[attr-defined]
        raise ShardingError("the exported program has no tensors, so there is nothing to cut")


def read_program(program: Any) -> Whole:
    """Read `program` into canonical form; `program` is not changed.

    Raises:
        ShardingError: something other than an exported program, or a program already cut for one rank.
    """
    if not isinstance(program, ExportedProgram):
        kind = "a module" if isinstance(program, nn.Module) else f"{type(program).__name__}"
        raise ShardingError(
            f"expected an ExportedProgram, got {kind}; export the model first:"
            " torch.export.export(model, example_inputs)"
        )
    record = (program.graph_module.meta.get("custom") or {}).get(RECORD)
    if record is not None:
        raise ShardingError(
            f"the program is already cut for rank {record['rank']} of {record['world_size']} and cannot be"
            " cut again; pass the whole program that torch.export.export returned"
        )
    for node in program.graph.nodes:
        if kind_of(node) is not None or getattr(node.target, "namespace", None) == "shardwise":
            raise ShardingError(
                f"the program already communicates, by {node.target} ({node.name}); pass a whole program,"
                " exported from a model that does not communicate"
            )
    program = functionalize(program)
    graph = canonicalize(program)
    placeholders = {str(node.target): node for node in graph.find_nodes(op="placeholder")}
    parameters = {
        placeholders[spec.arg.name]: Parameter(spec.target)
        for spec in program.graph_signature.input_specs
        if spec.kind in _STATE and spec.target is not None
    }
    by_name = {parameter.name: node for node, parameter in parameters.items()}
    ties = _tied_names(program)
    first_nodes = {name: by_name[first] for name, first in ties.items() if first in by_name}
    aliases = {by_name[name]: node for name, node in first_nodes.items() if name in by_name}
    for alias, node in aliases.items():
        alias.replace_all_uses_with(node)
    for name, node in first_nodes.items():
        by_name.setdefault(name, node)
    specs = program.graph_signature.output_specs
    mutated = frozenset(spec.target for spec in specs if spec.kind in _MUTATIONS and spec.target is not None)
    for node, parameter in parameters.items():
        overwrites = all(op_of(user) in _OVERWRITES and user.args[0] is node for user in node.users)
        if overwrites and parameter.name in mutated:
            parameter.style = "follow"
    return Whole(program, graph, parameters, by_name, ties, aliases, mutated)


def _tied_names(program: ExportedProgram) -> dict[str, str]:
    """Return the first name of the same tensor, for parameters and buffers that have an earlier name.

    Names that the graph contains come first: strict export drops others.
    """
    tensors = {**program.state_dict, **program.constants}
    in_graph = {spec.target for spec in program.graph_signature.input_specs}
    names: dict[Any, str] = {}
    firsts = {
        name: names.setdefault(_identity(tensors[name]), name)
        for name in sorted(tensors, key=lambda name: name not in in_graph)
        if isinstance(tensors[name], Tensor)
    }
    return {name: first for name, first in firsts.items() if first != name}


def _identity(tensor: Tensor) -> Any:
    if tensor.is_meta or _compat.is_fake(tensor) or not tensor.data_ptr():
        return id(tensor)
    kind = isinstance(tensor, nn.Parameter)
    return kind, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def resolve_style(weight: fx.Node, style: str, module: str) -> tuple[int | None, str]:
    """Return the dim that `style` cuts where `module` uses `weight`, and the style that cuts it at first use.

    A table that is both an embedding and the head's weight is cut along the vocabulary by "row" as the
    embedding, and by "column" as the head.
    """
    users = sorted(weight.users)  # in the graph's order
    user = next((x for x in users if module in modules_of(x)[-1:]), users[0] if users else None)
    dim = None if user is None else _cut_dim(style, user, weight)
    flips = dim is not None and _cut_dim(style, users[0], weight) not in (dim, None)
    return dim, {"column": "row", "row": "column"}[style] if flips else style


def _cut_dim(style: str, user: fx.Node, weight: fx.Node) -> int | None:
    """Return the dim of a matrix that a style cuts where `user` uses it; None if unknown."""
    if weight.meta["val"].ndim != 2:
        return None
    in_first = op_of(user) in ("embedding", "mm", "addmm")  # [rows, columns], [in, out]
    return int(in_first == (style == "column"))


def build_node(p: Partition, node: fx.Node, *, strict: bool = False) -> None:
    """Build this rank's form of `node` from its inputs in `p.values`, and put its value there."""
    if node.op in ("placeholder", "get_attr"):
        target = str(node.target)
        result = p.graph.placeholder(target) if node.op == "placeholder" else p.graph.get_attr(target)
        if node.op == "placeholder":
            result.name = target  # as in the signature, even if a Python function has that name ("input")
        result.meta = copy.copy(node.meta)
        p.values[node] = Value(result, REPLICATE)
        parameter = p.parameters.get(node)
        if parameter is not None and parameter.placement is not None:
            p.hold(node, parameter.placement)
    elif node.target is operator.getitem:
        getitem(p, node)
    elif p.is_whole(node):
        p.repeat(node)
    elif (rule := find(node)) is not None:
        rule(p, node)
    elif is_pointwise(node):
        pointwise(p, node)
    else:
        _replicate(p, node, strict=strict)


def _replicate(p: Partition, node: fx.Node, *, strict: bool) -> None:
    """Run an operation without a rule on whole inputs."""
    cut = [x for x in node.all_input_nodes if is_tensor(x) and p.placement(x) != REPLICATE]
    if cut:
        problem = f"{name_of(node)} ({node.name}, {line_of(node)}) has no tensor-parallel rule"
        size = sum(map(nbytes, cut))
        if strict:
            raise ShardingError(
                f"{problem} and would gather {size} bytes; register a rule, or pass strict=False"
            )
        p.warnings.append(
            f"{problem}, so its inputs are gathered, {size} bytes per call; register a rule with"
            " shardwise.tensor_parallel.rule"
        )
    p.repeat(node)


def outputs(whole: Whole, node: fx.Node) -> list[tuple[Any, fx.Node | None]]:
    """List the program's outputs, each with the parameter or buffer that it is written to, if any."""
    owners = whole.by_name
    specs = whole.program.graph_signature.output_specs
    values: Sequence[Any] = node.args[0]  # type: ignore[assignment]
    return [
        (value, owners.get(spec.target or "") if spec.kind in _WRITES else None)
        for spec, value in zip(specs, values, strict=True)
    ]


def output(p: Partition, value: Any, owner: fx.Node | None) -> Any:
    """Return an output of this rank: whole, or cut like the parameter that it is written to."""
    placement: Placement | None = None if owner is None else p.parameters[owner].placement
    return p.take(value, placement or REPLICATE)
