"""Hooks for the all-gather set on local tensors: the numbers of torch's FSDP2, in its bits."""

from __future__ import annotations

from types import MethodType, ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp.models import refused
from fsdp.parity.extension import Held, fill
from fsdp.parity.harness import OURS, TORCHS
from ranks import on_ranks


def narrow(self: Tensor, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
    return (self.to(torch.bfloat16),), None


def widen(
    self: Tensor, gathered: Any, metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None
) -> Any:
    (whole,) = gathered
    if out is not None:
        return fill(out, whole[: out.shape[0]])
    widened = whole.to(dtype)
    return widened, (widened,)


def send(self: Tensor, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
    return (self,), None


def take(self: Tensor, gathered: Any, metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None) -> Any:
    (whole,) = gathered
    if out is None:
        return whole, (whole,)
    assert out.data_ptr() == whole.data_ptr()
    return None


def patch(model: nn.Module, pre: Any = narrow, post: Any = widen) -> None:
    for param in model.parameters():
        local = param._local_tensor
        local.fsdp_pre_all_gather = MethodType(pre, local)
        local.fsdp_post_all_gather = MethodType(post, local)


def sharded(api: ModuleType, mesh: DeviceMesh, *, width: int, subclass: bool) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(3)])
    for layer in model:
        if subclass:
            layer.weight = nn.Parameter(Held(layer.weight.detach()))
        api.fully_shard(layer, mesh=mesh)
    return api.fully_shard(model, mesh=mesh)


def train(model: nn.Module, width: int) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, width, generator=torch.Generator().manual_seed(dist.get_rank()))
    losses = []
    for _ in range(3):
        losses.append(model(x).square().mean())
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("subclass", [False, True])
@on_ranks(4)
def test_hooks_set_on_local_tensors_are_called_as_those_of_a_class(subclass: bool, replicas: int) -> None:
    mesh = init_device_mesh("cpu", (replicas, 4 // replicas), mesh_dim_names=("replicate", "shard"))
    mesh = mesh if replicas > 1 else mesh["shard"]
    ours, torchs = (sharded(api, mesh, width=8, subclass=subclass) for api in (OURS, TORCHS))
    plain = sharded(OURS, mesh, width=8, subclass=False)
    patch(ours)
    patch(torchs)
    losses = train(ours, 8)
    assert torch.equal(torch.stack(losses), torch.stack(train(torchs, 8)))
    assert not torch.equal(torch.stack(losses), torch.stack(train(plain, 8)))


@on_ranks(2)
def test_a_hook_may_return_what_was_gathered_as_it_is() -> None:
    ours, torchs = (
        sharded(api, init_device_mesh("cpu", (2,)), width=8, subclass=False) for api in (OURS, TORCHS)
    )
    for model in (ours, torchs):
        patch(model, send, take)
    assert torch.equal(torch.stack(train(ours, 8)), torch.stack(train(torchs, 8)))


@on_ranks(2)
def test_the_first_forward_may_run_in_inference_mode() -> None:
    models = [sharded(OURS, init_device_mesh("cpu", (2,)), width=8, subclass=False) for _ in range(2)]
    for model in models:
        patch(model)
    with torch.inference_mode():
        models[0](torch.ones(1, 8))
    assert torch.equal(*(torch.stack(train(model, 8)) for model in models))


@on_ranks(4)
def test_such_hooks_see_padded_shards_of_today_where_the_cut_is_uneven() -> None:
    mesh = init_device_mesh("cpu", (4,))
    patched, plain = (sharded(OURS, mesh, width=7, subclass=False) for _ in range(2))
    patch(patched)
    torch.testing.assert_close(train(patched, 7), train(plain, 7), rtol=1e-2, atol=1e-3)
    patch(plain)
    refused(
        lambda: [plain(torch.ones(1, 7)) for _ in range(4)],
        "was given hooks for the all-gather after parameters were first gathered",
    )
