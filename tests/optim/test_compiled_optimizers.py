"""Steps of optimizers and clipping, compiled by themselves: the uncompiled numbers, in both layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ranks import on_ranks
from shardwise import ShardedParameter, clip_grad_norm_, fully_shard

# torch compiles AdamW's bias corrections as tensors of fp32, and its lerp as fused multiplications.
ROUNDING = 2e-6


def trained(layout: str, kind: Any, *, compiles: bool, clip: Any, **options: Any) -> list[Tensor]:
    """Norms, and the parameters after three steps."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 7, bias=False), nn.ReLU(), nn.Linear(7, 1, bias=False)]  # a rank lacks rows of one
    model = nn.Sequential(*layers)
    fully_shard(model, layout=layout)
    optimizer = kind(model.parameters(), lr=0.05, **options)
    step, found = optimizer.step, []
    for number in range(3):
        made = torch.Generator().manual_seed(10 * dist.get_rank() + number)
        model(torch.randn(4, 6, generator=made)).square().mean().backward()
        if compiles and not number:  # after the first backward, which nothing announced the compiler to
            step, clip = (torch.compile(one, backend="aot_eager") for one in (step, clip))
        if number:
            norm = clip(list(model.parameters()), 0.1)
            found.append(norm if type(norm) is Tensor else norm.full_tensor())
        step()
        optimizer.zero_grad()
    return found + [param.detach().full_tensor() for param in model.parameters()]


@on_ranks(2)
@pytest.mark.parametrize(
    ("layout", "kind", "options", "clip", "tolerance"),
    [
        ("contiguous", torch.optim.SGD, {"momentum": 0.9, "foreach": True}, clip_grad_norm_, 0.0),
        ("contiguous", torch.optim.AdamW, {"foreach": False}, nn.utils.clip_grad_norm_, ROUNDING),
        ("interleaved", torch.optim.AdamW, {"foreach": False}, clip_grad_norm_, ROUNDING),
    ],
)
def test_compiled_steps_and_clipping_are_the_uncompiled_ones(
    layout: str, kind: Any, options: Any, clip: Any, tolerance: float
) -> None:
    torch.compiler.reset()
    expected, found = (
        trained(layout, kind, compiles=compiles, clip=clip, **options) for compiles in (False, True)
    )
    assert len(found) == 2 + 2
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@on_ranks(2)
def test_whole_tensors_of_rows_are_gathered_in_graphs() -> None:
    model = fully_shard(nn.Linear(6, 3), layout="contiguous")
    assert isinstance(model.weight, ShardedParameter)
    whole = torch.compile(
        lambda param: param.full_tensor() * param.sum(), backend="aot_eager", fullgraph=True
    )
    with torch.no_grad():
        assert torch.equal(whole(model.weight), model.weight.full_tensor() * model.weight.sum())


@on_ranks(2)
@pytest.mark.parametrize("layout", ["interleaved", "contiguous"])
def test_gradients_from_before_anything_was_compiled_are_taken_by_any_compiled_function(layout: str) -> None:
    torch.compiler.reset()
    models = [fully_shard(nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 3)), layout=layout) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    for model in models:
        model(torch.ones(4, 6)).square().mean().backward()
    gradients = [param.grad for model in models for param in model.parameters()]
    doubled = torch.compile(lambda gradient: 2 * gradient, backend="aot_eager", dynamic=False)
    for gradient in gradients:
        assert torch.equal(doubled(gradient).full_tensor(), 2 * gradient.full_tensor())
    for model, optimizer in zip(models, optimizers, strict=True):
        expected = [p.detach().full_tensor() - p.grad.full_tensor() / 2 for p in model.parameters()]
        torch.compile(optimizer.step, backend="aot_eager")()
        for param, value in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(param.detach().full_tensor(), value)
