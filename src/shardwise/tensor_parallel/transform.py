"""`tensor_parallel_transformation`: turns an exported program into one rank's exported program.

Styles may give layouts for a module's input or outputs. An exported program has no modules, only nodes that
name the module call they belong to. A call's input is what its nodes take from other nodes; its output is
its last node.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import export, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature

from shardwise.errors import ShardingError, here
from shardwise.tensor_parallel import device, state
from shardwise.tensor_parallel import training as gradients
from shardwise.tensor_parallel.auto import best_plan
from shardwise.tensor_parallel.exploring import explore
from shardwise.tensor_parallel.nodes import calls_of, is_tensor, line_of, modules_of, name_of, nbytes
from shardwise.tensor_parallel.partition import Parameter, Partition, Value, aten
from shardwise.tensor_parallel.placement import REPLICATE, Placement, Split, even
from shardwise.tensor_parallel.program import Whole, build_node, output, outputs, read_program, resolve_style
from shardwise.tensor_parallel.styles import REPLICATED, Layout, Plan, plan_of

OFFLINE_GROUP = "shardwise_tensor_parallel"


def tensor_parallel_transformation(
    exported_program: export.ExportedProgram,
    rank: int,
    world_size: int,
    device_type: str,
    parallel_strategies: Mapping[str, Any] | Literal["auto"],
    *,
    group_name: str | None = None,
    strict: bool = False,
    training: bool = False,
    sharing: ExportedProgram | None = None,
) -> ExportedProgram:
    """Return the program that `rank` of `world_size` runs so that all ranks compute `exported_program`.

    Local: needs no process group and no communication, and any process can make any rank's program. Weights
    are only copied, once all placements are known. So a program exported on the meta device or from fake
    tensors can be cut too, and `materialize` fills the result from a checkpoint.

    Args:
        exported_program: from `torch.export.export`, decomposed or not. It is not changed; its in-place
            operations are functional in the result.
        rank: of the process that will run the result, in its group.
        world_size: number of ranks. If it exceeds the size of a dim, some ranks get no elements.
        device_type: where the result will run, such as "cuda". If this machine does not have it, values stay
            where they are until `load` moves them on a machine that does.
        parallel_strategies: styles by module, see `styles.plan_of`; or "auto": those of `choose`, at its
            default prices.
        group_name: of the process group to communicate over; by default the default group's, which must have
            `world_size` ranks. Without a default group, `package.bind` sets it later.
        strict: raise if an operation would gather what no style or layout asks for, as one without a rule
            does; if a weight with a style was not cut; or if a rank holds nothing of a weight.
        training: let backward through the result's module compute the whole program's gradients. If False,
            backward raises ShardingError if any parameter requires a gradient.
        sharing: result of this function for another program of the same model and the same rank. Tensors that
            both programs have get the same cut and are shared; so prefill and decode use one cache.

    Returns:
        A program with the same inputs and outputs, whole on every rank. Its state dict has this rank's parts
        of the parameters, and of buffers that it writes in parts, such as a cache of keys.

    Raises:
        ShardingError: a rank, world size, name or style that does not fit; something other than an exported
            program, or a program already cut for one rank.
    """
    _check_arguments(rank, world_size, device_type, parallel_strategies)
    whole = read_program(exported_program)
    if isinstance(parallel_strategies, str):
        parallel_strategies = best_plan(explore(whole, world_size)).strategies
    modules = dict.fromkeys(name for node in whole.graph.nodes for name in modules_of(node))
    tensors = {name: node.meta["val"] for name, node in whole.by_name.items()}
    plan = plan_of(parallel_strategies, tensors, modules=modules)
    parameters = {node: Parameter(x.name, x.style) for node, x in whole.parameters.items()}
    world = dist.group.WORLD if dist.is_initialized() else None
    if not group_name and world is not None and world.size() != world_size:
        raise ShardingError(
            f"{here()}: world_size is {world_size}, but the default process group has"
            f" {world.size()} ranks; pass group_name=group.group_name of the group"
            " that will run it, or pass any name and `bind` the result to a group later"
        )
    group = group_name or (OFFLINE_GROUP if world is None else world.group_name)
    partition = Partition(rank, world_size, group, whole.fake_mode, parameters)
    _set_styles(partition, plan, whole)
    if sharing is not None:
        _copy_placements(partition, sharing)
    _build_nodes(partition, plan, whole, strict=strict)
    styles: dict[fx.Node, str | None] = {}
    for name, node in whole.by_name.items():
        styles[node] = styles.get(node) or plan.styles.get(name)
    gathers = [_describe_gather(partition, *x) for x in partition.gathers if not _is_styled(*x, styles)]
    _report(partition, whole, styles, gathers, strict=strict)
    signature = whole.program.graph_signature
    if any(spec.kind in gradients.GRADIENTS for spec in signature.output_specs):
        pass  # the program includes its backward, which is cut like the rest
    elif training:
        gradients.differentiable(partition, signature)
    elif any(isinstance(x, nn.Parameter) and x.requires_grad for x in whole.program.state_dict.values()):
        gradients.untrainable(partition, signature)
    result = state.program_of(
        whole, partition, plan=plan, device_type=device_type, gathers=gathers, sharing=sharing
    )
    device.move_program(result, device_type)
    return result


def _check_arguments(rank: Any, world_size: Any, device_type: Any, strategies: Any) -> None:
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in (rank, world_size)):
        raise ShardingError(f"rank and world_size must be ints, got {rank!r} and {world_size!r}")
    if not 0 <= rank < world_size:
        raise ShardingError(f"expected 0 <= rank < world_size, got rank {rank} and world_size {world_size}")
    try:
        valid = isinstance(device_type, str) and torch.device(device_type) is not None
    except RuntimeError:
        valid = False
    if not valid:
        raise ShardingError(f"torch does not know device_type {device_type!r}; expected 'cpu', 'cuda', ...")
    if strategies != "auto" and not isinstance(strategies, Mapping):
        raise ShardingError(
            "expected strategies as a mapping from names of modules or parameters to styles, or 'auto', got"
            f" {type(strategies).__name__} {strategies!r}"
        )
    keys = [] if strategies == "auto" else [name for name in strategies if not isinstance(name, str)]
    if keys:
        raise ShardingError(
            f"the strategies have the key {keys[0]!r}; expected fully qualified names of modules or"
            " parameters, or patterns that match them"
        )


def _set_styles(p: Partition, plan: Plan, whole: Whole) -> None:
    """Set each parameter's style, named as its first use cuts it ("column" or "row")."""
    cuts: dict[fx.Node, tuple[int | None, str]] = {}
    for name, node in whole.by_name.items():
        style, original = plan.styles.get(name), whole.aliases.get(node, node)
        if style is None or p.parameters[node].name in whole.mutated:
            continue
        dim, p.parameters[original].style = resolve_style(original, style, name.rpartition(".")[0])
        other_dim, other_name = cuts.setdefault(original, (dim, name))
        if other_dim != dim:
            raise ShardingError(
                f"{other_name} and {name} are one tensor, but their styles cut it along dim {other_dim}"
                f" and along dim {dim}; give only one of them a style, or both styles that cut the same dim"
            )


def _copy_placements(p: Partition, sharing: ExportedProgram) -> None:
    record = state.record_of(sharing)
    if (record["rank"], record["world_size"]) != (p.rank, p.ranks):
        raise ShardingError(
            f"`sharing` is the program of rank {record['rank']} of {record['world_size']}, expected that of"
            f" rank {p.rank} of {p.ranks}"
        )
    for node, parameter in p.parameters.items():
        entry = record["parameters"].get(parameter.name)
        if entry is not None and entry["shape"] != p.shape(node):
            raise ShardingError(
                f"{parameter.name} has shape {entry['shape']} in `sharing`, but {p.shape(node)} here; share"
                " with a program of the same model"
            )
        if entry is not None:
            parameter.placement = state.placement_from_json(entry["placement"])


def _build_nodes(p: Partition, plan: Plan, whole: Whole, *, strict: bool) -> None:
    """Build every node in order, and move values to the layouts that the plan gives."""
    moves = insert_inputs(plan, whole.graph, whole.program.graph_signature) | find_outputs(plan, whole.graph)
    for node in whole.graph.nodes:
        if node.op == "output":
            p.graph.output(tuple(output(p, *pair) for pair in outputs(whole, node)))
            continue
        p.building = node
        build_node(p, node, strict=strict)
        p.building = None
        if node in moves:
            move_value(p, node, *moves[node])
    for alias, original in whole.aliases.items():  # an alias has no uses; it has the original's shard
        p.parameters[alias].placement = p.parameters[original].placement
        p.values[alias].node.meta["val"] = p.values[original].node.meta["val"]


def _is_styled(value: fx.Node, user: fx.Node, styles: Mapping[fx.Node, str | None]) -> bool:
    """Return whether a style asks for the gather: a weight's style places the input of its operation."""
    inputs = user.all_input_nodes
    weights = [*inputs, *(x.args[0] for x in inputs if x not in styles and x.args)]
    styled = any(styles.get(x) is not None for x in weights if isinstance(x, fx.Node))
    return styled and value not in styles


def _describe_gather(p: Partition, value: fx.Node, user: fx.Node) -> dict[str, Any]:
    """Return a gather that nothing asked for, as the program's record has it."""
    return {
        "op": name_of(user),
        "node": user.name,
        "module": (modules_of(user) or [""])[-1],
        "source": line_of(user),
        "value": p.parameters[value].name if value in p.parameters else value.name,
        "bytes": nbytes(value),
    }


def _report(
    p: Partition,
    whole: Whole,
    styles: Mapping[fx.Node, str | None],
    gathers: list[dict[str, Any]],
    *,
    strict: bool,
) -> None:
    """Warn of what the user may not have intended; if `strict`, raise."""
    if strict and gathers:
        raise ShardingError(
            "{op} ({node}, of module {module!r}, {source}) needs the whole of {value}, which is cut: it would"
            " gather {bytes} bytes that no style asks for; set output_layouts=Replicate() on the module that"
            " produces it, use another style, or pass strict=False".format(**gathers[0])
        )
    texts, uncut = p.warnings, []
    for node, x in p.parameters.items():
        shape, placement = tuple(node.meta["val"].shape), x.placement
        if styles.get(node) is not None and len(shape) >= 2 and not isinstance(placement, Split):
            reason = "nothing uses it" if placement is None else "its first use cannot work on a part of it"
            reason = "the program writes to it" if x.name in whole.mutated else reason
            uncut.append(
                f"{x.name} of shape {shape} has the style {styles[node]!r} but stays whole on every rank:"
                f" {reason}"
            )
        empty = [r for r in range(p.ranks) if isinstance(placement, Split) and not placement.size(r)]
        if strict and empty:
            raise ShardingError(
                f"rank {empty[0]} of {p.ranks} would hold no part of {x.name} of shape {shape}; use fewer"
                " ranks, or pass strict=False"
            )
    if uncut:
        text = uncut[0] + (f" (and {len(uncut) - 1} more like it)" if len(uncut) > 1 else "")
        if strict:
            raise ShardingError(f"{text}; remove its style, or pass strict=False")
        texts = [*texts, text]
    for text in texts:
        warnings.warn(text, stacklevel=3)


Moves = dict[fx.Node, tuple[str, Layout]]


def insert_inputs(plan: Plan, graph: fx.Graph, signature: ExportGraphSignature) -> Moves:
    """Insert a node for the input before each call of a module that moves it; return the nodes' layouts."""
    moves: Moves = {}
    for module, layout in plan.inputs.items():
        for nodes in _nodes_by_call(graph, module, "input"):
            if layout == REPLICATED:  # users that need it whole gather it themselves
                continue
            inputs = dict.fromkeys(x for node in nodes for x in node.all_input_nodes if x not in nodes)
            values = [x for x in inputs if x.op == "call_function" or x.target in signature.user_inputs]
            tensors = [x for x in values if is_tensor(x) and x.meta["val"].is_floating_point()]
            if len(tensors) != 1:
                raise ShardingError(
                    f"cannot move the input of {module}: it takes {len(tensors)} tensors"
                    f" ({', '.join(x.name for x in tensors[:5])}); set output_layouts where they are produced"
                )
            with graph.inserting_before(nodes[0]):
                alias = graph.call_function(aten.alias.default, (tensors[0],))
            alias.meta = {**nodes[0].meta, "val": tensors[0].meta["val"]}
            for node in nodes:
                node.replace_input_with(tensors[0], alias)
            moves[alias] = (module, layout)
    return moves


def find_outputs(plan: Plan, graph: fx.Graph) -> Moves:
    """Return the last operation of each call of a module that moves its outputs: module and layout."""
    return {
        [node for node in nodes if is_tensor(node)][-1]: (module, layout)
        for module, layout in plan.outputs.items()
        for nodes in _nodes_by_call(graph, module, "outputs")
    }


def _nodes_by_call(graph: fx.Graph, module: str, side: str) -> list[list[fx.Node]]:
    """Return the operations of each call of `module`, whose input or outputs are to be moved."""
    calls: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        for call in calls_of(node) if node.op == "call_function" else ():
            if call.partition("@")[0] == module:
                calls.setdefault(call, []).append(node)
    if not calls:
        raise ShardingError(
            f"cannot move the {side} of {module}: no operation of the program belongs to it (it was not"
            " called, or a pass dropped nn_module_stack); remove its layouts"
        )
    return list(calls.values())


def move_value(p: Partition, node: fx.Node, module: str, layout: Layout) -> None:
    """Move the value of `node` to the layout that the style of `module` gives."""
    placement = p.placement(node)
    target: Placement = REPLICATE
    if layout != REPLICATED:
        sizes, dim = p.shape(node), int(layout)
        if not -len(sizes) <= dim < len(sizes):
            raise ShardingError(
                f"cannot move the tensor at {module} to Shard({dim}): it has {len(sizes)} dims"
            )
        dim %= len(sizes)
        if isinstance(placement, Split) and placement.dim == dim:
            return
        if not isinstance(sizes[dim], int):
            raise ShardingError(
                f"cannot move the tensor at {module} to Shard({dim}): the size of that dim is not known"
                " before the program runs; export it as static, or remove the layout"
            )
        target = Split(dim, even(sizes[dim], p.ranks))
    p.values[node] = Value(p.take(node, target), target)
