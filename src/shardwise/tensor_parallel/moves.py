"""Values moved because the user says where a module's input or outputs are to be.

An exported program has no modules, only nodes that say which call of which module they belong to: what comes
in is what they take from others, what goes out is their last.
"""

from __future__ import annotations

from torch import Tensor, fx
from torch.export.graph_signature import ExportGraphSignature

from shardwise.errors import ShardingError
from shardwise.tensor_parallel.nodes import calls_of, is_tensor
from shardwise.tensor_parallel.partition import Partition, Value, aten
from shardwise.tensor_parallel.placement import REPLICATE, Placement, Split, even
from shardwise.tensor_parallel.styles import REPLICATED, Layout, Plan

Moves = dict[fx.Node, tuple[str, Layout]]


def enter(plan: Plan, graph: fx.Graph, signature: ExportGraphSignature) -> Moves:
    """Put a node before each call of a module whose input is to be moved, for what comes in: where to."""
    moves: Moves = {}
    for module, layout in plan.inputs.items():
        for own in _calls(graph, module, "input"):
            if layout == REPLICATED:  # users that take it whole have it whole
                continue
            entering = dict.fromkeys(x for node in own for x in node.all_input_nodes if x not in own)
            given = [x for x in entering if _is_activation(x, signature)]
            if len(given) != 1:
                raise ShardingError(
                    f"the input of {module} is to be moved, but it takes {len(given)} tensors"
                    f" ({', '.join(x.name for x in given[:5])}); give output_layouts to what makes them"
                )
            with graph.inserting_before(own[0]):
                moved = graph.call_function(aten.alias.default, (given[0],))
            moved.meta = {**own[0].meta, "val": given[0].meta["val"]}
            for node in own:
                node.replace_input_with(given[0], moved)
            moves[moved] = (module, layout)
    return moves


def leave(plan: Plan, graph: fx.Graph) -> Moves:
    """Return the last operation of each call of a module whose outputs move: the module, and where to."""
    return {
        [node for node in own if is_tensor(node)][-1]: (module, layout)
        for module, layout in plan.outputs.items()
        for own in _calls(graph, module, "outputs")
    }


def _calls(graph: fx.Graph, module: str, what: str) -> list[list[fx.Node]]:
    """Return the operations of each call of `module`, whose input or outputs are to be moved."""
    calls: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        for call in calls_of(node) if node.op == "call_function" else ():
            if call.partition("@")[0] == module:
                calls.setdefault(call, []).append(node)
    if not calls:
        raise ShardingError(
            f"the {what} of {module} are to be moved, but no operation of the program says that it belongs to"
            " it (it was not called, or a pass has dropped nn_module_stack); leave its layouts out"
        )
    return list(calls.values())


def _is_activation(node: fx.Node, signature: ExportGraphSignature) -> bool:
    """Return whether `node` is a floating tensor that is computed, or given by the caller."""
    value = node.meta.get("val")
    made = node.op == "call_function" or str(node.target) in signature.user_inputs
    return made and isinstance(value, Tensor) and value.is_floating_point()


def move(p: Partition, node: fx.Node, module: str, layout: Layout) -> None:
    """Have the value of `node` where the style of `module` wants it."""
    at = p.placement(node)
    wanted: Placement = REPLICATE
    if layout != REPLICATED:
        sizes, dim = p.shape(node), int(layout)
        if not -len(sizes) <= dim < len(sizes):
            raise ShardingError(
                f"what is to be moved at {module} has {len(sizes)} dims; Shard({dim}) is none of them"
            )
        dim %= len(sizes)
        if isinstance(at, Split) and at.dim == dim:
            return
        if not isinstance(sizes[dim], int):
            raise ShardingError(
                f"what is to be moved at {module} cannot be cut along dim {dim}, whose size is not known"
                " before the program runs; export with that dim static, or leave the layout out"
            )
        wanted = Split(dim, even(sizes[dim], p.ranks))
    p.values[node] = Value(p.take(node, wanted), wanted)
