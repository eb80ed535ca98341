"""Values moved because the user says where a module's input or outputs are to be.

An exported program has no modules, only nodes that say which call of which module they belong to: what comes
in is what they take from others, what goes out is their last.
"""

from __future__ import annotations

from torch import Tensor, fx
from torch.export.graph_signature import ExportGraphSignature

from shardwise.errors import ShardingError
from shardwise.tensor_parallel.nodes import calls_of
from shardwise.tensor_parallel.partition import Partition, Value, aten
from shardwise.tensor_parallel.placement import REPLICATE, Placement, Split, even
from shardwise.tensor_parallel.styles import REPLICATED, Layout, Plan

Moves = dict[fx.Node, tuple[str, Layout]]

_NOT_CALLED = (
    "the {} of {} are to be moved, but no operation of the program says that it belongs to it (it was not"
    " called, or a pass has dropped nn_module_stack); leave its layouts out"
)


def enter(plan: Plan, graph: fx.Graph, signature: ExportGraphSignature) -> Moves:
    """Put a node before each call of a module whose input is to be moved, for what comes in: where to."""
    moves: Moves = {}
    for module, layout in plan.inputs.items():
        calls: dict[str, list[fx.Node]] = {}
        for node in graph.nodes:
            if node.op == "call_function" and (call := _call_of(node, module)) is not None:
                calls.setdefault(call, []).append(node)
        if not calls:
            raise ShardingError(_NOT_CALLED.format("input", module))
        for own in calls.values() if layout != REPLICATED else ():  # who takes it whole has it so
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


def _is_activation(node: fx.Node, signature: ExportGraphSignature) -> bool:
    """Is it a floating tensor that is computed, or given by the caller?"""
    value = node.meta.get("val")
    made = node.op == "call_function" or str(node.target) in signature.user_inputs
    return made and isinstance(value, Tensor) and value.is_floating_point()


def _call_of(node: fx.Node, module: str) -> str | None:
    """Which call of `module` a node belongs to."""
    return next((call for call in calls_of(node) if call.partition("@")[0] == module), None)


def leave(plan: Plan, graph: fx.Graph) -> Moves:
    """The last operation of each call of a module whose outputs are to be moved: the module, and where to."""
    moves: Moves = {}
    for module, layout in plan.outputs.items():
        last: dict[str, fx.Node] = {}
        for node in graph.nodes:
            call = _call_of(node, module)
            if call is not None and node.op == "call_function" and isinstance(node.meta.get("val"), Tensor):
                last[call] = node
        if not last:
            raise ShardingError(_NOT_CALLED.format("outputs", module))
        moves.update((node, (module, layout)) for node in last.values())
    return moves


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
