"""A training step compiled as one graph does what the same step does uncompiled."""

from __future__ import annotations

import gc
import operator
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fake_ranks import as_one_of
from ranks import on_ranks
from shardwise import (
    MixedPrecisionPolicy,
    ShardedParameter,
    _compat,
    clip_grad_norm_,
    compile_step,
    fully_shard,
)
from shardwise.checkpoint import load, save
from shardwise.comm import DefaultAllGather
from shardwise.comm.kinds import GATHER
from shardwise.errors import RankMismatchError, ShardingError
from shardwise.graph.nodes import collectives
from shardwise.graph.step import CompiledStep
from shardwise.optim import flat

aten = torch.ops.aten
ONE_GRAPH = "forward, loss and backward"
VIEWS = (operator.getitem, aten.split_with_sizes.default, aten.view.default, aten.t.default)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width + 1)
        self.down = nn.Linear(width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(6) for _ in range(blocks))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Forgetful(Net):
    """Drops activations, both those of dropout and those of checkpointed blocks."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(
                lambda x, block=block: nn.functional.dropout(block(x), 0.3), x, use_reentrant=False
            )
        return self.head(x)


class WithLoss(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return nn.functional.cross_entropy(super().forward(x), y)


def sharded(net: Net, *, root: bool = True, **options: Any) -> Any:
    for block in net.blocks:
        fully_shard(block, **options)
    return fully_shard(net, **options) if root else net


def linear() -> Any:
    torch.manual_seed(0)
    return fully_shard(nn.Linear(6, 3))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(4, 6, generator=generator), torch.randint(3, (4,), generator=generator)


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x).float(), y)


def breaking(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    torch._dynamo.graph_break()
    return nn.functional.cross_entropy(out * 2, y)


def eager_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    number: int,
    loss_fn: Any = cross_entropy,
    max_norm: float | None = None,
) -> Tensor:
    optimizer.zero_grad()
    loss = model(*batch(number)) if loss_fn is None else loss_fn(model, *batch(number))
    loss.backward()
    if max_norm is not None:
        clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    return loss.detach()


def locals_of(model: nn.Module) -> list[Tensor]:
    found = []
    for param in model.parameters():
        if isinstance(param, DTensor):
            found.append(param.to_local())
        else:
            found.append(param.local if isinstance(param, ShardedParameter) else param.detach())
    return found


def check(
    make: Callable[[], Any],
    build: Callable[[nn.Module], torch.optim.Optimizer],
    *,
    loss_fn: Any = cross_entropy,
    max_norm: float | None = None,
    graphs: int | None = 1,
    **options: Any,
) -> CompiledStep:
    """Train two models alike, one compiled; the numbers are those of the other."""
    model, reference = make(), make()
    optimizer, other = build(model), build(reference)
    names, before = [name for name, _ in model.named_parameters()], list(model.parameters())
    step = compile_step(model, loss_fn, optimizer, max_norm=max_norm, **options)
    torch.compiler.reset()
    counters.clear()
    for number in range(3):
        torch.manual_seed(number)
        loss = step(*batch(number))
        torch.manual_seed(number)
        expected = eager_step(reference, other, number=number, loss_fn=loss_fn, max_norm=max_norm)
        assert torch.equal(loss, expected)
        assert not loss.requires_grad
        if number == 1:  # an uncompiled forward in between sees the new parameters
            with torch.no_grad():
                torch.manual_seed(number)
                ours = (loss_fn or nn.Module.__call__)(model, *batch(number))
                torch.manual_seed(number)
                assert torch.equal(ours, (loss_fn or nn.Module.__call__)(reference, *batch(number)))
    if graphs is not None:
        assert counters["stats"]["unique_graphs"] == graphs
        assert not counters["graph_break"]
    for ours, theirs in zip(locals_of(model), locals_of(reference), strict=True):
        assert torch.equal(ours, theirs)
    assert [name for name, _ in model.named_parameters()] == names
    assert all(now is then for now, then in zip(model.parameters(), before, strict=True))
    assert list(step.graphs) == step_parts(step)
    return step


def step_parts(step: CompiledStep) -> list[str]:
    first = [ONE_GRAPH] if ONE_GRAPH in step.graphs else ["forward and loss", "backward"]
    return [*first, *(["clipping"] if step.grad_norm is not None else []), "optimizer"]


@pytest.mark.parametrize("layout", ["contiguous", "interleaved"])
@on_ranks(2)
def test_a_compiled_step_gives_the_numbers_of_an_uncompiled_one(layout: str) -> None:
    def make() -> Any:
        return sharded(Net(blocks=1), layout=layout, reshard_after_forward=True)

    freed = check(make, adamw, max_norm=0.1, backend="aot_eager")
    assert freed.collectives == {"all_gather": 4, "reduce_scatter": 2}


@as_one_of(2)
def test_blocks_that_stay_gathered_and_backends_without_autograd_give_the_same_numbers() -> None:
    kept = check(lambda: sharded(Net(blocks=1), reshard_after_forward=False), sgd, backend="aot_eager")
    assert kept.collectives == {"all_gather": 2, "reduce_scatter": 2}
    assert kept.describe().startswith(
        f"{ONE_GRAPH}: one graph (2 all_gather, 2 reduce_scatter)\noptimizer: eager"
    )
    traced = check(lambda: sharded(Net(blocks=1), layout="contiguous"), sgd, max_norm=0.1, backend="eager")
    assert "stay gathered" in traced.graphs[ONE_GRAPH]


@as_one_of(2)
def test_losses_inside_models_flat_optimizers_and_plain_parameters_are_trained_alike() -> None:
    def partly() -> Any:
        return sharded(WithLoss(blocks=1), root=False)

    step = check(partly, adamw, loss_fn=None, backend="eager")
    assert step.graphs[ONE_GRAPH].startswith("one graph")

    def mixed() -> Any:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        return sharded(Net(blocks=1), layout="contiguous", mp_policy=policy)

    check(mixed, lambda model: flat(torch.optim.AdamW, model, lr=0.05), max_norm=0.1, backend="eager")


@on_ranks(1)
def test_any_number_of_steps_lives_in_a_process_and_none_longer_than_needed() -> None:
    torch.compiler.reset()
    kept, found = [], []
    gc.disable()  # they go when nothing refers to them
    try:
        for width in range(3, 7):
            model = sharded(Net(blocks=1)) if width < 5 else fully_shard(nn.Linear(6, width))
            optimizer, backend = sgd(model), "eager" if width > 3 else "aot_eager"
            loss = breaking if width == 4 else cross_entropy
            step = compile_step(model, loss, optimizer, backend=backend, fullgraph=width != 4)
            with torch._dynamo.config.patch(recompile_limit=1):
                step(*batch(0))
            kept.append(step)
            found += [weakref.ref(model), weakref.ref(optimizer)]
        del model, optimizer, step
        kept.clear()
        assert [one() for one in found] == [None] * 8
    finally:
        gc.enable()


@as_one_of(2)
@pytest.mark.parametrize(
    ("layout", "between"),
    [
        *[("interleaved", "nothing"), ("contiguous", "nothing")],
        *[("interleaved", "a reset"), ("contiguous", "another step")],
    ],
)
def test_what_is_frozen_or_unfrozen_between_graphs_costs_the_rest_no_gradient(
    layout: Any, between: str
) -> None:
    torch.compiler.reset()
    model, reference = (sharded(Net(blocks=1), layout=layout) for _ in range(2))
    optimizer, other = sgd(model), sgd(reference)
    steps = [compile_step(model, cross_entropy, optimizer, backend="eager") for _ in range(2)]
    graphs = []
    for number, trains in enumerate((True, False, True, False)):
        name = "blocks.0.up.weight"
        for each in (model, reference):
            dict(each.named_parameters())[name].requires_grad_(trains)
        if between == "a reset":
            torch.compiler.reset()
        earlier = _compat.graphs_traced()
        steps[number % 2 if between == "another step" else 0](*batch(number))
        graphs.append(_compat.graphs_traced() - earlier)
        eager_step(reference, other, number=number)
        missing = [n for n, p in model.named_parameters() if p.grad is None]
        assert missing == [name] * (not trains)
        assert all(map(torch.equal, locals_of(model), locals_of(reference)))
    assert graphs == ([1, 1, 1, 1] if between == "a reset" else [1, 1, 0, 0])
    model.requires_grad_(False)
    with pytest.raises(ShardingError, match="no parameter of the model trains"):
        steps[0](*batch(0))


@as_one_of(2)
@pytest.mark.parametrize(("layout", "made"), [("interleaved", "before"), ("contiguous", "after")])
def test_what_is_frozen_on_modules_that_evaluation_left_gathered_costs_the_rest_no_gradient(
    layout: Any, made: str
) -> None:
    torch.compiler.reset()
    model, reference = (sharded(Net(blocks=1), layout=layout, reshard_after_forward=False) for _ in range(2))
    optimizer, other = sgd(model), sgd(reference)
    step = compile_step(model, cross_entropy, optimizer, backend="eager") if made == "before" else None
    head_and_block = ["blocks.0.up.bias", "head.weight"]
    for number, frozen in enumerate((head_and_block, [], ["blocks.0.up.bias"], head_and_block)):
        for each in (model, reference):
            each.eval()(batch(number)[0])
            each.train()
            for name, param in each.named_parameters():
                assert type(param) is nn.Parameter  # gathered
                param.requires_grad_(name not in frozen)
        step = step or compile_step(model, cross_entropy, optimizer, backend="eager")
        step(*batch(number))
        eager_step(reference, other, number=number)
        assert [name for name, param in model.named_parameters() if param.grad is None] == frozen
        assert all(map(torch.equal, locals_of(model), locals_of(reference)))
    model.unshard()
    with pytest.raises(ShardingError, match="this SGD would train nothing of this FSDPNet"):
        compile_step(model, cross_entropy, sgd(reference))


@on_ranks(2)
@pytest.mark.parametrize(
    ("odd", "layout", "says"),
    [
        ("freezes", "interleaved", "Only on rank 0:\n  trained: head.bias"),
        ("freezes", "contiguous", "Only on rank 0:\n  trained: head.bias"),
        ("evaluates", "contiguous", "run the forward of Net"),
    ],
)
def test_a_rank_that_takes_another_step_is_an_error_on_every_rank(odd: str, layout: Any, says: str) -> None:
    mine = dist.get_rank() == 1
    model = sharded(Net(blocks=1), layout=layout)
    step = compile_step(model, cross_entropy, sgd(model), backend="eager")
    for number in range(2):
        step(*batch(number))
    model.head.bias.requires_grad_(not (mine and odd == "freezes"))
    evaluates = mine and odd == "evaluates"
    with pytest.raises(RankMismatchError, match=says), torch.set_grad_enabled(not evaluates):
        model(batch(2)[0]) if evaluates else step(*batch(2))


@on_ranks(2)
@pytest.mark.parametrize("then", ["calls the step again", "does nothing"])
def test_a_rank_whose_step_raises_in_tracing_is_named_on_every_rank_that_waits_for_it(then: str) -> None:
    model = sharded(Net(blocks=1), layout="contiguous")
    step = compile_step(model, cross_entropy, sgd(model), backend="aot_eager", max_norm=0.1)
    step(*batch(0))
    x, y = batch(1)
    if dist.get_rank() == 1:
        with pytest.raises(RuntimeError, match="fake tensor"):
            step(x, y[:3])
        if then == "does nothing":
            time.sleep(2)  # seconds in which others find out
            return
    says = "run a compiled step" if then == "calls the step again" else r"rank 1 will not come .* it raised"
    with pytest.raises(RankMismatchError, match=says):
        step(x, y)


@on_ranks(2)
def test_steps_that_raise_on_all_ranks_may_be_followed_by_others_though_one_is_late() -> None:
    def raising(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        time.sleep(0.5 * dist.get_rank())  # longer than ranks wait until they look for each other
        raise ValueError("no loss")

    first, second = linear(), sharded(Net(blocks=1))
    with pytest.raises(ValueError, match="no loss"):
        compile_step(first, raising, sgd(first), backend="eager", fullgraph=False)(*batch(0))
    compile_step(second, cross_entropy, sgd(second), backend="eager")(*batch(0))


@as_one_of(2)
def test_what_forward_frees_is_computed_again_in_backward_of_the_one_graph() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    check(lambda: sharded(Forgetful(), layout="contiguous"), sgd, backend=backend)
    (graph,) = [one.graph for one in graphs]
    nodes = list(graph.nodes)
    begin = next(i for i, node in enumerate(nodes) if node.meta.get("autograd_backward"))
    gathers = [one.wait for one in collectives(graph) if one.kind == GATHER]
    assert [nodes.index(one) < begin for one in gathers] == [True] * 3 + [False] * 2
    for gather in gathers[1:3]:  # the root's comes first and stays
        held = {gather}
        for node in nodes:
            if held & set(node.all_input_nodes) and node.target in VIEWS:
                held.add(node)
        assert len(held) > 4
        assert max(nodes.index(user) for node in held for user in node.users) < begin
    drawn = [node for node in nodes if node.target is aten.native_dropout.default]
    assert len(drawn) == 2


@as_one_of(2)
def test_without_one_graph_forward_is_compiled_in_parts_if_the_user_allows_it() -> None:
    step = compile_step(model := linear(), breaking, sgd(model), backend="eager")
    with pytest.raises(
        ShardingError, match=r"one graph: .*graph_break.*test_graph_step\.py:\d+\. Pass fullgraph=False"
    ):
        step(*batch(0))
    parts = check(
        lambda: sharded(Net(blocks=1)), adamw, loss_fn=breaking, backend="eager", fullgraph=False, graphs=None
    )
    assert "graph_break" in parts.graphs["forward and loss"]
    assert "autograd" in parts.graphs["backward"]

    class Own(DefaultAllGather):
        pass

    def custom() -> Any:
        model = linear()
        model.set_custom_all_gather(Own())
        return model

    parts = check(custom, sgd, max_norm=0.1, backend="eager", fullgraph=False, graphs=None)
    assert "group 'FSDPLinear' has the custom all-gather Own" in parts.graphs["forward and loss"]
    model = linear()
    model.set_requires_gradient_sync(False)
    with pytest.raises(ShardingError, match=r"set_requires_gradient_sync\(True\)"):
        compile_step(model, cross_entropy, sgd(model), backend="eager")(*batch(0))


@on_ranks(2)
def test_checkpoints_go_from_compiled_steps_to_uncompiled_ones_and_back(tmp_path: Path) -> None:
    expected = []
    reference = sharded(Net(blocks=1), layout="contiguous")
    optimizer = adamw(reference)
    for number in range(4):
        expected.append(eager_step(reference, optimizer, number=number))
    for first in (True, False):
        model = sharded(Net(blocks=1), layout="contiguous")
        optimizer = adamw(model)
        step = compile_step(model, cross_entropy, optimizer, backend="eager")
        for number in range(2):
            run = step(*batch(number)) if first else eager_step(model, optimizer, number=number)
            assert torch.equal(run, expected[number])
        folder = str(tmp_path / str(first))
        save(folder, training_state(model, optimizer), step=2)

        other = sharded(Net(blocks=1), layout="interleaved")
        optimizer = adamw(other)
        state = training_state(other, optimizer)
        load(folder, state)
        set_model_state_dict(other, state["model"])
        set_optimizer_state_dict(other, optimizer, state["optimizer"])
        step = compile_step(other, cross_entropy, optimizer, backend="eager")
        for number in range(2, 4):
            run = eager_step(other, optimizer, number=number) if first else step(*batch(number))
            torch.testing.assert_close(run, expected[number])


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
