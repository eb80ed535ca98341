"""Programs cut over ranks beside `fully_shard`: their parameters cut once more, over other ranks."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.export import ExportedProgram

from ranks import on_ranks
from shardwise import fully_shard
from shardwise.dimensions import Dimensions
from shardwise.errors import ShardingError
from shardwise.optim import clip_grad_norm_
from shardwise.tensor_parallel import (
    ColwiseParallel,
    RowwiseParallel,
    tensor_parallel_transformation,
    trainable,
)

COL, ROW = ColwiseParallel, RowwiseParallel
PLAN = {"embed": ROW, "q": COL, "k": COL, "v": COL, "o": ROW, "up": COL, "down": ROW}


class Language(nn.Module):
    """Every parameter has a gradient: no bias of keys, of which softmax sees nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(14, 24)
        self.q, self.k, self.v = nn.Linear(24, 24), nn.Linear(24, 24, bias=False), nn.Linear(24, 24)
        self.o, self.first, self.second = nn.Linear(24, 24), nn.LayerNorm(24), nn.LayerNorm(24)
        self.up, self.down = nn.Linear(24, 36), nn.Linear(36, 24)
        self.head = nn.Linear(24, 14, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        h = self.first(x)
        q, k, v = (each(h).unflatten(-1, (6, 4)).transpose(1, 2) for each in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(self.second(x))))
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def model() -> Language:
    torch.manual_seed(0)
    return Language().double()


def rows(step: int) -> Tensor:
    return torch.randint(14, (4, 5), generator=torch.Generator().manual_seed(step))


@functools.cache
def exported() -> ExportedProgram:
    """The whole program, which to be cut leaves as it is: once in each process."""
    return torch.export.export(model(), (rows(0)[:2],))


def cut(mesh: DeviceMesh, plan: dict[str, Any] = PLAN, program: ExportedProgram | None = None) -> Any:
    tp = mesh["tp"]
    return tensor_parallel_transformation(
        program or exported(), tp.get_local_rank(), tp.size(), "cpu", plan, group_name="later", training=True
    )


@on_ranks(4)
def test_clipped_steps_are_those_of_one_process() -> None:
    mesh = Dimensions("dp2,tp2").mesh("cpu")
    for layout in ("interleaved", "contiguous"):  # which share what DTensor works out for the mesh
        check_steps(mesh, layout)


def check_steps(mesh: DeviceMesh, layout: Any) -> None:
    sharded, reference = trainable(cut(mesh), mesh["tp"]), model()
    fully_shard(sharded, mesh=mesh["dp"], layout=layout)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (sharded, reference)]
    expected = dict(reference.named_parameters())
    for step in range(3):
        local, whole = sharded(rows(step).chunk(2)[mesh.get_local_rank("dp")]), reference(rows(step))
        local.backward()
        whole.backward()
        norm = clip_grad_norm_(sharded.parameters(), 0.1)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(reference.parameters(), 0.1))
        for name, param in sharded.named_parameters():
            assert expected[name].grad.abs().max() > 1e-6, name
            close(param.grad.full_tensor(), expected[name].grad, name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = get_model_state_dict(sharded)
    assert state.keys() == reference.state_dict().keys()
    for name, param in reference.state_dict().items():
        close(state[name].full_tensor(), param, name)


def close(actual: Tensor, expected: Tensor, name: str) -> None:
    distance = (actual - expected).abs().max() / expected.abs().max()
    assert distance < 1e-9, (name, distance)


class Fused(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.embed, self.qkv, self.heads = nn.Embedding(14, 12), nn.Linear(12, 36), heads

    def forward(self, ids: Tensor) -> Tensor:
        parts = self.qkv(self.embed(ids)).chunk(3, -1)
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in parts)
        return F.scaled_dot_product_attention(q, k, v).sum()


@on_ranks(4)
def test_what_no_dtensor_says_is_refused_by_name() -> None:
    mesh = Dimensions("dp2,tp2").mesh("cpu")
    fused = torch.export.export(Fused(2), (rows(0)[:2],))
    with pytest.raises(ShardingError, match=r"\(0, 6\), \(12, 18\).* of dim 0 of qkv.weight, \(36, 12\)"):
        trainable(cut(mesh, {"qkv": COL}, fused), mesh["tp"])
    with pytest.raises(ShardingError, match="expected a 1-D mesh"):
        trainable(cut(mesh), mesh)


@on_ranks(4)
def test_a_rank_s_program_without_its_cut_is_not_sharded() -> None:
    mesh = Dimensions("dp2,tp2").mesh("cpu")
    local = cut(mesh).module()
    for module in (local, nn.Sequential(local)):
        refused = r"'embed.weight' is only this rank's part of .* \(14, 24\).*trainable"
        with pytest.raises(ShardingError, match=refused):
            fully_shard(module, mesh=mesh["dp"])
