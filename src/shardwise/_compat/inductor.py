"""Private names of inductor: passes over its graphs, and the order in which it schedules their kernels."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node


def inductor(options: dict[str, Any], dynamic: bool | None) -> Callable[..., Any]:
    """Return the backend of `torch.compile(backend="inductor", options=options)`, to be wrapped."""
    wrapper: Any = torch._TorchCompileInductorWrapper
    return cast(Callable[..., Any], wrapper(None, options, dynamic))


def announcing(
    announce: Callable[[], None],
    *,
    backend: str | Callable[..., Any],
    dynamic: bool | None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Return a backend whose graphs call `announce` each time before they run; see `torch.compile`."""
    from torch._dynamo import lookup_backend

    compiler = inductor(options or {}, dynamic) if backend == "inductor" else lookup_backend(backend)

    def compile_announcing(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        run = compiler(module, inputs)

        def run_announced(*args: Any) -> Any:
            announce()
            return run(*args)

        return run_announced

    return compile_announcing


def inductor_pass(edit: Callable[[torch.fx.Graph], Any], uuid: str | None) -> Any:
    """Return a pass over inductor's graphs; `uuid` identifies it in caches of compiled graphs.

    If `uuid` is None, graphs are compiled anew.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Pass(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            edit(graph)

        def uuid(self) -> str | None:
            return uuid

    return Pass()


def collectives_in_place() -> Any:
    """Return a pass, before inductor fuses kernels, that keeps collectives where the graph has them."""
    # Inductor fuses kernels that read the same memory, however far apart they are. What one of them waits for
    # then runs before all that follows the other: a reduction slipped behind the next block's products. So
    # the pass makes each collective and wait follow the library calls before it and precede those after it.
    # Kernels that inductor generates may still move: fusing them is worth more than their place.
    from torch._inductor import custom_graph_pass
    from torch._inductor.dependencies import WeakDep
    from torch._inductor.utils import is_collective, is_wait
    from torch._inductor.virtualized import V

    def follow(node: Any, earlier: Sequence[Any]) -> None:
        buffer = next(iter(node.get_buffer_names()))
        for name in (name for other in earlier for name in other.get_buffer_names()):
            node.add_fake_dep(WeakDep(name, mutating_buf=buffer, is_fake=True))

    # 2.13 added a separate class for scheduler passes.
    base: Any = getattr(custom_graph_pass, "CustomSchedulerPass", custom_graph_pass.CustomGraphPass)

    class Pass(base):  # type: ignore[misc]
        def __call__(self, nodes: list[Any]) -> list[Any]:
            predecessors: list[Any] = []  # the previous collective, and library calls after it
            has_collective = False
            for node in nodes:
                kernel = getattr(node, "node", None)  # fused nodes have none
                if is_collective(kernel) or is_wait(kernel):
                    follow(node, predecessors)
                    predecessors, has_collective = [node], True
                elif node.is_extern() or node.is_template():
                    follow(node, predecessors[:1] if has_collective else ())
                    predecessors.append(node)
            if has_collective:
                V.graph.scheduler.compute_ancestors()  # the scheduler decides by them what it may fuse
            return nodes

        def uuid(self) -> str:
            return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()

    return Pass()


# A kernel's nodes, in graph order, and whether it is a library call that computes the last of them.
Kernel = tuple[tuple[Node, ...], bool]


def scheduled(keep: Callable[[GraphModule, bool, list[Kernel]], None]) -> Callable[[list[Any]], list[Any]]:
    """Return a pass that calls `keep` for every graph that inductor has fused, and changes nothing.

    `keep` gets the graph, whether it is a backward graph, and its kernels in order. There is no public hook.
    """
    from torch._inductor.virtualized import V

    def read_kernels(nodes: list[Any]) -> list[Any]:
        if getattr(V.graph, "parent", None) is None:  # no graph inside another
            module = cast(GraphModule, V.graph.module)
            place = {node: i for i, node in enumerate(module.graph.nodes)}
            kernels = [
                (
                    tuple(sorted((o for o in part.node.origins if o in place), key=place.__getitem__)),
                    part.is_extern(),
                )
                for fused in nodes
                for part in fused.get_nodes()
                if part.node is not None
            ]
            keep(module, bool(V.graph.is_backward), kernels)
        return nodes

    return read_kernels
