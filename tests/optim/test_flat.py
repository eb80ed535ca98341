"""A flat optimizer's steps are those of the ordinary optimizer over the same sharded parameters, bit by bit.

Exception: torch's fused kernels on CPU round the last elements of a tensor otherwise than those before,
and what is last differs; there the bound is a few units of fp32's 2^-23 per step, of weights below 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import Optimizer

from fsdp.models import Net
from optim.flat_steps import backward, model, ordinary, pair, rows, same_bits, train
from ranks import on_ranks
from shardwise import fully_shard
from shardwise.errors import ShardingError
from shardwise.fsdp.fast import process
from shardwise.optim import FlatOptimizer, flat

Make = Callable[..., Optimizer]
ELEMENTWISE: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {"weight_decay": 0.1}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
    (torch.optim.SGD, {}),
    (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    (torch.optim.Adamax, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.ASGD, {"t0": 2}),
    (torch.optim.Rprop, {}),
]


def flat_tensors(optimizer: Optimizer) -> list[Tensor]:
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]


# Numbers


@on_ranks(3)
@pytest.mark.parametrize("number", range(len(ELEMENTWISE)), ids=lambda i: ELEMENTWISE[i][0].__name__)
def test_steps_are_those_of_the_ordinary_optimizer(number: int) -> None:
    kind, options = ELEMENTWISE[number]
    (net, optimizer), (other, by_flat) = pair(kind, lr=1e-2, foreach=number % 2 == 0, **options)
    assert isinstance(by_flat, FlatOptimizer)
    assert isinstance(by_flat, kind)
    assert len(flat_tensors(by_flat)) == 3  # groups
    for each, of in ((net, optimizer), (other, by_flat)):
        train(each, of, range(3))
    assert same_bits(rows(net), rows(other))


@on_ranks(3)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad])
def test_fused_steps_are_those_of_the_ordinary_optimizer_to_rounding(kind: type[Optimizer]) -> None:
    (net, optimizer), (other, by_flat) = pair(kind, lr=1e-2, fused=True)
    for each, of in ((net, optimizer), (other, by_flat)):
        train(each, of, range(4))
    torch.testing.assert_close(rows(net), rows(other), rtol=0, atol=1e-6)


@on_ranks(2)
def test_reduced_gradients_are_read_where_they_lie() -> None:
    _, (net, optimizer) = pair(torch.optim.SGD, lr=1e-2)
    backward(net, 0)
    held = [param.grad._local_tensor for param in net.parameters() if param.grad._local_tensor.numel()]
    read = [run.gradient() for run in optimizer._runs.values()]
    assert {each.untyped_storage().data_ptr() for each in held} == {
        each.untyped_storage().data_ptr() for each in read
    }


def of_several_backwards(net: Net, step: int) -> None:
    backward(net, step + 10)


def that_a_user_replaced(net: Net, step: int) -> None:
    net.head.weight.grad = net.head.weight.grad * 3
    net.blocks[0].up.bias.grad = net.blocks[0].up.bias.grad.clone()


@on_ranks(3)
@pytest.mark.parametrize("change", [of_several_backwards, that_a_user_replaced])
def test_gradients_are_what_they_are_at_the_step(change: Callable[[Net, int], None]) -> None:
    (net, optimizer), (other, by_flat) = pair(torch.optim.AdamW, lr=1e-2, foreach=True)
    for each, of in ((net, optimizer), (other, by_flat)):
        for step in range(3):
            backward(each, step)
            change(each, step)
            of.step()
            of.zero_grad()
    assert same_bits(rows(net), rows(other))
    assert len(flat_tensors(by_flat)) == 3


@on_ranks(2, 3)
def test_parameters_without_gradients_are_skipped_and_keep_their_own_step_count() -> None:
    (net, optimizer), (other, by_flat) = pair(torch.optim.AdamW, lr=1e-2, foreach=True)
    for each, of in ((net, optimizer), (other, by_flat)):
        for step in range(6):
            backward(each, step)
            if step in (1, 2):
                each.blocks[0].up.weight.grad = None
            if step == 4:
                for param in each.blocks[1].parameters():  # a whole group
                    param.grad = None
            of.step()
            of.zero_grad()
    assert same_bits(rows(net), rows(other))
    expected = get_optimizer_state_dict(net, optimizer)["state"]
    found = by_flat.state_dict()["state"]
    assert {name for name, param in other.named_parameters() if param.local.numel()} == set(found)
    expected = {name: values for name, values in expected.items() if name in found}
    for name, values in expected.items():
        assert found[name]["step"].item() == values["step"].item()
        assert torch.equal(found[name]["exp_avg_sq"].local, values["exp_avg_sq"].local)
    counts = {name: int(values["step"].item()) for name, values in found.items()}
    assert counts.get("blocks.0.up.weight", 4) == 4
    assert counts.get("blocks.0.up.bias", 6) == 6
    assert counts.get("blocks.1.up.bias", 5) == 5


def decayed(net: nn.Module) -> list[dict[str, Any]]:
    biases = [param for name, param in net.named_parameters() if name.endswith("bias")]
    weights = [param for name, param in net.named_parameters() if not name.endswith("bias")]
    return [{"params": weights, "lr": 3e-2}, {"params": biases, "weight_decay": 0.0}]


@on_ranks(1, 2, 3)
def test_sets_of_options_have_flat_tensors_of_their_own() -> None:
    nets = []
    for make in (ordinary, flat):
        net = model()
        optimizer = make(torch.optim.AdamW, net, params=decayed(net), lr=1e-2, weight_decay=0.3, foreach=True)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        for step in range(4):
            train(net, optimizer, range(step, step + 1))
            schedule.step()
        assert [group["lr"] for group in optimizer.param_groups] == [3e-2 / 16, 1e-2 / 16]
        nets.append(net)
    assert same_bits(*map(rows, nets))


@on_ranks(2)
def test_only_given_parameters_are_stepped() -> None:
    nets = []
    for make in (ordinary, flat):
        net = model()
        named = [("head.weight", net.head.weight), ("bias", net.blocks[0].up.bias)]
        optimizer = make(torch.optim.SGD, net, params=named, lr=1.0)
        train(net, optimizer, range(2))
        nets.append(net)
    assert same_bits(*map(rows, nets))
    unchanged = rows(model())
    changed = [not torch.equal(a, b) for a, b in zip(rows(nets[1]), unchanged, strict=True)]
    moved = [
        name for (name, _), is_moved in zip(nets[1].named_parameters(), changed, strict=True) if is_moved
    ]
    assert set(moved) <= {"head.weight", "blocks.0.up.bias"}
    everywhere: list[Any] = [None] * 2
    dist.all_gather_object(everywhere, moved)
    assert {name for each in everywhere for name in each} == {"head.weight", "blocks.0.up.bias"}


@on_ranks(2)
def test_ignored_parameters_are_optimized_as_they_are() -> None:
    nets = []
    for make in (ordinary, flat):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 2))
        fully_shard(net, layout="contiguous", ignored_params={net[1].bias})
        optimizer = make(torch.optim.AdamW, net, lr=1e-2, foreach=True)
        for step in range(3):
            net(torch.ones(2, 9) * step).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        nets.append(net)
    assert torch.equal(nets[0][1].bias, nets[1][1].bias)
    assert torch.equal(nets[0][0].weight.local, nets[1][0].weight.local)
    state = optimizer.state_dict()
    assert state["param_groups"][0]["params"] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert type(state["state"]["1.bias"]["exp_avg"]) is Tensor


@on_ranks(3)
def test_padding_stays_zero_also_where_eps_is_zero() -> None:
    net = model()
    optimizer = flat(torch.optim.Adam, net, lr=1e-2, eps=0.0)
    train(net, optimizer, range(3))
    used = {param.local.data_ptr(): param.local.numel() for param in net.parameters()}
    assert sum(tensor.numel() for tensor in flat_tensors(optimizer)) > sum(used.values())
    for tensor in flat_tensors(optimizer):
        padding = torch.ones(tensor.numel(), dtype=torch.bool)
        for param in net.parameters():
            begin = (param.local.data_ptr() - tensor.data_ptr()) // 4
            if param.local.numel() and 0 <= begin < tensor.numel():
                padding[begin : begin + param.local.numel()] = False
        assert torch.equal(tensor.detach()[padding], torch.zeros(int(padding.sum())))


# What else an optimizer is


@on_ranks(2)
def test_a_step_counts_once_and_what_was_gathered_before_is_not_used_again() -> None:
    net = model(reshard_after_forward=False)
    optimizer = flat(torch.optim.SGD, net, lr=0.5)
    backward(net, 0)
    before = process.steps
    optimizer.step()
    assert process.steps == before + 1
    torch.optim.SGD(net.parameters())  # torch hooks the class when it is first built
    optimizer.step()
    assert process.steps == before + 2
    with torch.no_grad():
        found = net(torch.ones(1, 9))
        whole = Net(blocks=2, width=9)
        whole.load_state_dict({name: value.full_tensor() for name, value in net.state_dict().items()})
        assert torch.equal(found, whole(torch.ones(1, 9)))


@on_ranks(2)
def test_a_closure_is_evaluated_before_gradients_are_taken() -> None:
    nets = []
    for net, optimizer in pair(torch.optim.SGD, lr=0.1):

        def closure(net: Net = net, optimizer: Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = net(torch.ones(2, 9)).square().mean()
            loss.backward()
            return loss

        assert all(optimizer.step(closure).item() > 0 for _ in range(2))
        nets.append(net)
    assert same_bits(*map(rows, nets))


@on_ranks(2)
def test_zero_grad_clears_the_models_gradients_and_frees_their_memory() -> None:
    net = model()
    optimizer = flat(torch.optim.SGD, net, lr=0.1)
    backward(net, 0)
    optimizer.step()
    assert all(tensor.grad is None for tensor in flat_tensors(optimizer))
    optimizer.zero_grad(set_to_none=False)
    assert all(param.grad.local.count_nonzero() == 0 for param in net.parameters())
    optimizer.zero_grad()
    assert all(param.grad is None for param in net.parameters())


@on_ranks(2)
def test_values_loaded_by_assignment_are_stepped_on() -> None:
    net = model()
    optimizer = flat(torch.optim.SGD, net, lr=0.1)
    train(net, optimizer, range(1))
    net.load_state_dict({name: value.clone() for name, value in net.state_dict().items()}, assign=True)
    before = rows(net)
    train(net, optimizer, range(1, 2))
    assert not same_bits(rows(net), before)


# Errors


class Mine(torch.optim.AdamW):
    pass


@on_ranks(2)
def test_optimizers_that_are_not_elementwise_are_refused_by_name() -> None:
    net = model()
    for kind, message in (
        (torch.optim.LBFGS, "LBFGS cannot step on flat memory.*inner products"),
        (torch.optim.Adafactor, "Adafactor cannot.*rows and columns"),
        (torch.optim.Muon, r"Muon cannot.*shardwise\.optim\.Muon"),
        (Mine, "Mine cannot.*only ASGD, Adadelta, Adagrad, Adam, AdamW"),
    ):
        with pytest.raises(ShardingError, match=rf"rank {dist.get_rank()}: {message}"):
            flat(kind, net, lr=0.1)


@on_ranks(2)
def test_parameters_that_are_not_contiguously_sharded_are_refused_by_name() -> None:
    net, interleaved, low = model(), Net(), Net()
    fully_shard(interleaved.blocks[0])
    low.head.weight.grad_dtype = torch.bfloat16
    fully_shard(low, layout="contiguous")
    stranger, bias = nn.Parameter(torch.ones(3)), net.head.bias
    for of, params, message in (
        (Net(), None, r"inner\.weight.*are not sharded"),
        (interleaved, None, r"of 'blocks\.0' \(.*up\.weight.*layout=\"interleaved\""),
        (net.head, None, r"weight.*sharded by a module around this one"),
        (net, [stranger], r"Parameter of shape \(3,\) that is not a parameter of the model"),
        (net, [{"params": [bias]}, {"params": bias}], r"'head\.bias' is given twice"),
        (low, None, r"'head\.weight' are kept in torch\.bfloat16"),
    ):
        with pytest.raises(ShardingError, match=message):
            flat(torch.optim.SGD, of, params=params)
    with pytest.raises(ShardingError, match=r"give all parameters in params="):
        flat(torch.optim.SGD, net).add_param_group({"params": [stranger]})


@on_ranks(2)
def test_states_that_do_not_fit_are_refused() -> None:
    net = model()
    optimizer = flat(torch.optim.AdamW, net)
    train(net, optimizer, range(1))
    with pytest.raises(ShardingError, match="numbers its parameters"):
        optimizer.load_state_dict(torch.optim.AdamW(net.parameters()).state_dict())
    for spoil, message in (
        (lambda s: s["state"].update(elsewhere={}), r"lacks nothing, and has \['elsewhere'\] more"),
        (lambda s: s["param_groups"][0]["params"].remove("head.bias"), r"lacks \['head\.bias'\]"),
        (
            lambda s: next(iter(s["state"].values())).update(exp_avg=torch.zeros(3, 3, 3)),
            r"'exp_avg' of '.+' has shape \(3, 3, 3\), expected .* \(\d+",
        ),
    ):
        state = optimizer.state_dict()
        spoil(state)
        with pytest.raises(ShardingError, match=message):
            optimizer.load_state_dict(state)


@on_ranks(1)
def test_gradient_scalers_are_refused() -> None:
    net = model()
    optimizer = flat(torch.optim.AdamW, net, fused=True)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(net(torch.ones(2, 9)).square().mean()).backward()
    with pytest.raises((ShardingError, AssertionError), match=r"GradScaler|No inf checks"):
        scaler.step(optimizer)
