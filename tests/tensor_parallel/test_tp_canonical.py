"""Other ways to write an operation become the one that rules know."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.export import export

from shardwise.tensor_parallel.canonical import _as_copied, _as_heads


class Copies(nn.Module):
    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.dtype = shape, dtype

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype).copy_(x)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own, of run_decompositions
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(3,), (2, 3)])
def test_a_copy_into_another_dtype_or_shape_is_converted_and_no_other(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    module, x = Copies(shape, dtype), torch.randn(3)
    graph_module = export(module, (x,)).run_decompositions({}).graph_module
    (copy,) = [node for node in graph_module.graph.nodes if node.target is torch.ops.aten.copy.default]
    copy.replace_all_uses_with(_as_copied(graph_module.graph, copy))
    graph_module.recompile()
    torch.testing.assert_close(graph_module(x)[0], module(x))
    added = {node.target for node in graph_module.graph.nodes if node.op == "call_function"}
    assert (torch.ops.aten.to.dtype in added) == (dtype != x.dtype)
    assert (torch.ops.aten.expand_as.default in added) == (shape != (3,))


class Heads(nn.Module):
    def __init__(self, first: int, second: int) -> None:
        super().__init__()
        self.dims = first, second

    def forward(self, x: Tensor) -> Tensor:
        return x.view(3, 4, 2).transpose(*self.dims).reshape(2, 2, 3, 2)


@pytest.mark.parametrize(("dims", "known"), [((0, 1), True), ((1, 2), False)])
def test_heads_that_are_split_another_way_stay_as_they_are(dims: tuple[int, int], known: bool) -> None:
    graph_module = export(Heads(*dims), (torch.randn(3, 2, 4),)).graph_module
    assert (_as_heads(graph_module.graph, [*graph_module.graph.nodes][-1].args[0][0]) is not None) == known
