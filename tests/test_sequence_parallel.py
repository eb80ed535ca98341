"""DTensor's sequence and loss parallelism beside `fully_shard`: norms of pieces, logits by vocabulary."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import fsdp as torchs
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from ranks import on_ranks
from shardwise import fully_shard
from shardwise.dimensions import Dimensions, dense_mesh, share_of_batch
from shardwise.optim import clip_grad_norm_

WORDS, WIDTH = 14, 16
IN_PIECES = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
PLAN = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "first": SequenceParallel(),
    "attention": IN_PIECES,
    **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
    "attention.out": RowwiseParallel(output_layouts=Shard(1)),
    "second": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
    "last": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)  # softmax sees nothing of a bias

    def forward(self, x: Tensor) -> Tensor:
        heads = (
            each(x).unflatten(-1, (-1, 4)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        return self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.attention = nn.Embedding(WORDS, WIDTH), Attention()
        self.first, self.second, self.last = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = x + self.attention(self.first(x))
        x = x + self.down(F.gelu(self.up(self.second(x))))
        return self.head(self.last(x))


def model() -> Language:
    torch.manual_seed(0)
    return Language().double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    rows = torch.randint(WORDS, (4, 7), generator=torch.Generator().manual_seed(step))
    return rows[:, :-1], rows[:, 1:]


def train(trained: nn.Module, share: Any, *, clip: Any) -> list[dict[str, Tensor]]:
    """Norms, and gradients and parameters by name, after each of two steps."""
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2, foreach=True)
    found = []
    for step in range(2):
        inputs, targets = (share(each) for each in batch(step))
        F.cross_entropy(trained(inputs).flatten(0, 1), targets.flatten()).backward()
        seen = {"norm": clip(trained.parameters(), 0.1)}
        seen |= {f"{name} gradient": param.grad for name, param in trained.named_parameters()}
        optimizer.step()
        seen |= dict(trained.named_parameters())
        found.append({name: whole(tensor) for name, tensor in seen.items()})
        optimizer.zero_grad()
    return found


def whole(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def on_mesh(mesh: DeviceMesh, api: Any, *, clip: Any, **options: Any) -> list[dict[str, Tensor]]:
    trained = parallelize_module(model(), mesh["tp"], PLAN)
    for module in (trained.attention, trained):
        api(module, mesh=dense_mesh(mesh), **options)
    index, count = share_of_batch(mesh)
    with loss_parallel():
        return train(trained, lambda rows: rows.chunk(count)[index], clip=clip)


@pytest.mark.parametrize(
    ("mesh", "layouts"), [("dp2,tp2", ["interleaved", "contiguous"]), ("replicate2,tp2", ["contiguous"])]
)
@on_ranks(4)
def test_clipped_steps_are_those_of_one_process_and_of_fsdp2(mesh: Any, layouts: list[str]) -> None:
    mesh = Dimensions(mesh).mesh("cpu")
    expected = train(model(), lambda rows: rows, clip=nn.utils.clip_grad_norm_)
    theirs = on_mesh(mesh, torchs.fully_shard, clip=nn.utils.clip_grad_norm_)
    for layout in layouts:
        found = on_mesh(mesh, fully_shard, layout=layout, clip=clip_grad_norm_)
        for step in range(2):
            assert found[step].keys() == expected[step].keys() == theirs[step].keys()
            for name, tensor in expected[step].items():
                assert tensor.abs().max() > 1e-5, name
                for other in (tensor, theirs[step][name]):
                    apart = (found[step][name] - other).abs().max() / other.abs().max()
                    assert apart < 1e-9, (layout, step, name, apart)
