"""Small graphs of collectives, drawn node by node."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter, Node, map_arg

from shardwise.fsdp.traced import Cut
from shardwise.graph.measure import graph_report

RANKS, SIZE = 4, 3
C10D: Any = torch.ops._c10d_functional
ATEN: Any = torch.ops.aten


def most_unsharded(graph: Graph) -> int:
    """How many gathers are held at a time, at most."""
    return graph_report(graph, kind="forward").peak_groups


class Drawing:
    """A graph, drawn node by node."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.mode = FakeTensorMode()

    def input(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Node:
        node = self.graph.create_node("placeholder", name, name=name)
        with self.mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        return node

    def call(self, name: str, target: Any, *args: Any, **kwargs: Any) -> Node:
        node = self.graph.create_node("call_function", target, args, kwargs, name=name)
        given, named = map_arg((args, kwargs), lambda one: one.meta["val"])
        node.meta["val"] = target(*given, **named)
        return node

    def gather(self, name: str, shard: Node, *, group: str = "0") -> Node:
        issue = self.call(f"gather_{name}", C10D.all_gather_into_tensor.default, shard, RANKS, group)
        return self.call(f"full_{name}", C10D.wait_tensor.default, issue)

    def scatter(self, name: str, grad: Node, *, op: str = "sum", group: str = "0") -> Node:
        issue = self.call(f"scatter_{name}", C10D.reduce_scatter_tensor.default, grad, op, RANKS, group)
        return self.call(f"reduced_{name}", C10D.wait_tensor.default, issue)

    def stage(self, name: str, *grads: Node) -> Node:
        sizes = [grad.meta["val"].numel() for grad in grads]
        placed = [(place, 0, [size], [size]) for place, size in enumerate(sizes)]
        cut = Cut.of(1, sizes, placed, [True] * len(grads), list(range(len(grads))))
        staged: Any = torch.ops.shardwise.staged
        return self.call(f"staged_{name}", staged.default, list(grads), cut.numbers, torch.float32)

    def reduce(self, name: str, x: Node) -> Node:
        issue = self.call(f"reduce_{name}", C10D.all_reduce.default, x, "sum", "1")
        return self.call(f"summed_{name}", C10D.wait_tensor.default, issue)

    def mul(self, name: str, a: Node, b: Node) -> Node:
        return self.call(name, ATEN.mul.Tensor, a, b)

    def returns(self, *nodes: Node) -> Graph:
        self.graph.output(nodes)
        self.graph.lint()
        return self.graph


def names(graph: Graph) -> list[str]:
    return [node.name for node in graph.nodes if node.op == "call_function"]


def forward(*, blocks: int = 3, cast: bool = False) -> Graph:
    """x times the parameter of each block, gathered where it is needed."""
    drawing = Drawing()
    shards = [drawing.input(f"shard_{i}", SIZE) for i in range(blocks)]
    x = drawing.input("x", RANKS * SIZE, dtype=torch.bfloat16 if cast else torch.float32)
    for i, shard in enumerate(shards):
        if cast:
            shard = drawing.call(f"cast_{i}", ATEN._to_copy.default, shard, dtype=torch.bfloat16)
        full = drawing.gather(str(i), shard)
        weight = drawing.call(f"weight_{i}", ATEN.view.default, full, [RANKS * SIZE])
        x = drawing.mul(f"mul_{i}", x, weight)
    return drawing.returns(x)


def backward(*, blocks: int = 3, replicated: bool = False) -> Graph:
    """Gradients of `forward`, each reduced where it stands."""
    drawing = Drawing()
    shards = [drawing.input(f"shard_{i}", SIZE) for i in range(blocks)]
    xs = [drawing.input(f"x_{i}", RANKS * SIZE) for i in range(blocks)]
    grad = drawing.input("grad", RANKS * SIZE)
    found = []
    for i in reversed(range(blocks)):
        full = drawing.gather(str(i), shards[i])
        weight_grad = drawing.mul(f"weight_grad_{i}", grad, xs[i])
        grad = drawing.mul(f"grad_{i}", grad, full)
        flat = drawing.call(f"flat_{i}", ATEN.view.default, weight_grad, [-1])
        reduced = drawing.scatter(str(i), flat)
        if replicated:
            reduced = drawing.reduce(str(i), reduced)
        found.append(drawing.call(f"mean_{i}", ATEN.div.Tensor, reduced, 4))
    return drawing.returns(grad, *found)


def deep_backward(*, blocks: int = 3) -> Graph:
    """Gradients of blocks that multiply by two parameters each, staged and reduced together."""
    drawing = Drawing()
    width = RANKS * SIZE
    shards = [drawing.input(f"shard_{i}", 2 * SIZE) for i in range(blocks)]
    x, grad = drawing.input("x", width), drawing.input("grad", width)
    found = []
    for i in reversed(range(blocks)):
        full = drawing.gather(str(i), shards[i])
        grads = []
        for part in (1, 0):
            name = f"{'ab'[part]}_{i}"
            weight = drawing.call(
                f"weight_{name}", ATEN.slice.Tensor, full, 0, part * width, (part + 1) * width
            )
            before, grad = grad, drawing.mul(f"grad_{name}", grad, weight)
            grads.append(drawing.mul(f"weight_grad_{name}", before, x))
        found.append(drawing.scatter(str(i), drawing.stage(str(i), *reversed(grads))))
    return drawing.returns(grad, *found)


class Alone(Interpreter):
    """Runs a graph as if all ranks had its tensors, each a little other."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        name = str(target)
        if "c10d" not in name:
            return super().call_function(target, args, kwargs)
        if "wait" in name:
            return args[0].clone()
        if "all_gather" in name:
            return torch.cat([args[0] + rank for rank in range(RANKS)])
        if "reduce_scatter" in name:
            return args[0].view(RANKS, -1)[1] * 3
        return args[0] * 5


def computed(graph: Graph) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = []
    for node in graph.nodes:
        if node.op == "placeholder":
            value = node.meta["val"]
            inputs.append(torch.rand(value.shape, generator=generator, dtype=value.dtype))
    return list(Alone(GraphModule(torch.nn.Module(), graph)).run(*inputs))


def assert_same(a: list[Tensor], b: list[Tensor]) -> None:
    assert len(a) == len(b)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
