"""What users do with compiled sharded modules: mix them with eager ones, change settings, shard otherwise."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from fake_ranks import as_one_of
from fsdp.compiled.harness import Run, batch, by_block, compare, compiled, local, loss_of, train
from fsdp.compiled.models import Block, CheckpointedBlock, Mlp, Transformer
from fsdp.models import LAYOUTS, assert_same_gradients, update
from ranks import on_ranks
from shardwise import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from shardwise.comm import DefaultAllGather
from shardwise.errors import LifecycleError, ShardingError

TRANSFORMER = Run(Transformer, by_block, options={"layout": "contiguous"}, compile=compiled("aot_eager"))
ONE_BLOCK = replace(TRANSFORMER, model=partial(Transformer, depth=1))
SMALL = Run(Mlp, fully_shard, options={"layout": "contiguous"}, compile=compiled("aot_eager"))


def each_block(model: nn.Module, **options: Any) -> nn.Module:
    for block in model.blocks:
        block.compile(backend="aot_eager", **options)
    return model


@as_one_of(2)
def test_equal_blocks_compiled_in_place_share_one_graph() -> None:
    each = partial(each_block, fullgraph=True)
    regional = replace(TRANSFORMER, model=partial(Transformer, depth=3), compile=each, steps=2)
    with torch._dynamo.config.patch(recompile_limit=1):
        compare(regional)
    found = compare(replace(regional, model=Transformer, options={"layout": "interleaved"}))
    assert type(found.model.blocks[0].up) is nn.Linear


class Encoder(nn.Linear):
    def encode(self, x: Tensor) -> Tensor:
        return torch.relu(nn.Linear.forward(self, x))


class Encoded(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return self[1](self[0].encode(x))


@as_one_of(2)
def test_registered_forward_methods_are_part_of_the_graph() -> None:
    found = []
    for backend in (None, "aot_eager"):
        torch.manual_seed(0)
        model = Encoded(fully_shard(Encoder(8, 8)), nn.Linear(8, 3))
        register_fsdp_forward_method(model[0], "encode")
        fully_shard(model)
        call = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
        loss = call(torch.ones(2, 8)).square().sum()
        loss.backward()
        found.append([loss.detach(), *(local(param.grad) for param in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@as_one_of(2)
def test_more_classes_and_shapes_of_modules_than_one_function_is_compiled_for() -> None:
    classes = [type(f"Linear{index}", (nn.Linear,), {}) for index in range(3)]
    shapes = [(4 + index, 5 + index) for index in range(3)]
    model = nn.Sequential(*(made(4, 4) for made in classes), *(nn.Linear(*shape) for shape in shapes))
    for module in model:
        fully_shard(module, layout="contiguous").compile(backend="eager", fullgraph=True)
    fully_shard(model, layout="contiguous")
    counters.clear()
    with torch._dynamo.config.patch(recompile_limit=2):
        for _ in range(2):
            model(torch.randn(2, 4)).square().sum().backward()
    assert counters["stats"]["unique_graphs"] == 3 + 3


@as_one_of(2)
@pytest.mark.parametrize("synchronises", [True, False])
def test_a_backward_whose_model_is_gone_has_nothing_to_reduce(synchronises: bool) -> None:
    model = fully_shard(nn.Linear(4, 4), layout="contiguous")
    model.set_requires_gradient_sync(synchronises)
    loss = torch.compile(model, backend="aot_eager", fullgraph=True)(
        x := torch.ones(2, 4, requires_grad=True)
    )
    freed = weakref.ref(model)
    del model
    gc.collect()
    assert freed() is None
    loss.sum().backward()
    assert x.grad is not None


@as_one_of(2)
def test_blocks_compiled_in_place_whose_code_breaks_graphs_run_eagerly_around_the_breaks() -> None:
    broken = partial(Transformer, partial(Block, breaks=True), depth=3)
    run = replace(TRANSFORMER, model=broken, compile=each_block, steps=2)
    with torch._dynamo.config.patch(recompile_limit=1):
        compare(run, graphs=2, breaks=2)
    around = partial(Transformer, partial(Block, breaks=True), recompute="all", depth=1)
    compare(replace(run, model=around), graphs=2, breaks=2)
    inside = partial(Transformer, partial(CheckpointedBlock, breaks=True), depth=1)
    compare(replace(run, model=inside), graphs=0, breaks=2)  # torch traces no checkpoint that breaks


@as_one_of(2)
def test_compiled_and_eager_steps_take_turns() -> None:
    def every_other(model: nn.Module) -> Any:
        made = torch.compile(model, backend="aot_eager", fullgraph=True)
        calls = iter(range(100))
        return lambda words: (made if next(calls) % 2 else model)(words)

    compare(replace(ONE_BLOCK, compile=every_other))
    compare(replace(SMALL, compile=every_other, options={"layout": "interleaved"}))


@as_one_of(2)
def test_evaluation_between_steps_has_a_graph_of_its_own() -> None:
    model = by_block(Transformer(depth=1), layout="contiguous")
    made = torch.compile(model, backend="eager", fullgraph=True)
    words = batch(0, 4, 5)
    counters.clear()
    for _ in range(2):
        model.eval()
        with torch.no_grad():
            assert torch.equal(made(words), model(words))
        model.train()
        loss_of(made, words).backward()
    assert counters["stats"]["unique_graphs"] == 2
    with torch.no_grad():
        model(words)  # eager, after which the root stays gathered
    loss_of(made, words).backward()
    assert all(param.grad is not None for param in model.parameters())
    model.compile(backend="eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(model(words), made(words))


@as_one_of(4)
def test_beside_tensor_parallelism() -> None:
    mesh, results = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), []
    counters.clear()
    for compiles in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in "ab"))
        for layer, layout in zip(model, ("interleaved", "contiguous"), strict=True):
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(layer, mesh["tp"], plan, src_data_rank=None)
            fully_shard(layer, mesh=mesh["dp"], layout=layout)
        call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiles else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            made = torch.Generator().manual_seed(10 * mesh["dp"].get_local_rank() + step)
            call(torch.randn(4, 8, generator=made)).square().sum().backward()
            update(optimizer)
        results.append([local(param.detach()).clone() for param in model.parameters()])
    assert counters["stats"]["unique_graphs"] == 1
    assert all(map(torch.equal, *results))


class Mine(DefaultAllGather):
    pass


@as_one_of(2)
def test_what_cannot_be_traced_leaves_the_graph_and_is_named() -> None:
    def with_mine(model: nn.Module, **options: Any) -> nn.Module:
        fully_shard(model, **options).set_custom_all_gather(Mine())
        return model

    with pytest.raises(Unsupported, match="custom all-gather Mine"):
        train(replace(SMALL, shard=with_mine), eager=False)
    low = Mlp()
    next(low.parameters()).grad_dtype = torch.bfloat16
    with pytest.raises(Unsupported, match="parameters with a grad_dtype"):
        torch.compile(fully_shard(low), backend="eager", fullgraph=True)(batch(0, 4, 5))
    partly = replace(SMALL, shard=with_mine, compile=compiled("aot_eager", fullgraph=False), steps=2)
    compare(partly, graphs=None, breaks=None)


@as_one_of(2)
def test_parameters_that_are_frozen_later_are_named_and_moved_ones_are_followed() -> None:
    model = fully_shard(Mlp(), layout="contiguous")
    made = torch.compile(model, backend="aot_eager", fullgraph=True)
    words = batch(0, 4, 5)
    loss_of(made, words).backward()
    model.double()  # other memory
    expected = model(words)
    assert torch.equal(made(words), expected)
    loss_of(made, words).backward()
    model.reshard()
    model.up.weight.requires_grad_(False)
    with pytest.raises(LifecycleError, match=r"up.weight.*changed after compilation"):
        loss_of(made, words).backward()
    torch.compiler.reset()
    model.reset_iter_state()


@pytest.mark.parametrize(
    ("layout", "gathered"), [("interleaved", False), ("interleaved", True), ("contiguous", True)]
)
@as_one_of(2)
def test_what_is_frozen_or_unfrozen_later_is_followed_or_named_and_trains_after_a_reset(
    layout: str, gathered: bool
) -> None:
    options = {"layout": layout, "reshard_after_forward": False if gathered else None}
    model, eager = (by_block(Transformer(depth=1), **options) for _ in range(2))
    eager.load_state_dict(model.state_dict())
    optimizer, words = torch.optim.SGD(model.parameters(), lr=0.0), batch(0, 4, 5)
    made = torch.compile(model, backend="aot_eager", fullgraph=True)

    def set_block(trains: bool) -> None:
        if gathered:
            model.eval()(words)  # uncompiled, and no backward comes
            assert all(type(param) is nn.Parameter for param in model.parameters())
        model.train().blocks[0].requires_grad_(trains)

    set_block(False)
    loss_of(made, words).backward()
    model.blocks[0].reshard()
    trained = {name: param.grad is not None for name, param in model.named_parameters()}
    assert trained == {name: not name.startswith("blocks.") for name in trained}
    update(optimizer)
    set_block(True)
    with pytest.raises(LifecycleError, match=r"blocks.0.*changed after compilation"):
        loss_of(made, words).backward()
    torch.compiler.reset()
    model.zero_grad()
    model.reset_iter_state()
    for one in (made, eager):
        loss_of(one, words).backward()
    assert all(
        torch.equal(local(a.grad), local(b.grad))
        for a, b in zip(model.parameters(), eager.parameters(), strict=True)
    )


@as_one_of(4)
def test_gradients_of_graphs_are_on_registered_parameters_where_evaluation_left_smaller_shards() -> None:
    model, words = fully_shard(Mlp(), layout="contiguous", reshard_after_forward=2), batch(0, 4, 5)
    sharded = list(model.parameters())
    model.eval()(words)
    assert all(now is not then for now, then in zip(model.parameters(), sharded, strict=True))
    loss_of(torch.compile(model.train(), backend="aot_eager"), words).backward()
    assert all(now is then for now, then in zip(model.parameters(), sharded, strict=True))
    assert all(param.grad is not None for param in sharded)


@as_one_of(2)
def test_settings_are_followed_without_compiling_again_where_they_are_what_they_were() -> None:
    model = by_block(Transformer(depth=1), layout="interleaved")
    made = torch.compile(model, backend="eager", fullgraph=True)
    words = batch(dist.get_rank(), 4, 5)

    def gradient() -> Tensor:
        loss_of(made, words).backward()
        found = local(model.blocks[0].up.weight.grad).clone()
        model.zero_grad()
        return found

    model.blocks[0].set_gradient_divide_factor(4.0)
    quarter = gradient()
    counters.clear()
    model.set_requires_gradient_sync(True)
    assert torch.equal(gradient(), quarter)
    assert counters["stats"]["unique_graphs"] == 0
    model.blocks[0].set_gradient_divide_factor(2.0)
    assert torch.equal(gradient(), 2 * quarter)
    assert counters["stats"]["unique_graphs"] == 1


@dataclass
class Answer(OrderedDict):  # as transformers' outputs are
    value: Tensor

    def __post_init__(self) -> None:
        self["value"] = self.value


class Answering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, pair: tuple[Tensor, Tensor], *, scale: Tensor) -> Answer:
        return Answer(self.linear(pair[0] + pair[1]) * scale)


@as_one_of(2)
def test_inputs_and_outputs_in_containers_are_cast() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model = fully_shard(Answering(), mp_policy=policy)
    made = torch.compile(model, backend="aot_eager", fullgraph=True)
    inputs = (torch.randn(2, 4), torch.randn(2, 4))
    expected, found = (call(inputs, scale=torch.ones(1)) for call in (model, made))
    assert type(found) is Answer
    assert found.value.dtype == found["value"].dtype == torch.float32
    assert torch.equal(found.value, expected.value)


model_of_a_script: nn.Module


@torch.compile(backend="aot_eager", fullgraph=True)
def step_of_a_script(words: Tensor) -> Tensor:
    return loss_of(model_of_a_script, words)


@as_one_of(2)
def test_a_compiled_function_that_calls_a_global_model() -> None:
    global model_of_a_script
    model_of_a_script = fully_shard(Mlp(), layout="contiguous")
    counters.clear()
    for step in range(3):
        words = batch(step, 4, 5)
        expected = loss_of(model_of_a_script, words).detach()
        assert torch.equal(step_of_a_script(words), expected)
        step_of_a_script(words).backward()
        torch.optim.SGD(model_of_a_script.parameters(), lr=0.1).step()
        model_of_a_script.zero_grad()
    assert counters["stats"]["unique_graphs"] == 1
    del model_of_a_script


@as_one_of(2)
@pytest.mark.parametrize("strict", [True, False])
def test_an_export_is_refused_and_leaves_the_model_as_it_was(strict: bool) -> None:
    model = fully_shard(nn.Sequential(fully_shard(nn.Linear(4, 4)), nn.Linear(4, 2)))
    x = torch.randn(2, 4)
    expected = model(x)
    with pytest.raises((ShardingError, Unsupported), match="export it before fully_shard"):
        torch.export.export(model, (x,), strict=strict)
    assert torch.equal(model(x), expected)
    model(x).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


class Breaks(nn.Module):
    """Breaks its graph, and may raise behind the break."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.raises = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        torch._dynamo.graph_break()
        if self.raises:
            raise ValueError("on purpose")
        return self.inner(x)


@as_one_of(2)
def test_what_raises_around_a_graph_break_leaves_parameters_sharded() -> None:
    model = fully_shard(Breaks(), layout="contiguous")
    whole = torch.compile(model, backend="eager")
    sharded = dict(model.named_parameters())
    expected = whole(torch.ones(2, 4)).detach()

    model.raises = True
    with pytest.raises(ValueError, match="on purpose"):
        whole(torch.ones(2, 4))
    assert all(param is sharded[name] for name, param in model.named_parameters())
    model.raises = False
    assert torch.equal(whole(torch.ones(2, 4)), expected)

    def refuse(grad: Tensor) -> Tensor:
        raise ValueError("on purpose")

    x = torch.ones(2, 4, requires_grad=True) * 1
    x.register_hook(refuse)
    with pytest.raises(ValueError, match="on purpose"):
        whole(x).sum().backward()
    model.reset_iter_state()  # modules around the break run eagerly
    assert all(param is sharded[name] for name, param in model.named_parameters())
    assert torch.equal(whole(torch.ones(2, 4)), expected)


@as_one_of(2)
def test_compiled_blocks_of_an_eager_root_accumulate_without_synchronisation() -> None:
    grads = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        for block, layout in zip(model, LAYOUTS, strict=False):
            fully_shard(block, layout=layout, reshard_after_forward=True)
            if is_compiled:
                block.compile(backend="eager")
        fully_shard(model)
        for step in range(3):
            model.set_requires_gradient_sync(step == 2)
            model(torch.full((2, 4), 1.0 + step)).sum().backward()
        grads.append([local(param.grad) for param in model.parameters()])
    assert all(map(torch.equal, *grads))


@as_one_of(2)
@pytest.mark.parametrize("compiled_first", [True, False])
def test_gradients_that_are_reduced_together_are_all_compiled_or_all_eager(compiled_first: bool) -> None:
    model = fully_shard(nn.Linear(4, 4), layout="contiguous")
    calls = [torch.compile(model, backend="eager"), model]
    first, second = calls if compiled_first else calls[::-1]
    model.set_requires_gradient_sync(False)
    first(torch.ones(2, 4)).sum().backward()
    with torch.no_grad():
        second(torch.ones(2, 4))
    model.set_requires_gradient_sync(True)
    with pytest.raises(LifecycleError, match="unreduced gradient"):
        second(torch.ones(2, 4)).sum().backward()
    model.reset_iter_state()
    second(torch.ones(2, 4)).sum().backward()
    assert torch.equal(model.bias.grad.full_tensor(), torch.full((4,), 2.0))


class Recomputed(nn.Sequential):
    """A module whose call is recomputed in backward."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def inside() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 4))


def wrapped_before(layout: str) -> tuple[nn.Module, nn.Module]:
    """A reference, and a module like it that was compiled and then sharded."""
    reference = inside()
    made = torch.compile(copy.deepcopy(reference), backend="aot_eager")
    return Recomputed(reference), Recomputed(fully_shard(made, layout=layout))


def in_place_before(layout: str) -> tuple[nn.Module, nn.Module]:
    reference = inside()
    made = copy.deepcopy(reference)
    made.compile(backend="aot_eager")
    return Recomputed(reference), Recomputed(fully_shard(made, layout=layout))


def a_part_after(layout: str) -> tuple[nn.Module, nn.Module]:
    reference = Recomputed(Recomputed(*inside()), nn.Linear(4, 3))
    model = fully_shard(copy.deepcopy(reference), layout=layout)
    model[0].compile(backend="eager")
    return reference, model


@pytest.mark.parametrize(
    ("made", "layout"),
    [(wrapped_before, LAYOUTS[0]), (in_place_before, LAYOUTS[1]), *((a_part_after, one) for one in LAYOUTS)],
)
@on_ranks(2)
def test_what_was_compiled_before_or_after_it_was_sharded_is_recomputed_in_checkpoints(
    made: Any, layout: str
) -> None:
    torch.compiler.reset()
    reference, model = made(layout)
    for rows in (2, 3):
        for one in (reference, model):
            one(torch.ones(rows, 4)).square().sum().backward()
    assert_same_gradients(model, reference)
