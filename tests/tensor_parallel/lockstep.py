"""Run every rank's exported program in this one process, node by node, with collectives worked out here.

Each rank is a generator that gives out the tensor of every collective it comes to and gets back the result.
All ranks must come to the same collectives in the same order, or `run` raises: so it finds what would hang.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

Collective = tuple[str, Tensor, tuple[Any, ...]]
_NAMESPACE = "_c10d_functional"


def run(programs: Sequence[ExportedProgram], *args: Any, **kwargs: Any) -> list[list[Any]]:
    """What each rank's program returns for the same inputs, flattened; its state dict is written to."""
    ranks = [_rank(program, args, kwargs) for program in programs]
    results: list[list[Any] | None] = [None] * len(ranks)
    answers: list[Any] = [None] * len(ranks)
    while True:
        asked: dict[int, Collective] = {}
        for rank, generator in enumerate(ranks):
            try:
                asked[rank] = generator.send(answers[rank])
            except StopIteration as stop:
                results[rank] = stop.value
        if not asked:
            break
        if len(asked) != len(ranks):
            raise AssertionError(f"ranks {sorted(asked)} wait in a collective that the others do not come to")
        answers = _collective([asked[rank] for rank in range(len(ranks))])
    return [result for result in results if result is not None]


def collectives(program: ExportedProgram) -> dict[str, int]:
    """How many of each collective the program has."""
    found: dict[str, int] = {}
    for node in program.graph.nodes:
        name = _collective_name(node)
        if name is not None:
            found[name] = found.get(name, 0) + 1
    return found


def _collective_name(node: fx.Node) -> str | None:
    if node.op != "call_function" or getattr(node.target, "namespace", None) != _NAMESPACE:
        return None
    name = str(node.target).split(".")[1]
    return None if name == "wait_tensor" else name


def _collective(asked: list[Collective]) -> list[Tensor]:
    names, tensors = [name for name, _, _ in asked], [tensor for _, tensor, _ in asked]
    same = [(name, tensor.shape, tensor.dtype, rest) for name, tensor, rest in asked]
    if any(each != same[0] for each in same):
        raise AssertionError(f"ranks come to different collectives: {same}")
    if names[0] == "all_reduce":
        assert asked[0][2][0] == "sum"
        total = torch.stack(tensors).sum(0, dtype=tensors[0].dtype)
        return [total.clone() for _ in asked]
    if names[0] == "reduce_scatter_tensor":
        assert asked[0][2][:2] == ("sum", len(asked))
        return list(torch.stack(tensors).sum(0, dtype=tensors[0].dtype).chunk(len(asked)))
    assert names[0] == "all_gather_into_tensor", names[0]
    assert asked[0][2][0] == len(asked)
    assert all(tensor.is_contiguous() for tensor in tensors)
    return [torch.cat(tensors) for _ in asked]


def _rank(program: ExportedProgram, args: Any, kwargs: Any) -> Generator[Collective, Tensor, list[Any]]:
    given = iter(_in_order(program, args, kwargs))
    graph, root, values = program.graph, program.graph_module, dict[fx.Node, Any]()
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    for node in graph.nodes:
        if node.op == "placeholder":
            spec = specs[node.name]
            if spec.kind == InputKind.USER_INPUT:
                values[node] = next(given)
            elif spec.kind == InputKind.TOKEN:
                values[node] = torch.empty(0)
            elif spec.target in program.state_dict:
                values[node] = program.state_dict[spec.target]
            else:
                values[node] = program.constants[spec.target]
            _check(program, node, values[node])
        elif node.op == "get_attr":
            values[node] = root.get_submodule(node.target) if hasattr(root, node.target) else None
        elif node.op == "call_function":
            here = fx.map_arg(node.args, values.__getitem__)
            named = fx.map_arg(node.kwargs, values.__getitem__)
            name = _collective_name(node)
            if name is not None:
                values[node] = yield name, here[0], tuple(here[1:])
            elif getattr(node.target, "namespace", None) == _NAMESPACE:
                values[node] = here[0]  # the result was there when the collective was asked for
            else:
                values[node] = node.target(*here, **named)
    (output,) = graph.find_nodes(op="output")
    return _finish(program, fx.map_arg(output.args[0], values.__getitem__))


def _in_order(program: ExportedProgram, args: Any, kwargs: Any) -> list[Any]:
    names = [spec.context for spec in program.call_spec.in_spec.children()[1:]]
    ordered = {key: kwargs[key] for key in (names[0] if names and kwargs else kwargs)}
    return list(pytree.tree_leaves((args, ordered)))


def _check(program: ExportedProgram, node: fx.Node, value: Any) -> None:
    """The sizes that the program says its inputs have, where they are numbers."""
    told = node.meta.get("val")
    if isinstance(told, Tensor):
        for own, size in zip(value.shape, told.shape, strict=True):
            assert not isinstance(size, int) or own == size, f"{node.name}: {value.shape}, not {told.shape}"


def _finish(program: ExportedProgram, outputs: Sequence[Any]) -> list[Any]:
    returned = []
    for spec, value in zip(program.graph_signature.output_specs, outputs, strict=True):
        if spec.kind == OutputKind.BUFFER_MUTATION:
            store = program.state_dict if spec.target in program.state_dict else program.constants
            assert store[spec.target].shape == value.shape
            store[spec.target] = value
        elif spec.kind != OutputKind.TOKEN:
            returned.append(value)
    return returned
