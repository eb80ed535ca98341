"""`tensor_parallel_transformation`: an exported program in, one rank's exported program out."""

from __future__ import annotations

import copy
import math
import operator
import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, export, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, OutputKind

from shardwise import _compat
from shardwise.errors import ShardingError, here
from shardwise.tensor_parallel import arguments, device, moves, state
from shardwise.tensor_parallel import training as gradients
from shardwise.tensor_parallel.canonical import canonical, functional
from shardwise.tensor_parallel.partition import Gathered, Parameter, Partition, Replicated, Value
from shardwise.tensor_parallel.placement import REPLICATE, Placement, Split, hint
from shardwise.tensor_parallel.rules import find, getitem, is_pointwise, name_of, pointwise
from shardwise.tensor_parallel.styles import Plan, plan_of

OFFLINE_GROUP = "shardwise_tensor_parallel"

_STATE = (InputKind.PARAMETER, InputKind.BUFFER)
# Outputs that belong to a parameter or buffer, and are as it is cut.
_MUTATIONS = (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION)
WRITES = (*_MUTATIONS, OutputKind.GRADIENT_TO_PARAMETER)


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
) -> ExportedProgram:
    """The program that `rank` of `world_size` runs so that all together compute `exported_program`.

    Local: needs no process group and no communication, and any rank's program can be made in any process.
    Weights are only copied, when all placements are known: a program exported on the meta device or from fake
    tensors is cut as well, and `materialize` fills the result from a checkpoint.

    Args:
        exported_program: from `torch.export.export`, as it is or decomposed. It stays as it is; operations
            that write in place are made functional in the result.
        rank: of the process that will run the result, within its group.
        world_size: how many ranks. More than a dim has elements leaves some ranks without any of them.
        device_type: where it will run, such as "cuda". This machine need not have it: values then stay where
            they are, until `load` moves them on one that has.
        parallel_strategies: styles by module, see `styles.plan_of`; or "auto": those of `choose`, at its own
            prices.
        group_name: of the process group that it communicates over; by default the default group's, which
            must have `world_size` ranks. Where there is none yet, `package.bind` names it later.
        strict: raise where an operation would gather what no style or layout asks for, as one without a rule
            does; where a weight with a style was not cut; and where some rank has nothing of a weight.
        training: have backward through the result's module give the whole program's gradients. Without it
            backward raises ShardingError, where any parameter requires a gradient.

    Returns:
        A program with the same inputs and outputs, whole on every rank, whose state dict has this rank's
        parts of the parameters. Buffers that it writes are whole.

    Raises:
        ShardingError: a rank, world size, name or style that does not fit; what is no exported program, or is
            one rank's already.
    """
    arguments.check_whole(exported_program)
    arguments.check_ranks(rank, world_size)
    arguments.check_device(device_type)
    program = functional(exported_program)
    if isinstance(parallel_strategies, str) and parallel_strategies == "auto":
        from shardwise.tensor_parallel.auto import choose  # which explores programs with this module

        parallel_strategies = choose(program, world_size).strategies
    arguments.check_strategies(parallel_strategies)
    graph = canonical(program)
    parameters = parameters_of(program, graph)
    dropped = _dropped(program, parameters)
    named = {p.name: node for node, p in parameters.items()} | dropped
    modules = list(dict.fromkeys(name for node in graph.nodes for name in _modules(node)))
    known = {name: node.meta["val"] for name, node in named.items()}
    plan = plan_of(parallel_strategies, known, modules=modules)
    aliases = untie(program, graph, parameters)
    written = _written(program.graph_signature)
    _give_styles(plan, parameters, aliases, written, dropped=dropped)
    group = group_name or _default_group(world_size)
    partition = Partition(rank, world_size, group, state.fake_mode_of(program), parameters)
    moved = moves.enter(plan, graph, program.graph_signature) | moves.leave(plan, graph)
    for node in graph.nodes:
        if node.op == "output":
            _outputs(partition, node, program.graph_signature)
        else:
            partition.building = node
            reword(partition, node)
            last = next(iter(reversed(partition.graph.nodes)), None)
            build(partition, node, strict=strict)
            _name_source(partition, node, last)
        partition.building = None
        if node in moved:
            moves.move(partition, node, *moved[node])
    for alias, first in aliases.items():
        _place_alias(partition, alias, first)
    words: dict[fx.Node, str | None] = {}
    for name, node in named.items():  # those of names that are dropped last
        words[node] = words.get(node) or plan.styles.get(name)
    for node, parameter in parameters.items():
        parameter.style = words[node]
    unasked = [_told(partition, x) for x in partition.gathers if not _is_asked(partition, x)]
    _report(partition, written, unasked, strict=strict)
    if training:
        gradients.differentiable(partition, program.graph_signature)
    elif any(isinstance(x, nn.Parameter) and x.requires_grad for x in program.state_dict.values()):
        gradients.untrainable(partition, program.graph_signature)
    made = state.program_of(program, partition, plan=plan, device_type=device_type, gathers=unasked)
    device.move_program(made, device_type)
    return made


def _default_group(world_size: int) -> str:
    if not dist.is_initialized() or dist.group.WORLD is None:
        return OFFLINE_GROUP
    if dist.group.WORLD.size() != world_size:
        raise ShardingError(
            f"{here()}: world_size is {world_size}, but the default process group has"
            f" {dist.group.WORLD.size()} ranks; give the name of the group that will run it,"
            " group_name=group.group_name, or any name and `bind` the result to a group later"
        )
    return dist.group.WORLD.group_name


# ------------------------------------------------------------ before: what is asked, of what


def parameters_of(program: ExportedProgram, graph: fx.Graph) -> dict[fx.Node, Parameter]:
    placeholders = {str(node.target): node for node in graph.find_nodes(op="placeholder")}
    return {
        placeholders[spec.arg.name]: Parameter(spec.target, placeholders[spec.arg.name])
        for spec in program.graph_signature.input_specs
        if spec.kind in _STATE and spec.target is not None
    }


def _dropped(program: ExportedProgram, parameters: dict[fx.Node, Parameter]) -> dict[str, fx.Node]:
    """Names that strict export drops from the graph: the placeholder of the tensor's other name."""
    by_name = {parameter.name: node for node, parameter in parameters.items()}
    tied = state.tied(program).items()
    return {name: by_name[first] for name, first in tied if name not in by_name and first in by_name}


def untie(
    program: ExportedProgram, graph: fx.Graph, parameters: dict[fx.Node, Parameter]
) -> dict[fx.Node, fx.Node]:
    """Let one placeholder have all uses of those that share a tensor; the others by that one."""
    first = state.tied(program)
    by_name = {parameter.name: node for node, parameter in parameters.items()}
    aliases = {}
    for name, node in by_name.items():
        if name in first and first[name] in by_name:
            node.replace_all_uses_with(by_name[first[name]])
            aliases[node] = by_name[first[name]]
    return aliases


def _written(signature: ExportGraphSignature) -> list[str]:
    return [
        spec.target for spec in signature.output_specs if spec.kind in _MUTATIONS and spec.target is not None
    ]


def _give_styles(
    plan: Plan,
    parameters: dict[fx.Node, Parameter],
    aliases: dict[fx.Node, fx.Node],
    written: list[str],
    *,
    dropped: Mapping[str, fx.Node] = MappingProxyType({}),
) -> None:
    """Write its style on each parameter: the word that cuts it, at its first use, along the dim asked for.

    A table that is an embedding and the head's weight is cut along the vocabulary by "row" as the one and by
    "column" as the other.
    """
    wanted: dict[fx.Node, tuple[int | None, str, str]] = {}
    named = [(parameter.name, node) for node, parameter in parameters.items()] + list(dropped.items())
    for name, node in named:
        word = plan.styles.get(name)
        if word is None or parameters[node].name in written:
            continue
        first = aliases.get(node, node)
        used = _use(first, name.rpartition(".")[0])
        dim = None if used is None else _dim(word, used, first)
        if first in wanted and wanted[first][0] != dim:
            raise ShardingError(
                f"{wanted[first][2]} and {name} are one tensor, to be cut along dim"
                f" {wanted[first][0]} by one style and along dim {dim} by the other; give one of them, or"
                " such that cut it alike"
            )
        wanted[first] = (dim, word, name)
    for node, (dim, word, _) in wanted.items():
        use = min(node.users, default=None)  # in the graph's order
        other = {"column": "row", "row": "column"}[word]
        flips = dim is not None and use is not None and _dim(word, use, node) not in (dim, None)
        parameters[node].style = other if flips else word


def _use(weight: fx.Node, module: str) -> fx.Node | None:
    """The operation by which `module` uses a weight; the first of all if it uses it by none."""
    users = sorted(weight.users)
    return next((user for user in users if module in _modules(user)[-1:]), users[0] if users else None)


def _dim(word: str, user: fx.Node, weight: fx.Node) -> int | None:
    """The dim of a matrix that a style cuts where `user` uses it; None where that is not known."""
    if weight.meta["val"].ndim != 2:
        return None
    name = name_of(user).partition(".")[0]
    if name in ("aten::embedding", "aten::mm", "aten::addmm"):  # [rows, columns], [in, out]
        return 0 if word == "row" else 1
    return 0 if word == "column" else 1


def _modules(node: fx.Node) -> list[str]:
    """Names of the modules that `node` lies in, the innermost last; without the number of the call."""
    return [str(entry[0]).partition("@")[0] for entry in (node.meta.get("nn_module_stack") or {}).values()]


# ------------------------------------------------------------ node by node


def reword(p: Partition, node: fx.Node) -> None:
    """Call the style of matrices that are cut already by the word for that cut at this use of them."""
    for x in node.all_input_nodes:
        parameter = p.parameters.get(x)
        if parameter is not None and isinstance(parameter.placement, Split):
            words = [word for word in ("column", "row") if _dim(word, node, x) == parameter.placement.dim]
            parameter.style = words[0] if words else parameter.style


def build(p: Partition, node: fx.Node, *, strict: bool) -> None:
    if node.op == "placeholder":
        made = p.graph.placeholder(str(node.target))
        made.name = str(node.target)  # the signature's, though it may be that of a Python function ("input")
        made.meta = copy.copy(node.meta)
        p.values[node] = Value(made, REPLICATE)
    elif node.op == "get_attr":
        made = p.graph.get_attr(str(node.target))
        made.meta = copy.copy(node.meta)
        p.values[node] = Value(made, REPLICATE)
    elif node.target is operator.getitem:
        getitem(p, node)
    elif (known := find(node)) is not None:
        known(p, node)
    elif _compat.is_operator(node.target) and is_pointwise(node, name_of(node)):
        pointwise(p, node)
    else:
        _replicate(p, node, strict=strict)


def _name_source(p: Partition, node: fx.Node, last: fx.Node | None) -> None:
    """Nodes made for `node`, those after `last`, are of its module, except what first moves its inputs."""
    made: list[fx.Node] = []
    for new in reversed(p.graph.nodes):
        if new is last:
            break
        made.append(new)
    weights = [p.values[x].node for x in node.all_input_nodes if x in p.parameters]
    stack, own = node.meta.get("nn_module_stack"), False
    for new in reversed(made):
        own = own or new.target == node.target or any(x in weights for x in new.all_input_nodes)
        if own and stack is not None:
            new.meta.setdefault("nn_module_stack", stack)


def _outputs(p: Partition, node: fx.Node, signature: ExportGraphSignature) -> None:
    """What the program returns is whole; what it writes to a parameter or buffer is cut as that is."""
    placements = {x.name: x.placement for x in p.parameters.values()}
    returned = []
    for spec, value in zip(signature.output_specs, node.args[0], strict=True):  # type: ignore[arg-type]
        belongs = spec.kind in WRITES and spec.target in placements
        where: Placement = (placements[spec.target] if belongs else None) or REPLICATE  # type: ignore[index]
        returned.append(p.take(value, where))
    p.graph.output(tuple(returned))


def _replicate(p: Partition, node: fx.Node, *, strict: bool) -> None:
    """An operation without a rule, on whole inputs."""
    cut = [x for x in node.all_input_nodes if x in p.values and p.values[x].placement != REPLICATE]
    cut = [x for x in cut if isinstance(x.meta.get("val"), Tensor)]
    if cut:
        source = _source(node)
        size = sum(x.meta["val"].numel() * x.meta["val"].element_size() for x in cut)
        lost = Replicated(node.name, name_of(node), source, int(size))
        if strict:
            raise ShardingError(
                f"{lost.op} ({lost.node}, {source}) has no tensor-parallel rule and would gather"
                f" {lost.gathered_bytes} bytes; register a rule, or pass strict=False"
            )
        p.replicated.append(lost)
    p.repeat(node)


def _source(node: fx.Node) -> str:
    """The line of the model that `node` comes from."""
    return (node.meta.get("stack_trace") or "no source line").strip().splitlines()[-1].strip()


def _is_asked(p: Partition, found: Gathered) -> bool:
    """Does a style ask for it? The weight of a style says where the input of its operation is to be."""
    sources = [x.args[0] if x not in p.parameters and x.args else x for x in found.user.all_input_nodes]
    weights = [*found.user.all_input_nodes, *(x for x in sources if isinstance(x, fx.Node))]
    styled = any(x in p.parameters and p.parameters[x].style is not None for x in weights)
    return styled and found.value not in p.parameters


def _told(p: Partition, found: Gathered) -> dict[str, Any]:
    """A gather that nothing asked for, as it is written down with the program."""
    value: Any = found.value.meta["val"]
    return {
        "op": name_of(found.user),
        "node": found.user.name,
        "module": (_modules(found.user) or [""])[-1],
        "source": _source(found.user),
        "value": p.parameters[found.value].name if found.value in p.parameters else found.value.name,
        "bytes": math.prod(map(hint, value.shape)) * value.element_size(),
    }


def _place_alias(p: Partition, alias: fx.Node, first: fx.Node) -> None:
    """A placeholder without uses has the shard of the one that shares its tensor."""
    p.parameters[alias].placement = p.parameters[first].placement
    p.values[alias].node.meta["val"] = p.values[first].node.meta["val"]


# ------------------------------------------------------------ after


def _report(p: Partition, written: list[str], unasked: list[dict[str, Any]], *, strict: bool) -> None:
    for told in unasked if strict else ():
        raise ShardingError(
            "{op} ({node}, of module {module!r}, {source}) takes the whole of {value}, which is cut, and"
            " would gather {bytes} bytes that no style asks for; give output_layouts=Replicate() to its"
            " module, another style, or pass strict=False".format(**told)
        )
    for lost in p.replicated:
        _warn(
            f"{lost.op} ({lost.node}, {lost.source}) has no tensor-parallel rule: its inputs are gathered,"
            f" {lost.gathered_bytes} bytes a call; register a rule with shardwise.tensor_parallel.rule"
        )
    whole = []
    for x in p.parameters.values():
        shape = tuple(x.node.meta["val"].shape)
        if x.style is not None and len(shape) >= 2 and not isinstance(x.placement, Split):
            why = "nothing uses it" if x.placement is None else "its first use has no way to use a part of it"
            why = "the program writes to it" if x.name in written else why
            whole.append(
                f"{x.name} of shape {shape} has the style {x.style!r} but stays whole on every rank: {why}"
            )
        empty = [r for r in range(p.ranks) if isinstance(x.placement, Split) and not x.placement.size(r)]
        if strict and empty:
            raise ShardingError(
                f"rank {empty[0]} of {p.ranks} would have nothing of {x.name} of shape {shape}; use fewer"
                " ranks, or pass strict=False"
            )
    if whole:
        text = whole[0] + (f" (and {len(whole) - 1} more like it)" if len(whole) > 1 else "")
        if strict:
            raise ShardingError(f"{text}; leave its style out, or pass strict=False")
        _warn(text)


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=4)
