"""What `fully_shard` makes of a module, and what its methods do, beyond numbers."""

import copy
import io
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from fsdp.models import (
    EXACT,
    WAYS,
    Block,
    Net,
    assert_same_gradients,
    assert_same_parameters,
    groups,
    in_each_layout,
    shard_each,
    sharded_net,
    step,
    update,
)
from ranks import on_ranks
from shardwise import (
    FSDPModule,
    LifecycleError,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from shardwise.comm.count import CommCounter
from shardwise.comm.watch import order_of
from shardwise.fsdp.module import sharded_class
from shardwise.fsdp.module_state import state_of
from shardwise.planner.noop_group import noop_world
from shardwise.sharded_tensor.rows import ShardedParameter


@on_ranks(2)
def test_the_module_stays_the_same_object_of_a_named_subclass() -> None:
    block = Block(4)
    assert fully_shard(block) is block
    assert type(block) is sharded_class(Block)
    assert type(block).__name__ == "FSDPBlock"
    assert isinstance(block, FSDPModule)
    assert isinstance(block, Block)
    assert type(fully_shard(Block(4))) is type(block), "equal modules stay of equal type"
    assert type(fully_shard(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))[:1]) is nn.Sequential


@in_each_layout(1, 2, 3, 4)
def test_names_shapes_and_values_stay_those_of_the_whole_model(layout: str) -> None:
    whole, net = Net(), sharded_net(layout=layout)
    assert [n for n, _ in net.named_parameters()] == [n for n, _ in whole.named_parameters()]
    for ours, theirs in zip(net.parameters(), whole.parameters(), strict=True):
        assert isinstance(ours, ShardedParameter if layout == "contiguous" else DTensor)
        assert isinstance(ours, nn.Parameter)
        assert layout == "contiguous" or ours.placements == (Shard(0),)
        assert (ours.shape, ours.dtype, ours.requires_grad) == (theirs.shape, theirs.dtype, True)
    assert_same_parameters(net, whole, **EXACT)


@in_each_layout(2)
def test_an_encoder_layer_of_torch_evaluates_with_sharded_attention(layout: str) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(2, 3, 8)
    with torch.no_grad():
        expected = layer(x)
        fully_shard(layer.self_attn, layout=layout)
        fully_shard(layer, layout=layout)
        assert torch.allclose(layer(x), expected, atol=1e-6)  # torch's fused kernel rounds otherwise


@in_each_layout(2)
def test_copying_a_sharded_module_says_when_to_copy(layout: str) -> None:
    net = sharded_net(layout=layout)
    for copied in (copy.copy, copy.deepcopy):
        with pytest.raises(LifecycleError, match="before fully_shard"):
            copied(net)
    step(net)
    if layout == "interleaved":
        with pytest.raises(LifecycleError, match="before fully_shard"):
            copy.deepcopy(net.head)
    for param in net.parameters():
        copied = copy.deepcopy(param).to_local()
        assert torch.equal(copied, param.to_local())
        assert copied.data_ptr() != param.to_local().data_ptr() or not copied.numel()


@in_each_layout(2)
def test_a_users_hooks_see_whole_parameters_and_whole_gradients(layout: str) -> None:
    net = sharded_net(layout=layout)
    seen: list[tuple[type, torch.Size]] = []
    grads: list[tuple[type, torch.Size]] = []

    def look(module: nn.Module, *unused: object) -> None:
        seen.append((type(module.up.weight), module.up.weight.shape))
        if not grads:
            module.up.weight.register_hook(lambda grad: grads.append((type(grad), grad.shape)))

    net.blocks[0].register_forward_pre_hook(look)
    net.blocks[0].register_forward_hook(look)
    step(net)
    assert seen == [(nn.Parameter, torch.Size([16, 8]))] * 2
    assert set(grads) == {(Tensor, torch.Size([16, 8]))}


@in_each_layout(2)
def test_unshard_shows_whole_parameters_until_reshard(layout: str) -> None:
    net, whole = sharded_net(layout=layout), Net()
    handle = net.unshard(async_op=True)
    assert isinstance(net.inner.weight, DTensor), "nothing is shown before the wait"
    assert handle is not None
    handle.wait()
    handle.wait()
    assert type(net.inner.weight) is nn.Parameter
    assert torch.equal(net.inner.weight, whole.inner.weight)
    assert isinstance(net.blocks[0].up.weight, DTensor), "unshard is not recursive"
    net.reshard()
    assert isinstance(net.inner.weight, DTensor)
    net.blocks[0].unshard(async_op=True)
    with CommCounter() as counter, torch.no_grad():
        net(torch.ones(1, 8))
    assert counter.count("all_gather") == 3  # the root and the two other blocks


@in_each_layout(2)
def test_a_registered_method_runs_like_a_forward(layout: str) -> None:
    net, whole = sharded_net(layout=layout), Net()
    register_fsdp_forward_method(net, "features")
    x = torch.ones(2, 8)
    assert torch.equal(net.features(x), whole.features(x))
    with pytest.raises(AttributeError, match="no method 'nothing'"):
        register_fsdp_forward_method(net, "nothing")
    register_fsdp_forward_method(whole, "nothing")  # not sharded: nothing to do


@on_ranks(2)
def test_a_registered_method_may_call_its_own_module_again_and_again() -> None:
    class Generator(Net):
        def generate(self, x: torch.Tensor, steps: int) -> torch.Tensor:
            for _ in range(steps):
                x = x + self(x).sum()
            return x

    whole, net = Generator(), Generator()
    for module in (*net.blocks, net):
        fully_shard(module)
    register_fsdp_forward_method(net, "generate")
    x = torch.ones(2, 8)
    with torch.no_grad():
        assert torch.equal(net.generate(x, 3), whole.generate(x, 3))
    for model in (net, net, whole, whole):
        model.generate(x, 2).sum().backward()
    assert_same_gradients(net, whole, rtol=1e-5, atol=1e-5)


@on_ranks(2)
def test_a_forward_that_raised_is_forgotten_and_can_be_tried_again() -> None:
    net, healthy = sharded_net(), sharded_net()
    step(healthy)
    hook = net.blocks[1].register_forward_hook(lambda *unused: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(net)
    hook.remove()
    with pytest.raises(LifecycleError, match="root"):
        net.blocks[1].reset_iter_state()
    assert all(isinstance(p, DTensor) for p in net.parameters())
    with CommCounter() as counter:
        step(net)
    assert counter.count("all_gather") == 4 + 2  # in backward all but the root and the last block
    assert_same_gradients(net, healthy, **EXACT)


@on_ranks(2)
def test_parameters_changed_by_a_step_are_gathered_again_even_if_kept() -> None:
    """Evaluation keeps the root gathered; the optimizer then changes its shards."""
    net = sharded_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    step(net)
    with torch.no_grad():
        before = net(torch.ones(1, 8))
        optimizer.step()
        after = net(torch.ones(1, 8))
    whole = Net()
    whole.load_state_dict({k: v.full_tensor() for k, v in net.state_dict().items()})
    assert not torch.equal(before, after)
    assert torch.equal(after, whole(torch.ones(1, 8)))


@on_ranks(2)
def test_unshard_never_shows_values_from_before_an_optimizer_step() -> None:
    net = sharded_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    step(net)
    net.unshard()
    optimizer.step()
    net.unshard()
    shown = net.inner.weight.detach().clone()
    assert torch.equal(shown, net.state_dict()["inner.weight"].full_tensor())  # which reshards
    assert net.unshard(async_op=True) is not None
    optimizer.step()  # while the gather is on its way
    expected = Net()
    expected.load_state_dict({k: v.full_tensor() for k, v in net.state_dict().items()})
    with torch.no_grad():
        assert torch.equal(net(torch.ones(1, 8)), expected(torch.ones(1, 8)))


@in_each_layout(4)
def test_zero_grad_after_an_evaluation_clears_the_gradients_of_the_optimizer(layout: str) -> None:
    for reshard in (None, False, 2):
        net = sharded_net(layout=layout, reshard_after_forward=reshard)
        sharded = list(net.parameters())
        for to_none in (False, True):
            step(net)
            assert all(param.grad is not None for param in sharded)
            with torch.no_grad():
                net(torch.ones(1, 8))
            net.zero_grad(to_none)
            left = [param.grad for param in sharded]
            assert all(grad is None if to_none else not grad.full_tensor().any() for grad in left)


@in_each_layout(2, 3)
def test_hooks_after_gradient_accumulation_run_on_sharded_gradients(layout: str) -> None:
    """An optimizer in backward: step each parameter as soon as its gradient is reduced."""
    net, reference = sharded_net(layout=layout), sharded_net(layout=layout)
    for param in net.parameters():
        param.register_post_accumulate_grad_hook(
            lambda p: (p.data.add_(p.grad, alpha=-0.1), setattr(p, "grad", None))
        )
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    step(net)
    step(reference)
    optimizer.step()
    assert all(param.grad is None for param in net.parameters())
    assert_same_parameters(net, reference, **EXACT)


@on_ranks(2)
def test_several_roots_may_share_their_communication_streams() -> None:
    first, second = sharded_net(), sharded_net()
    share_comm_ctx([first, second])
    step(first)
    step(second)
    assert state_of(first).schedule.streams is state_of(second).schedule.streams


@on_ranks(2)
def test_reductions_may_have_a_process_group_of_their_own() -> None:
    net, plain = sharded_net(), sharded_net()
    net.set_separate_reduce_scatter_group(True)
    groups = {g.settings.reduce_scatter_group for s in net._states(True) for g in s.groups}
    assert len(groups) == 1
    assert None not in groups
    assert groups != {plain._groups()[0].info.shard_process_group}
    step(net)
    step(plain)
    assert_same_gradients(net, plain, **EXACT)
    plain.set_separate_reduce_scatter_group(True)  # after its first forward: ranks that wait there are ended
    of = order_of(plain._groups()[0].info.shard_process_group)
    assert of is not None
    assert plain._groups()[0].settings.reduce_scatter_group in of.groups
    net.set_separate_reduce_scatter_group(False)
    assert {g.settings.reduce_scatter_group for s in net._states(True) for g in s.groups} == {None}


@pytest.mark.parametrize("options", WAYS, ids=str)
@on_ranks(3)
def test_a_converted_model_keeps_its_shards_and_computes_in_the_new_dtype(options: dict[str, Any]) -> None:
    for stepped, dtype in itertools.product((False, True), (torch.float64, torch.bfloat16)):
        net, reference = sharded_net(**options), Net().to(dtype)
        if stepped:
            step(net)
            net.zero_grad()
        shapes = [param.to_local().shape for param in net.parameters()]
        net.to(dtype)
        net.to("cpu")
        assert [param.to_local().shape for param in net.parameters()] == shapes
        assert {param.dtype for param in net.parameters()} == {dtype}
        x = torch.ones(2, 8, dtype=dtype)
        assert torch.equal(net(x), reference(x))
        for group in groups(net):
            begin = group.shards[0].data_ptr()
            starts = [p.local.data_ptr() - begin for p in group.params if p.local.numel()]
            assert starts == sorted(starts) or options
            assert all(0 <= start < group.shards[0].nbytes for start in starts)
        net(x).float().square().mean().backward()
        assert {param.grad.dtype for param in net.parameters()} == {dtype}
        assert [param.grad.to_local().shape for param in net.parameters()] == shapes


@on_ranks(2)
def test_state_dicts_can_be_copied_and_saved_one_by_one() -> None:
    net = sharded_net()
    copied = copy.deepcopy(net.state_dict())
    file = io.BytesIO()
    torch.save(copied["blocks.1.down.bias"], file)
    assert file.tell() < 5000, "one small parameter, not its group's buffer"
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded.to_local(), net.blocks[1].down.bias.to_local())


@on_ranks(2)
@pytest.mark.parametrize("options", WAYS, ids=str)
def test_assigned_state_dicts_are_used_before_and_after_the_first_step(options: dict[str, str]) -> None:
    source = sharded_net(**options)
    with torch.no_grad():
        for param in source.parameters():
            param.mul_(2.0)
    state = {name: value.clone() for name, value in source.state_dict().items()}
    fresh, trained = sharded_net(**options), sharded_net(**options)
    step(trained)
    x = torch.ones(2, 8)
    expected = source(x)
    for net in (fresh, trained):
        net.load_state_dict(state, assign=True)
        assert torch.equal(net(x), expected)
        net.load_state_dict(net.state_dict(), assign=True)  # other parameters, of the same memory
        assert torch.equal(net(x), expected)
        step(net)
        assert all(p.grad is not None for p in net.parameters())


@in_each_layout(3)
def test_gradients_and_states_belong_to_the_same_ranks_as_their_parameters(layout: str) -> None:
    net = fully_shard(nn.Linear(2, 1), layout=layout)  # one row over three ranks: two ranks hold nothing
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    held = torch.zeros((), dtype=torch.int64)
    for param in net.parameters():
        for tensor in (param.grad, optimizer.state[param]["exp_avg"]):
            assert tensor.to_local().shape == param.to_local().shape
            assert tensor.placements == param.placements
        held += param.to_local().numel()
    assert layout == "contiguous" or held == (3 if dist.get_rank() == 0 else 0)
    dist.all_reduce(held)
    assert held == 3


class Reentrant(nn.Module):
    """Runs a layer in a checkpoint, and a last one wholly so: that one's output has no graph of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(Checkpointed(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 4))
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.last, self.first(x), use_reentrant=True)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, *, reentrant: bool = True) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


@in_each_layout(2)
def test_backward_of_each_module_of_a_list_gathers_also_where_the_last_was_recomputed(layout: str) -> None:
    net, reference = Reentrant(), Reentrant()
    fully_shard([net.first, net.last], layout=layout)
    fully_shard(net, layout=layout)
    for _ in range(2):
        for model in (net, reference):
            model(torch.ones(2, 4, requires_grad=True)).square().sum().backward()
    assert_same_gradients(net, reference)


@pytest.mark.parametrize("how", WAYS, ids=str)
@on_ranks(2)
def test_a_checkpoint_within_a_recomputation_leaves_gathered_what_backward_needs(how: dict[str, Any]) -> None:
    torch.manual_seed(0)
    block = Checkpointed(Block(4))
    net = nn.Sequential(Checkpointed(block, reentrant=False), nn.Linear(4, 4))
    reference = copy.deepcopy(net)
    shard_each(block.inner.up, block, net, **how)
    for model in (net, reference):
        model(torch.ones(2, 4, requires_grad=True)).square().sum().backward()
    assert_same_gradients(net, reference)


class Half(nn.Sequential):
    """Runs its first module alone on demand; 1 does, and 2 raises behind it."""

    def forward(self, x: Tensor, ends: int = 0) -> Tensor:
        x = self[0](x)
        if ends == 2:
            raise ValueError("behind it")
        return x if ends else self[1](x)


def _alone(net: nn.Sequential, which: int | str) -> None:
    if isinstance(which, int):
        net[0][which](torch.ones(2, 4))
    elif which == "half":
        net[0](torch.ones(2, 4), 1)
    else:
        with pytest.raises(ValueError, match="behind"):
            net[0](torch.ones(2, 4), 2)


@pytest.mark.parametrize("reshard", [None, True, False])
@in_each_layout(2)
def test_a_part_of_a_list_that_runs_outside_of_the_root_leaves_no_old_values(
    layout: str, reshard: bool | None
) -> None:
    how, x = {"layout": layout, "reshard_after_forward": reshard}, torch.ones(2, 4)
    for which in (0, 1, "half", "raises"):
        net, whole = (nn.Sequential(Half(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4)) for _ in "ab")
        whole.load_state_dict(net.state_dict())
        fully_shard([*net[0]], **how)
        fully_shard(net[0], **how)
        fully_shard(net, **how)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (net, whole)]
        for trains in (False, True):
            for model, optimizer in zip((net, whole), optimizers, strict=True):
                model(x).square().sum().backward()
                with torch.set_grad_enabled(trains):
                    _alone(model, which)
                update(optimizer)
            torch.testing.assert_close(net(x), whole(x))


@on_ranks(4)
@torch.no_grad()
def test_a_model_that_forward_left_in_smaller_shards_may_be_converted() -> None:
    net, x = sharded_net(reshard_after_forward=2), torch.ones(1, 8)
    expected = net(x).double()
    net.double()
    torch.testing.assert_close(net(x.double()), expected, rtol=1e-6, atol=1e-6)


@on_ranks(2)
def test_a_parameter_that_is_not_used_stays_without_gradient() -> None:
    net = Net()
    net.spare = nn.Linear(2, 2)
    net.spare.bias.requires_grad_(False)
    model = fully_shard(net)
    step(net)
    assert net.spare.weight.grad is None
    assert net.head.weight.grad is not None
    model.set_reduce_scatter_unused_params(True)
    step(net)
    assert net.spare.weight.grad is not None
    assert net.spare.bias.grad is None


def test_settings_reach_modules_inside_unless_told_otherwise() -> None:
    with noop_world(2):
        model = nn.Sequential(nn.Linear(4, 4))
        for module in (model[0], model):
            fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
        settings = state_of(model[0]).groups[0].settings
        for recurses in (False, True):
            model.set_reduce_scatter_unused_params(True, **({} if recurses else {"recurse": False}))
            model.set_separate_reduce_scatter_group(**({} if recurses else {"recurse": False}))
            assert settings.reduce_unused == recurses
            assert (settings.reduce_scatter_group is not None) == recurses
