"""What users do to sharded parameters: hooks on their gradients, other dtypes and data; in either layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp.models import Net, in_each_layout, refused, sharded_net, step
from ranks import on_ranks
from shardwise import fully_shard


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
@in_each_layout(4)
def test_hooks_after_accumulation_run_in_order_of_registration_on_every_rank(
    layout: str, replicas: int
) -> None:
    mesh = init_device_mesh("cpu", (replicas, 4 // replicas), mesh_dim_names=("replicate", "shard"))
    mesh = mesh if replicas > 1 else mesh["shard"]
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


@in_each_layout(3)
def test_a_gradient_hook_changes_the_sharded_gradient_before_it_is_accumulated(layout: str) -> None:
    model, reference = sharded_net(layout=layout), sharded_net(layout=layout)
    bias = model.head.bias  # two rows on three ranks
    seen: list[tuple[type, torch.Size]] = []

    def double(grad: torch.Tensor) -> torch.Tensor:
        seen.append((type(grad), grad.shape))
        return grad * 2 + grad.norm() * 0  # collective

    handle = bias.register_hook(double)
    for _ in range(2):
        step(model)
        step(reference)
    handle.remove()
    step(model)
    step(reference)
    once = reference.head.bias.grad.full_tensor() / 3
    assert seen == [(type(bias.grad), torch.Size([2]))] * 2
    torch.testing.assert_close(bias.grad.full_tensor(), 5 * once)
    torch.testing.assert_close(
        model.head.weight.grad.full_tensor(), reference.head.weight.grad.full_tensor(), rtol=0, atol=0
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@in_each_layout(2)
def test_gradients_of_a_converted_model_describe_the_new_dtype(layout: str, dtype: torch.dtype) -> None:
    model = sharded_net(layout=layout)
    step(model)
    model.zero_grad()
    model.to(dtype)
    model(torch.ones(4, 8, dtype=dtype)).sum().backward()
    for param in model.parameters():
        assert (param.grad + torch.ones_like(param)).dtype == dtype
    torch.optim.AdamW(model.parameters()).step()


@pytest.mark.parametrize("by_hand", [False, True])
@in_each_layout(2)
def test_what_is_frozen_or_trained_while_gathered_stays_so(layout: str, by_hand: bool) -> None:
    model = sharded_net(layout=layout)
    names, sharded = zip(*model.named_parameters(), strict=True)
    optimizer = torch.optim.SGD(sharded, lr=0.1)
    step(model)  # trains all of them
    for frozen in (True, False, True):
        optimizer.zero_grad()
        with torch.no_grad():
            model(torch.ones(1, 8))
        model.head.requires_grad_(not frozen)  # gathered, as the root's are
        if by_hand:
            sharded[names.index("inner.bias")].requires_grad_(not frozen)  # which is not shown
            model.reshard()
        before = [param.detach().full_tensor().clone() for param in sharded]
        for _ in range(2):
            step(model)
            optimizer.step()
        expected = ("head.weight", "head.bias", *["inner.bias"] * by_hand) if frozen else ()
        after = [param.detach().full_tensor() for param in sharded]
        same = {name for name, a, b in zip(names, before, after, strict=True) if torch.equal(a, b)}
        assert same == {n for n, p in model.named_parameters() if not p.requires_grad} == set(expected)


@pytest.mark.parametrize("stepped", [False, True])
@on_ranks(2)
def test_data_assigned_to_a_dtensor_is_an_error_and_to_rows_is_used(stepped: bool) -> None:
    contiguous, interleaved = sharded_net(layout="contiguous"), sharded_net()
    for model in (contiguous, interleaved):
        if stepped:
            step(model)
        for param in model.parameters():
            param.data = torch.zeros_like(param)
    assert contiguous(torch.ones(4, 8)).abs().sum() == 0
    refused(
        lambda: interleaved(torch.ones(4, 8)),
        f"'{'blocks.1.up' if stepped else 'inner'}.weight'.data was assigned to",
    )
    contiguous.reshard()
    contiguous.head.weight.data = contiguous.head.weight.data.double()
    refused(lambda: contiguous(torch.ones(4, 8)), "'head.weight' was given other memory (torch.float64")


@in_each_layout(4)
@pytest.mark.parametrize("after", [False, True, 2])
def test_the_form_that_was_frozen_or_trained_last_counts(layout: Any, after: Any) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(net[0], layout=layout, reshard_after_forward=after)
    fully_shard(net, layout=layout)
    sharded, x = list(net[0].parameters()), torch.ones(2, 4)

    def set_registered(trains: bool) -> None:
        net[0].requires_grad_(trains)

    def set_sharded(trains: bool) -> None:
        for param in sharded:
            param.requires_grad_(trains)

    for first, last in ((set_registered, set_sharded), (set_sharded, set_registered)):
        for trains in (True, False):
            net(x)
            first(not trains)
            net(x)
            last(trains)
            net(x).sum().backward()
            assert [param.grad is not None for param in sharded] == [trains] * 2
            net(x)
            assert {param.requires_grad for param in (*sharded, *net[0].parameters())} == {trains}
            net.zero_grad()
            for param in sharded:
                param.grad = None


@in_each_layout(4)
@pytest.mark.parametrize("evaluates", [False, True])
def test_blocks_left_in_smaller_shards_may_be_frozen(layout: Any, evaluates: bool) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    for block in net:
        fully_shard(block, layout=layout, reshard_after_forward=2)
    fully_shard(net, layout=layout)
    first, x = list(net[0].parameters()), torch.ones(2, 4)
    # A frozen first block has no backward, but is prefetched for it.
    for trains in (True, False, True, False):
        if evaluates:
            with torch.no_grad():
                net(x)
        else:
            net(x)
        net[0].requires_grad_(trains)
        net(x).sum().backward()
        assert [param.grad is not None for param in first] == [trains] * 2
        assert all(param.grad is not None for param in net[1].parameters())
        assert [param.requires_grad for param in net[0].parameters()] == [trains] * 2
        net.zero_grad()
        for param in first:
            param.grad = None
