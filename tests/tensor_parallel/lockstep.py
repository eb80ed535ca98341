"""Run every rank's exported program in this one process, node by node, with collectives worked out here.

Each rank is a generator that gives out the tensor of every collective it comes to and gets back the result;
going backward, a thread that meets the others in each. All ranks must come to the same collectives in the
same order, or it raises: so it finds what would hang.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.tensor_parallel import tensor_parallel_transformation
from shardwise.tensor_parallel.canonical import functionalize

Collective = tuple[str, Tensor, tuple[Any, ...]]
_NAMESPACE = "_c10d_functional"
_SECONDS = 60.0  # that a rank waits for the others before it is sure that they do not come


def parts(program: ExportedProgram, plan: Any, *, ranks: int = 2, **options: Any) -> list[ExportedProgram]:
    """Every rank's program; operations in place are replaced once for all, which takes as long as to cut."""
    program = functionalize(program)
    return [
        tensor_parallel_transformation(program, rank, ranks, "cpu", plan, **options) for rank in range(ranks)
    ]


def run(programs: Sequence[ExportedProgram], *args: Any, **kwargs: Any) -> list[list[Any]]:
    """What each rank's program returns for the same inputs, flattened; its state dict is written to."""
    return run_each(programs, [(args, kwargs)] * len(programs))


def run_each(
    programs: Sequence[ExportedProgram], inputs: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]
) -> list[list[Any]]:
    """The same, each rank on inputs of its own."""
    ranks = [_run_rank(program, *call) for program, call in zip(programs, inputs, strict=True)]
    results: list[list[Any] | None] = [None] * len(ranks)
    answers: list[Any] = [None] * len(ranks)
    draws = [torch.get_rng_state()] * len(ranks)
    while True:
        calls: dict[int, Collective] = {}
        for rank, generator in enumerate(ranks):
            torch.set_rng_state(draws[rank])
            try:
                calls[rank] = generator.send(answers[rank])
            except StopIteration as stop:
                results[rank] = stop.value
            draws[rank] = torch.get_rng_state()
        if any(not torch.equal(draws[0], draw) for draw in draws):
            raise AssertionError("ranks have drawn different numbers of random values")
        if not calls:
            break
        if len(calls) != len(ranks):
            raise AssertionError(f"ranks {sorted(calls)} wait in a collective that the others do not come to")
        answers = _collective([calls[rank] for rank in range(len(ranks))])
    return [result for result in results if result is not None]


def backward(losses: Sequence[Tensor]) -> dict[str, int]:
    """Go backward from each rank's loss, all together; returns how many of each collective that took."""
    counts: dict[str, int] = {}
    calls: list[Any] = [None] * len(losses)
    answers: list[Any] = [None] * len(losses)
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(losses), timeout=_SECONDS)

    def meet(rank: int, call: Collective) -> Tensor:
        calls[rank] = call
        if barrier.wait() == 0:
            answers[:] = _collective(calls)
            if call[0] != "end":
                counts[call[0]] = counts.get(call[0], 0) + 1
        barrier.wait()
        answer: Tensor = answers[rank]
        return answer

    def work(rank: int) -> None:
        try:
            with _Meeting(lambda call: meet(rank, call)):
                losses[rank].backward()
            meet(rank, ("end", torch.empty(0), ()))
        except threading.BrokenBarrierError:
            errors.append(AssertionError(f"rank {rank} waits backward in {calls[rank]} for the others"))
        except BaseException as error:
            errors.insert(0, error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(losses))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return counts


class _Meeting(TorchDispatchMode):
    """Functional collectives of this thread, by a function."""

    def __init__(self, meet: Callable[[Collective], Tensor]) -> None:
        super().__init__()
        self.meet = meet

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != _NAMESPACE:
            return func(*args, **(kwargs or {}))
        name = str(func).split(".")[1]
        return args[0] if name == "wait_tensor" else self.meet((name, args[0], tuple(args[1:])))


def _collective_name(node: fx.Node) -> str | None:
    if node.op != "call_function" or getattr(node.target, "namespace", None) != _NAMESPACE:
        return None
    name = str(node.target).split(".")[1]
    return None if name == "wait_tensor" else name


def _collective(calls: list[Collective]) -> list[Tensor]:
    names, tensors = [name for name, _, _ in calls], [tensor for _, tensor, _ in calls]
    signatures = [(name, tensor.shape, tensor.dtype, rest) for name, tensor, rest in calls]
    if any(signature != signatures[0] for signature in signatures):
        raise AssertionError(f"ranks come to different collectives: {signatures}")
    rest = calls[0][2]
    if names[0] == "end":
        return tensors
    if names[0] == "all_reduce":
        total = _reduce(tensors, rest[0])
        return [total.clone() for _ in calls]
    if names[0] == "reduce_scatter_tensor":
        assert rest[1] == len(calls)
        return [part.clone() for part in _reduce(tensors, rest[0]).chunk(len(calls))]
    assert names[0] == "all_gather_into_tensor", names[0]
    assert rest[0] == len(calls)
    assert all(tensor.is_contiguous() for tensor in tensors)
    return [torch.cat(tensors) for _ in calls]


def _reduce(tensors: list[Tensor], op: str) -> Tensor:
    stacked = torch.stack([tensor.detach() for tensor in tensors])
    return {
        "sum": lambda: stacked.sum(0, dtype=stacked.dtype),
        "max": lambda: stacked.amax(0),
        "min": lambda: stacked.amin(0),
    }[op]()


def _run_rank(program: ExportedProgram, args: Any, kwargs: Any) -> Generator[Collective, Tensor, list[Any]]:
    inputs = iter(_ordered_inputs(program, args, kwargs))
    graph, root, values = program.graph, program.graph_module, dict[fx.Node, Any]()
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    for node in graph.nodes:
        if node.op == "placeholder":
            spec = specs[node.name]
            if spec.kind == InputKind.USER_INPUT:
                values[node] = next(inputs)
            elif spec.kind == InputKind.TOKEN:
                values[node] = torch.empty(0)
            elif spec.target in program.state_dict:
                values[node] = program.state_dict[spec.target]
            else:
                values[node] = program.constants[spec.target]
            _check_sizes(program, node, values[node])
        elif node.op == "get_attr":
            values[node] = root.get_submodule(node.target) if hasattr(root, node.target) else None
        elif node.op == "call_function":
            positional = fx.map_arg(node.args, values.__getitem__)
            keywords = fx.map_arg(node.kwargs, values.__getitem__)
            name = _collective_name(node)
            if name is not None:
                values[node] = yield name, positional[0], tuple(positional[1:])
            elif getattr(node.target, "namespace", None) == _NAMESPACE:
                values[node] = positional[0]  # the result was there when the collective was asked for
            else:
                values[node] = node.target(*positional, **keywords)
    (output,) = graph.find_nodes(op="output")
    return _finish(program, fx.map_arg(output.args[0], values.__getitem__))


def _ordered_inputs(program: ExportedProgram, args: Any, kwargs: Any) -> list[Any]:
    names = [spec.context for spec in program.call_spec.in_spec.children()[1:]]
    ordered = {key: kwargs[key] for key in (names[0] if names and kwargs else kwargs)}
    return list(pytree.tree_leaves((args, ordered)))


def _check_sizes(program: ExportedProgram, node: fx.Node, value: Any) -> None:
    """The sizes that the program says its inputs have, where they are numbers."""
    fake = node.meta.get("val")
    if isinstance(fake, Tensor):
        for n, size in zip(value.shape, fake.shape, strict=True):
            assert not isinstance(size, int) or n == size, f"{node.name}: {value.shape}, not {fake.shape}"


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
