"""Dtypes of single parameters: what conversions keep, and what is refused. Numbers are in `parity`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fsdp.models import Net, in_each_layout, refused, step
from ranks import on_ranks
from shardwise import MixedPrecisionPolicy, ShardingError, _compat, fully_shard


@in_each_layout(2)
def test_a_chosen_grad_dtype_and_its_gradients_outlive_conversions(layout: str) -> None:
    net = Net(blocks=1)
    net.head.weight.grad_dtype = torch.bfloat16
    for module in (net.blocks[0], net):
        fully_shard(module, layout=layout)
    assert net.head.weight.grad_dtype is torch.bfloat16
    net.inner.bias.grad_dtype = torch.bfloat16  # also on the sharded one, before the first forward
    step(net)
    before = {name: param.grad.full_tensor() for name, param in net.named_parameters()}
    net.double()
    for name, param in net.named_parameters():
        assert param.dtype is torch.float64
        chosen = name in ("head.weight", "inner.bias")
        assert param.grad.dtype is param.grad_dtype is (torch.bfloat16 if chosen else torch.float64)
        assert torch.equal(param.grad.full_tensor(), before[name].to(param.grad.dtype))


@in_each_layout(2)
@pytest.mark.parametrize("ran", [False, True])
def test_a_model_with_a_list_is_converted_whole(layout: str, ran: bool) -> None:
    net, whole = Net(blocks=2), Net(blocks=2)
    fully_shard([net.blocks[1], net.head, net.blocks[0]], layout=layout)  # not in the model's order
    fully_shard(net, layout=layout)
    if ran:
        step(net)
    for dtype in (torch.float64, torch.bfloat16):
        net.to(dtype)
        whole.to(dtype)
        x = torch.ones(4, 8, dtype=dtype)
        assert torch.equal(net(x), whole(x))


@on_ranks(2)
def test_a_module_of_a_list_is_not_converted_without_the_others_in_the_contiguous_layout() -> None:
    for ran, said in ((False, "were converted to different dtypes"), (True, "was given other memory")):
        net = Net(blocks=2)
        fully_shard(list(net.blocks), layout="contiguous")
        fully_shard(net, layout="contiguous")
        if ran:
            step(net)
        net.blocks[0].double()
        refused(lambda net=net: net(torch.ones(4, 8)), said)


@on_ranks(2)
def test_a_removed_module_that_was_not_converted_is_named() -> None:
    for is_converted in (False, True):
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(net, layout="contiguous")
        net(torch.ones(4, 4)).sum().backward()
        removed, net[1] = net[1], nn.Identity()
        if is_converted:
            removed.double()
            assert net.double()(torch.ones(4, 4, dtype=torch.float64)).dtype is torch.float64
        else:
            with pytest.raises(ShardingError, match=r"'1.bias' is torch.float32.*Modules removed"):
                net.double()


@on_ranks(2)
def test_gradients_share_the_spec_that_a_converted_parameter_has() -> None:
    net = Net(blocks=1)
    fully_shard(net)
    step(net)
    net.double()
    net.zero_grad()
    net(torch.ones(4, 8, dtype=torch.float64)).sum().backward()
    for param in net.parameters():
        assert _compat.spec_of(param.grad) is _compat.spec_of(param)
        assert _compat.spec_of(param.grad).tensor_meta.dtype is torch.float64


@in_each_layout(2)
def test_a_grad_dtype_that_is_set_after_the_first_forward_is_named(layout: str) -> None:
    net = fully_shard(Net(blocks=1), layout=layout)
    step(net)
    net.zero_grad()
    net.head.weight.grad_dtype = torch.bfloat16
    refused(
        lambda: step(net), "grad_dtype of 'head.weight' was set to torch.bfloat16", "expected torch.float32"
    )


@in_each_layout(2)
def test_an_override_that_is_neither_the_stored_nor_the_computed_dtype_is_refused(layout: str) -> None:
    net = Net(blocks=1)
    policy = MixedPrecisionPolicy(torch.bfloat16, param_dtype_override_fn=lambda param: torch.float16)
    refused(lambda: fully_shard(net, mp_policy=policy, layout=layout), "'inner.weight'", "torch.float32")
    assert type(net.inner.weight) is nn.Parameter


@on_ranks(2)
def test_keyword_arguments_are_cast_as_others_are() -> None:
    class Takes(nn.Linear):
        def forward(self, x: torch.Tensor, *, mask: torch.Tensor) -> torch.Tensor:
            seen.append((x.dtype, mask.dtype))
            return super().forward(x * mask)

    seen: list[tuple[torch.dtype, torch.dtype]] = []
    module = fully_shard(Takes(4, 4), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    module(torch.ones(1, 4), mask=torch.ones(4))
    assert seen == [(torch.bfloat16, torch.bfloat16)]


class Turned(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(features, features, dtype=torch.complex64) / features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.weight).real


@on_ranks(2)
@pytest.mark.parametrize("features", [6, 200])  # 200: 320 kB, which go without c10d
def test_a_group_of_complex_parameters_trains_as_one_process_does(features: int) -> None:
    whole, sharded = Turned(features), fully_shard(Turned(features))
    x = torch.randn(4, features, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        for model in (whole, sharded):
            model(x).square().mean().backward()
        assert torch.equal(sharded.weight.grad.full_tensor(), whole.weight.grad)
        for model in (whole, sharded):
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()
        assert torch.equal(sharded.weight.full_tensor(), whole.weight)
