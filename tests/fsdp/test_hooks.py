"""Hooks of the user on sharded parameters, in either layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp.models import Net, sharded_net, step
from ranks import on_ranks

LAYOUTS = ("interleaved", "contiguous")


def names_seen(model: nn.Module, seen: list[str]) -> None:
    """Let hooks after accumulation note whose gradient is there, and communicate over it."""

    def note(name: str) -> Any:
        def hook(param: nn.Parameter) -> None:
            assert param.grad is not None
            norm = param.grad.norm()  # collective; pairs different parameters if ranks differ in order
            getattr(norm, "full_tensor", lambda: norm)()
            seen.append(name)

        return hook

    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(note(name))


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(2, 4)
def test_hooks_after_accumulation_run_in_order_of_registration_on_every_rank(
    layout: str, replicas: int
) -> None:
    shape, names = (replicas, dist.get_world_size() // replicas), ("replicate", "shard")
    mesh = init_device_mesh("cpu", shape[-2 + (replicas == 1) :], mesh_dim_names=names[replicas == 1 :])
    model = sharded_net(blocks=2, layout=layout, mesh=mesh)
    seen: list[str] = []
    names_seen(model, seen)
    expected = [name for index in (1, 0) for name in dict(Net().named_parameters()) if f"s.{index}." in name]
    expected += ["inner.weight", "inner.bias", "head.weight", "head.bias"]
    step(model)
    assert seen == expected
    seen.clear()
    model.set_requires_gradient_sync(False)
    step(model)
    assert seen == []
    model.set_requires_gradient_sync(True)
    for param in model.blocks[1].parameters():
        param.grad = None
    step(model)  # makes some gradients, and adds to others
    assert seen == expected
    seen.clear()
    for param in model.parameters():
        param.grad = None
    model.blocks[0].up.requires_grad_(False)
    step(model)
    assert seen == [name for name in expected if "0.up" not in name]
