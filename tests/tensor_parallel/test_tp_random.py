"""Random operations in programs that are cut, evenly and not."""

from __future__ import annotations

import copy

import lockstep
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.export import Dim, export
from torch.nn import functional as F

from ranks import on_ranks
from shardwise.tensor_parallel import counts, tensor_parallel_transformation

# torch's compiler copies what it calls deprecated
pytestmark = pytest.mark.filterwarnings("ignore:.*treespec:FutureWarning")

PLAN = {"qkv": "colwise", "out": "rowwise", "up": "colwise", "down": "rowwise"}


class Block(nn.Module):
    """Drops parts of what is cut, of what is whole, and of attention's weights."""

    def __init__(self, *, key_heads: int) -> None:
        super().__init__()
        self.sizes = [3 * 4, key_heads * 4, key_heads * 4]
        self.qkv, self.out = nn.Linear(12, sum(self.sizes)), nn.Linear(12, 12)
        self.up, self.down = nn.Linear(12, 10), nn.Linear(10, 12)
        self.drop = nn.Dropout(0.4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in self.qkv(x).split(self.sizes, -1))
        grouped = k.shape[1] != 3
        causal = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=True, enable_gqa=grouped)
        seen = torch.ones(5, 5, dtype=torch.bool).triu(-2)
        masked = F.scaled_dot_product_attention(q, k, v, seen, dropout_p=0.5, scale=0.3, enable_gqa=grouped)
        x = x + self.drop(self.out((causal + masked).transpose(1, 2).flatten(-2)))
        y = self.drop(F.gelu(self.up(x)))
        y = y + torch.rand_like(y) * torch.randn_like(y)
        return self.drop(self.down(y)) * F.dropout(x, 0.9)


@pytest.mark.parametrize("decomposed", [False, True])
def test_a_cut_program_draws_what_the_whole_model_draws(decomposed: bool) -> None:
    for key_heads, ranks in ((1, 2),) if decomposed else ((1, 3), (3, 4)):
        torch.manual_seed(0)
        model, x = Block(key_heads=key_heads), torch.randn(2, 5, 12, dtype=torch.float64)
        shapes = {"x": {0: Dim("batch", min=2)}} if ranks == 2 else None
        program = export(copy.deepcopy(model), (x,), dynamic_shapes=shapes)
        program = program.run_decompositions() if decomposed else program
        programs = lockstep.parts(program, PLAN, ranks=ranks, training=True)
        assert counts(programs[0]) == {"all_reduce": 2}
        torch.manual_seed(1)
        expected = model(x)
        after = torch.rand(3)
        expected.square().sum().backward()
        torch.manual_seed(1)
        results = lockstep.run(programs, x)
        assert torch.equal(torch.rand(3), after)
        for (y,) in results:
            torch.testing.assert_close(y, expected)
        lockstep.backward([y.square().sum() for (y,) in results])
        rows = [part.state_dict["down.weight"].grad for part in programs]
        torch.testing.assert_close(torch.cat(rows, 1), model.down.weight.grad)


class NoneAndAll(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return F.dropout(y * F.dropout(y, 0.0) + F.dropout(y, 1.0), 0.3)


def test_dropout_of_nothing_and_of_all_draws_nothing() -> None:
    model, x = NoneAndAll(), torch.randn(4, 6)
    programs = lockstep.parts(export(model, (x,)), {"up": "colwise"}, ranks=2, training=True)
    torch.manual_seed(1)
    expected = model(x)
    torch.manual_seed(1)
    for (y,) in lockstep.run(programs, x):
        torch.testing.assert_close(y, expected)


@on_ranks(2)
def test_what_is_whole_is_equal_on_all_ranks_to_the_last_bit_also_compiled() -> None:
    model, x = Block(key_heads=1), torch.randn(2, 5, 12, dtype=torch.float64)
    rank = dist.get_rank()
    local = tensor_parallel_transformation(export(model, (x,)), rank, 2, "cpu", PLAN).module()
    for run in (local, local, torch.compile(local, backend="aot_eager", fullgraph=True)):
        with torch.no_grad():
            result = run(x)
        everyones = [torch.empty_like(result) for _ in range(2)]
        dist.all_gather(everyones, result)
        assert all(torch.equal(each, result) for each in everyones)
        assert (result == 0).double().mean() > 0.8
