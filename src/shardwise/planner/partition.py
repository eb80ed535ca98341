"""Tensors that a compiler keeps for backward or recomputes, by torch's own min-cut of a joint graph.

A function is traced, forward and backward together, on the fake tensors of its first call. Inductor's
partitioner splits that graph in two, which then run instead of the function. So a recording sees what is kept
between them, and what the second recomputes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from functorch.compile import (  # type: ignore[import-untyped]
    aot_function,
    default_decompositions,
    make_boxed_func,
    min_cut_rematerialization_partition,
)
from torch import nn

from shardwise.planner.recorder import Recorder


def partition_function(function: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Return `function` as its forward and backward graphs, which are all that the recorder sees of it."""

    patched = functools.partial(mock.patch.multiple, recorder)

    def compile_graph(graph: Any, inputs: Any) -> Any:
        def call(*args: Any) -> Any:
            with patched(looks_away=False, in_graphs=True):
                return graph(*args)

        return make_boxed_func(call)  # else AOTAutograd warns

    joint: Any = aot_function(
        function,
        fw_compiler=compile_graph,
        bw_compiler=compile_graph,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=default_decompositions,
    )

    def call(*args: Any) -> Any:
        with patched(looks_away=True):
            return joint(*args)

    return call


class _Plain(nn.Module):
    """A block's own forward, without the library's hooks around it."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.original = block, block.forward

    def forward(self, args: Any, kwargs: Any) -> Any:
        return self.original(*args, **kwargs)


def partition(blocks: list[nn.Module], recorder: Recorder) -> None:
    """Make each block run its graphs, which blocks of equal code share."""
    graphs_by_code: dict[str, Callable[..., Any]] = {}
    for block in blocks:
        plain, key = _Plain(block), str(block)
        if key not in graphs_by_code:

            def run_block(params: Any, args: Any, kwargs: Any, plain: _Plain = plain) -> Any:
                return torch.func.functional_call(plain, params, (args, kwargs))

            graphs_by_code[key] = partition_function(run_block, recorder)
        graphs = graphs_by_code[key]

        def forward(*args: Any, plain: _Plain = plain, graphs: Any = graphs, **kwargs: Any) -> Any:
            return graphs(dict(plain.named_parameters()), args, kwargs)

        block.forward = forward
